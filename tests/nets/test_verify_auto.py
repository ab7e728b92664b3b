"""verify="auto", the default: every replay is checked, at once on a CPU, without waiting on an accelerator."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.convert.convert import stages_of
from retrograde.core.call import Extra
from retrograde.nets import RevNet
from retrograde.stack import calibrate, ledger
from retrograde.stack import later as later_module
from retrograde.stack.forward import Forward
from retrograde.stack.momentum import Momentum
from retrograde.stack.proof import EVERY

WRONG = "the gradients of {} backward pass are wrong"


class Scaled(nn.Module):
    """tanh(W·(scale·x)), with a scale that nobody can see from outside, and a count of its runs."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear, self.setting, self.runs = nn.Linear(width, width), {"scale": 1.0}, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.runs[0] += 1
        return self.linear(x * self.setting["scale"]).tanh()


def blocks(depth: int, width: int = 8) -> list[Scaled]:
    torch.manual_seed(0)
    return [Scaled(width) for _ in range(depth)]


def momentum(memory: str, depth: int = 5, **options: object) -> rg.MomentumNet:
    return rg.MomentumNet(blocks(depth), memory=memory, fraction_bits=22, **options)


@pytest.fixture(autouse=True, params=["one by one", "together"])
def hashed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors as on a CPU, and as on an accelerator: one hash of all."""
    if request.param == "together":
        monkeypatch.setattr(ledger, "_ALONE", set())


class Event:
    """Stands in for an accelerator's: done when it is said to be."""

    done = True

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        pass


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> type[Event]:
    """Have values told of fetched as from an accelerator."""
    monkeypatch.setattr(later_module, "event_on", lambda device: Event())
    monkeypatch.setattr(Event, "done", True)
    return Event


NETS: dict[str, Callable[[], nn.Module]] = {
    "reverse": lambda: momentum("reverse"),
    "checkpoint": lambda: momentum("checkpoint"),
    "gamma 0": lambda: rg.MomentumNet(blocks(5), gamma=0, memory="checkpoint"),
    "coupling": lambda: RevNet(blocks(3, 4), blocks(3, 4), dim=-1, memory="reverse", fraction_bits=22),
    "coupling, checkpoint": lambda: RevNet(blocks(3, 4), blocks(3, 4), dim=-1, memory="checkpoint", fraction_bits=22),
    "converted": lambda: rg.convert(nn.Sequential(*blocks(5)), stages=["*"], memory="reverse", fraction_bits=22),
    "converted, gamma 0": lambda: rg.convert(nn.Sequential(*blocks(5)), stages=["*"], gamma=0, memory="checkpoint"),
}


def some_block(net: nn.Module) -> Scaled:
    return [m for m in net.modules() if isinstance(m, Scaled)][2]


@pytest.mark.parametrize("kind", NETS)
def test_right_is_let_through_and_wrong_is_not(kind: str) -> None:
    net, x = NETS[kind](), torch.randn(3, 8)
    net(x).sum().backward()
    kept = [p.grad.clone() for p in net.parameters()]
    y = net(x)
    some_block(net).setting["scale"] = 0.5
    with pytest.raises(rg.ReplayError, match=WRONG.format("this")) as raised:
        y.sum().backward()
    assert "not put back" in str(raised.value)
    assert any(not torch.equal(p.grad, g) for p, g in zip(net.parameters(), kept, strict=True))
    net.zero_grad()
    some_block(net).setting["scale"] = 1.0
    net(x).sum().backward()  # and is not held against the next pass
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), kept, strict=True))


@pytest.mark.parametrize("kind", NETS)
def test_off_is_off(kind: str) -> None:
    net, x = NETS[kind](), torch.randn(3, 8)
    for m in net.modules():
        if hasattr(m, "verify"):
            m.verify = "off"
    if "converted" in kind:
        net = rg.convert(
            nn.Sequential(*blocks(5)), stages=["*"], gamma=0 if "0" in kind else 0.9, verify="off", fraction_bits=22,
            memory="checkpoint" if "0" in kind else "reverse",
        )  # fmt: skip
    y = net(x)
    some_block(net).setting["scale"] = 0.5
    y.sum().backward()


