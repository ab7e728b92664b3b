"""What the experiments have in common: a network is converted, and then left as it is, re-estimated, refitted, or warmed up.

converted     nothing else is done
statistics    the running statistics of BatchNorm are estimated anew; no parameter changes
refit         a short training at the final γ
warmup        the same training, with γ rising from 0 to its final value over the first part of it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg

WAYS = ("converted", "statistics", "refit", "warmup")
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
    warm_steps: int = 0,
    clip: float | None = None,
) -> dict[str, Any]:
    """Train for some steps, the rate rising over the first twentieth and falling to 0 along a cosine.

    Args:
        net: the network, converted or not.
        warm_steps: steps over which γ rises from 0; 0 for the final γ from the start.
        clip: the largest norm of the gradient.

    Returns:
        `losses`: the mean over each tenth of the steps. `stopped`: the step at which it was given up, or None: a loss that is not
        finite, or values beyond the fixed-point range, end the training.
    """
    warmup = rg.GammaWarmup(net, warm_steps) if warm_steps else None
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
        if warmup is not None:
            warmup.step()
        if step % 50 == 49 and not bool(torch.isfinite(held[-1])):  # to look costs a wait for the device
            stopped = step
            break
    seen = torch.stack(held).cpu() if held else torch.zeros(0)
    return {
        "losses": [float(part.mean()) for part in seen.tensor_split(min(10, max(1, len(seen))))],
        "stopped": stopped,
    }


def steps_of_warmup(way: str, steps: int, part: float) -> int:
    """How many steps γ rises for."""
    return max(1, round(part * steps)) if way == "warmup" else 0


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
