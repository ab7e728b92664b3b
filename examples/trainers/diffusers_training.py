"""A diffusion transformer of diffusers, trained on noise as in its examples, with gradient checkpointing on.

Its blocks are of no class that is known, so they are found by a try on an example.

python examples/trainers/diffusers_training.py
"""

from __future__ import annotations

from typing import Any

import torch
from tiny import images
from torch import nn

import retrograde as rg
from retrograde.extras import require

require("transformers")  # before diffusers, which imports it
diffusers = require("diffusers")
torch.manual_seed(0)
model = diffusers.DiTTransformer2DModel(
    num_attention_heads=2, attention_head_dim=16, in_channels=3, out_channels=3, num_layers=8, sample_size=16, patch_size=4,
    num_embeds_ada_norm=10, norm_num_groups=4,
)  # fmt: skip
noisy: dict[str, Any] = {
    "hidden_states": torch.randn(4, 3, 16, 16),
    "timestep": torch.arange(4),
    "class_labels": torch.arange(4),
}
rg.convert(model, noisy)  # the one line
model.enable_gradient_checkpointing()  # has no effect on the converted blocks

scheduler = diffusers.DDPMScheduler(num_train_timesteps=10)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for image, label in torch.utils.data.DataLoader(images(16), batch_size=4):
    noise, time = torch.randn_like(image), torch.randint(0, 10, (4,))
    predicted = model(scheduler.add_noise(image, noise, time), timestep=time, class_labels=label).sample
    loss = nn.functional.mse_loss(predicted, noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")