@pytest.mark.parametrize("kind", NETS)
def test_an_accelerator_is_not_waited_for(kind: str, accelerator: type[Event]) -> None:
    net, x = NETS[kind](), torch.randn(3, 8)
    for _ in range(3):
        net(x).sum().backward()  # nothing to say
    accelerator.done = False
    y = net(x)
    some_block(net).setting["scale"] = 0.5
    y.sum().backward()
    some_block(net).setting["scale"] = 1.0
    net(x).sum().backward()  # not known yet
    accelerator.done = True
    with pytest.raises(rg.ReplayError, match=WRONG.format("an earlier")):
        net(x)
    net(x).sum().backward()  # said once


@pytest.fixture
def capture(accelerator: type[Event], monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Have passes believe that they are on an accelerator, and captured in a CUDA graph while "on" is true: each then is a replay."""
    state, begin = {"on": False}, Momentum.__init__
    for module in (later_module, calibrate):
        monkeypatch.setattr(module, "capturing", lambda x: state["on"])
    monkeypatch.setattr(later_module, "capturing_on", lambda device: state["on"])

    def init(self: Momentum, *args: object, **kwargs: object) -> None:
        begin(self, *args, **(kwargs | {"overflow": "nan"}))  # or it would be raised where it happens
        self.raises, self.eager = kwargs["overflow"] == "raise", False

    def seen(self: calibrate.Range, run: Momentum) -> None:
        self.later.tell(run.watch.clone(), partial(self._judge, run.outcome()))

    monkeypatch.setattr(Momentum, "__init__", init)
    monkeypatch.setattr(calibrate.Range, "seen", seen)
    monkeypatch.setattr(calibrate.Range, "_outgrown", lambda self, x, fixed: 0)
    return state


def warm(net: nn.Module, x: Tensor) -> None:
    with torch.inference_mode():
        net(x)
    for _ in range(2):
        net(x).sum().backward()
    rg.settle(net)


@pytest.mark.parametrize("kind", NETS)
def test_replays_of_a_graph_are_judged_by_a_later_pass(
    kind: str, capture: dict[str, bool], accelerator: type[Event]
) -> None:
    net, x = NETS[kind](), torch.randn(3, 8)
    warm(net, x)

    def a_later_pass() -> None:
        accelerator.done = False
        for _ in range(3):
            net(x)  # has it fetched: it is not known yet
        accelerator.done = True
        net(x)

    for look in (lambda: rg.settle(net), a_later_pass):
        for scale in (1.0, 0.5, 1.0):  # the one in the middle is wrong, and not forgotten by the last
            capture["on"] = True
            y = net(x)
            some_block(net).setting["scale"] = scale
            y.sum().backward()
            some_block(net).setting["scale"] = 1.0
        capture["on"] = False
        with pytest.raises(rg.ReplayError, match=WRONG.format("an earlier")) as raised:
            look()
        if "gamma 0" in kind:
            assert {"gamma 0": "block 2", "converted, gamma 0": "2"}[kind] in str(raised.value)
        rg.settle(net)  # said once
        net(x).sum().backward()
        rg.settle(net)


@pytest.mark.parametrize("scale", [0.01, 40.0, 1000.0])
def test_a_look_between_replays_leaves_the_range_alone(scale: float, capture: dict[str, bool]) -> None:
    net, x = rg.MomentumNet(blocks(5), memory="reverse"), scale * torch.randn(3, 8)
    warm(net, x)
    fixed = dict(net.range.fixed)
    for _ in range(3):
        capture["on"] = True
        net(x).sum().backward()
        capture["on"] = False
        for _ in range(3):  # with nothing to see from the second on
            rg.settle(net)
            net(x)
            assert net.range.fixed == fixed
    capture["on"] = True
    net(1000 * x)
    capture["on"] = False
    with pytest.raises(rg.RangeOverflow):
        rg.settle(net)
    rg.settle(net)
    assert net.range.fixed != fixed  # it follows, for the passes that follow


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_one_bad_replay_is_told_once(memory: str, capture: dict[str, bool]) -> None:
    net, x = nn.Sequential(*(momentum(memory) for _ in range(3))), torch.randn(3, 8)
    warm(net, x)
    capture["on"] = True
    y = net(1e5 * x)
    assert y.isnan().all()
    y.sum().backward()  # NaN in every stage
    capture["on"] = False
    with pytest.raises(rg.RangeOverflow, match="beyond"):
        rg.settle(net)
    rg.settle(net)


def test_looking_costs_no_more_than_a_pass_tells(capture: dict[str, bool], accelerator: type[Event]) -> None:
    net, x = NETS["converted, gamma 0"](), torch.randn(3, 8)
    warm(net, x)
    later = stages_of(net)[0].range.later
    capture["on"] = True
    net(x).sum().backward()
    capture["on"], accelerator.done = False, False
    rooms = len(later.rooms)
    for k in range(1, 4):
        net(x).sum().backward()
        assert len(later.waiting) == rooms + 5 * k  # one look, and what the five blocks of each pass tell
    assert len(later.rooms) == rooms == 5


@pytest.mark.parametrize("setting", ["auto", 22])
def test_the_first_step_cannot_be_captured(setting: object, capture: dict[str, bool]) -> None:
    net, x = rg.MomentumNet(blocks(5), memory="reverse", fraction_bits=setting), torch.randn(3, 8)
    capture["on"] = True
    with pytest.raises(RuntimeError, match="Run two or three steps like the one to be captured first"):
        net(x).sum().backward()
    capture["on"] = False
    net(x).sum().backward()
    capture["on"] = True
    net(x).sum().backward()


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("verify", ["end", "blocks"])
def test_what_asks_the_device_cannot_be_captured(kind: str, verify: str, capture: dict[str, bool]) -> None:
    net, x = NETS[kind](), torch.randn(3, 8)
    for module in net.modules():
        if hasattr(module, "verify"):
            module.verify = verify
    for stage in stages_of(net):
        stage.settings = replace(stage.settings, verify=verify)
    net(x).sum().backward()
    capture["on"] = True
    with torch.no_grad():
        net(x)  # asks nothing
    with pytest.raises(RuntimeError, match="Capture with verify='auto'"):
        net(x)
    if "coupling" in kind or "gamma 0" in kind or kind == "converted":
        return
    net.memory = "store"
    net(x).sum().backward()


def test_what_is_under_way_is_not_copied(accelerator: type[Event]) -> None:
    net, x = momentum("reverse"), torch.randn(3, 8)
    y = net(x)
    some_block(net).setting["scale"] = 0.5
    y.sum().backward()
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        other(x)
    with pytest.raises(rg.ReplayError):
        net(x)


@pytest.mark.parametrize("verify", ["auto", "end"])
@pytest.mark.parametrize("frozen", [3, 8, 11])
def test_frozen_blocks_below_are_not_run_again(verify: str, frozen: int) -> None:
    net, x = momentum("reverse", 20, verify=verify), torch.randn(3, 8)
    for block in net.blocks[:frozen]:
        block.requires_grad_(False)
    y = net(x)
    net.blocks[frozen - 1].setting["scale"] = 0.5  # nothing depends on it any more
    y.sum().backward()
    assert [block.runs[0] for block in net.blocks] == [1] * frozen + [2] * (20 - frozen)
    for bad in (frozen, 19):
        y = net(x)
        net.blocks[bad].setting["scale"] = 0.5
        with pytest.raises(rg.ReplayError, match="did not rewind"):
            y.sum().backward()
        net.blocks[bad].setting["scale"] = 1.0


@pytest.mark.parametrize("verify", ["auto", "end"])
@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_a_backward_pass_that_ends_half_way(memory: str, verify: str) -> None:
    net, x = momentum(memory, 3 * EVERY, verify=verify), torch.randn(3, 8)
    upper = [p for block in net.blocks[2 * EVERY + 3 :] for p in block.parameters()]
    y = net(x)
    gradients = torch.autograd.grad(y.sum(), upper)
    runs = sum(block.runs[0] for block in net.blocks) - 3 * EVERY
    assert runs == (EVERY if memory == "reverse" else EVERY - 3)  # down to the next mark, no further
    y = net(x)
    net.blocks[2 * EVERY + 4].setting["scale"] = 0.5
    with pytest.raises(rg.ReplayError):
        torch.autograd.grad(y.sum(), upper)
    net.blocks[2 * EVERY + 4].setting["scale"] = 1.0
    again = torch.autograd.grad(net(x).sum(), upper)
    assert all(map(torch.equal, gradients, again))


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
@pytest.mark.parametrize("bad", [0, 4, EVERY, 2 * EVERY + 2])
def test_what_changes_between_two_backward_passes(memory: str, bad: int) -> None:
    """In reverse the second runs the blocks forwards first: the way up is checked, not only the way down."""
    net, x = momentum(memory, 2 * EVERY + 3), torch.randn(3, 8)
    y = net(x)
    y.sum().backward(retain_graph=True)
    first = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    y.sum().backward(retain_graph=True)
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), first, strict=True))
    net.blocks[bad].setting["scale"] = 0.5
    with pytest.raises(rg.ReplayError, match="are wrong"):
        y.sum().backward()


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_second_order_gradients(memory: str) -> None:
    found = []
    for mode in (memory, "store"):
        net, x = momentum(mode, EVERY + 2), torch.ones(3, 8, requires_grad=True)
        (g,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), [x, *net.parameters()], allow_unused=True))
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(*found, strict=True))
    net, x = momentum(memory, EVERY + 2), torch.ones(3, 8, requires_grad=True)
    (g,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    net.blocks[3].setting["scale"] = 0.5
    with pytest.raises(rg.ReplayError, match="are wrong"):
        g.square().sum().backward()


@pytest.mark.parametrize("verify", ["auto", "end", "blocks"])
@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_what_makes_the_initial_velocity_is_checked_too(memory: str, verify: str) -> None:
    launcher, x = Scaled(), torch.randn(3, 8)
    net = momentum(memory, verify=verify, velocity=launcher)
    net(x).sum().backward()
    y = net(x)
    launcher.setting["scale"] = 0.5
    with pytest.raises(rg.ReplayError):
        y.sum().backward()


class EndsInProduct(nn.Module):
    """Two branches; the last tensor saved does not depend on the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x * self.scale).sin() + self.b(x.tanh())


