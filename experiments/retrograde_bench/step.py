"""One training step of one method, as a function to time; and what is checked and searched with it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from retrograde_experiments.private import Peak, peak_memory

from .cases import Case
from .methods import Method, Missing, Setup

Kept = tuple[Tensor, ExitStack]


@dataclass(frozen=True)
class Step:
    """Forward, mean of squares, backward; gradients are added to those there are.

    Attributes:
        forward: gives the loss, and the contexts that backward runs in.
        backward: takes them.
    """

    forward: Callable[[], Kept]
    backward: Callable[[Kept], None]

    def __call__(self) -> None:
        self.backward(self.forward())


def training_step(method: Method, net: nn.Module, x: Tensor, case: Case, cached: bool = True) -> Step:
    """The step of a method's network.

    Args:
        cached: whether autocast keeps the weights it has cast until the end of forward, as it does by default.
    """

    def forward() -> Kept:
        with ExitStack() as stack:
            stack.enter_context(method.around())
            inside = stack.enter_context(ExitStack())
            if case.autocast is not None:
                inside.enter_context(torch.autocast(x.device.type, case.autocast, cache_enabled=cached))
            loss = net(x).float().square().mean()
            if method.inside:
                inside.enter_context(torch.autograd.set_multithreading_enabled(False))
            else:
                inside.close()
            return loss, stack.pop_all()

    def backward(kept: Kept) -> None:
        loss, stack = kept
        with stack:
            loss.backward()

    return Step(forward, backward)


def captured(step: Step, device: torch.device) -> tuple[Callable[[], None], int]:
    """The step as a CUDA graph, and the peak of the pool that the graph keeps."""
    if device.type != "cuda":
        raise Missing("CUDA graphs need a CUDA device")
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.graph(graph):
            step()

    free(device)
    return graph.replay, peak_memory(capture, device=device).peak


def zero_gradients(setup: Setup, x: Tensor) -> None:
    """Gradients of zeros, allocated once."""
    for leaf in [*setup.network.parameters(), x]:
        if not leaf.requires_grad:
            continue
        if leaf.grad is None:
            leaf.grad = torch.zeros_like(leaf)
        else:
            leaf.grad.zero_()


def memory(step: Step, device: torch.device) -> Peak:
    """Bytes above what was there before: the most at any time, and what forward keeps for backward."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return peak_memory(step.forward, step.backward, device=device)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Agreement:
    """Whether a method's gradients are, to the bit, those of its twin that keeps everything.

    The twins' gradients are kept for the next methods with the same twin. Where they differ, both steps are repeated with
    deterministic algorithms, and so are those of all further methods: some of cuDNN's weight gradients and all fused attention
    backward passes add in any order, and differ between two runs of the plain network as well.
    """

    def __init__(self, x: Tensor) -> None:
        self.x, self.steady = x, True
        self.twins: dict[str, tuple[str, list[Tensor]]] = {}  # by name: the mode it ran in, its gradients
        self.expected: list[Tensor] = []

    def check(self, method: Method, setup: Setup, net: nn.Module) -> str:
        """How a network fresh from `method.build` compares; its first step is taken.

        Returns:
            "equal", "equal (deterministic)" or "differs in …", with the twin's mode if that is not "store".
        """
        found, worst, mode = "equal", 0, ""
        if self.steady:
            mode = self._remember(method, setup)
            worst = self._differing(method, setup, net)
            if worst:
                self.forget()
        else:
            training_step(method, net, self.x, setup.case)()
        if worst or not self.steady:
            self.steady, found = False, ""
            try:
                with deterministic():
                    mode = self._remember(method, setup)
                    worst = self._differing_roomily(method, setup)
                found = f"differs in {worst} of {len(self.expected)}" if worst else "equal (deterministic)"
            except torch.OutOfMemoryError:
                pass
            if not found:  # the row's other figures stand
                self.forget()
                free(self.x.device)
                return "not compared: attention by matrix products does not fit"
        return found if mode == "store" else f"{found}, against {mode}"

    def forget(self) -> None:
        self.twins, self.expected = {}, []

    def _remember(self, method: Method, setup: Setup) -> str:
        """Have the twin's gradients; the mode it ran in: "store", or "checkpoint" if that does not fit."""
        assert method.twin is not None
        for mode in ("store", "checkpoint"):
            if method.twins in self.twins:
                break
            try:
                self.twins[method.twins] = mode, self._gradients(method, method.twin(setup, mode), setup)
            except torch.OutOfMemoryError:
                if mode == "checkpoint":
                    raise
            if method.twins not in self.twins:  # here, where the error and what it holds is gone
                self.forget()
                free(self.x.device)
        mode, self.expected = self.twins[method.twins]
        return mode

    def _gradients(self, method: Method, net: nn.Module, setup: Setup) -> list[Tensor]:
        zero_gradients(setup, self.x)
        training_step(method, net, self.x, setup.case)()
        return [p.grad.clone() for p in self._leaves(setup) if p.grad is not None]

    def _differing(self, method: Method, setup: Setup, net: nn.Module) -> int:
        return self.differing(training_step(method, net, self.x, setup.case), setup)

    def _differing_roomily(self, method: Method, setup: Setup) -> int:
        """With larger budgets: attention by matrix products takes more memory, by far at many tokens, and no plan changes a bit."""
        try:
            return self._differing(method, setup, method.build(roomy(setup, 4)))
        except ValueError:
            if method.share is None:
                raise
        return self._differing(method, setup, method.build(roomy(setup, 64)))

    def differing(self, step: Callable[[], None], setup: Setup) -> int:
        """How many gradients of a step are not those of the last twin."""
        zero_gradients(setup, self.x)
        step()
        found = [p.grad for p in self._leaves(setup) if p.grad is not None]
        return sum(not torch.equal(a, b) for a, b in zip(found, self.expected, strict=True))

    def _leaves(self, setup: Setup) -> list[Tensor]:
        return [p for p in [*setup.network.parameters(), self.x] if p.requires_grad]


