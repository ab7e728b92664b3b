"""A replay that differs from the first run is found: nothing wrong enters a gradient, and nothing that is right is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from retrograde.convert.convert import stages_of
from retrograde.nets.coupling import CouplingNet
from retrograde.reverse.checks import Checks
from retrograde.reverse.deferred import FIRST_STEP, Deferred
from retrograde.reverse.range import holders
from retrograde.reverse.replay import Call
from ways import assert_equal

FIXED = rg.FixedPoint(22, torch.int32)
REPLAYING = ["reverse", "checkpoint"]


class Parts(nn.Module):
    """Linear maps, a norm, a gate of zeros, and a scale that nobody sees from outside; `run` says what is made of them."""

    def __init__(self, run: Callable[[Parts, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.instance = nn.InstanceNorm1d(4, track_running_stats=True) if run is after_an_instance_norm else None
        self.zero, self.run, self.scale, self.runs = nn.Parameter(torch.zeros(8)), run, 1.0, 0
        self.side: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.run(self, x)


class OwnFunction(torch.autograd.Function):
    """The identity, and a multiple of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.saved_tensors[0], None


def side_loss(m: Parts, x: Tensor) -> Tensor:
    m.side = m.c(x * m.scale).square().mean()
    return m.b(m.a(x).tanh())


def stopped_gradient(m: Parts, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(torch.where(torch.full((8,), m.scale) > 0.7, h, h.detach()))


def two_views_at_one_address(m: Parts, x: Tensor) -> Tensor:
    odd = torch.where(torch.arange(16) % 2 == 1, m.scale, 1.0)
    h = (m.a(x).tanh().repeat(1, 2) * odd).contiguous()
    return m.b(h[:, ::2]) + m.c(h[:, :8])


def hooks_that_copy(m: Parts, x: Tensor) -> Tensor:
    h = (m.a(x) * m.scale).tanh()
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t * 1):
        return m.b(h)


def hooks_that_give_once(m: Parts, x: Tensor) -> Tensor:
    h, kept = (m.a(x) * m.scale).tanh(), dict[int, Tensor]()

    def pack(t: Tensor) -> int:
        kept[id(t)] = t
        return id(t)

    with saved_tensors_hooks(pack, kept.pop):
        return m.b(h)


def straight_through(m: Parts, x: Tensor) -> Tensor:
    """Part of the gradient is let through, all of the value."""
    y, mask = m.a(x), torch.full((8,), m.scale) > 0.7
    return y * mask + (y * ~mask).detach()


def conjugate(m: Parts, x: Tensor) -> Tensor:
    f = (torch.fft.rfft(x) * m.scale).conj()
    return m.a(torch.fft.irfft(f * f.abs(), n=8))


def negated(m: Parts, x: Tensor) -> Tensor:
    im = torch.fft.fft(x * m.scale).conj().imag
    return m.a(im * im.sin())


def one_column(m: Parts, x: Tensor) -> Tensor:
    c = (m.a(x).tanh() * m.scale)[:, 0]
    return m.b(x.tanh() * (c * c.exp())[:, None])


def two_linear(m: Parts, x: Tensor) -> Tensor:
    return m.b(m.a(x))


def after_an_instance_norm(m: Parts, x: Tensor) -> Tensor:
    """Which saves copies of its statistics that nothing tells from tensors of their shape."""
    return two_linear(m, m.instance(x[None])[0]) * torch.full((4, 8), m.scale)


