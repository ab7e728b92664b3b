"""What must hold on a GPU, as a plain script: it needs no test runner and nothing installed but PyTorch, Triton and NumPy.

    PYTHONPATH=src:tests python tests/arithmetic/gpu_check.py             # every case; exit code 1 if one fails
    PYTHONPATH=src:tests python tests/arithmetic/gpu_check.py graph       # cases with this in their name

On a machine without a GPU the same cases run on the CPU (nothing is captured there), which is how they are tested.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from bodies import carried, state, step_both
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import retrograde as rg
from retrograde.arithmetic import reference
from retrograde.arithmetic.kernels import kernels_for

Case = Callable[[str], str]
NINE_TENTHS = Fraction(9, 10)


def kernels(device: str) -> Any:
    found = kernels_for(torch.empty(1, device=device))
    assert found is not reference.KERNELS, f"there are no kernels for {device}: is Triton, or a C compiler, installed?"
    return found


def steps_are_those_of_plain_torch(device: str) -> str:
    """The integer steps, on and back, by the kernels of the device and by their definition; on aligned memory and on other."""
    ours, count = kernels(device), 0
    for integers in (torch.int32, torch.int16):
        for dtype in (torch.float32, torch.bfloat16):
            for form in range(3):
                for width in (torch.uint8, torch.int16):
                    drawn = state(NINE_TENTHS, (3, 40_000), width, "contiguous", dtype, 5, integers)
                    on = tuple(None if t is None else t.to(device) for t in drawn)
                    for given in (on, on, tuple(None if t is None else Shifted(t) for t in on)):
                        for gamma, over in ((NINE_TENTHS, 0), (Fraction(1, 8), 0), (Fraction(1, 8), 2)):
                            found, wanted = step_both(ours, given, gamma, form, 3, over)
                            count += same(found, wanted)
    return f"{count} tensors"


class Shifted(Tensor):
    """Marks a tensor whose copies are to begin one element after an aligned address."""

    @staticmethod
    def __new__(cls, t: Tensor) -> Any:
        return t.as_subclass(cls)

    def clone(self, **_: Any) -> Tensor:  # type: ignore[override]
        t = self.as_subclass(Tensor)
        memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
        return memory[1:].view(t.shape).copy_(t)


def gradients_are_carried_as_in_plain_torch(device: str) -> str:
    ours, count = kernels(device), 0
    for carried_in in (torch.float32, torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            for form in range(3):
                for found, wanted in carried(ours, (3, 40_001), dtype, carried_in, form, device):
                    count += same(found, wanted)
    return f"{count} tensors"


def hash_is_that_of_plain_torch(device: str) -> str:
    ours, count = kernels(device), 0
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.int16, torch.uint8):
        for shape in ((1,), (1000,), (70_001,), (33, 4097), (2**23 + 77,)):
            t = (torch.randn(shape, device=device) * 50).to(dtype)
            found, wanted = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
            ours.digest(t, found, 3, 1)
            reference.digest(t, wanted, 3, 1)
            count += same([found], [wanted])
    return f"{count} hashes"


class Conv(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        parts = [[nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)] for _ in range(2)]
        self.f = nn.Sequential(*parts[0], nn.ReLU(), *parts[1])

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.f(x))


def conv(memory: str, fixed_point: str = "auto", **rest: Any) -> nn.Module:
    return rg.MomentumNet([Conv(16) for _ in range(12)], form="block", memory=memory, fixed_point=fixed_point, **rest)


def conv_relu(memory: str, fixed_point: str = "auto", **rest: Any) -> nn.Module:
    """As `conv`, with the additions and relus in the steps."""
    return rg.MomentumNet([Conv(16).f for _ in range(12)], form="relu", memory=memory, fixed_point=fixed_point, **rest)


def transformer(memory: str, fixed_point: str = "auto", **rest: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    return rg.convert(encoder, memory=memory, fixed_point=fixed_point, **rest)


def trained(net: nn.Module, x: Tensor, amp: bool, steps: int = 3) -> list[Tensor]:
    """Outputs of some steps of training; parameters and buffers after them."""
    optimizer, outputs = torch.optim.SGD(net.parameters(), 0.01), []
    torch.manual_seed(1)  # of dropout
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
            y = net(x)
        y.float().square().mean().backward()
        optimizer.step()
        outputs.append(y.detach().clone())
    return [t.detach().clone() for t in (*outputs, *net.parameters(), *net.buffers())]


def mode_changes_no_bit(make: Callable[..., nn.Module], x: Tensor) -> str:
    """reverse and checkpoint against store: float32, autocast, 16-bit state; the default verify."""
    count, before = 0, torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True  # else weight gradients differ between two plain runs
    try:
        for amp, fixed_point in ((False, "auto"), (True, "auto"), (True, "int16")):
            found = {}
            for memory in ("store", "reverse", "checkpoint"):
                torch.manual_seed(0)
                found[memory] = trained(make(memory, fixed_point).to(x.device), x, amp)
            count += same(found["reverse"], found["store"]) + same(found["checkpoint"], found["store"])
    finally:
        torch.backends.cudnn.deterministic = before
    return f"{count} tensors"


def conv_mode_changes_no_bit(device: str) -> str:
    torch.manual_seed(2)
    return mode_changes_no_bit(conv, torch.randn(4, 16, 16, 16).to(device, memory_format=torch.channels_last))


def conv_relu_mode_changes_no_bit(device: str) -> str:
    torch.manual_seed(2)
    return mode_changes_no_bit(conv_relu, torch.randn(3, 16, 15, 15).to(device, memory_format=torch.channels_last))


def transformer_mode_changes_no_bit(device: str) -> str:
    """With attention by matrix products: the fused ones' backward passes add in any order."""
    torch.manual_seed(2)
    with sdpa_kernel(SDPBackend.MATH):
        return mode_changes_no_bit(transformer, torch.randn(4, 16, 64).to(device))