class Masked(nn.Module):
    """A mask that enters by a product of which autograd saves the mask alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.out = nn.Linear(8, 8), 1.0, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.linear(x)) * torch.full((8,), self.scale)


class MaskedAfterNorm(Masked):
    """The same where running statistics, which are left out of the proof, are of the mask's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class MaskedInstance(nn.Module):
    """Instance norm saves copies of its running statistics, which nothing tells from a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out, self.scale = nn.InstanceNorm1d(3, track_running_stats=True), nn.Linear(8, 8), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x[None])[0]) * torch.full((8,), self.scale)


@pytest.mark.parametrize("verify", ["auto", "end"])
@pytest.mark.parametrize("make", [EndsInProduct, Masked, MaskedAfterNorm, MaskedInstance])
def test_every_tensor_that_the_gradient_is_made_of_counts(make: Callable[[], nn.Module], verify: str) -> None:
    net = rg.MomentumNet([make() for _ in range(3)], memory="checkpoint", fraction_bits=22, verify=verify)
    x = torch.randn(3, 8)
    net(x).sum().backward()
    y = net(x)
    net.blocks[1].scale = 0.5
    with pytest.raises(rg.ReplayError, match="block 1"):
        y.sum().backward()


class Weighted(nn.Module):
    """A weight that looks like a place of a generator, or like a workspace, which are left out elsewhere."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.linear, self.weights = nn.Linear(8, 8), [weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.weights[0]


