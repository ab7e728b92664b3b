"""What the experiments have in common: a network is converted, and then left as it is, re-estimated, refitted, or warmed up.

converted     nothing else is done
statistics    the running statistics of BatchNorm are estimated anew; no parameter changes
refit         a short training at the final γ
warmup        the same training, with γ rising from 0 to its final value over the first part of it

Fine-tuned in reverse to be used as the plain network, in one of these ways:

kept          at one γ, which is then left out
falling       the same, with γ falling to 0 over the last part, so that the plain network is what is trained last
sign          each sample of each block draws +γ or −γ in training; without training it is the plain network
split         as kept, with attention and MLP of a transformer's layers as two steps
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg

from ..errors import ExperimentError, suggestion
from ..metrics import Key

WAYS = ("converted", "statistics", "refit", "warmup")
DEPLOYED = ("kept", "falling", "sign", "split")
FALL = 0.2  # the part of the steps over which γ falls
VELOCITIES = {"zero": None, "first": "first"}
GAMMAS = (0.0, 0.9, 0.5, 0.99, 0.7, 0.95, 0.3, 0.8, 0.1, 0.6, 0.2, 0.4)  # a run cut short has the telling ones


def placed(net: Any, device: torch.device) -> Any:
    """The network on the device, in the memory layout that convolutions there are fastest in."""
    return net.to(device, memory_format=torch.channels_last)


def as_momentum(net: nn.Module, gamma: float, velocity: str, memory: str, example: Any = None) -> nn.Module:
    """The network with its residual stages as momentum networks, in place."""
    return rg.convert(net, example, gamma=gamma, velocity=VELOCITIES[velocity], memory=memory)


def kept(gamma: float, blocks: int, velocity: str = "zero") -> list[float]:
    """How much of each block's f arrives at the end of a stage, where 1 is what the plain network adds.

    With v₀ = 0, x_K = x₀ + Σ (1 − γ^(K−n))·f_n; with v₀ = f₀, the first block's weight is (1 − γ^K) / (1 − γ).

    >>> [round(share, 2) for share in kept(0.9, 3)]
    [0.27, 0.19, 0.1]
    """
    shares = [1 - gamma ** (blocks - n) for n in range(blocks)]
    if velocity == "first":
        shares[0] = float(sum(gamma**n for n in range(blocks)))
    return shares


def statistics(net: nn.Module, inputs: Iterable[Tensor]) -> None:
    """Estimate what BatchNorm knows of its inputs anew, as the mean over these batches."""
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    was = net.training
    net.train()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
    with torch.no_grad():
        for x in inputs:
            net(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    net.train(was)


def fit(
    net: nn.Module,
    batches: Iterable[Any],
    loss_of: Callable[[Any], Tensor],
    optimizer: torch.optim.Optimizer,
    steps: int,
    shares: Mapping[int, float] | None = None,
    clip: float | None = None,
) -> dict[str, Any]:
    """Train for some steps, the rate rising over the first twentieth and falling to 0 along a cosine.

    Args:
        net: the network, converted or not.
        shares: by step, which share of its γ the network has then (`rg.GammaSchedule`); None: all of it from the start.
        clip: the largest norm of the gradient.

    Returns:
        `losses`: the mean over each tenth of the steps. `stopped`: the step at which it was given up, or None: a loss that is not
        finite, or values beyond the fixed-point range, end the training.
    """
    schedule = rg.GammaSchedule(net, shares) if shares else None
    rates = [group["lr"] for group in optimizer.param_groups]
    rise = max(1, steps // 20)
    held: list[Tensor] = []
    stopped = None
    for step, batch in enumerate(islice(batches, steps)):
        part = min(1.0, (step + 1) / rise) * (1 + math.cos(math.pi * step / steps)) / 2
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * part
        try:
            loss = loss_of(batch)
            loss.backward()
        except rg.RangeOverflow:
            stopped = step
            break
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        held.append(loss.detach())
        if schedule is not None:
            schedule.step()
        if step % 50 == 49 and not bool(torch.isfinite(held[-1])):  # to look costs a wait for the device
            stopped = step
            break
    seen = torch.stack(held).cpu() if held else torch.zeros(0)
    return {
        "losses": [float(part.mean()) for part in seen.tensor_split(min(10, max(1, len(seen))))],
        "stopped": stopped,
    }


def shares_of(way: str, steps: int, part: float) -> dict[int, float] | None:
    """How γ moves: up over the first part of the steps, down over the last, or not at all.

    >>> shares_of("warmup", 10, 0.5), shares_of("falling", 10, 0.2)
    ({0: 0, 5: 1}, {8: 1, 10: 0})
    """
    moved = max(1, round(part * steps))
    shares: dict[str, dict[int, float]] = {"warmup": {0: 0, moved: 1}, "falling": {steps - moved: 1, steps: 0}}
    return shares.get(way)


def deployed(gammas: Iterable[float], ways: Iterable[str]) -> list[dict[str, Any]]:
    """The units of an experiment that ends with the plain network: every γ above 0, every way, random signs up to 1/2.

    The way "kept" is left out of the key.

    >>> deployed([0, 0.5], ["kept", "falling"])
    [{'gamma': 0}, {'gamma': 0.5}, {'gamma': 0.5, 'way': 'falling'}]
    """
    ways = tuple(ways)
    unknown = [way for way in ways if way not in DEPLOYED]
    if unknown:
        raise ExperimentError(f"there is no way {unknown[0]!r} to fine-tune. {suggestion(unknown[0], DEPLOYED)}")
    named = [{} if way == "kept" else {"way": way} for way in ways]
    found: list[dict[str, Any]] = [{"gamma": gamma, **way} for gamma in gammas for way in (named if gamma else [{}])]
    return [point for point in found if point.get("way") != "sign" or point["gamma"] <= 1 / 2]


def with_seed(point: Key, seed: int) -> Key:
    """The key of a unit of `deployed`, with its seed."""
    way = {name: value for name, value in point.items() if name != "gamma"}
    return {"gamma": point["gamma"], "seed": seed, **way}


def to_be_plain(net: nn.Module, unit: Key, memory: str, example: Any = None) -> None:
    """Convert the network for a fine-tuning after which it is the plain one. At γ = 0 it is left as it is."""
    if not unit["gamma"]:
        return
    gamma = unit["gamma"]
    if unit.get("way") == "sign":
        if not hasattr(rg, "RandomSign"):
            raise ExperimentError("this version of retrograde has no RandomSign. Leave out the way 'sign'.")
        gamma = rg.RandomSign(gamma)
    rg.convert(net, example, gamma=gamma, memory=memory, split=unit.get("way") == "split")


def plain_again(net: nn.Module, unit: Key) -> None:
    """The inverse of `to_be_plain`."""
    if unit["gamma"]:
        rg.revert(net)


def points(gammas: Iterable[float], velocities: Iterable[str], ways: Iterable[str]) -> list[dict[str, Any]]:
    """The units of an experiment: every γ, v₀ and way; γ = 0 has no v₀, and nothing to warm up to.

    >>> [tuple(p.values()) for p in points([0, 0.5], ["zero"], ["refit", "warmup"])]
    [('refit', 'zero', 0), ('refit', 'zero', 0.5), ('warmup', 'zero', 0.5)]
    """
    ways = tuple(ways)
    return [
        {"way": way, "velocity": velocity, "gamma": gamma}
        for gamma in gammas
        for velocity in velocities
        for way in ways
        if gamma or (velocity == "zero" and way != "warmup")
    ]