def graph_capture_of_a_training_step(device: str) -> str:
    """Forward, backward and optimizer as one CUDA graph, against the same steps taken one by one; the default verify."""
    x, found = torch.randn(16, 64, device=device), []
    for captured in (False, True):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)]
        # a range of its own: one that follows the activations stands still in a graph
        net = rg.MomentumNet(blocks, memory="reverse", fixed_point=rg.FixedPoint(22, torch.int32)).to(device)
        optimizer, untrained = torch.optim.SGD(net.parameters(), 0.1), next(net.parameters()).detach().clone()

        def step(net: nn.Module = net, optimizer: torch.optim.Optimizer = optimizer) -> None:
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        again = in_graph(step, net) if captured and device == "cuda" else step
        for _ in range(4):
            again()
        found.append([p.detach().clone() for p in net.parameters()])
        assert not torch.equal(found[-1][0], untrained), "the steps have trained nothing"
    return f"{same(*found)} parameters" + ("" if device == "cuda" else ", nothing captured: there is no GPU")


class Drifting(nn.Module):
    """Repeats itself as long as `by` is 0. It and `so_far` are inside an object of another class, so nobody knows of them."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.hidden = SimpleNamespace(by=torch.zeros((), device=device), so_far=torch.ones((), device=device))

    def forward(self, x: Tensor) -> Tensor:
        so_far = self.hidden.so_far
        return torch.tanh(self.linear(x)) * so_far.add_(self.hidden.by).clone()


def graph_replays_are_judged(device: str) -> str:
    """What goes wrong in a replay, which no host looks at, is raised by `settle` and by the next pass that is none."""
    found = []
    for kind in ("reverse", "checkpoint", "converted"):
        blocks, x = [Drifting(device) for _ in range(10)], torch.randn(4, 8, device=device)
        fixed_point = rg.FixedPoint(22, torch.int32)
        if kind == "converted":
            net = rg.convert(
                nn.Sequential(*blocks), stages=["*"], form="block", memory="reverse", fixed_point=fixed_point
            )
        else:
            net = rg.MomentumNet(blocks, memory=kind, fixed_point=fixed_point)
        net.to(device)
        held = x.clone()

        def step(net: nn.Module = net, held: Tensor = held) -> None:
            net.zero_grad(set_to_none=False)
            net(held).square().mean().backward()

        again = in_graph(step, net) if device == "cuda" else step
        for look in (lambda net=net: rg.settle(net), lambda net=net, x=x: (net(x), rg.settle(net))):
            for spoil, error in (("drift", rg.ReplayError), ("range", rg.RangeOverflow)):
                again()
                look()  # nothing to say
                by = blocks[4].hidden.by
                raised = False
                try:
                    by.fill_(float(spoil == "drift"))
                    held.copy_(x * (1e5 if spoil == "range" else 1))
                    again()
                    by.zero_()
                    held.copy_(x)
                    again()
                    look()
                except error:
                    raised = True
                assert raised, f"{kind}: {spoil} in a replay was not told"
                by.zero_()
                held.copy_(x)
        found.append(kind)
    return ", ".join(found) + ("" if device == "cuda" else "; nothing captured: there is no GPU")


def graph_in_the_trainer(device: str) -> str:
    """`retrograde train --graph`: the bits of the same steps one by one."""
    if device != "cuda":
        return "there is no GPU"
    sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
    from retrograde.reverse.range import holders
    from retrograde_experiments.train.learner import Learner
    from retrograde_experiments.train.models import build
    from retrograde_experiments.train.setting import Recipe

    count, before = 0, torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        for gamma, amp, accumulate in ((0.9, "off", 1), (0.9, "bf16", 2), (0.9, "fp16", 1), (0.0, "bf16", 1)):
            found, batches = (
                [],
                [
                    (torch.randn(16, 3, 32, 32, device=device), torch.randint(10, (16,), device=device))
                    for _ in range(9)
                ],
            )
            for graph in (False, True):
                torch.manual_seed(0)
                net = build(
                    "thin-resnet20", classes=10, channels=3, gamma=gamma, memory="auto" if gamma else "store"
                ).to(device)
                for _, part in holders(net):
                    part.range.setting = rg.FixedPoint(
                        20, torch.int32
                    )  # one that follows the activations stands still in a graph
                recipe = Recipe(
                    epochs=1, batch=16, rate=0.1, schedule="constant", amp=amp, accumulate=accumulate, graph=graph
                )
                learner = Learner(net, recipe, steps=9)
                for x, y in [*batches, (batches[0][0][:8], batches[0][1][:8]), batches[1]]:
                    learner.step(x, y)
                assert graph == (learner.graphed.graph is not None), "no graph was made"
                found.append([torch.tensor(learner.loss()), *(t.clone() for t in net.state_dict().values())])
            count += same(*found)
    finally:
        torch.backends.cudnn.deterministic = before
    return f"{count} tensors"


def in_graph(step: Callable[[], None], net: nn.Module) -> Callable[[], None]:
    """The step as a CUDA graph, the parameters being what they were before it was made."""
    before = [p.detach().clone() for p in net.parameters()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    with torch.no_grad():
        for p, value in zip(net.parameters(), before, strict=True):
            p.copy_(value)
    return graph.replay


class Unsteady(nn.Module):
    """Draws from NumPy's generator, which nobody puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * torch.full((8,), float(np.random.rand()), device=x.device)  # noqa: NPY002


