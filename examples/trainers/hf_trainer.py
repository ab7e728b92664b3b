"""The Trainer of transformers, with gradient checkpointing turned on: converted layers take its place.

python examples/trainers/hf_trainer.py
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

from tiny import language_model, tokens

import retrograde as rg
from retrograde.extras import require

transformers = require("transformers")
model = language_model()
rg.convert(model)  # the one line

with TemporaryDirectory() as folder:
    arguments = transformers.TrainingArguments(
        folder, max_steps=8, per_device_train_batch_size=4, learning_rate=3e-3, gradient_accumulation_steps=2, report_to=[],
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}, use_cpu=True, save_strategy="no",
        logging_steps=2, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=tokens())
    trainer.train()
