"""LoRA by peft in a loop of one's own. The adapters may come before the conversion or after it.

python examples/trainers/peft_lora.py
"""

from __future__ import annotations

import torch
from tiny import language_model, tokens

import retrograde as rg
from retrograde.extras import require

require("transformers")
peft = require("peft")
model = language_model()
rg.convert(model)  # the one line
model = peft.get_peft_model(
    model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1)
)
model.enable_input_require_grads()
model.gradient_checkpointing_enable()  # has no effect on the converted layers

batch = torch.tensor([row["input_ids"] for row in tokens()])
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-3)
for step in range(6):
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