@pytest.mark.parametrize("verify", ["auto", "end"])
@pytest.mark.parametrize("weight", [torch.tensor(2), torch.full((8,), 2, dtype=torch.uint8)])
def test_no_factor_is_left_out(weight: Tensor, verify: str) -> None:
    net = rg.MomentumNet([Weighted(weight) for _ in range(3)], memory="checkpoint", fraction_bits=22, verify=verify)
    net(torch.randn(3, 8)).sum().backward()
    y = net(torch.randn(3, 8))
    net.blocks[1].weights[0] = weight + 1
    with pytest.raises(rg.ReplayError, match="block 1"):
        y.sum().backward()


ODD: dict[str, Callable[[float], Tensor]] = {
    "to be negated": lambda s: torch._neg_view(torch.full((8,), s)),
    "to be negated, with gaps": lambda s: torch.full((8,), s * 1j).conj().imag,
    "to be conjugated": lambda s: torch.full((8,), s * 1j).conj(),
    "one element of many": lambda s: torch.full((14,), s)[::7][:1],
    "one element of many, in 16 bits": lambda s: torch.full((14,), s, dtype=torch.bfloat16)[::7][:1],
    "a single number": torch.tensor,
    "with gaps": lambda s: torch.full((8, 16), s)[:3, ::2],
    "the same element everywhere": lambda s: torch.full((1, 1), s).expand(3, 8),
    "turned": lambda s: torch.full((8, 3), s).T,
}


