"""Lightning, the model converted by a callback, which moves γ from 0 to 1/8 over the first steps.

python examples/trainers/lightning_fit.py
"""

from __future__ import annotations

from typing import Any

import torch
from tiny import images
from torch import Tensor, nn

from retrograde.extras import require
from retrograde.integrations.lightning import Reversible

lightning, models = require("lightning"), require("torchvision.models")


class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.net = models.VisionTransformer(
            32, 8, num_layers=6, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=4, dropout=0.1
        )
        nn.init.normal_(self.net.heads.head.weight, std=0.1)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


torch.manual_seed(0)
model = Classifier()
reversible = Reversible(gamma=1 / 8, schedule={0: 0, 4: 1})  # the one line
trainer = lightning.Trainer(
    callbacks=[reversible], max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, torch.utils.data.DataLoader(images(), batch_size=4))
print(model.net.encoder.layers[0].extra_repr())
