"""What `retrograde train` does, as one frozen dataclass: every field is an option of the command line.

The defaults are the paper's for CIFAR: batch 128, SGD with momentum 0.9, rate 0.01, ÷10 at epoch 180 of 220, weight decay 5e-4.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..data import NAMES
from ..errors import suggestion

SCHEDULES = ("multistep", "cosine", "onecycle", "constant")
AMP = ("off", "bf16", "fp16")
PARALLEL = ("ddp", "fsdp")
DECAY = ("all", "weights")
FREE = (
    "out",
    "data_dir",
    "workers",
    "log_every",
    "checkpoint_every",
    "keep",
    "memory",
    "tensorboard",
    "device",
    "seeds",
    "sweep",
)
"""Settings that may change between a start and the next: none of them changes what is computed."""


def _option(default: Any, words: str, *choices: str) -> Any:
    return field(default=default, metadata={"help": words, "choices": choices or None})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a network is trained."""

    epochs: int = _option(220, "passes over the training images")
    batch: int = _option(128, "images per step, over all processes")
    rate: float = _option(0.01, "learning rate (its largest, for onecycle and cosine)")
    optimizer: str = _option("sgd", "any of torch.optim, by name: sgd, adamw, radam, muon, …")
    optimizer_options: tuple[str, ...] = _option((), "more of its arguments, as name=value: betas=(0.9,0.95) eps=1e-6")
    momentum: float = _option(0.9, "of SGD")
    nesterov: bool = _option(False, "Nesterov's momentum")
    weight_decay: float = _option(5e-4, "on every parameter, or on those of --decay")
    decay: str = _option("all", "parameters that decay: all, or weights alone (neither norms nor biases)", *DECAY)
    schedule: str = _option("multistep", "of the rate", *SCHEDULES)
    milestones: tuple[int, ...] = _option((180,), "epochs at which multistep multiplies the rate by --factor")
    factor: float = _option(0.1, "of multistep")
    warmup: float = _option(0.0, "epochs of linear increase at the start (onecycle: 30 %% of the epochs unless given)")
    clip: float = _option(0.0, "the largest norm of all gradients together; 0: they are not clipped")
    smoothing: float = _option(0.0, "of labels")
    amp: str = _option("off", "automatic mixed precision", *AMP)
    channels_last: bool = _option(False, "memory format of images and convolutions")
    compile: bool = _option(False, "torch.compile the network (momentum networks: each block)")
    graph: bool = _option(False, "forward and backward as one CUDA graph, for networks that cannot keep a GPU busy")
    accumulate: int = _option(1, "parts that a batch is taken in, one after the other")
    ema: float = _option(0.0, "decay of an exponential moving average of the weights, which is then evaluated; 0: off")

    def __post_init__(self) -> None:
        for name, allowed in (("schedule", SCHEDULES), ("amp", AMP), ("decay", DECAY)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}.")
        if not self.rate > 0:
            raise ValueError(f"rate must be above 0; got {self.rate:g}.")
        if self.clip < 0:
            raise ValueError(f"clip must be 0 (off) or above; got {self.clip:g}.")
        for name in ("epochs", "batch", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
        if self.batch % self.accumulate:
            raise ValueError(f"batch must be a multiple of accumulate; got {self.batch} and {self.accumulate}.")
        if self.graph and self.compile:
            raise ValueError("graph and compile are not to be used together: leave one of them out.")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema must be from 0 (off) to below 1; got {self.ema}.")


@dataclass(frozen=True, kw_only=True)
class Setting(Recipe):
    """What is trained, on what, and where the run is kept."""

    model: str = _option(
        "resnet101",
        "resnet18 … resnet152, thin-resnet20 … thin-resnet1202, revnet18 … revnet152; torchvision:NAME; timm:NAME; or "
        "module:function of your own, called as function(num_classes=…)",
    )
    init: str | None = _option(
        None,
        "a file of weights to start from (.safetensors, or what torch.save wrote); a head of another size is left out",
    )
    residual: str = _option(
        "relu",
        "blocks of the networks of this library: He's, or the paper's, without a ReLU after the addition",
        "relu",
        "branch",
    )
    data: str = _option("cifar10", "the images", *NAMES, "folder")
    data_dir: str | None = _option(None, "where they are (default: $RETROGRADE_DATA, or data)")
    gamma: float = _option(0.9, "γ of the momentum network; 0 with --memory store is the plain ResNet")
    velocity: str = _option(
        "zero", "v₀: 0, or f(x₀) of each stage's first block, or of a block of its own", "zero", "first", "learned"
    )
    gamma_schedule: tuple[str, ...] = _option(
        (), "of a torchvision, timm or own model: shares of --gamma by step, as 0:0 500:1 to warm up"
    )
    memory: str = _option("auto", "how activations are remembered", "reverse", "checkpoint", "store", "auto")
    fixed_point: str = _option("auto", "the integers that hold x and v; int16 is for --amp", "auto", "int16")
    verify: str = _option("auto", "check that backward rewound the network", "auto", "strict", "off")
    seed: int = _option(0, "of the weights, the order of the images and what is done to them")
    seeds: tuple[int, ...] = _option((), "train once with each of these, in a folder seed-N of --out each")
    sweep: tuple[str, ...] = _option(
        (), "train with each combination of these values, name=value,value, in a folder of --out each"
    )
    limit: int | None = _option(None, "use the first so many training images only")
    image_size: int = _option(224, "pixels, for folders of images")
    augment: bool = _option(True, "shift and flip the training images")
    workers: int = _option(4, "processes that decode folders of images")
    device: str = _option("auto", "cpu, cuda, cuda:1; auto: cuda where there is one")
    parallel: str = _option("ddp", "over the processes of torchrun", *PARALLEL)
    out: str = _option("out/train", "folder of the run; a run that is there goes on")
    resume: str | None = _option(None, "a checkpoint of the run to go on from, instead of its newest")
    log_every: int = _option(50, "steps between lines of the log")
    checkpoint_every: int = _option(0, "steps between checkpoints, besides the one after each epoch")
    keep: int = _option(2, "checkpoints kept")
    tensorboard: bool = _option(True, "also log for TensorBoard")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.points()
        if self.graph and self.verify == "strict":
            raise ValueError(
                f"graph cannot wait for the checks of verify={self.verify}: leave one of them out, or use verify=auto."
            )

    def points(self) -> dict[int, float]:
        """The γ schedule: shares by step."""
        try:
            return {int(step): float(share) for step, share in (point.split(":") for point in self.gamma_schedule)}
        except ValueError:
            raise ValueError(
                f"gamma_schedule takes points step:share, as 0:0 500:1; got {' '.join(self.gamma_schedule)}."
            ) from None


def parse(arguments: list[str] | None = None, prog: str = "retrograde train") -> Setting:
    """The setting from the command line, and from a file of settings, whose values options override."""
    parser = argparse.ArgumentParser(
        prog=prog, formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Train a residual network, plain or as a momentum network. The same command goes on with a run that was "
        "interrupted, to the same losses. Under torchrun: DDP or FSDP2.",
    )  # fmt: skip
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="settings from a file, .toml or .json (a run's setting.json, say); options come after it",
    )
    hints = typing.get_type_hints(Setting)
    for part in (Setting, Recipe):
        group = parser.add_argument_group("how" if part is Recipe else "what and where")
        inherited = {f.name for f in dataclasses.fields(Recipe)} if part is Setting else set()
        for option in dataclasses.fields(part):
            if option.name not in inherited:
                _add(group, option, hints[option.name])
    try:
        given, _ = parser.parse_known_args(arguments)
        if given.config is not None:
            parser.set_defaults(**read(Path(given.config)))
        values = vars(parser.parse_args(arguments))
        del values["config"]
        return Setting(**values)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def read(path: Path) -> dict[str, Any]:
    """The settings in a file.

    Raises:
        ValueError: if it has a name that is no setting, or is not what its name says.
    """
    if path.suffix == ".toml":
        try:
            import tomllib
        except ModuleNotFoundError:  # Python 3.10
            import tomli as tomllib  # type: ignore[no-redef,import-not-found]
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    else:
        found = json.loads(path.read_text(encoding="utf-8"))
    names = [field.name for field in dataclasses.fields(Setting)]
    wrong = [name for name in found if name not in names]
    if wrong:
        raise ValueError(f"{path}: there is no setting {wrong[0]!r}. {suggestion(wrong[0], names)}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _add(group: Any, option: dataclasses.Field[Any], hint: Any) -> None:
    name, words = f"--{option.name.replace('_', '-')}", option.metadata["help"]
    settings: dict[str, Any] = {"default": option.default, "help": words}
    if hint is bool:
        group.add_argument(name, action=argparse.BooleanOptionalAction, **settings)
    elif typing.get_origin(hint) is tuple:
        group.add_argument(name, type=typing.get_args(hint)[0], nargs="*", **settings)
    else:
        if typing.get_origin(hint) is types.UnionType:
            hint = typing.get_args(hint)[0]
        group.add_argument(name, type=hint, choices=option.metadata["choices"], **settings)


def fixed(setting: Setting) -> dict[str, Any]:
    """What must stay the same for a run to go on, as JSON holds it."""
    values = dataclasses.asdict(setting)
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {name: value for name, value in values.items() if name not in (*FREE, "resume")}
