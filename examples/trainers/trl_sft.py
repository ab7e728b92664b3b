"""TRL's SFTTrainer, as it comes: bf16 autocast off (this is a CPU), gradient checkpointing on, its default.

python examples/trainers/trl_sft.py
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

from tiny import SENTENCES, language_model, tokenizer

import retrograde as rg
from retrograde.extras import require

trl, datasets = require("trl"), require("datasets")
model = language_model()
rg.convert(model)  # the one line

with TemporaryDirectory() as folder:
    arguments = trl.SFTConfig(
        folder, max_steps=6, per_device_train_batch_size=4, learning_rate=3e-3, bf16=False, use_cpu=True, report_to=[],
        save_strategy="no", logging_steps=2, disable_tqdm=True, max_length=16,
    )  # fmt: skip
    data = datasets.Dataset.from_list([{"text": sentence} for sentence in SENTENCES])
    trainer = trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer())
    assert arguments.gradient_checkpointing
    trainer.train()