ODD: dict[str, Callable[[float], Tensor]] = {
    "a mask": lambda s: torch.full((8,), s),
    "to be negated": lambda s: torch._neg_view(torch.full((8,), s)),
    "to be negated, with gaps": lambda s: torch.full((8,), s * 1j).conj().imag,
    "one element of many": lambda s: torch.full((14,), s)[::7][:1],
    "one element of many, in 16 bits": lambda s: torch.full((14,), s, dtype=torch.bfloat16)[::7][:1],
    "a single number": torch.tensor,
    "with gaps": lambda s: torch.full((8, 16), s)[:4, ::2],
    "the same element everywhere": lambda s: torch.full((1, 1), s).expand(4, 8),
    "turned": lambda s: torch.full((8, 4), s).T,
    "bytes": lambda s: torch.full((4, 8), int(2 * s), dtype=torch.uint8),
    "whole numbers": lambda s: torch.full((8,), int(2 * s)),
}
SEEN: dict[str, Callable[[Parts, Tensor], Tensor]] = {
    "tanh of a product": lambda m, x: m.a(x * m.scale).tanh(),
    "a gate of zeros": lambda m, x: m.b((m.a(x) + m.c(x * m.scale) * m.zero).tanh()),
    "a gate after a tanh": lambda m, x: m.a(x).tanh() + m.zero * (x * m.scale),
    "the last tensor saved does not depend on it": lambda m, x: m.a(x * m.scale).sin() + m.b(x.tanh()),
    "after a norm": lambda m, x: two_linear(m, m.norm(x)) * torch.full((8,), m.scale),
    "straight through a norm": lambda m, x: m.norm(straight_through(m, x)),
    "products side by side": lambda m, x: x + m.b((m.a(x.cos().exp()) * m.scale).tanh()) - m.c(x.sin()),
    "a checkpoint inside": lambda m, x: checkpoint(lambda h: m.b(h.tanh()), m.a(x) * m.scale, use_reentrant=False),
    "a Function of one's own": lambda m, x: OwnFunction.apply(m.a(x).tanh(), torch.tensor([m.scale])),
    **{f.__name__: f for f in (side_loss, stopped_gradient, two_views_at_one_address, hooks_that_copy, hooks_that_give_once)},
    **{f.__name__: f for f in (straight_through, conjugate, negated, one_column, after_an_instance_norm)},
    **{name: lambda m, x, make=make: two_linear(m, x.sin()) * make(m.scale) for name, make in ODD.items()},
}  # fmt: skip
"""What a block may compute so that its scale enters gradients, and perhaps nothing else."""


def gradients(run: Any, memory: str, gamma: float, verify: str, changed: bool, rows: int = 4) -> list[Tensor | None]:
    torch.manual_seed(0)
    net = rg.MomentumNet([Parts(run) for _ in range(3)], gamma=gamma, memory=memory, verify=verify)
    x = torch.randn(rows, 8, requires_grad=True)
    net(x).sum().backward()
    net.zero_grad()
    loss = net(x).square().sum() + sum(block.side for block in net.blocks)
    if changed:
        net.blocks[1].scale = 0.5
    loss.backward()
    return [x.grad, *(p.grad for p in net.parameters())]


@pytest.mark.parametrize(("memory", "gamma"), [("reverse", 0.9), ("checkpoint", 0.9), ("checkpoint", 0)])
@pytest.mark.parametrize("name", SEEN)
def test_what_enters_a_gradient_is_right_to_the_bit_or_refused(name: str, memory: str, gamma: float) -> None:
    expected = gradients(SEEN[name], "store", gamma, "off", changed=False)
    for verify in ("auto", "strict"):
        assert_equal(gradients(SEEN[name], memory, gamma, verify, changed=False), expected)
        with pytest.raises(rg.ReplayError, match="block 1" if verify == "strict" else "wrong"):
            gradients(SEEN[name], memory, gamma, verify, changed=True)


@pytest.mark.parametrize("memory", REPLAYING)
def test_large_tensors_of_any_layout_pass(memory: str) -> None:
    for name in ("conjugate", "negated", "one_column", "two_views_at_one_address", "to be negated"):
        found = gradients(SEEN[name], memory, 0.9, "auto", changed=False, rows=1200)
        assert_equal(found, gradients(SEEN[name], "store", 0.9, "off", changed=False, rows=1200))


