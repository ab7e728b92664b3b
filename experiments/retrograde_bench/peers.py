"""The same networks by other packages, where they can be imported.

    momentumnet 0.10   the paper's own: MomentumNet(blocks, γ, use_backprop=False, is_residual=False), set up as its
                       `transform_to_momentumnet` does: a stage's head stays plain. "momentumnet-heads": with heads checkpointed.
    revlib 1.7.2       RevNet coupling, x0 ← x0 + f(x1) and swap.
    memcnn 1.5.2       the same, two steps to an invertible module.

The last two are other architectures. They get the same blocks and parameters: both streams begin as x (a RevNet of half the
channels would be another network), each block is one step of the coupling (a transformer layer two: attention, MLP), and a
stage ends with the mean of its streams. So they do the same matrix products and convolutions as the rest. An odd last
block, which memcnn cannot pair, is checkpointed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .methods import Chain, Method, Missing, Setup, again, head_again
from .networks import Stage, assembled


def load(name: str) -> Any:
    """The package, its warnings about a newer PyTorch turned off."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=name)
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
    try:
        return __import__(name)
    except ImportError as error:
        raise Missing(f"{name} is not installed ({error})") from error


def _momentumnet(head: Callable[[nn.Module], nn.Module]) -> Callable[[Setup], nn.Module]:
    def build(setup: Setup) -> nn.Module:
        package = load("momentumnet")

        def stack(stage: Stage) -> nn.Module:
            return package.MomentumNet(list(stage.blocks), setup.gamma, use_backprop=False, is_residual=False)

        return assembled(setup.network, stack, head)

    return build


class TwoStreams(nn.Module):
    """x -> coupling of (x, x) -> mean of the two. `dim`: along which the streams lie side by side."""

    def __init__(self, coupling: nn.Module, dim: int) -> None:
        super().__init__()
        self.coupling, self.dim = coupling, dim

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.coupling(torch.cat([x, x], self.dim)).chunk(2, self.dim)
        return (a + b) / 2


def _dim(setup: Setup) -> int:
    return 2 if len(setup.case.shape) == 2 else 1


def _revlib(setup: Setup) -> nn.Module:
    package = load("revlib")

    def stack(stage: Stage) -> nn.Module:
        return TwoStreams(package.ReversibleSequential(*stage.halves(), split_dim=_dim(setup)), _dim(setup))

    return assembled(setup.network, stack, head_again)


def _memcnn(setup: Setup) -> nn.Module:
    package = load("memcnn")

    def stack(stage: Stage) -> nn.Module:
        halves, wrapped = stage.halves(), []
        for f, g in zip(halves[::2], halves[1::2], strict=False):
            coupling = package.AdditiveCoupling(f, g, split_dim=_dim(setup))
            wrapped.append(package.InvertibleModuleWrapper(coupling))
        paired = TwoStreams(nn.Sequential(*wrapped), _dim(setup))
        return nn.Sequential(paired, Chain([stage.blocks[-1]], again)) if len(halves) % 2 else paired

    return assembled(setup.network, stack, head_again)


PEERS = (
    Method("momentumnet", "the reference package `momentumnet` 0.10", _momentumnet(lambda head: head), inside=True),
    Method(
        "momentumnet-heads", "the same, with the blocks that change the shape checkpointed", _momentumnet(head_again),
        inside=True, applies=lambda case: case.images,
    ),
    Method("revlib", "RevNet coupling of the same blocks by `revlib` 1.7.2", _revlib, inside=True),
    Method("memcnn", "RevNet coupling of the same blocks by `memcnn` 1.5.2", _memcnn, inside=True),
)  # fmt: skip
