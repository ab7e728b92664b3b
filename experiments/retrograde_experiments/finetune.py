"""Fig. 8: a pretrained ResNet and its Momentum form on a small new set of large images, under a small GPU's memory.

    resnet        the ImageNet ResNet-50           checkpoint   the same, torch.utils.checkpoint on every block
    momentum      the same weights, γ = 0.9; γ rises from 0.1 within the first epochs of the fine-tuning itself, since ImageNet, on
                  which the paper refits, is not at hand
    reference     the same weights through the package momentumnet 0.10, γ = 0.9 (where it is installed)

First the largest batch with which three steps fit under the limit is found for each, then each is fine-tuned, all layers of it, with
that batch, or, where the memory does not last, with the next smaller one: accuracy over seconds of training. The limit is set on
PyTorch's allocator; the CUDA context comes on top. The rate is proportional to the batch.

Trainings may share a device; their seconds then say nothing. So the seconds of an epoch are measured apart (`--only phase=time`, to run
with the device otherwise idle), and where they are, an accuracy is shown over epochs times that.

While γ rises the network is between the plain one and the Momentum ResNet: what counts as the latter's accuracy, best or first to reach
a bar, is what it has once γ is at its last value.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from retrograde.nets.resnet import resnet

from .data import Images, Spec, data_dir
from .data.batches import Resident
from .data.folder import decode, load_folders, middle
from .data.weights import MEAN, STD, as_published, resnet50_weights
from .errors import ExperimentError
from .findings import Finding, spread
from .memory_batch import checkpoint_blocks, largest_fitting
from .metrics import Key, Record, read_metrics
from .run import Context
from .style import COLOURS, NAMES, canvas
from .train import Learner, Recipe
from .train.learner import set_gamma
from .train.unit import small_set

WAYS = ("resnet", "checkpoint", "momentum", "reference")
FIRST_GAMMA, LEVELS = 0.1, 8
FIRST_STEPS, TIMED = 5, 3  # steps that are not counted, then epochs that are


@dataclass(frozen=True)
class Config:
    data: str = "hymenoptera"
    pretrained: bool = True
    depth: int = 50
    size: int = 500
    gamma: float = 0.9
    limit_gb: float = 3.0
    cap: int = 64  # batches are not tried beyond
    epochs: int = 15
    warm: int = 4  # epochs in which γ rises
    rate: float = 2.5e-4  # per image of a batch
    weight_decay: float = 1e-4
    reach: float = 90.0  # %, to whose time the runs are compared
    repeats: int = 3
    reference: bool = True

    @classmethod
    def paper(cls) -> Config:
        return cls()

    @classmethod
    def default(cls) -> Config:
        return cls(epochs=10)

    @classmethod
    def smoke(cls) -> Config:
        return cls(
            data="digits", pretrained=False, depth=18, size=32, cap=32, epochs=1, warm=1, repeats=1, reference=False
        )

    def setting(self) -> str:
        weights = "ImageNet's" if self.pretrained else "random"
        return (
            f"ResNet-{self.depth} ({weights} weights), {self.data} at {self.size}×{self.size}, {self.limit_gb:g} GB of device memory, "
            f"float32, {self.epochs} epochs of SGD 0.9 with the largest batch of each, rate {self.rate:g} per image falling to 0, γ to "
            f"{self.gamma:g} within {self.warm} epochs, {self.repeats} seeds. The paper: ResNet-152, refitted on ImageNet first."
        )


def ways(config: Config) -> tuple[str, ...]:
    return WAYS if config.reference else WAYS[:3]


def units(config: Config) -> list[Key]:
    found: list[Key] = [{"phase": "largest", "net": net} for net in ways(config)]
    found += [{"phase": "train", "net": net, "seed": s} for s in range(config.repeats) for net in ways(config)]
    return found + [{"phase": "time", "net": net} for net in ways(config)]


def needs(config: Config, unit: Key) -> list[Key]:
    """The batch to train with must be found; the one that was trained with is timed."""
    if unit["phase"] == "time":
        return [{"phase": "train", "net": unit["net"], "seed": s} for s in range(config.repeats)]
    return [{"phase": "largest", "net": unit["net"]}] if unit["phase"] == "train" else []


def measure(config: Config, unit: Key, context: Context) -> dict[str, Any]:
    if unit["net"] == "reference" and find_spec("momentumnet") is None:
        raise ExperimentError(
            "momentumnet is not installed: `pip install --no-deps momentumnet==0.10`, or leave it out with --set reference=false."
        )
    with limited(config.limit_gb, context.device):
        if unit["phase"] == "largest":
            return {"largest": _largest(config, unit["net"], context)}
        for batch in range(_known_to_fit(unit, context), 0, -1):
            done = _if_it_fits(config, unit, batch, context)
            if done is not None:
                return done
        return {"batch": 0, "reserved": None, "seconds": [], "accuracy": []}


def _known_to_fit(unit: Key, context: Context) -> int:
    """The largest batch; to be timed, that of the trainings where there are some."""
    mine = [r for r in read_metrics(context.folder) if r["net"] == unit["net"]]
    trained = [r["batch"] for r in mine if r["phase"] == "train" and r["batch"]]
    if unit["phase"] == "time" and trained:
        return int(min(trained))
    for record in mine:
        if record["phase"] == "largest":
            return int(record["largest"])
    raise ExperimentError(f"the largest batch of {unit['net']} is not known: run the units with phase=largest first.")


def _if_it_fits(config: Config, unit: Key, batch: int, context: Context) -> dict[str, Any] | None:
    """None if the memory does not last after all: what fits three steps may not fit many, whose blocks of memory are cut up."""
    try:
        work = _timed if unit["phase"] == "time" else _finetuned
        return work(config, unit, batch, context)
    except torch.OutOfMemoryError:
        context.progress.step(f"batch {batch} does not fit for long")
    context.checkpoint.delete()
    _release(context.device)
    torch.cuda.reset_peak_memory_stats(context.device)
    return None


@contextmanager
def limited(gigabytes: float, device: torch.device) -> Iterator[None]:
    """No more than this of a GPU's memory for PyTorch. On a CPU nothing is limited."""
    if device.type != "cuda":
        yield
        return
    index = torch.cuda.current_device() if device.index is None else device.index  # a fraction is set by index alone
    total = torch.cuda.get_device_properties(index).total_memory
    _release(device)
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 1e9 / total), index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, index)
        _release(device)


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def network(config: Config, net: str, classes: int, seed: int) -> nn.Module:
    """The pretrained network with a new head, in one of the ways."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {"gamma": FIRST_GAMMA, "memory": "auto"} if net == "momentum" else {}
    made: nn.Module = resnet(config.depth, classes=1000, **options)
    if config.pretrained:
        if config.depth != 50:
            raise ExperimentError(f"there are pretrained weights of depth 50 only; got depth={config.depth}.")
        as_published(made).load_state_dict(_weights(data_dir()))
    head: Any = made.fc
    made.fc = nn.Linear(head.in_features, classes)
    if net in ("checkpoint", "momentum"):
        checkpoint_blocks(made, every=net == "checkpoint")
    if net == "reference":
        from momentumnet import transform_to_momentumnet  # type: ignore[import-not-found]

        made = transform_to_momentumnet(made, gamma=config.gamma, is_residual=True)
    return made


@lru_cache(maxsize=1)
def _weights(root: Path) -> dict[str, Tensor]:
    return resnet50_weights(root)


def _recipe(config: Config, batch: int) -> Recipe:
    return Recipe(
        epochs=config.epochs, batch=batch, rate=config.rate * batch, schedule="cosine", warmup=0.5, weight_decay=config.weight_decay,
        channels_last=True,
    )  # fmt: skip


def _largest(config: Config, net: str, context: Context) -> int:
    """The largest batch with which three steps of training fit."""
    device = context.device

    def needed(batch: int) -> int | None:
        fits = device.type == "cpu" or _fits(config, net, batch, device)
        _release(device)
        context.progress.step(f"batch {batch} {'fits' if fits else 'does not fit'}")
        return 0 if fits else None

    return largest_fitting(needed, 1, config.cap)


def _fits(config: Config, net: str, batch: int, device: torch.device) -> bool:
    try:
        learner = Learner(network(config, net, 2, 0).to(device), _recipe(config, batch), steps=1)
        x = torch.randn(batch, 3, config.size, config.size, device=device).to(memory_format=torch.channels_last)
        calibrate(learner.net, x)
        for _ in range(3):
            learner.step(x, torch.zeros(batch, dtype=torch.int64, device=device))
        torch.cuda.synchronize(device)
        return True
    except torch.OutOfMemoryError:
        return False


@torch.no_grad()
def calibrate(net: nn.Module, x: Tensor) -> None:
    """Let a momentum network find its fixed-point ranges on two images: the pass that finds them runs on 64-bit integers, and takes
    more memory than a step of training. As in training, but for BatchNorm's statistics, which are left as they are."""
    kept = [(buffer, buffer.clone()) for buffer in net.buffers()]
    net.train()
    net(x[:2])
    for buffer, value in kept:
        buffer.copy_(value)