class Odd(nn.Module):
    """Multiplies by a tensor that lies in memory in an uncommon way."""

    def __init__(self, made: Callable[[float], Tensor]) -> None:
        super().__init__()
        self.linear, self.made, self.scale = nn.Linear(8, 8), made, 1.5

    def forward(self, x: Tensor) -> Tensor:
        odd = self.made(self.scale)
        if odd.is_complex():
            return self.linear(torch.view_as_real(x.sin() * odd).sum(-1))
        return self.linear(x.sin()) * odd


@pytest.mark.parametrize("verify", ["auto", "end"])
@pytest.mark.parametrize("odd", ODD)
def test_however_it_lies_in_memory_it_is_hashed(odd: str, verify: str) -> None:
    net = rg.MomentumNet([Odd(ODD[odd]) for _ in range(3)], memory="checkpoint", fraction_bits=22, verify=verify)
    net(torch.randn(3, 8)).sum().backward()
    y = net(torch.randn(3, 8))
    net.blocks[1].scale = 1.25
    with pytest.raises(rg.ReplayError, match="block 1"):
        y.sum().backward()


class Parallel(nn.Module):
    """Two products side by side; `scale` is seen in what the first is made of."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 8)
        self.kind, self.scale, self.gain = kind, 1.0, nn.Parameter(torch.ones(8))
        self.b.requires_grad_(kind != "frozen")

    def forward(self, x: Tensor) -> Tensor:
        inner = self.b((self.a(x.cos().exp()) * self.scale).tanh())
        outer = self.c(x.sin())
        if self.kind == "scaled":
            return x + self.gain * inner + outer
        return x + inner - outer


@pytest.mark.parametrize("verify", ["auto", "end"])
@pytest.mark.parametrize("kind", ["trained", "frozen", "scaled"])
def test_products_side_by_side_all_count(kind: str, verify: str) -> None:
    net = rg.MomentumNet([Parallel(kind) for _ in range(3)], memory="checkpoint", fraction_bits=22, verify=verify)
    x = torch.randn(3, 8, requires_grad=True)
    for _ in range(2):
        net(x).sum().backward()
    y = net(x)
    net.blocks[1].scale = 0.5
    with pytest.raises(rg.ReplayError, match="block 1"):
        y.sum().backward()


def test_of_a_block_that_ends_in_products_their_factors_are_hashed_and_of_the_rest_the_start(monkeypatch) -> None:
    """Not all of what leads to them: for a transformer's layer that would be six times as much."""
    monkeypatch.setattr(ledger, "_START", 5)
    together, hashed = not ledger._ALONE, list[int]()
    monkeypatch.setattr(ledger, "digest", lambda t, into, seed, sign: hashed.append(t.numel()))
    net = rg.MomentumNet([Parallel("trained")], memory="checkpoint", fraction_bits=22)
    y = net(torch.randn(3, 8, requires_grad=True))
    # x.cos(), its exp() and x.sin(); then x.sin() and tanh(...), and the two weights' starts
    assert sorted(hashed) == sorted(([80] if together else [5] * 4) + [24, 96]), hashed  # together as bytes
    y.sum().backward()
    assert len(hashed) == (6 if together else 12)


