"""Fig. 6, bottom: top-1 error on ImageNet of a ResNet-101, two Momentum ResNets and a RevNet with as many parameters.

Not run here: ImageNet is given to registered users only. Put it into `imagenet/` of the data directory (train/ and val/, a
folder per class) and `--preset paper` runs the paper's setting; the default preset is a short ResNet-50 schedule. The smoke
test trains on a folder of the same layout that it makes of real digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from retrograde.extras import require

from .data import data_dir
from .data.folder import FolderBatches, load_folders
from .findings import Finding, spread
from .metrics import Key, Record
from .run import Context
from .style import COLOURS, canvas
from .train import build
from .train.unit import Training, parameters, small_set, trained

NETS = {
    "resnet": "ResNet", "momentum": "Momentum, v₀ = 0", "momentum-first": "Momentum, v₀ = f(x₀)", "revnet": "RevNet",
}  # fmt: skip
PAPERS = {"resnet": 22, "momentum": 23, "momentum-first": 23, "revnet": 23}  # the paper's errors, %


@dataclass(frozen=True)
class Config(Training):
    decisive: ClassVar[tuple[str, ...]] = (
        "data",
        "depth",
        "residual",
        "gamma",
        "size",
        "epochs",
        "batch",
        "rate",
        "schedule",
    )

    data: str = "imagenet"
    depth: int = 101
    gamma: float = 0.9
    memory: str = "auto"
    size: int = 224
    epochs: int = 100
    batch: int = 256
    rate: float = 0.1
    milestones: tuple[int, ...] = (30, 60, 90)
    weight_decay: float = 1e-4
    workers: int = 12

    @classmethod
    def default(cls) -> Config:
        return cls(depth=50, epochs=18, batch=512, rate=0.4, schedule="onecycle", amp="bf16")

    @classmethod
    def smoke(cls) -> Config:
        return cls(
            data="digits", depth=18, size=32, epochs=1, batch=16, schedule="onecycle", channels_last=False, workers=0
        )

    def setting(self) -> str:
        return (
            f"Depth {self.depth}, {self.data} at {self.size}×{self.size}, γ = {self.gamma:g}, {self.trained_as()}. "
            "The paper: depth 101, 100 epochs of batch 256."
        )


def units(config: Config) -> list[Key]:
    return [{"net": net, "seed": seed} for seed in range(config.repeats) for net in NETS]


def measure(config: Config, unit: Key, context: Context) -> dict[str, Any]:
    name, root = (
        (config.data, data_dir()) if config.data != "digits" else ("folder", digits_folder(context.folder / "images"))
    )
    source = FolderBatches(
        load_folders(name, root),
        config.batch,
        size=config.size,
        seed=unit["seed"],
        device=context.device,
        workers=config.workers,
    )
    torch.manual_seed(unit["seed"])
    kind, plain = ("revnet" if unit["net"] == "revnet" else "resnet"), unit["net"] == "resnet"
    velocity = ("learned" if config.residual == "branch" else "first") if unit["net"] == "momentum-first" else "zero"
    net = build(
        f"{kind}{config.depth}", classes=source.classes, size="imagenet", gamma=0.0 if plain else config.gamma,
        velocity=velocity, memory="store" if plain else config.memory, residual="relu" if plain else config.residual,
    )  # fmt: skip
    _, curve = trained(net, config.recipe(), source, context)
    return {
        "error": [100 - a for a in curve["accuracy"]],
        "test_loss": curve["test_loss"],
        "parameters": parameters(net),
    }


def digits_folder(folder: Path, classes: int = 4, count: int = 6) -> Path:
    """A folder in ImageNet's layout, of real digits."""
    held, image = small_set("digits"), require("PIL.Image")
    for part, x, y in (("train", held.train_x, held.train_y), ("val", held.test_x, held.test_y)):
        for index in (k for digit in range(classes) for k in (y == digit).nonzero()[:count, 0].tolist()):
            path = folder / part / f"n{int(y[index]):08d}" / f"{part}_{index}.png"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                image.fromarray(x[index, 0].numpy()).resize((40, 40)).save(path)
    return folder


def figure(config: Config, records: list[Record]) -> Any:
    picture, axis = canvas(6, 3.8)
    for record in records:
        net = record["net"]
        label = f"{NETS[net]}: {record['error'][-1]:.2f} %" if record["seed"] == 0 else None
        axis.plot(range(1, len(record["error"]) + 1), record["error"], color=COLOURS[net], label=label)
    axis.set(xlabel="epoch", ylabel="top-1 error, %", title=f"{config.data}, depth {config.depth}")
    axis.legend(fontsize=8)
    return picture


def findings(config: Config, records: list[Record]) -> list[Finding]:
    found = []
    for net, name in NETS.items():
        errors = [r["error"][-1] for r in records if r["net"] == net]
        if errors:
            met = abs(sum(errors) / len(errors) - PAPERS[net]) <= 1
            found.append(Finding(f"top-1 error, {name}", spread(errors, ".2f", " %"), f"{PAPERS[net]} ± 1 %", met))
    return found
