"""A timm model as timm's train.py runs it: gradient checkpointing on, drop path, an average of the weights.

python examples/trainers/timm_training.py
"""

from __future__ import annotations

import torch
from tiny import images
from torch import nn

import retrograde as rg
from retrograde.extras import require

timm = require("timm")
torch.manual_seed(0)
model = timm.create_model(
    "vit_tiny_patch16_224",
    img_size=32,
    patch_size=8,
    embed_dim=48,
    depth=8,
    num_heads=2,
    num_classes=4,
    drop_path_rate=0.1,
)
rg.convert(model)  # the one line
model.set_grad_checkpointing()  # --grad-checkpointing: has no effect on the converted blocks

average = require("timm.utils").ModelEmaV3(model, decay=0.9)
optimizer = require("timm.optim").create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
for image, label in torch.utils.data.DataLoader(images(), batch_size=4):
    loss = nn.functional.cross_entropy(model(image), label)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update(model)
    print(f"loss {loss.item():.3f}")