class Routed(nn.Module):
    """Computes the same in every pass, and uses one of two results: what proves the one says nothing of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.up, self.used, self.noise = nn.Linear(8, 8), nn.Linear(8, 8), False, 0.0
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        m = self.up((h + self.noise).exp())
        return x + (m if self.used else h)


@pytest.mark.parametrize("verify", ["auto", "end"])
@pytest.mark.parametrize("before", [(), (False,), (True,), (True, False)])
def test_a_block_that_uses_another_of_its_results_is_looked_at_anew(before: tuple[bool, ...], verify: str) -> None:
    torch.manual_seed(0)
    net = rg.MomentumNet([Routed() for _ in range(3)], memory="checkpoint", fraction_bits=22, verify=verify)
    x = torch.randn(3, 8, requires_grad=True)
    for used in (*before, True):
        for block in net.blocks:
            block.used = used
        net(x).sum().backward()
    y = net(x)
    net.blocks[1].noise = 0.5
    with pytest.raises(rg.ReplayError, match="block 1"):
        y.sum().backward()


def test_products_outside_of_a_block_are_not_asked_for_their_factors() -> None:
    """What is added as it was given has a history of its own, which another block's replay may be needed for."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, given: Tensor) -> Tensor:
            return self.linear(x.sin()) + given

    first = rg.MomentumNet([Parallel("trained")], memory="checkpoint", gamma=0, fraction_bits=22)
    second = rg.MomentumNet([Adds(), Adds()], memory="checkpoint", fraction_bits=22)
    runs: list[int] = []
    first.blocks[0].a.register_forward_hook(lambda *_: runs.append(1))
    given = first(torch.randn(3, 8))
    y = second(torch.randn(3, 8), given)
    assert len(runs) == 1
    y.sum().backward()
    assert len(runs) == 2