def _finetuned(config: Config, unit: Key, batch: int, context: Context) -> dict[str, Any]:
    images = small(config)
    source = Resident(images, batch, seed=unit["seed"], device=context.device, test_batch=2, home="cpu")
    net = network(config, unit["net"], source.classes, unit["seed"]).to(context.device)
    learner = Learner(net, _recipe(config, batch), source.steps)
    curve: dict[str, list[float]] = {
        "seconds": [0.0],
        "accuracy": [learner.evaluate(source)["accuracy"]],
        "train_loss": [],
    }
    saved, gamma = context.checkpoint.load(), FIRST_GAMMA
    if saved is not None:
        curve, gamma = saved["curve"], saved["gamma"]
        if unit["net"] == "momentum":
            set_gamma(net, gamma)
        learner.restore(saved["learner"])
    context.progress.steps(config.epochs * source.steps, learner.done)
    for epoch in range(learner.done // source.steps, config.epochs):
        start = _now(context.device)
        for x, y in source.epoch(epoch):
            wanted = risen(config, learner.done, source.steps)
            if unit["net"] == "momentum" and (wanted != gamma or not learner.done):
                set_gamma(net, gamma := wanted)
                calibrate(net, x)
            learner.step(x, y)
            context.progress.step()
        curve["seconds"].append(curve["seconds"][-1] + _now(context.device) - start)
        curve["accuracy"].append(learner.evaluate(source)["accuracy"])
        curve["train_loss"].append(learner.loss())
        if context.checkpoint.due():
            context.checkpoint.save({"learner": learner.state(), "curve": curve, "gamma": gamma})
    reserved = torch.cuda.max_memory_reserved(context.device) if context.device.type == "cuda" else None
    return {"batch": batch, "reserved": reserved, **curve}


def _timed(config: Config, unit: Key, batch: int, context: Context) -> dict[str, Any]:
    """The seconds of an epoch of training, without evaluation. γ is the last: it has that in most epochs of a training."""
    source = Resident(small(config), batch, seed=0, device=context.device, test_batch=2, home="cpu")
    net = network(config, unit["net"], source.classes, 0).to(context.device)
    learner = Learner(net, _recipe(config, batch), source.steps)
    if unit["net"] == "momentum":
        set_gamma(net, config.gamma)
        calibrate(net, next(source.epoch(0))[0])
    for x, y in islice(source.epoch(0), FIRST_STEPS):
        learner.step(x, y)
    seconds = []
    context.progress.steps(TIMED * source.steps)
    for epoch in range(TIMED):
        start = _now(context.device)
        for x, y in source.epoch(epoch):
            learner.step(x, y)
            context.progress.step()
        seconds.append(_now(context.device) - start)
    return {"batch": batch, "epochs": seconds, "epoch": median(seconds)}


def risen(config: Config, step: int, steps: int) -> float:
    """γ of a step: from 0.1 to the last in equal rises.

    >>> [round(risen(Config(warm=2), step, 10), 2) for step in (0, 3, 10, 17, 18, 100)]
    [0.1, 0.2, 0.5, 0.7, 0.8, 0.9]
    """
    done = min(1.0, step / max(1, config.warm * steps))
    return (
        config.gamma
        if done == 1
        else round(FIRST_GAMMA + (config.gamma - FIRST_GAMMA) * int(done * LEVELS) / LEVELS, 4)
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@lru_cache(maxsize=1)
def small(config: Config) -> Images:
    """The images as squares in memory: for training 12 % larger than what is cut out of them."""
    large = round(1.12 * config.size / 2) * 2
    if config.data == "digits":  # for the smoke test
        held = small_set("digits")
        spec = Spec(
            "digits", 10, 64, 16, (3, config.size, config.size), held.spec.mean * 3, held.spec.std * 3, flip=False
        )

        def scaled(x: Tensor, size: int) -> Tensor:
            return interpolate(x.float(), (size, size)).byte().expand(-1, 3, -1, -1)

        return Images(
            spec,
            scaled(held.train_x[:64], large),
            held.train_y[:64],
            scaled(held.test_x[:16], config.size),
            held.test_y[:16],
        )
    folders = load_folders(config.data)
    train = torch.stack([torch.from_numpy(middle(decode(path), large, 1.0).copy()) for path, _ in folders.train])
    test = torch.stack([torch.from_numpy(middle(decode(path), config.size, 1.12).copy()) for path, _ in folders.val])
    labels = [torch.tensor([label for _, label in part]) for part in (folders.train, folders.val)]
    spec = Spec(config.data, len(folders.classes), len(train), len(test), (3, config.size, config.size), MEAN, STD)
    return Images(spec, train.permute(0, 3, 1, 2), labels[0], test.permute(0, 3, 1, 2), labels[1])


def _risen_after(config: Config, record: Record) -> int:
    """Epochs after which γ has its last value, so that accuracies count; the last of a run counts in any case."""
    return min(config.warm + 1, len(record["accuracy"]) - 1) if record["net"] == "momentum" else 0


def _reached(config: Config, seconds: list[float], record: Record) -> float | None:
    """Seconds of training after which the accuracy to reach was first reached."""
    found = list(zip(seconds, record["accuracy"], strict=True))[_risen_after(config, record) :]
    return next((s for s, a in found if a >= config.reach), None)


def _epochs(records: list[Record]) -> dict[tuple[str, int], float]:
    """The seconds of an epoch, measured alone, by network and batch."""
    return {(r["net"], r["batch"]): r["epoch"] for r in records if r["phase"] == "time" and r["batch"]}


def _seconds(record: Record, alone: dict[tuple[str, int], float]) -> list[float]:
    """Of training, until each accuracy: epochs times the seconds of one measured alone, or else as they passed."""
    epoch = alone.get((record["net"], record["batch"]))
    return record["seconds"] if epoch is None else [k * epoch for k in range(len(record["accuracy"]))]


def _split(records: list[Record]) -> tuple[dict[str, int], dict[str, list[Record]]]:
    """The largest batches, and the training runs, by network."""
    largest = {r["net"]: r["largest"] for r in records if r["phase"] == "largest"}
    runs = {net: [r for r in records if r["phase"] == "train" and r["net"] == net and r["batch"]] for net in WAYS}
    return largest, {net: found for net, found in runs.items() if found}


def figure(config: Config, records: list[Record]) -> Any:
    picture, (left, axis) = canvas(9, 4, 1, 2, width_ratios=(1, 1.6))
    largest, runs = _split(records)
    alone = _epochs(records)
    shown = [net for net in WAYS if net in largest]
    bars = left.barh(
        range(len(shown)), [largest[net] for net in shown], color=[COLOURS[net] for net in shown], height=0.6
    )
    left.bar_label(bars, padding=2)
    left.set_yticks(range(len(shown)), [NAMES[net].replace(", ", ",\n") for net in shown], fontsize=8)
    left.invert_yaxis()
    left.xaxis.get_major_locator().set_params(integer=True)
    left.set(xlabel="images", title=f"largest batch in {config.limit_gb:g} GB")
    for net, found in runs.items():
        for record in found:
            axis.plot(_seconds(record, alone), record["accuracy"], color=COLOURS[net], alpha=0.25, linewidth=1)
        seconds, accuracy = (
            [mean(v) for v in zip(*curves, strict=True)]
            for curves in ([_seconds(r, alone) for r in found], [r["accuracy"] for r in found])
        )
        batches = ", ".join(str(batch) for batch in sorted({r["batch"] for r in found}))
        line = "o-" if not alone or _timed_alone(found, alone) else "o--"
        label = f"{NAMES[net]}, batch {batches}{_seeds(config, found)}"
        axis.plot(seconds, accuracy, line, color=COLOURS[net], label=label, markersize=4)
        rising = slice(_risen_after(config, found[0]))
        axis.plot(seconds[rising], accuracy[rising], "o", color=COLOURS[net], markerfacecolor="white", markersize=4)
    axis.set_xlabel(_axis(runs, alone), fontsize=9)
    axis.set_ylabel("test accuracy, %")
    axis.set_title(f"{config.data} at {config.size}×{config.size}" + " (hollow: γ still rises)" * ("momentum" in runs))
    ends = [_seconds(r, alone)[-1] for found in runs.values() for r in found]
    if ends and max(ends) > 4 * min(ends):  # the fast ones would be a line at the left
        axis.set_xscale("symlog", linthresh=min(ends) / 10, linscale=0.4)
        axis.xaxis.set_major_formatter("{x:g}")
    if runs:
        axis.legend(fontsize=8, loc="lower right", handlelength=3)
    else:
        axis.text(0.5, 0.5, "training: not run", ha="center", va="center", transform=axis.transAxes, color="#6b7280")
        axis.set(xticks=[], yticks=[])
    return picture


def _timed_alone(found: list[Record], alone: dict[tuple[str, int], float]) -> bool:
    return all((r["net"], r["batch"]) in alone for r in found)


def _seeds(config: Config, found: list[Record]) -> str:
    """To be said where some are missing."""
    return "" if len(found) == config.repeats else f" ({len(found)} of {config.repeats} seeds)"


def _axis(runs: dict[str, list[Record]], alone: dict[tuple[str, int], float]) -> str:
    if not runs or not alone:
        return "seconds of training"
    passed = "" if all(_timed_alone(found, alone) for found in runs.values()) else "; dashed: beside others"
    return f"seconds of training\n(epochs × an epoch's, measured alone{passed})"


def findings(config: Config, records: list[Record]) -> list[Finding]:
    largest, runs = _split(records)
    found = [Finding(f"largest batch, {NAMES[net]}", str(batch)) for net, batch in largest.items()]
    if {"resnet", "momentum"} <= largest.keys():
        more = largest["momentum"] > largest["resnet"]
        found.append(
            Finding(
                "largest batch, Momentum against ResNet", f"{largest['momentum']} : {largest['resnet']}", "larger", more
            )
        )
    reserved = [r["reserved"] for done in runs.values() for r in done if r["reserved"]]
    if reserved:
        kept = max(reserved) <= config.limit_gb * 1e9
        found.append(
            Finding("memory reserved, at most", f"{max(reserved) / 1e9:.2f} GB", f"≤ {config.limit_gb:g} GB", kept)
        )
    times, told, alone = dict[str, float](), dict[str, str](), _epochs(records)
    found += [Finding(f"an epoch alone, {NAMES[net]}, batch {b}", f"{s:.2f} s") for (net, b), s in alone.items()]
    for net, done in runs.items():
        counted = {
            "best": [max(r["accuracy"][_risen_after(config, r) :]) for r in done],
            "last": [r["accuracy"][-1] for r in done],
        }
        for name, values in counted.items():
            found.append(Finding(f"{name} accuracy, {NAMES[net]}", spread(values, ".1f", " %") + _seeds(config, done)))
        reached = [_reached(config, _seconds(r, alone), r) for r in done]
        all_of_them = [s for s in reached if s is not None]
        told[net] = f"{len(all_of_them)} of {len(done)} seeds reach it"
        if len(all_of_them) == len(done):
            times[net] = mean(all_of_them)
            told[net] = spread(all_of_them, ".1f", " s") + _seeds(config, done)
            told[net] += "" if not alone or _timed_alone(done, alone) else ", beside others"
        found.append(Finding(f"time to {config.reach:g} %, {NAMES[net]}", told[net]))
    if "resnet" in times and "momentum" in runs:
        ratio = times["momentum"] / times["resnet"] if "momentum" in times else None
        ours = told["momentum"] if ratio is None else f"{ratio:.2f}×"
        met = ratio is not None and ratio < 1
        found.append(Finding(f"time to {config.reach:g} %, Momentum over ResNet", ours, "< 1×", met))
    return found