def unsteady_blocks_are_found(device: str) -> str:
    """At the end of backward on a CPU; on a GPU, which is not waited for, where the next pass begins."""
    found = []
    for memory in ("reverse", "checkpoint"):
        net = rg.MomentumNet([Unsteady() for _ in range(10)], memory=memory).to(device)
        x = torch.randn(4, 8, device=device, requires_grad=True)
        found.append(f"{memory}: pass {first_refused(net, x)}")
    return ", ".join(found)


def steady_blocks_pass_every_check(device: str) -> str:
    """BatchNorm, dropout and whichever attention there is save nothing that their replay does not, as far as it is compared."""
    count = 0
    for make, shape in ((conv, (4, 16, 16, 16)), (conv_relu, (4, 16, 16, 16)), (transformer, (4, 16, 64))):
        for memory in ("reverse", "checkpoint"):
            for verify in ("auto", "strict"):
                for amp in (False, True):
                    trained(make(memory, verify=verify).to(device), torch.randn(shape, device=device), amp)
                    count += 1
    return f"{count} trainings"


def a_pass_that_leaves_its_range_is_run_again(device: str) -> str:
    """At once: no output is NaN, statistics move once, and every mode has the same bits."""
    count = 0
    for make, shape in ((conv, (4, 16, 16, 16)), (transformer, (4, 16, 64))):
        found = []
        for memory in ("store", "reverse", "checkpoint"):
            torch.manual_seed(0)
            net = make(memory).to(device)
            values: list[Tensor | None] = []
            for scale in (1.0, 1.0, 1e3):
                x = scale * torch.randn(shape, device=device)
                net.zero_grad()
                y = net(x)
                assert y.isfinite().all(), "the range was left"
                y.square().mean().backward()
                values += [y.detach(), *(p.grad for p in net.parameters()), *(b.clone() for b in net.buffers())]
            rg.settle(net)
            found.append(values)
        count += same(found[1], found[0]) + same(found[2], found[0])
    return f"{count} tensors"


def first_refused(net: nn.Module, x: Tensor) -> int:
    for k in range(2):
        try:
            net(x).sum().backward()
        except rg.ReplayError:
            return k
        if x.is_cuda:
            torch.cuda.synchronize()
    raise AssertionError("a block that does not repeat itself was not found at the next pass")


def same(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> int:
    """How many tensors there are, which must have the same bits."""
    count = 0
    for k, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert (a is None) == (b is None), f"tensor {k} is there in one of the two only"
        if a is not None and b is not None:
            assert torch.equal(a, b), f"tensor {k}, {a.dtype} of shape {tuple(a.shape)}, differs"
            count += 1
    return count


CASES: tuple[Case, ...] = (
    steps_are_those_of_plain_torch, gradients_are_carried_as_in_plain_torch, hash_is_that_of_plain_torch,
    conv_mode_changes_no_bit, conv_relu_mode_changes_no_bit, transformer_mode_changes_no_bit,
    graph_capture_of_a_training_step, graph_replays_are_judged, graph_in_the_trainer, unsteady_blocks_are_found,
    steady_blocks_pass_every_check, a_pass_that_leaves_its_range_is_run_again,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Cases that must hold on a GPU.")
    parser.add_argument("only", nargs="?", default="", help="cases with this in their name")
    only: str = parser.parse_args(arguments).only
    device, failed = "cuda" if torch.cuda.is_available() else "cpu", 0
    print(f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}", flush=True)
    for case in CASES:
        if only not in case.__name__:
            continue
        start, name = time.perf_counter(), case.__name__.replace("_", " ")
        try:
            print(f"ok      {name}: {case(device)} ({time.perf_counter() - start:.1f} s)", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
            traceback.print_exc(limit=-3)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
