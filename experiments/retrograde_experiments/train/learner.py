"""A network with its optimizer: one step of training, an evaluation, and everything that a resumed run needs.

What a step computes follows from `state()` and the batch: parameters, buffers, the optimizer's and the loss scaler's state,
the moving average, random numbers, and the fixed-point ranges of momentum networks, which follow the activations and are no
part of a state_dict.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import retrograde as rg

from ..data.batches import Source
from ..errors import ExperimentError, suggestion
from ..private import (
    captured_by,
    collect,
    converted_blocks,
    evaluation_ranges,
    put_back,
    stacks,
    training_ranges,
    written,
)
from ..private import set_gamma as set_gamma
from .graphed import Graphed
from .parallel import Alone, World
from .schedule import rate_at
from .setting import Recipe

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Learner:
    """A network being trained.

    Args:
        net: on its device already.
        recipe: how.
        steps: in an epoch.
        world: the processes that train it.
    """

    def __init__(self, net: nn.Module, recipe: Recipe, steps: int, world: World | None = None) -> None:
        self.net, self.recipe, self.steps, self.done = net, recipe, steps, 0
        self.world = world or Alone(next(net.parameters()).device)
        self.device = self.world.device
        if recipe.channels_last:
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if recipe.compile:
            compile_blocks(net)
        if recipe.graph:
            self._check_graph()
        self.wrapped = self.world.wrap(net)
        self.optimizer = optimizer(decaying(net, recipe), recipe)
        self.schedule: rg.GammaSchedule | None = None  # of γ; see `gammas`
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=recipe.amp == "fp16")
        self.average = [p.detach().clone() for p in net.parameters()] if recipe.ema else []
        self.graphed = Graphed(list(net.parameters()), lambda: captured_by(net), recipe.graph)
        self.window = torch.zeros(2, dtype=torch.float64, device=self.device)  # losses since last asked, and how many

    def step(self, x: Tensor, y: Tensor) -> None:
        """One step of training on this process's share of a batch."""
        if not self.net.training:
            self.net.train()
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(self.recipe, self.done, self.steps)
        parts = self.recipe.accumulate
        for k, (xk, yk) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            with self.world.sync(self.wrapped, k == parts - 1):
                self.window[0] += self.graphed(self._both, xk, yk)
        if self.recipe.clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.net.parameters(), self.recipe.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not self.recipe.graph)
        self.window[1] += 1
        self.done += 1
        if self.schedule is not None:
            self.schedule.step()
        if self.recipe.graph:  # no pass begins in a replay: look here, as one would, whether the range still fits
            collect(self.net, x)
        if self.average:
            with torch.no_grad():
                for average, parameter in zip(self.average, self.net.parameters(), strict=True):
                    average.lerp_(parameter, 1 - self.recipe.ema)

    def gammas(self, points: dict[int, float]) -> None:
        """Move γ of a converted model with the steps: see `rg.GammaSchedule`."""
        try:
            self.schedule = rg.GammaSchedule(self.net, points)
        except ValueError as error:
            raise ExperimentError(f"--gamma-schedule: {error} It is for torchvision:, timm: and own models.") from error

    def _check_graph(self) -> None:
        if self.device.type != "cuda":
            raise ExperimentError(f"--graph makes CUDA graphs, and there are none on {self.device.type}: leave it out.")
        if type(self.world) is not Alone:
            raise ExperimentError("--graph makes CUDA graphs of one process's steps: leave it out under torchrun.")

    def _both(self, x: Tensor, y: Tensor) -> Tensor:
        """Forward and backward of one part of a batch; its share of the loss."""
        with self._autocast():
            loss = cross_entropy(self._forward(x), y, label_smoothing=self.recipe.smoothing) / self.recipe.accumulate
        self.scaler.scale(loss).backward()
        return loss.detach()

    def loss(self) -> float:
        """The mean training loss since the last call."""
        if self.recipe.graph:
            rg.settle(self.net)  # what made it NaN, if it is, rather than that
        total, count = self.world.total(self.window).tolist()
        self.window.zero_()
        return total / count if count else float("nan")

    @torch.no_grad()
    def evaluate(self, source: Source) -> dict[str, float]:
        """Loss, accuracy and top-5 accuracy (in %) on the test images; of the moving average, if there is one."""
        self.net.eval()
        self.world.agree(self.net)
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        with self._averaged(), evaluation_ranges(self.net):
            for x, y in source.test():
                x, y = x[self.world.rank :: self.world.size], y[self.world.rank :: self.world.size]
                with self._autocast():
                    output = self._forward(x)
                loss = cross_entropy(output.float(), y, reduction="sum")
                hits = output.topk(min(5, output.shape[1]), dim=1).indices == y[:, None]
                found = loss, hits[:, 0].sum(), hits.sum(), sums.new_tensor(len(y))
                sums += torch.stack([value.double() for value in found])
            self.world.settle(self.wrapped)
        self.net.train()
        loss_sum, right, near, count = self.world.total(sums).tolist()
        return {"test_loss": loss_sum / count, "accuracy": 100 * right / count, "top5": 100 * near / count}

    def state(self) -> dict[str, Any]:
        """All of it: tensors, numbers, strings, lists and dicts. The keys "net" and "average" hold the weights."""
        net, optimizer = self.world.gather(self.net, self.optimizer)
        kept: dict[str, Any] = {
            "net": net, "optimizer": optimizer, "scaler": self.scaler.state_dict(), "done": self.done,
            "window": self.window.tolist(), "ranges": ranges(self.net), "rng": torch.get_rng_state(),
        }  # fmt: skip
        if self.average:
            kept["average"] = self.world.whole(dict(zip(self._names(), self.average, strict=True)))
        if self.device.type == "cuda":
            kept["cuda_rng"] = torch.cuda.get_rng_state(self.device)
        return kept

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`: what is computed from here on has the bits of the run that was saved."""
        self.world.scatter(self.net, self.optimizer, state["net"], state["optimizer"])
        if self.average:
            self.world.spread(self.average, [state["average"][name] for name in self._names()])
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.done = state["done"]
        if self.schedule is not None:
            self.schedule.load_state_dict({**self.schedule.state_dict(), "t": self.done})
        self.window.copy_(torch.tensor(state["window"], dtype=torch.float64))
        put_back(training_ranges(self.net), state["ranges"])
        torch.set_rng_state(state["rng"].cpu())
        if self.device.type == "cuda" and "cuda_rng" in state:
            torch.cuda.set_rng_state(state["cuda_rng"].cpu(), self.device)

    def _names(self) -> list[str]:
        return [name for name, _ in self.net.named_parameters()]

    def _forward(self, x: Tensor) -> Tensor:
        return self.wrapped(x if self.recipe.channels_last else x.contiguous())

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = DTYPES.get(self.recipe.amp)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """With the moving average in place of the parameters."""
        if not self.average:
            yield
            return
        own = [p.detach().clone() for p in self.net.parameters()]
        for parameter, average in zip(self.net.parameters(), self.average, strict=True):
            parameter.copy_(average)
        yield
        for parameter, value in zip(self.net.parameters(), own, strict=True):
            parameter.copy_(value)


def optimizer(groups: list[dict[str, Any]], recipe: Recipe) -> torch.optim.Optimizer:
    """The optimizer of torch.optim that the recipe names, whatever the case of its letters."""
    kinds = {name.lower(): kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    kind = kinds.get(recipe.optimizer.lower())
    if kind is None or not issubclass(kind, torch.optim.Optimizer) or kind is torch.optim.Optimizer:
        raise ExperimentError(
            f"torch.optim has no optimizer {recipe.optimizer!r}. {suggestion(recipe.optimizer, kinds)}"
        )
    options: dict[str, Any] = {"lr": recipe.rate, "weight_decay": recipe.weight_decay}
    if kind is torch.optim.SGD:
        options |= {"momentum": recipe.momentum, "nesterov": recipe.nesterov}
    for option in recipe.optimizer_options:
        name, _, value = option.partition("=")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise ExperimentError(f"--optimizer-options takes name=value, as eps=1e-6; got {option!r}.") from None
    try:
        return kind(groups, **options)
    except (TypeError, ValueError) as error:
        raise ExperimentError(f"--optimizer {recipe.optimizer} with {options}: {error}") from error


def decaying(net: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """The parameters, in their order where all decay; else those of more than one dimension first, and the others, which do not."""
    every = list(net.parameters())
    if recipe.decay == "all":
        return [{"params": every}]
    weights, others = [p for p in every if p.ndim > 1], [p for p in every if p.ndim <= 1]
    return [{"params": weights}, {"params": others, "weight_decay": 0.0}]


def ranges(net: nn.Module) -> dict[str, list[list[Any]]]:
    """The fixed-point ranges in use."""
    rg.settle(net)  # on an accelerator the last passes may not have been looked at yet
    return written(training_ranges(net))


def compile_blocks(net: nn.Module) -> None:
    """Compile a network in place: a momentum network block by block, another as a whole."""
    blocks = [block for inner in stacks(net) for block in inner.blocks] + converted_blocks(net)
    for block in blocks:
        block.compile()
    if not blocks:
        net.compile()


@contextmanager
def fast(device: torch.device) -> Iterator[None]:
    """TF32 and tuned convolutions on a GPU, as before afterwards."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = before[:2]
        torch.set_float32_matmul_precision(before[2])
