"""What the stages of a converted model keep together within a budget. Peaks are measured, bits compared."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import math
import pickle
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import retrograde as rg
from conversion import anatomy, step
from problems import KNOWN_INSIDE
from retrograde.convert.convert import stages_of
from retrograde.convert.schedule import SCHEDULER
from retrograde.memory import peak_memory
from retrograde.memory.budget import Scheduler, Step, choose
from retrograde.memory.modes import Budget
from retrograde.memory.schedule import RESERVE, with_reserve
from retrograde.nets.resnet import Bottleneck, ResNet
from retrograde.reverse.momentum import Momentum

FIXED = rg.FixedPoint(20, torch.int32)
IMAGES = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def resnet(*blocks: int) -> nn.Module:
    """The shape of a ResNet-152, small: most blocks are in the third of four stages."""
    torch.manual_seed(0)
    return ResNet(Bottleneck, blocks or (6, 4, 14, 2), classes=10, width=8)


def first_deep() -> nn.Module:
    """Fewer blocks, most of them in the first stage; 4.3 MB are room for all at once: reversed, kept and stored."""
    return resnet(6, 2, 2, 1)


def converted(model: nn.Module, memory: Any = "auto", **options: Any) -> nn.Module:
    return rg.convert(model, IMAGES, memory=memory, **options)


def scheduler_of(model: nn.Module) -> Scheduler:
    scheduler, _ = model.__dict__[SCHEDULER]
    return scheduler


def observed(model: nn.Module, plans: Any = None) -> Step:
    """A step of a converted model with these plans, without values."""
    return Scheduler(None, outputs=2).step(model, [stage.stack for stage in stages_of(model)], (IMAGES,), {}, plans)


def used(model: nn.Module) -> dict[str, str]:
    return {stage.name: stage.used for stage in stages_of(model)}


def bits(model: nn.Module, x: Tensor = IMAGES) -> dict[str, Tensor]:
    return step(model, lambda m: m(x))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_memory_below_the_peak_is_used() -> None:
    """Given what the leanest plan takes at its highest point, the other stages keep inputs and tensors while it is not their turn."""
    lean = converted(resnet())
    budget = with_reserve(max(observed(lean).usage))
    used_up = converted(resnet(), memory=budget)
    before, after = (rg.measure(model, IMAGES, repeats=1) for model in (lean, used_up))
    assert after.held > 1.05 * before.held  # it is used
    assert after.peak <= budget or not KNOWN_INSIDE
    assert used(lean) != used(used_up)
    assert same(bits(lean), bits(used_up))


@pytest.fixture(scope="module")
def extremes() -> tuple[dict[str, Tensor], int, int]:
    """What a step gives with everything stored, the memory that takes, and the least of all plans."""
    most = rg.measure(converted(resnet(), memory="store"), IMAGES, repeats=1).peak
    expected = bits(converted(resnet(), memory="store"))
    model = converted(resnet(), memory=1)
    with pytest.raises(ValueError, match=r"memory=1 is not enough .* is \d+ bytes") as error:
        model(IMAGES)
    return expected, int(str(error.value).split(", is ")[1].split()[0]), most


@pytest.mark.parametrize("share", [0.0, 0.15, 0.3, 0.5, 0.75, 1.0])
def test_budget_sweep_over_all_stages(share: float, extremes: tuple[dict[str, Tensor], int, int]) -> None:
    expected, least, most = extremes
    budget = int(least + share * (most * 1.25 - least))
    model = converted(resnet(), memory=budget)
    assert same(bits(model), expected)
    assert rg.measure(model, IMAGES, repeats=1).peak <= budget or not KNOWN_INSIDE
    (known,) = scheduler_of(model).known.values()
    assert all(plan.peak <= budget for plan in known.plans[budget].values())
    if share == 1.0:
        assert set(used(model).values()) == {"store"}
    if share == 0.0:
        assert any("reverse" in mode for mode in used(model).values())


def test_more_memory_is_never_slower() -> None:
    model = converted(resnet())
    lean, costs = observed(model), []
    least = math.ceil(max(lean.usage) * (1 + RESERVE))
    seen: dict[str, Any] = {}

    def once(plans: Any) -> Step:
        ways = str({name: (p.reversed, p.kept, p.stored) for name, p in plans.items()})
        seen[ways] = seen.get(ways) or observed(model, plans)
        return seen[ways]

    for factor in torch.linspace(1, 4, 12).tolist():
        plans = choose(once, lean, Budget(int(least * factor), factor), IMAGES.device)
        costs.append(next(iter(plans.values())).cost)
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == 0 < costs[0]


def test_the_prediction_of_the_leanest_step() -> None:
    """Interval by interval, the highest is near to what is measured."""
    model = converted(resnet())
    step = observed(model)
    measured = rg.measure(model, IMAGES, repeats=1).peak
    assert measured <= max(step.usage) * (1 + RESERVE)
    assert max(step.usage) <= 1.25 * measured  # what oneDNN takes is bounded, not known
    assert set(step.tracks) == {stage.name for stage in stages_of(model)}
    for stage in stages_of(model):
        track = step.tracks[stage.name]
        assert sorted(track.forward) == sorted(track.backward) == list(range(stage.steps))
        assert max(track.forward.values()) < min(track.backward.values())


def test_each_kind_of_input_has_its_plan() -> None:
    model = converted(first_deep(), memory=4_100_000)
    few, many = IMAGES[:2], IMAGES
    model(many)
    kept = used(model)
    assert set(kept.values()) != {"store"}
    model(few)
    assert set(used(model).values()) == {"store"}
    model(many)
    assert used(model) == kept
    assert len(scheduler_of(model).known) == 2
    with torch.no_grad():
        model(many[:3])
    assert len(scheduler_of(model).known) == 2


def test_warm_up_from_the_plain_network() -> None:
    """At gamma = 0 nothing can be reversed; later plans are made for what can."""
    model = converted(first_deep(), memory=5_000_000)
    warmup = rg.GammaSchedule(model, {0: 0, 3: 1})
    for _ in range(5):
        model(IMAGES).sum().backward()
        warmup.step()
    assert len(scheduler_of(model).known) <= 4  # γ = 0, ⅓, ⅔ and 1 of the way


def test_a_model_that_keeps_what_it_made() -> None:
    """A mask made in the first forward pass is not to be one without values."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
            self.mask: Tensor | None = None
            self.seen: list[int] = []
            self.cache: dict[str, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            if self.mask is None:
                self.mask = torch.ones(x.shape[1], 1).cumsum(0)
                self.cache["shift"] = torch.ones(1)
            self.seen.append(len(x))
            y: Tensor = self.encoder(x * self.mask + self.cache["shift"])
            return y

    torch.manual_seed(0)
    model, x = Masked(), torch.randn(2, 5, 16)
    other = rg.convert(copy.deepcopy(model), memory="store", fixed_point=FIXED)
    rg.convert(model, memory=10**8, fixed_point=FIXED)
    assert same(bits(model, x), bits(other, x))
    assert type(model.mask) is Tensor
    assert len(model.seen) == len(other.seen) == 1


def test_a_later_conversion_of_the_whole_takes_over() -> None:
    """A part converted first has its own hook; the plans are those of the whole."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2)]
    model = nn.Sequential(*(nn.TransformerEncoder(layer, 8, enable_nested_tensor=False) for layer in layers))
    rg.convert(model[0], memory=10**9)
    rg.convert(model, stages=["1.layers"], memory=10**9)
    model(torch.randn(2, 5, 16))
    assert scheduler_of(model[0]).known == {}
    assert set(used(model).values()) == {"store"}
    assert len(used(model)) == 2


def test_a_stage_that_runs_twice_keeps_the_least() -> None:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.encoder(x), self.encoder(-x)
            return a * b

    torch.manual_seed(0)
    model, x = rg.convert(Siamese(), memory=10**9, fixed_point=FIXED), torch.randn(2, 5, 16)
    other = rg.convert(rg.revert(copy.deepcopy(model)), memory="store", fixed_point=FIXED)
    assert same(bits(model, x), bits(other, x))
    assert used(model) == {"encoder.layers.0-11": "reverse"}


def test_copies_pickles_and_revert() -> None:
    model = converted(first_deep(), memory=4_100_000)
    expected = bits(model)
    assert "reverse 3, keep input 2" in used(model).values()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(bits(other), expected)
        assert used(other) == used(model)
    plain = first_deep()
    before = anatomy(plain)
    converted(plain, memory=4_100_000)(IMAGES)
    rg.revert(plain)
    after = anatomy(plain)
    assert {path: found[:3] for path, found in after.items() if path != "parameters"} == {
        path: found[:3] for path, found in before.items() if path != "parameters"
    }


class Opaque(nn.Module):
    """x + f(x) that cannot be run without values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * min(float(x.detach().abs().max()), 1)


@pytest.mark.parametrize("head", [False, True])
def test_a_model_that_needs_values_is_planned_from_its_first_step(head: bool) -> None:
    """`head`: something outside of the stages keeps more than they do."""
    torch.manual_seed(0)
    blocks, x = nn.Sequential(*(Opaque() for _ in range(12))), torch.randn(1024, 8)
    wide = nn.Sequential(nn.Linear(8, 1500), nn.Tanh(), nn.Linear(1500, 8)) if head else nn.Identity()
    plain = nn.Sequential(blocks, wide)
    expected = bits(rg.convert(copy.deepcopy(plain), stages=["0.*"], memory="store", fixed_point=FIXED), x)
    most = rg.measure(plain, x, repeats=1).peak
    chosen = []
    for factor in (1.1, 2.5):
        budget = int(most * factor)
        model = rg.convert(copy.deepcopy(plain), stages=["0.*"], memory=budget, fixed_point=FIXED)
        assert same(bits(model, x), expected)
        assert set(used(model).values()) == {"reverse"}
        assert same(bits(model, x), expected)
        chosen.append(used(model))
        assert rg.measure(model, x, repeats=1).peak <= budget
    assert head or chosen[0] != chosen[1]
    assert set(chosen[1].values()) == {"store"}
    model = rg.convert(copy.deepcopy(plain), stages=["0.*"], memory=1, fixed_point=FIXED)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    lean = peak_memory(
        lambda: model(x).square().mean(), lambda loss: loss.backward()
    )  # the first step, whatever the budget
    with pytest.raises(ValueError, match="memory=1 is not enough") as error:
        model(x)
    assert int(str(error.value).split(", is ")[1].split()[0]) >= lean.peak


def test_plan_shows_it() -> None:
    plan = rg.plan(first_deep(), IMAGES, memory=4_100_000)
    assert plan.peaks["auto"].peak <= 4_100_000
    model = converted(first_deep(), memory=4_100_000)
    model(IMAGES)
    assert {row.path: row.mode for row in plan.rows if row.mode != "as it is"} == used(model)
    assert any("keep input" in row.mode for row in plan.rows)
    assert any("keep input" in line for line in str(plan).splitlines())
    with pytest.raises(ValueError, match="not enough"):
        rg.plan(first_deep(), IMAGES, memory=100)


class Kept:
    """A plain object with a table of its own."""

    table: Tensor | None = None


class Inside(nn.Module):
    """Keeps tensors in a plain object and in a dictionary of another kind. Has a leaf that is no parameter, and counts its calls."""

    def __init__(self, kept: Kept, leaf: Tensor) -> None:
        super().__init__()
        self.linear, self.kept, self.ordered, self.leaf = nn.Linear(8, 8), kept, OrderedDict[int, Tensor](), leaf

    def forward(self, x: Tensor) -> Tensor:
        if self.kept.table is None or self.kept.table.shape[0] != len(x):
            self.kept.table = torch.ones(len(x), 1)
        ordered = self.ordered.setdefault(len(x), torch.ones(len(x), 1))
        return x + torch.tanh(self.linear(x)) * self.kept.table * ordered * self.leaf * outside


outside = torch.full((1,), 0.5, requires_grad=True)


def test_what_a_model_keeps_is_not_touched_by_planning() -> None:
    """Nor gradients of leaves that are no parameters, of the model's own or in global variables."""
    found = {}
    for memory in ("store", 10**9):
        torch.manual_seed(0)
        outside.grad = None
        leaf, kept = torch.full((1,), 0.5, requires_grad=True), Kept()
        stages = [nn.Sequential(*[Inside(kept, leaf) for _ in range(6)]) for _ in range(2)]
        model = nn.Sequential(stages[0], nn.Linear(8, 8), stages[1])
        rg.convert(model, stages=["0", "2"], memory=memory, fixed_point=FIXED)
        for n in (4, 5):
            model(torch.full((n, 8), 0.3)).square().sum().backward()
        assert type(leaf.grad) is type(outside.grad) is type(kept.table) is Tensor
        found[memory] = [leaf.grad, outside.grad, *(p.grad for p in model.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True))


@functools.lru_cache
def ramp(n: int) -> Tensor:
    return torch.linspace(0, 1, n)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


LEFT: dict[int, Tensor] = {}


class Scale(nn.Module):
    """Keeps a tensor in a global variable, in a cache of a function, or in one that is part of a closure."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        cached = functools.lru_cache(functools.partial(torch.linspace, 1, 2))
        self.table = {
            "global": lambda n: LEFT.setdefault(n, torch.linspace(1, 2, n)), "function": ramp, "closure": lambda n: cached(n)
        }[kept]  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table(len(x))[:, None]


@pytest.mark.parametrize("kept", ["global", "function", "closure"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_left_without_values_is_dropped_or_refused(place: int, kept: str) -> None:
    """Also outside of stages, where it made the loss one without values: gradients vanished, or the process crashed."""
    LEFT.clear()
    ramp.cache_clear()
    parts: list[nn.Module] = [nn.Sequential(*[Residual() for _ in range(4)]) for _ in range(2)]
    parts.insert(place, Scale(kept))
    model = nn.Sequential(*parts)
    stages = [str(k) for k, part in enumerate(parts) if isinstance(part, nn.Sequential)]
    rg.convert(model, stages=stages, memory=10**9, fixed_point=FIXED)

    def steps() -> None:
        for n in (4, 5):
            model(torch.full((n, 8), 0.3)).square().sum().backward()

    if kept != "global":  # a cache of functools is emptied
        steps()
        return
    with pytest.raises(RuntimeError, match=r"without values is used.*Clear that, and keep the tensor as a buffer"):
        steps()


def test_losses_left_without_values_in_a_list_are_refused_by_name() -> None:
    """Python's `+` turns a TypeError from inside a tensor into one about classes of tensors."""
    losses: list[Tensor] = []

    class Penalised(Residual):
        def forward(self, x: Tensor) -> Tensor:
            losses.append(self.linear(x).square().mean())
            return super().forward(x)

    model = rg.convert(nn.Sequential(*[Penalised() for _ in range(4)]), stages=["*"], memory=10**9)
    y = model(torch.ones(4, 8))
    with pytest.raises(RuntimeError, match="a tensor without values is used"):
        y.sum() + sum(losses)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_cached_parametrizations_are_those_of_the_model() -> None:
    found = []
    for memory in ("store", "reverse", 10**9, 20_000):
        torch.manual_seed(0)
        blocks = [Residual() for _ in range(4)]
        for block in blocks:
            parametrize.register_parametrization(block.linear, "weight", Doubled())
        model = rg.convert(nn.Sequential(*blocks), stages=["*"], memory=memory)
        with parametrize.cached():
            model(torch.ones(4, 8)).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
        assert all(type(g) is Tensor for g in found[-1])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_a_plan_that_takes_more_than_was_thought_is_exchanged() -> None:
    """The plan is tried: though every interval is thought to need less than it does, no budget is exceeded."""
    model = converted(resnet())
    lean = observed(model)
    least = max(lean.usage)
    thought = dataclasses.replace(lean, usage=[n - least // 5 for n in lean.usage])
    for factor in (1.3, 2.5):
        budget = int(least * factor)
        plans = choose(functools.partial(observed, model), thought, Budget(budget, budget), IMAGES.device)
        assert with_reserve(max(observed(model, plans).usage)) <= budget, factor
        assert any(plan.kept or plan.stored for plan in plans.values()), factor


@pytest.mark.parametrize("memory", ["store", "checkpoint"])
def test_the_state_goes_with_the_pass(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the garbage collector comes: until then a plan would hold a state that nobody needs."""
    states = list[weakref.ref[Momentum]]()
    born = Momentum.__init__

    def noted(self: Momentum, *args: Any, **kwargs: Any) -> None:
        born(self, *args, **kwargs)
        states.append(weakref.ref(self))

    model = converted(resnet(3, 3, 1, 1), memory=memory)
    bits(model)  # the range is found
    monkeypatch.setattr(Momentum, "__init__", noted)
    gc.disable()
    try:
        y = model(IMAGES)
        assert states
        assert not any(state() is not None for state in states)
    finally:
        gc.enable()
    y.sum().backward()