class Undefined(nn.Module):
    """Saves memory that the operation has not written, or whose values nothing depends on."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how, self.scale = nn.Linear(64, 64), nn.Linear(64, 64), how, 1.0
        self.rrelu, self.ctc = nn.RReLU(inplace=how == "in place"), nn.CTCLoss()

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "ctc":
            chances = self.a(x).log_softmax(-1).view(15, 2, 64)
            return self.b(x.sin()) * self.scale * self.ctc(chances, torch.arange(1, 17).view(2, 8), [15, 15], [2, 8])
        return self.b(self.rrelu(self.a(x)) * self.scale)


@pytest.mark.parametrize("verify", ["auto", "strict"])
@pytest.mark.parametrize("how", ["module", "in place", "ctc"])
def test_memory_that_an_operation_saves_without_writing_it_is_not_compared(how: str, verify: str) -> None:
    for memory in REPLAYING:
        net = rg.MomentumNet([Undefined(how) for _ in range(4)], memory=memory, verify=verify).eval()
        x = torch.randn(30, 64)
        for changed in (False, True):
            loss = net(x).square().sum()
            junk = [torch.full(shape, float(k)) for shape in ((30, 64), (2, 15, 17)) for k in range(50)]
            del junk  # something else is in the memory that is given out next
            if not changed:
                loss.backward()
        net.blocks[2].scale = 0.5
        if memory == "reverse" or verify == "strict":  # its output is compared
            with pytest.raises(rg.ReplayError):
                loss.backward()


class Random(nn.Module):
    """In training, a random relu is compared."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.own = nn.Linear(8, 8), torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return torch.ops.aten.rrelu_with_noise(h, torch.empty_like(h), 0.1, 0.3, True, self.own)


@pytest.mark.parametrize("verify", ["auto", "strict"])
@pytest.mark.parametrize("memory", REPLAYING)
def test_noise_that_is_drawn_from_a_generator_of_ones_own_is_seen(memory: str, verify: str) -> None:
    y = rg.MomentumNet([Random() for _ in range(3)], memory=memory, verify=verify)(torch.randn(4, 8))
    with pytest.raises(rg.ReplayError):
        y.sum().backward()


def tanh(m: Parts, x: Tensor) -> Tensor:
    return SEEN["tanh of a product"](m, x)


def blocks(depth: int) -> list[Parts]:
    torch.manual_seed(0)
    return [Parts(tanh) for _ in range(depth)]


def momentum(memory: str, depth: int = 5, **options: Any) -> rg.MomentumNet:
    return rg.MomentumNet(blocks(depth), **{"memory": memory, "fixed_point": FIXED, **options})


def converted(verify: str, **options: Any) -> nn.Module:
    return rg.convert(nn.Sequential(*blocks(5)), stages=["*"], form="block", verify=verify, **options)


NETS: dict[str, Callable[[str], nn.Module]] = {
    "reverse": lambda v: momentum("reverse", verify=v),
    "checkpoint": lambda v: momentum("checkpoint", verify=v),
    "gamma 0": lambda v: momentum("checkpoint", verify=v, gamma=0),
    "coupling": lambda v: CouplingNet(blocks(6), dim=0, memory="reverse", verify=v),
    "coupling, checkpoint": lambda v: CouplingNet(blocks(6), dim=0, memory="checkpoint", verify=v),
    "converted": lambda v: converted(v, memory="reverse", fixed_point=FIXED),
    "converted, gamma 0": lambda v: converted(v, memory="checkpoint", gamma=0),
}


def scale_of_one(net: nn.Module, scale: float) -> None:
    [m for m in net.modules() if isinstance(m, Parts)][2].scale = scale


def wrong_pass(net: nn.Module, x: Tensor) -> None:
    y = net(x)
    scale_of_one(net, 0.5)
    try:
        y.sum().backward()
    finally:
        scale_of_one(net, 1.0)


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("verify", ["auto", "strict", "off"])
def test_right_is_let_through_and_wrong_is_not_except_where_checks_are_off(kind: str, verify: str) -> None:
    net, x = NETS[kind](verify), torch.randn(6, 8)
    for _ in range(2):
        net(x)
    net(x).sum().backward()
    kept = [p.grad for p in net.parameters()]
    net.zero_grad()
    if verify == "off":
        wrong_pass(net, x)
    else:
        says = (
            r"block|run again|\d"
            if verify == "strict"
            else r"the gradients of this backward pass are wrong.*Zero the gradients"
        )
        with pytest.raises(rg.ReplayError, match=says):
            wrong_pass(net, x)
    net.zero_grad()
    net(x).sum().backward()  # and is not held against the next pass
    assert_equal([p.grad for p in net.parameters()], kept)


