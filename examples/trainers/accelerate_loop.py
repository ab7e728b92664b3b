"""A loop with Accelerate: accumulation, clipping, and a checkpoint that knows γ.

python examples/trainers/accelerate_loop.py        or: accelerate launch examples/trainers/accelerate_loop.py
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

import torch
from tiny import images
from torch import nn

import retrograde as rg
from retrograde.extras import require
from retrograde.integrations.accelerate import remember

resnet = require("torchvision.models").resnet
torch.manual_seed(0)
model: nn.Module = resnet.ResNet(resnet.BasicBlock, (4, 4, 2, 2), num_classes=4, width_per_group=64)
rg.convert(model)  # the one line

accelerator = require("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=2)
loader = torch.utils.data.DataLoader(images(), batch_size=4)
net, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), loader)
remember(accelerator, model)
for image, label in loader:
    with accelerator.accumulate(net):
        loss = nn.functional.cross_entropy(net(image), label)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.3f}")
with TemporaryDirectory() as folder:
    accelerator.save_state(folder)
    accelerator.load_state(folder)
