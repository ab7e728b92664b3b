"""Fig. 8: a pretrained ResNet and its Momentum form on a small new set of large images, under a small GPU's memory.

    resnet        the ImageNet ResNet
    checkpoint    the same, torch.utils.checkpoint on every block
    momentum      the same weights, with every γ of `gammas`; γ rises from 0.1 in the first epochs of the fine-tuning itself, since
                  ImageNet, on which the paper refits, is not at hand
    reference     the same weights through the package momentumnet 0.10, γ = 0.9, where it is installed. Its option
                  is_residual adds what a block returns to x; He's blocks return relu(x + f(x)), so it is off

Three phases. "largest": the largest batch with which three steps fit under the limit. "time": the seconds of an epoch, one batch of
noise that lies on the device, with that batch and with those of `batches`, by single kernels and as a CUDA graph; to run with the
device otherwise idle. "train": fine-tuning of all layers with the largest batch, or, where the memory does not last, with the next
smaller one.
The limit is set on PyTorch's allocator; the CUDA context comes on top. The rate is proportional to the batch. An accuracy is shown over
epochs times the seconds of one of that batch, where these were measured.

While γ rises the network is between the plain one and the Momentum ResNet: what counts as the latter's accuracy, best or first to reach
a bar, is what it has once γ is at its last value. repeats=0 with pretrained=false is for memory and time alone.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from retrograde.nets.resnet import resnet

from .config import Settings
from .data import Images, Spec, data_dir
from .data.batches import Resident
from .data.folder import decode, load_folders, middle
from .data.weights import MEAN, STD, as_published, resnet50_weights
from .errors import ExperimentError
from .findings import Finding, compared, spread
from .memory_batch import checkpoint_blocks, largest_fitting
from .metrics import Key, Record, read_metrics
from .run import Context
from .style import COLOURS, MARKERS, NAMES, canvas
from .train import Learner, Recipe
from .train.learner import set_gamma
from .train.unit import small_set

WAYS = ("resnet", "checkpoint", "momentum", "reference")
REFERENCE = 0.9  # γ of the package
FIRST_GAMMA, LEVELS = 0.1, 8
FIRST_STEPS, TIMED = 5, 3  # steps that are not counted, then epochs that are


@dataclass(frozen=True)
class Config(Settings):
    decisive: ClassVar[tuple[str, ...]] = ("data", "pretrained", "depth", "size", "limit_gb", "warm")

    data: str = "hymenoptera"
    pretrained: bool = True
    depth: int = 152
    size: int = 500
    gammas: tuple[float, ...] = (0.9,)
    limit_gb: float = 3.0
    cap: int = 64  # batches are not tried beyond
    batches: tuple[int, ...] = (2, 4)  # timed, besides the largest
    graph: bool = True  # time an epoch as a CUDA graph, too
    images: int = 244  # in an epoch that is timed
    epochs: int = 15
    warm: int = 0  # epochs in which γ rises; 0: the weights have been refitted with γ before
    rate: float = 2.5e-4  # per image of a batch
    weight_decay: float = 1e-4
    reach: float = 90.0  # %, to whose time the runs are compared
    repeats: int = 3
    reference: bool = True

    @classmethod
    def default(cls) -> Config:
        return cls(depth=50, epochs=10, warm=4, gammas=(0.125, 0.3, 0.5, 0.7, 0.9))

    @classmethod
    def smoke(cls) -> Config:
        return cls(
            data="digits", pretrained=False, depth=18, size=32, cap=32, epochs=1, warm=1, repeats=1, reference=False, images=8,
            batches=(2,),
        )  # fmt: skip

    def setting(self) -> str:
        weights, gammas = "ImageNet's" if self.pretrained else "random", ", ".join(f"{g:g}" for g in self.gammas)
        training = (
            f"{self.epochs} epochs of SGD 0.9 with the largest batch of each, rate {self.rate:g} per image falling to 0, γ to "
            f"{gammas} within {self.warm} epochs, {self.repeats} seeds"
        )
        return (
            f"ResNet-{self.depth} ({weights} weights), {self.data} at {self.size}×{self.size}, {self.limit_gb:g} GB of device memory, "
            f"float32, {training if self.repeats else 'memory and time alone, no training'}. The paper: ResNet-152, refitted on "
            "ImageNet first, γ = 0.9."
        )


def ways(config: Config) -> tuple[str, ...]:
    return WAYS if config.reference else WAYS[:3]


def units(config: Config) -> list[Key]:
    found: list[Key] = [{"phase": "largest", "net": net} for net in ways(config)]
    for seed in range(config.repeats):
        for net in ways(config):
            gammas = [{"gamma": g} for g in config.gammas] if net == "momentum" else [{}]
            found += [{"phase": "train", "net": net, "seed": seed, **gamma} for gamma in gammas]
    for net in ways(config):
        for graph in (False, True)[: 1 + (config.graph and net != "reference")]:
            found += [{"phase": "time", "net": net, "batch": b, "graph": graph} for b in ("largest", *config.batches)]
    return found


def needs(config: Config, unit: Key) -> list[Key]:
    """The largest batch must be known."""
    known = unit["phase"] == "largest" or unit.get("batch") in config.batches
    return [] if known else [{"phase": "largest", "net": unit["net"]}]


def measure(config: Config, unit: Key, context: Context) -> dict[str, Any]:
    if unit["net"] == "reference" and find_spec("momentumnet") is None:
        raise ExperimentError(
            "momentumnet is not installed: `pip install --no-deps momentumnet==0.10`, or leave it out with --set reference=false."
        )
    with limited(config.limit_gb, context.device):
        if unit["phase"] == "largest":
            return {"largest": _largest(config, unit["net"], context)}
        wanted = unit.get("batch", "largest")
        most = _known_to_fit(config, unit, context) if wanted == "largest" else int(wanted)
        for batch in range(most, 0 if wanted == "largest" else most - 1, -1):
            done = _if_it_fits(config, unit, batch, context)
            if done is not None:
                return done
        return {"fits": 0, "epoch": None} if unit["phase"] == "time" else {"fits": 0, "seconds": [], "accuracy": []}


def _known_to_fit(config: Config, unit: Key, context: Context) -> int:
    """The largest batch; to be timed, that of the trainings where there are some: with a larger one the memory may not last."""
    mine = [r for r in read_metrics(context.folder) if r["net"] == unit["net"]]
    trained = [r["fits"] for r in mine if r["phase"] == "train" and r["fits"]]
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
        made = _pretrained(made, config.depth)
    head: Any = made.fc
    made.fc = nn.Linear(head.in_features, classes)
    if net in ("checkpoint", "momentum"):
        checkpoint_blocks(made, every=net == "checkpoint")
    if net == "reference":
        from momentumnet import transform_to_momentumnet  # type: ignore[import-not-found]

        made = transform_to_momentumnet(made, gamma=REFERENCE, is_residual=False)
    return made


def _pretrained(net: nn.Module, depth: int) -> nn.Module:
    """With ImageNet's weights: of depth 50 as `resnet50_weights` finds them, else torchvision's file resnetDEPTH.pth."""
    if depth == 50:
        as_published(net).load_state_dict(_weights(data_dir()))
        return net
    path = data_dir() / f"resnet{depth}.pth"
    if not path.exists():
        raise ExperimentError(
            f"{path} is missing: put torchvision's ImageNet weights of ResNet-{depth} there, or take --set depth=50, or "
            "--set pretrained=false --set repeats=0 for memory and time alone."
        )
    net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return net


@lru_cache(maxsize=1)
def _weights(root: Path) -> dict[str, Tensor]:
    return resnet50_weights(root)


def _recipe(config: Config, batch: int, graph: bool = False) -> Recipe:
    return Recipe(
        epochs=config.epochs, batch=batch, rate=config.rate * batch, schedule="cosine", warmup=0.5, weight_decay=config.weight_decay,
        channels_last=True, graph=graph,
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
    saved, gamma, last = context.checkpoint.load(), FIRST_GAMMA, unit.get("gamma", 0.0)
    if saved is not None:
        curve, gamma = saved["curve"], saved["gamma"]
        if unit["net"] == "momentum":
            set_gamma(net, gamma)
        learner.restore(saved["learner"])
    context.progress.steps(config.epochs * source.steps, learner.done)
    for epoch in range(learner.done // source.steps, config.epochs):
        start = _now(context.device)
        for x, y in source.epoch(epoch):
            wanted = risen(config, learner.done, source.steps, last)
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
    return {"fits": batch, "reserved": reserved, **curve}


def _timed(config: Config, unit: Key, batch: int, context: Context) -> dict[str, Any]:
    """The seconds of an epoch of training, without evaluation and without loading images. γ is 0.9."""
    if unit["graph"] and context.device.type != "cuda":
        return {"fits": batch, "epochs": [], "epoch": None}
    net = network(config, unit["net"], 2, 0).to(context.device)
    learner = Learner(net, _recipe(config, batch, unit["graph"]), max(1, config.images // batch))
    x = torch.randn(batch, 3, config.size, config.size, device=context.device).to(memory_format=torch.channels_last)
    y = torch.zeros(batch, dtype=torch.int64, device=context.device)
    if unit["net"] == "momentum":
        set_gamma(net, max(config.gammas))
        calibrate(net, x)
    for _ in range(FIRST_STEPS):
        learner.step(x, y)
    seconds = []
    context.progress.steps(TIMED * learner.steps)
    for _ in range(TIMED):
        start = _now(context.device)
        for _ in range(learner.steps):
            learner.step(x, y)
            context.progress.step()
        seconds.append(_now(context.device) - start)
    return {"fits": batch, "epochs": seconds, "epoch": median(seconds)}


def risen(config: Config, step: int, steps: int, last: float) -> float:
    """γ of a step: from 0.1 to the last in equal rises.

    >>> [round(risen(Config(warm=2), step, 10, 0.9), 2) for step in (0, 3, 10, 17, 18, 100)]
    [0.1, 0.2, 0.5, 0.7, 0.8, 0.9]
    """
    done = min(1.0, step / (config.warm * steps)) if config.warm else 1.0
    first = min(FIRST_GAMMA, last)
    return last if done == 1 else round(first + (last - first) * int(done * LEVELS) / LEVELS, 4)


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
    late = config.warm + 1 if config.warm else 0
    return min(late, len(record["accuracy"]) - 1) if record["net"] == "momentum" else 0


def _reached(config: Config, seconds: list[float], record: Record) -> float | None:
    """Seconds of training after which the accuracy to reach was first reached."""
    found = list(zip(seconds, record["accuracy"], strict=True))[_risen_after(config, record) :]
    return next((s for s, a in found if a >= config.reach), None)


def _alone(records: list[Record]) -> dict[tuple[str, int], float]:
    """The seconds of an epoch by single kernels, measured alone, by network and batch."""
    timed = [r for r in records if r["phase"] == "time" and not r.key["graph"] and r["epoch"] is not None]
    return {(r["net"], r["fits"]): r["epoch"] for r in timed}


def _seconds(record: Record, alone: dict[tuple[str, int], float]) -> list[float]:
    """Of training, until each accuracy: epochs times the seconds of one measured alone, or else as they passed."""
    epoch = alone.get((record["net"], record["fits"]))
    return record["seconds"] if epoch is None else [k * epoch for k in range(len(record["accuracy"]))]


def _split(records: list[Record]) -> tuple[dict[str, int], dict[tuple[str, float], list[Record]]]:
    """The largest batches by network, and the training runs by network and γ."""
    largest = {r["net"]: r["largest"] for r in records if r["phase"] == "largest"}
    runs: dict[tuple[str, float], list[Record]] = {}
    for record in sorted(records, key=lambda r: (WAYS.index(r["net"]), r.key.get("gamma", 0))):
        if record["phase"] == "train" and record["fits"]:
            runs.setdefault((record["net"], record.key.get("gamma", 0.0)), []).append(record)
    return largest, runs


def _name(net: str, gamma: float) -> str:
    return f"{NAMES[net]}, γ = {gamma:g}" if gamma else NAMES[net]


def figure(config: Config, records: list[Record]) -> Any:
    """The largest batches, and accuracy over the time of training."""
    picture, (left, axis) = canvas(9.4, 4.2, 1, 2, width_ratios=(1, 1.7))
    largest, runs = _split(records)
    alone = _alone(records)
    shown = [net for net in WAYS if net in largest]
    bars = left.barh(
        range(len(shown)), [largest[net] for net in shown], color=[COLOURS[net] for net in shown], height=0.6
    )
    left.bar_label(bars, padding=2)
    left.set_yticks(range(len(shown)), [NAMES[net].replace(", ", ",\n") for net in shown], fontsize=8.5)
    left.invert_yaxis()
    left.xaxis.get_major_locator().set_params(integer=True)
    left.set(xlabel="images", title=f"largest batch in {config.limit_gb:g} GB")
    for (net, gamma), found in runs.items():
        for record in found:
            axis.plot(_seconds(record, alone), record["accuracy"], color=COLOURS[net], alpha=0.25, linewidth=1)
        seconds = [mean(v) for v in zip(*(_seconds(r, alone) for r in found), strict=True)]
        accuracy = [mean(v) for v in zip(*(r["accuracy"] for r in found), strict=True)]
        line = MARKERS[net] + ("-" if _timed_alone(found, alone) or not alone else "--")
        label = f"{_name(net, gamma)}, batch {_batches(found)}{_seeds(config, found)}"
        shade = {"alpha": 0.35 + 0.65 * gamma / max(config.gammas)} if gamma else {}
        axis.plot(seconds, accuracy, line, color=COLOURS[net], label=label, **shade)
        rising = slice(_risen_after(config, found[0]))
        axis.plot(seconds[rising], accuracy[rising], MARKERS[net], color=COLOURS[net], markerfacecolor="white")
    axis.set(
        xlabel=_axis(runs, alone), ylabel="test accuracy, %", title=f"{config.data} at {config.size}×{config.size}"
    )
    if any(net == "momentum" for net, _ in runs) and config.warm:
        axis.set_title(axis.get_title() + " (hollow: γ still rises)")
    ends = [_seconds(r, alone)[-1] for found in runs.values() for r in found]
    if ends and max(ends) > 4 * min(ends):  # the fast ones would be a line at the left
        axis.set_xscale("symlog", linthresh=min(ends) / 10, linscale=0.4)
        axis.set_xticks([t for t in (0, 1, 3, 10, 30, 100, 300, 1000) if t < 1.2 * max(ends)])
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
    if runs:
        axis.legend(loc="lower right", handlelength=3)
    else:
        axis.text(
            0.5, 0.5, "training: not run", ha="center", va="center", transform=axis.transAxes, color=COLOURS["resnet"]
        )
        axis.set(xticks=[], yticks=[])
    return picture


def _batches(found: list[Record]) -> str:
    return ", ".join(str(batch) for batch in sorted({r["fits"] for r in found}))


def _timed_alone(found: list[Record], alone: dict[tuple[str, int], float]) -> bool:
    return all((r["net"], r["fits"]) in alone for r in found)


def _seeds(config: Config, found: list[Record]) -> str:
    """To be said where some are missing."""
    return "" if len(found) == config.repeats else f" ({len(found)} of {config.repeats} seeds)"


def _axis(runs: dict[tuple[str, float], list[Record]], alone: dict[tuple[str, int], float]) -> str:
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
    found += _reserved(config, runs) + _time(records)
    plain = runs.get(("resnet", 0.0), [])
    for (net, gamma), done in runs.items():
        name = _name(net, gamma)
        found.append(
            Finding(
                f"last accuracy, {name}", spread([r["accuracy"][-1] for r in done], ".1f", " %") + _seeds(config, done)
            )
        )
        pairs = [(r["accuracy"][-1], p["accuracy"][-1]) for r in done for p in plain if p["seed"] == r["seed"]]
        if gamma and pairs:
            found.append(
                compared(f"last accuracy, {name}, less the ResNet's", *map(list, zip(*pairs, strict=True)), form=".1f")
            )
    return found + _reaching(config, runs, _alone(records))


def _reserved(config: Config, runs: dict[tuple[str, float], list[Record]]) -> list[Finding]:
    reserved = [r["reserved"] for done in runs.values() for r in done if r["reserved"]]
    kept = max(reserved, default=0) <= config.limit_gb * 1e9
    most = f"{max(reserved, default=0) / 1e9:.2f} GB"
    return [Finding("memory reserved, at most", most, f"≤ {config.limit_gb:g} GB", kept)] if reserved else []


def _time(records: list[Record]) -> list[Finding]:
    """The seconds of an epoch, each with its batch; and whether the momentum network's larger batch saves time."""
    found, best = [], dict[str, float]()
    for record in (r for r in records if r["phase"] == "time"):
        graph = ", as a CUDA graph" if record.key["graph"] else ""
        batch = record["fits"] or record.key["batch"]
        name = f"an epoch alone, {NAMES[record['net']]}, batch {batch}{graph}"
        if record["epoch"] is not None:
            found.append(Finding(name, f"{record['epoch']:.2f} s"))
            best[record["net"]] = min(record["epoch"], best.get(record["net"], record["epoch"]))
        elif not record["fits"]:
            found.append(Finding(name, "does not fit"))
    if {"resnet", "momentum"} <= best.keys():
        ratio = best["momentum"] / best["resnet"]
        found.append(Finding("an epoch at best, Momentum over ResNet", f"{ratio:.2f}×", "< 1×", ratio < 1))
    return list({f.what: f for f in found}.values())