@pytest.mark.parametrize("memory", REPLAYING)
def test_strict_raises_before_gradients_are_made_of_it(memory: str) -> None:
    net = momentum(memory, verify="strict")
    y = net(torch.randn(3, 8))
    net.blocks[2].scale = 0.5
    with pytest.raises(rg.ReplayError, match="block 2 did not repeat itself"):
        y.sum().backward()
    made = [any(p.grad is not None for p in block.parameters()) for block in net.blocks]
    assert made == [False, False, False, True, True]


def shifted(m: Parts, x: Tensor) -> Tensor:
    """Another output with another scale, and the same gradients."""
    return m.a(x) + m.scale


def test_an_output_that_no_gradient_depends_on_is_let_through_where_inputs_are_kept() -> None:
    expected = gradients(shifted, "store", 0.9, "auto", changed=False)
    assert_equal(gradients(shifted, "checkpoint", 0.9, "auto", changed=True), expected)
    for memory, verify in (("reverse", "auto"), ("checkpoint", "strict")):
        with pytest.raises(rg.ReplayError):
            gradients(shifted, memory, 0.9, verify, changed=True)


@pytest.mark.parametrize("memory", REPLAYING)
@pytest.mark.parametrize("verify", ["auto", "strict"])
def test_whichever_way_the_graph_is_run_through(verify: str, memory: str) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    launcher = Parts(tanh)
    cases: dict[str, Callable[[], tuple[rg.MomentumNet, list[Parts], Callable[[], Any]]]] = {}

    def case(make: Callable[[], Any]) -> None:
        cases[make.__name__] = make

    @case
    def half_way() -> Any:
        net = momentum(memory, 12, verify=verify)
        loss = net(x).sum()
        upper = [p for block in net.blocks[8:] for p in block.a.parameters()]
        return net, [net.blocks[8], net.blocks[11]], lambda: torch.autograd.grad(loss, upper)

    @case
    def the_second_time() -> Any:
        """In reverse the blocks are run forwards first: the way up is checked, not only the way down."""
        net = momentum(memory, 6, verify=verify)
        loss = net(x).sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        return net, [net.blocks[0], net.blocks[3], net.blocks[5]], lambda: loss.backward(retain_graph=True)

    @case
    def of_second_order() -> Any:
        net = momentum(memory, 6, verify=verify)
        (g,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        return net, [net.blocks[0], net.blocks[3]], lambda: g.square().sum().backward()

    @case
    def of_the_velocity() -> Any:
        net = momentum(memory, verify=verify, velocity=launcher)
        loss = net(x).sum()
        return net, [launcher], loss.backward

    @case
    def above_frozen_blocks() -> Any:
        net = momentum(memory, 8, verify=verify)
        for block in net.blocks[:5]:
            block.requires_grad_(False)
        loss = net(x.detach()).sum()
        return net, [net.blocks[5], net.blocks[7]], loss.backward

    for name, make in cases.items():
        for which in range(len(make()[1])):
            _, _, backward = make()
            backward() if name != "of_second_order" else None  # nothing to say
            _, bad, backward = make()
            bad[which].scale = 0.5
            try:
                with pytest.raises(rg.ReplayError):
                    backward()
            finally:
                bad[which].scale = 1.0


@pytest.mark.parametrize("verify", ["auto", "strict"])
@pytest.mark.parametrize("frozen", [3, 8, 11])
def test_frozen_blocks_below_are_not_run_again(frozen: int, verify: str) -> None:
    net = momentum("reverse", 20, verify=verify)
    for block in net.blocks[:frozen]:
        block.requires_grad_(False)
    y = net(torch.randn(3, 8))
    net.blocks[frozen - 1].scale = 0.5  # nothing depends on it any more
    y.sum().backward()
    assert [block.runs for block in net.blocks] == [1] * frozen + [2] * (20 - frozen)


def test_a_replay_from_a_kept_input_stops_at_the_last_tensor_it_is_run_for() -> None:
    class Counts(nn.Module):
        """Counts its runs, and saves nothing."""

        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            return x + 1

    for memory, verify, runs in (
        ("checkpoint", "off", 1),
        ("checkpoint", "auto", 1),
        ("checkpoint", "strict", 2),
        ("reverse", "off", 2),
    ):
        counts = [Counts() for _ in range(3)]
        net = rg.MomentumNet(
            [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), c) for c in counts],
            memory=memory,
            verify=verify,
        )
        loss = net(torch.randn(3, 8)).sum()
        before = torch.get_rng_state()
        loss.backward()
        assert [count.runs for count in counts] == [runs] * 3
        assert torch.equal(torch.get_rng_state(), before)  # wherever the replay stopped