def roomy(setup: Setup, times: int) -> Setup:
    """With budgets so many times as large."""
    return replace(setup, peaks={name: times * bytes_ for name, bytes_ in setup.peaks.items()})


@contextmanager
def deterministic() -> Iterator[None]:
    """Deterministic algorithms where PyTorch has them; attention by matrix products, since no fused backward pass repeats itself."""
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    try:
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        torch.backends.cudnn.deterministic = cudnn


def largest_batch(method: Method, setup: Setup, limit: int, tries: int = 5) -> int:
    """The largest batch whose step, with parameters, gradients and batch, stays within `limit` bytes.

    Memory is all but linear in the batch: a line through two measured points proposes, a measurement confirms or gives the next
    line. The answer has been measured; 0 if not even one example was seen to fit.
    """
    device = next(setup.network.parameters()).device
    fixed = 2 * sum(p.numel() * p.element_size() for p in setup.network.parameters())

    def total(batch: int) -> int:
        x = setup.case.inputs(batch, device)
        zero_gradients(setup, x)
        step = training_step(method, method.build(setup), x, setup.case)
        step()
        held = x.numel() * x.element_size() * (2 if x.requires_grad else 1)
        return fixed + held + memory(step, device).peak

    small, large = max(1, setup.case.batch // 4), max(2, setup.case.batch // 2)
    seen = {batch: total(batch) for batch in (small, large)}
    for _ in range(tries):
        (b0, m0), (b1, m1) = sorted(seen.items(), key=lambda item: abs(item[1] - limit))[:2]
        slope = (m1 - m0) / (b1 - b0)
        if slope <= 0:
            break
        batch = int(b0 + (limit - m0) / slope)
        if batch < 1 or batch in seen:
            break
        try:
            seen[batch] = total(batch)
        except torch.OutOfMemoryError:
            free(device)
            break
        if 0.97 * limit <= seen[batch] <= limit:
            break
    return max((batch for batch, bytes_ in seen.items() if bytes_ <= limit), default=0)