def _reaching(
    config: Config, runs: dict[tuple[str, float], list[Record]], alone: dict[tuple[str, int], float]
) -> list[Finding]:
    """When each reaches the bar, and whether the momentum network does so sooner."""
    found, times = [], dict[str, dict[int, float]]()
    for (net, gamma), done in runs.items():
        reached = {r["seed"]: s for r in done if (s := _reached(config, _seconds(r, alone), r)) is not None}
        told = f"{len(reached)} of {len(done)} seeds reach it"
        if len(reached) == len(done):
            told = spread(list(reached.values()), ".1f", " s") + _seeds(config, done)
            told += "" if not alone or _timed_alone(done, alone) else ", beside others"
        found.append(Finding(f"time to {config.reach:g} %, {_name(net, gamma)}", told))
        if gamma in (0.0, max(config.gammas)):
            times[net] = reached
    if {"resnet", "momentum"} <= times.keys():
        name, both = (
            f"time to {config.reach:g} %, Momentum less ResNet",
            sorted(times["resnet"].keys() & times["momentum"].keys()),
        )
        if len(both) < config.repeats:
            found.append(
                Finding(
                    name,
                    f"{len(times['momentum'])} seeds reach it, {len(times['resnet'])} of the ResNet's",
                    "< 0 s",
                    False,
                )
            )
        else:
            pair = ([times[net][s] for s in both] for net in ("momentum", "resnet"))
            found.append(compared(name, *pair, most=0.0, form=".1f", unit=" s"))
    return found
