"""QLoRA: layers frozen in 4 bits by bitsandbytes, adapters by peft, trained by TRL's SFTTrainer with gradient checkpointing on.

python examples/trainers/trl_qlora.py
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tiny import SENTENCES, language_model, tokenizer

import retrograde as rg
from retrograde.extras import require

transformers, peft, trl, datasets = map(require, ("transformers", "peft", "trl", "datasets"))
with TemporaryDirectory() as folder:
    language_model().save_pretrained(folder)
    four_bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=four_bits, device_map={"": "cpu"}
    )
model = peft.prepare_model_for_kbit_training(model)
torch.manual_seed(0)
model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1))
rg.convert(model)  # the one line; before get_peft_model is as good

with TemporaryDirectory() as folder:
    arguments = trl.SFTConfig(
        folder, max_steps=6, per_device_train_batch_size=4, learning_rate=3e-2, bf16=False, use_cpu=True, report_to=[],
        save_strategy="no", logging_steps=2, disable_tqdm=True, max_length=16,
    )  # fmt: skip
    data = datasets.Dataset.from_list([{"text": sentence} for sentence in SENTENCES])
    trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer()).train()
    model.save_pretrained(folder)
    print(sorted(path.name for path in Path(folder).glob("adapter*")))