def routed(m: Parts, x: Tensor) -> Tensor:
    """Computes the same in every pass, and uses one of two results: what is compared for the one says nothing of the other."""
    h = m.a(x).tanh()
    other = F.linear((h * m.scale).exp(), m.b.weight * m.zero)
    return x + (other if m.used else h)


@pytest.mark.parametrize("before", [(), (False,), (True,), (True, False)])
def test_a_block_that_uses_another_of_its_results_is_looked_at_anew(before: tuple[bool, ...]) -> None:
    net = rg.MomentumNet([Parts(routed) for _ in range(3)], memory="checkpoint")
    x = torch.randn(3, 8, requires_grad=True)
    for used in (*before, True):
        for block in net.blocks:
            block.used = used
        y = net(x)
        y.sum().backward(retain_graph=True)
    net.blocks[1].scale = 0.5
    with pytest.raises(rg.ReplayError, match="block 1"):
        y.sum().backward()


@pytest.mark.parametrize("inside", ["checkpoint", "network"])
def test_what_is_inside_of_a_block_is_run_once_in_forward(inside: str) -> None:
    def run(m: Parts, x: Tensor) -> Tensor:
        return m.net(x) if inside == "network" else checkpoint(m.core, x, use_reentrant=False)

    made = [Parts(run) for _ in range(2)]
    for m in made:
        m.core = Parts(lambda m, x: m.a(m.norm(x).tanh()))
        m.net = rg.MomentumNet([m.core], gamma=0, memory="checkpoint")
    y = rg.MomentumNet(made, memory="checkpoint")(torch.randn(4, 8))
    assert [(m.runs, m.core.runs, int(m.core.norm.num_batches_tracked)) for m in made] == [(1, 1, 1)] * 2
    y.sum().backward()
    if inside == "network":  # a checkpoint moves them once more without us, too
        assert [int(m.core.norm.num_batches_tracked) for m in made] == [1, 1]


# checks that are deferred ----------------------------------------------------------------------------------------------


class Accelerator:
    """Events of a device that is done when it is said to be; and whether a CUDA graph is being captured."""

    def __init__(self) -> None:
        self.done = True
        self.captures = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None: ...

    def deferred(self) -> Deferred:
        return Deferred(lambda device: self, lambda x: self.captures)

    def hold(self, net: nn.Module) -> nn.Module:
        for part in (*(part for _, part in holders(net)), *stages_of(net)):
            part.range.deferred = self.deferred()
        return net


@pytest.mark.parametrize("kind", NETS)
def test_an_accelerator_is_not_waited_for(kind: str) -> None:
    device = Accelerator()
    net, x = device.hold(NETS[kind]("auto")), torch.randn(6, 8)
    for _ in range(3):
        net(x).sum().backward()  # nothing to say
    device.done = False
    wrong_pass(net, x)
    net(x).sum().backward()  # not known yet
    copy.deepcopy(net)(x)  # what is under way is not copied
    device.done = True
    with pytest.raises(rg.ReplayError, match="the gradients of an earlier backward pass are wrong"):
        net(x)
    net(x).sum().backward()  # said once
    wrong_pass(net, x)
    with pytest.raises(rg.ReplayError, match="an earlier"):
        rg.settle(net)