class Shifted(nn.Module):
    """Another output at each run, and the same gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.runs = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.linear(x) + self.runs


@pytest.mark.parametrize("verify", ["auto", "end"])
def test_what_no_gradient_depends_on_is_let_through_where_inputs_are_kept(verify: str) -> None:
    x, found = torch.randn(3, 8), []
    for memory in ("checkpoint", "store"):
        torch.manual_seed(0)
        net = rg.MomentumNet([Shifted() for _ in range(3)], memory=memory, fraction_bits=22, verify=verify)
        net(x).square().sum().backward()
        found.append([p.grad for p in net.parameters()])
    assert all(map(torch.equal, *found))
    net = rg.MomentumNet([Shifted() for _ in range(3)], memory="checkpoint", fraction_bits=22, verify="blocks")
    with pytest.raises(rg.ReplayError, match="block 2 did not repeat itself"):
        net(x).square().sum().backward()


@pytest.mark.parametrize("verify", ["end", "blocks"])
@pytest.mark.parametrize("bad", [0, 4, 7, 9])
def test_gradients_are_put_back_whichever_way_a_block_is_remembered(verify: str, bad: int) -> None:
    """Reversed below, kept above: what is wrong below is found after the gradients above are made."""
    net, x = momentum("reverse", 10, verify=verify), torch.randn(3, 8)
    net(x).sum().backward()
    before = [p.grad.clone() for p in net.parameters()]
    fixed = net.range.current(x)
    run = Forward(x, net.recurrence, fixed, mode="reverse", kept_from=6, verify=verify)
    for block in net.blocks:
        run.step(block, Extra((), {}))
    net.blocks[bad].setting["scale"] = 0.5
    with pytest.raises(rg.ReplayError):
        run.finish().sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("verify", ["auto", "end"])
def test_a_replay_still_stops_at_the_last_tensor_saved(verify: str) -> None:
    class Counted(nn.Linear):
        ends = 0

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            Counted.ends += 1
            return y

    net = rg.MomentumNet(
        [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Counted(8, 8))] * 3,
        memory="checkpoint",
        fraction_bits=22,
        verify=verify,
    )
    net(torch.randn(3, 8)).sum().backward()
    assert Counted.ends == 3


@pytest.mark.parametrize(
    "block",
    [
        lambda: nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        ),
        lambda: nn.Sequential(nn.InstanceNorm2d(4, track_running_stats=True), nn.Conv2d(4, 4, 3, padding=1)),
        lambda: nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Conv2d(4, 4, 1)),
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Hardswish()),
    ],
)
@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_no_false_alarm(block: Callable[[], nn.Module], memory: str, layout: torch.memory_format) -> None:
    net = rg.MomentumNet([block() for _ in range(4)], memory=memory).to(memory_format=layout)
    for _ in range(3):
        net(torch.randn(2, 4, 6, 6).contiguous(memory_format=layout)).square().mean().backward()
    with torch.autocast("cpu", torch.bfloat16):
        y = net(torch.randn(2, 4, 6, 6).contiguous(memory_format=layout))
    y.square().mean().backward()


class EveryOther(nn.Module):
    """Saves two strided views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.out = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.wide(x)
        return self.out(h[:, ::2] * h[:, 1::2])


class Expanded(nn.Module):
    """Saves one number, seen eight times."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.out = nn.Parameter(torch.tensor(0.3)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.tanh() * self.gain.exp().expand(8))


class Column(nn.Module):
    """Saves a column."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = x.tanh()
        c = h[:, 0]
        return self.out(h * (c * c.exp())[:, None])


class Negated(nn.Module):
    """Saves a view that is yet to be negated."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        im = torch.fft.fft(x).conj().imag
        return self.out(im * im.sin())


class Conjugated(nn.Module):
    """Saves a view that is yet to be conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        f = torch.fft.rfft(x).conj()
        return self.out(torch.fft.irfft(f * f.abs(), n=8))


class SparseBuffer(nn.Module):
    """A buffer that has no address."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)
        self.register_buffer("mixing", torch.eye(8).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.sparse.mm(self.mixing, x.t()).t().tanh())


@pytest.mark.parametrize("rows", [3, 1200], ids=["small", "large"])
@pytest.mark.parametrize("verify", ["auto", "end"])
@pytest.mark.parametrize("make", [EveryOther, Expanded, Column, Negated, Conjugated, SparseBuffer])
def test_any_layout_of_what_is_saved(make: Callable[[], nn.Module], verify: str, rows: int) -> None:
    x, found = torch.randn(rows, 8), []
    for memory in ("checkpoint", "store"):
        torch.manual_seed(0)
        net = rg.MomentumNet([make() for _ in range(3)], memory=memory, verify=verify)
        for _ in range(2):
            leaf = x.clone().requires_grad_()
            net.zero_grad()
            net(leaf).square().mean().backward()
        found.append([leaf.grad, *(p.grad for p in net.parameters())])
    assert all(map(torch.equal, *found))
