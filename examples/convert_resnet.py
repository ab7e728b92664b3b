"""A torchvision ResNet, converted: what would be saved, a few training steps, and back.

python examples/convert_resnet.py
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

import retrograde as rg
from retrograde.extras import require

torch.manual_seed(0)
model = require("torchvision.models").resnet50(num_classes=10)
images, labels = torch.randn(4, 3, 64, 64), torch.randint(10, (4,))

# %% What would be converted, and what that would save. Nothing is changed yet.
print(rg.plan(model, images, gamma="auto"))

# %% The optimizer may be made before: parameters stay the same objects.
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
names = list(model.state_dict())
rg.convert(model, memory="reverse", verify="strict")
for step in range(3):
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}")

# %% The state_dict is that of a plain ResNet, and so is the model, once it is put back.
assert list(model.state_dict()) == names
rg.revert(model)
print(type(model.layer3[1]).__name__, "again")