def test_what_is_under_way_is_not_copied() -> None:
    device = Accelerator()
    deferred = device.deferred()
    deferred.tell(torch.ones(2), lambda values, when: None)
    assert len(deferred.waiting) == 1
    for other in (copy.deepcopy(deferred), pickle.loads(pickle.dumps(Deferred()))):
        assert not other.waiting


def say(values: Tensor, when: str) -> None:
    if values.any():
        raise rg.ReplayError(f"{when}: {values.tolist()}")


def test_replays_of_a_cuda_graph_are_judged_by_a_later_pass_or_settle() -> None:
    device = Accelerator()
    deferred, x = device.deferred(), torch.ones(1)
    device.captures = True
    with pytest.raises(RuntimeError, match=FIRST_STEP[:60]):
        deferred.tell(torch.zeros(2), say, "a")
    device.captures = False
    deferred.tell(torch.zeros(2), say, "a")  # a step like it, first
    deferred.settle()
    for look in (deferred.settle, lambda: (deferred.collect(x), deferred.collect(x))):
        device.captures = True
        for values in ([0, 1], [2, 0], [0, 0]):  # a good replay does not forget a bad one
            deferred.tell(torch.tensor(values).float(), say, "a")
            deferred.collect(x)  # asks nothing while it is captured
        device.captures = False
        with pytest.raises(rg.ReplayError, match=r"an earlier: \[2.0, 1.0\]"):
            look()
        deferred.settle()  # said once
    device.done = False
    for _ in range(5):
        deferred.collect(x)
    assert len(deferred.waiting) <= 1  # looking costs no more than a pass tells
    device.done = True
    deferred.settle()


def test_every_error_is_judged_and_the_first_is_raised() -> None:
    device, judged = Accelerator(), list[str]()
    deferred = device.deferred()

    def judge(values: Tensor, when: str) -> None:
        judged.append(when)
        raise rg.RangeOverflow(str(values.item()))

    device.done = False
    for k in range(3):
        deferred.tell(torch.tensor(k), judge)
    with pytest.raises(rg.RangeOverflow, match="0"):
        deferred.settle()
    assert judged == ["an earlier"] * 3
    deferred.settle()
    assert not deferred.waiting


def test_on_a_cpu_values_are_judged_at_once() -> None:
    with pytest.raises(rg.ReplayError, match="this"):
        Deferred().tell(torch.ones(2), say)
    Deferred().tell(torch.ones(2, device="meta"), say)  # nothing is known of these


@pytest.mark.parametrize("gamma", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_running_statistics_that_instance_norm_copies_in_16_bits(dtype: torch.dtype, gamma: float) -> None:
    """A replay works on scratch memory instead of them; what it saves is as large, and of no use to a gradient."""
    blocks = [nn.Sequential(nn.InstanceNorm2d(4, track_running_stats=True), nn.Conv2d(4, 4, 1)) for _ in range(3)]
    net = rg.MomentumNet(blocks, gamma=gamma, memory="checkpoint")
    with torch.autocast("cpu", dtype):
        y = net(torch.randn(2, 4, 5, 5, dtype=torch.float32 if gamma else dtype))
    y.float().sum().backward()


def test_a_stride_that_nothing_goes_by_is_no_difference() -> None:
    """A replay's input may have another one where a dimension has one element."""
    block, checks = nn.Linear(300, 300), Checks(1, torch.device("cpu"), "auto", Deferred())
    call = Call(block, "block 0")
    saved = torch.randn(1, 300)
    first = checks.first_run(0, call, torch.randn(1))
    first.add(saved)
    first.end(None)
    left = checks.slots[0].clone()
    assert left != 0
    checks._add(0, [saved.as_strided((1, 300), (1, 1))], None, left, -1)
    assert left == 0
    checks._add(0, [saved + 1], None, left, -1)
    assert left != 0
