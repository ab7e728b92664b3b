"""The contenders: Retrograde, and what else there is.

    Retrograde             momentum network, memory="reverse"; truth: memory="store", and a float recurrence beside it
    torch checkpoint       x ← x + checkpoint(f, x), use_reentrant=False; truth: x ← x + f(x)
    momentumnet 0.10       the reference; truth: its own use_backprop=True
    revlib 1.7.2           ReversibleSequential; truth: the same coupling in plain torch
    memcnn 1.5.2           InvertibleModuleWrapper(AdditiveCoupling); truth: its own disable=True

Two-stream networks run on x beside itself and return the sum of their streams. The last three are looked for where
`peers` says (a folder for `sys.path`); nothing here needs them.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hazard_registry import CannotExpress, Contender
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from ways import Mixed, network


class Retrograde(Contender):
    name = "Retrograde"
    truth = "branch"

    def __init__(self, verify: str = "auto", memory: str = "reverse") -> None:
        self.verify, self.memory = verify, memory

    def net(self, blocks: Sequence[nn.Module], stored: bool, dim: int = -1, **options: Any) -> nn.Module:
        memory = "store" if stored else self.memory
        return rg.MomentumNet(blocks, memory=memory, verify=self.verify, **options)

    def plain(  # type: ignore[override]
        self, blocks: Sequence[nn.Module], dim: int = -1, gamma: Any = 0.9, form: str = "branch", velocity: Any = None,
    ) -> nn.Module:  # fmt: skip
        gammas = [gamma] * len(blocks) if isinstance(gamma, float | int) else list(gamma)
        return PlainMomentum(blocks, gammas, form == "block", velocity)


class Way(Retrograde):
    """One of our schemes, and a way to remember; "mixed" is some blocks reversed, some kept, the last one stored.

    There is no float recurrence beside it. `sign`: with γ of random sign, as large as the γ that is asked for.
    """

    def __init__(self, scheme: str, memory: str = "reverse", sign: bool = False) -> None:
        super().__init__(memory=memory)
        self.scheme, self.sign = scheme, sign
        self.truth = f"{scheme}, signed" if sign else scheme

    def net(self, blocks: Sequence[nn.Module], stored: bool, dim: int = -1, **options: Any) -> nn.Module:
        if self.scheme in ("coupling", "residual") or "form" in options:
            _none_of(options)
        if self.sign:
            gamma = options.get("gamma", 1 / 8)
            if not isinstance(gamma, float | int):
                raise CannotExpress
            options["gamma"] = rg.RandomSign(gamma if 0 < gamma < 1 else 1 / 8)
        net = network(self.scheme, blocks, **options)
        if not stored and self.memory == "mixed":
            return Mixed(net, reversed=max(len(blocks) - 3, 1), kept=2)
        net.memory = "store" if stored else self.memory
        return TwoStreams(net, dim) if self.scheme == "coupling" else net

    def plain(self, blocks: Sequence[nn.Module], **options: Any) -> nn.Module:  # type: ignore[override]
        raise CannotExpress


class Converted(Way):
    """A loop over blocks, converted."""

    def __init__(self, memory: str = "reverse") -> None:
        super().__init__("branch", memory)
        self.truth = "converted"

    def net(  # type: ignore[override]
        self, blocks: Sequence[nn.Module], stored: bool, dim: int = -1, gamma: Any = 0.9, form: str = "branch", velocity: Any = None,
    ) -> nn.Module:  # fmt: skip
        if velocity is not None:
            raise CannotExpress
        model = Checkpointed(blocks, stored=True, residual=form == "block")
        memory = "store" if stored else self.memory
        return rg.convert(model, stages=["blocks"], gamma=gamma, form=form, memory=memory)


class PlainMomentum(nn.Module):
    """The momentum recurrence in floats, by autograd alone."""

    def __init__(self, blocks: Sequence[nn.Module], gammas: list[float], residual: bool, velocity: Any) -> None:
        super().__init__()
        self.blocks, self.gammas, self.residual, self.velocity = nn.ModuleList(blocks), gammas, residual, velocity

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        v = torch.zeros_like(x) if self.velocity is None else self.velocity(x.clone())
        for block, gamma in zip(self.blocks, self.gammas, strict=True):
            f = block(x.clone(), *args, **kwargs)
            f = f - x if self.residual else f
            v = (gamma * v + (1 - gamma if gamma < 1 else 1) * f).to(x.dtype)
            x = x + v
        return x


class Checkpoint(Contender):
    name = "torch checkpoint"

    def net(
        self, blocks: Sequence[nn.Module], stored: bool, dim: int = -1, form: str = "branch", **options: Any
    ) -> nn.Module:
        _none_of(options)
        return Checkpointed(blocks, stored, form == "block")


class Checkpointed(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module], stored: bool, residual: bool) -> None:
        super().__init__()
        self.blocks, self.stored, self.residual = nn.ModuleList(blocks), stored, residual

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for block in self.blocks:
            if self.stored:
                y = block(x, *args, **kwargs)
            else:
                y = checkpoint(block, x, *args, use_reentrant=False, **kwargs)
            x = y if self.residual else x + y
        return x


class Reference(Contender):
    name = "momentumnet"

    def __init__(self, module: Any) -> None:
        self.module = module

    def net(
        self, blocks: Sequence[nn.Module], stored: bool, dim: int = -1, gamma: Any = 0.9, form: str = "branch",
        velocity: Any = None, **options: Any,
    ) -> nn.Module:  # fmt: skip
        _none_of(options)
        if not isinstance(gamma, float | int) or gamma == 1:  # there (1 − γ)·f is nothing at all
            raise CannotExpress
        return self.module.MomentumNet(
            blocks, gamma=gamma, use_backprop=stored, is_residual=form == "branch", init_speed=velocity is not None,
            init_function=velocity,
        )  # fmt: skip

    def plain(self, blocks: Sequence[nn.Module], **options: Any) -> nn.Module:
        return Retrograde().plain(blocks, **options)


class Revlib(Contender):
    name = "revlib"

    def __init__(self, module: Any) -> None:
        self.module = module

    def net(self, blocks: Sequence[nn.Module], stored: bool, dim: int = -1, **options: Any) -> nn.Module:
        _none_of(options)
        if stored:
            return TwoStreams(_Additive(blocks, dim), dim)
        return TwoStreams(self.module.ReversibleSequential(*blocks, split_dim=dim), dim)


class _Additive(nn.Module):
    """x₀, x₁ ← x₁, x₀ + f(x₁)."""

    def __init__(self, blocks: Sequence[nn.Module], dim: int) -> None:
        super().__init__()
        self.blocks, self.dim = nn.ModuleList(blocks), dim

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x0, x1 = x.chunk(2, self.dim)
        for block in self.blocks:
            x0, x1 = x1, x0 + block(x1, *args, **kwargs)
        return torch.cat([x0, x1], self.dim)


class Memcnn(Contender):
    name = "memcnn"

    def __init__(self, module: Any) -> None:
        self.module = module

    def net(self, blocks: Sequence[nn.Module], stored: bool, dim: int = -1, **options: Any) -> nn.Module:
        _none_of(options)
        pairs = zip(blocks[::2], blocks[1::2], strict=True)
        couplings = [self.module.AdditiveCoupling(f, g, split_dim=dim) for f, g in pairs]
        wrapped = [self.module.InvertibleModuleWrapper(c, disable=stored, preserve_rng_state=True) for c in couplings]
        return TwoStreams(_Alone(*wrapped), dim)


class _Alone(nn.Sequential):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        if args or kwargs:
            raise CannotExpress
        return super().forward(x)


class TwoStreams(nn.Module):
    """A two-stream network as a map of x to a tensor like x."""

    def __init__(self, core: nn.Module, dim: int) -> None:
        super().__init__()
        self.core, self.dim = core, dim

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.ndim == 0:
            raise CannotExpress
        a, b = self.core(torch.cat([x, x], self.dim), *args, **kwargs).chunk(2, self.dim)
        return a + b


def _none_of(options: dict[str, Any]) -> None:
    if options:
        raise CannotExpress


PEERS: dict[str, Callable[[Any], Contender]] = {"momentumnet": Reference, "revlib": Revlib, "memcnn": Memcnn}


def contenders(peers: str | None = None) -> list[Contender]:
    """Retrograde and checkpointing, and the packages in the folder `peers`, if one is given."""
    found: list[Contender] = [Retrograde(), Checkpoint()]
    if peers is not None:
        sys.path.insert(0, peers)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found += [make(importlib.import_module(name)) for name, make in PEERS.items()]
    return found
