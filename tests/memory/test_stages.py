"""What the stages of a model keep together: in memory that is free anyway, or within a budget. Peaks are measured, bits compared."""

from __future__ import annotations

import copy
import functools
import gc
import math
import pickle
import sys
import weakref
from collections import OrderedDict
from types import ModuleType
from typing import Any

import pytest
import torch
from conversion import anatomy, step
from torch import Tensor, nn

import retrograde as rg
from problems import KNOWN_INSIDE
from retrograde.convert import arrange
from retrograde.convert.convert import ARRANGED, stages_of
from retrograde.memory import dry
from retrograde.nets.resnet import Bottleneck, ResNet
from retrograde.stack.momentum import Momentum
from retrograde.stack.timeline import RESERVE, with_reserve

IMAGES = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def resnet(*blocks: int) -> nn.Module:
    """The shape of a ResNet-152, small: most blocks are in the third of four stages."""
    torch.manual_seed(0)
    return ResNet(Bottleneck, blocks or (6, 4, 14, 2), classes=10, width=8)


def first_deep() -> nn.Module:
    """Fewer blocks, most of them in the first stage; 4.3 MB are room for all at once: reversed, kept and stored."""
    return resnet(6, 2, 2, 1)


def converted(model: nn.Module, example: Any = IMAGES, arranged: bool = True, **options: Any) -> nn.Module:
    options = {"budget": "free", **options} if arranged and options.get("memory", "auto") == "auto" else options
    return rg.convert(model, example, **options)


def used(model: nn.Module) -> dict[str, str]:
    return {stage.name: stage.used for stage in stages_of(model)}


def bits(model: nn.Module, x: Tensor = IMAGES) -> dict[str, Tensor]:
    return step(model, lambda m: m(x))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_free_memory_is_used_and_the_peak_stays() -> None:
    lean, free = (converted(resnet(), arranged=arranged) for arranged in (False, True))
    before, after = (rg.measure(model, IMAGES, repeats=1) for model in (lean, free))
    assert after.held > 1.05 * before.held  # it is used
    assert after.peak <= before.peak + 4_096 or not KNOWN_INSIDE  # hashes of what is kept
    assert used(lean) != used(free)
    assert any("keep input" in mode or mode == "store" for mode in used(free).values())
    assert same(bits(lean), bits(free))


def test_nothing_is_kept_where_nothing_is_free() -> None:
    """Two stages below a head whose output is larger than all else: the peak is there, while everything is held."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
            self.encoder, self.head = (
                nn.TransformerEncoder(layer, 12, enable_nested_tensor=False),
                nn.Linear(16, 20_000),
            )

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.encoder(x))
            return y

    model, x = rg.convert(Model()), torch.randn(2, 10, 16)
    model(x)
    assert used(model) == {"encoder.layers.0-11": "reverse"}


@pytest.fixture(scope="module")
def extremes() -> tuple[dict[str, Tensor], int, int]:
    """What a step gives with everything stored, the memory that takes, and the least of all plans."""
    stored = converted(resnet(), memory="store")
    most, expected = rg.measure(stored, IMAGES, repeats=1).peak, bits(stored)
    model = converted(resnet(), budget=1)
    with pytest.raises(ValueError, match=r"budget = 1 bytes is not enough .* is \d+") as error:
        model(IMAGES)
    return expected, int(str(error.value).split(", is ")[1].split(".")[0]), most


@pytest.mark.parametrize("share", [0.0, 0.15, 0.3, 0.5, 0.75, 1.0])
def test_budget_sweep_over_all_stages(share: float, extremes: tuple[dict[str, Tensor], int, int]) -> None:
    expected, least, most = extremes
    budget = int(least + share * (most * 1.25 - least))
    model = converted(resnet(), budget=budget)
    assert same(bits(model), expected)
    assert rg.measure(model, IMAGES, repeats=1).peak <= budget or not KNOWN_INSIDE
    (plans,) = model.__dict__[ARRANGED].plans.values()
    assert all(plan.peak <= budget for plan in plans.values())
    if share == 1.0:
        assert set(used(model).values()) == {"store"}
    if share == 0.0:
        assert any("reverse" in mode for mode in used(model).values())


def test_more_memory_is_never_slower() -> None:
    model = converted(resnet())
    tried = functools.partial(arrange.simulated, model, stages_of(model), (IMAGES,), {}, None, None)
    least, costs = math.ceil(max(tried(None)[0]) * (1 + RESERVE)), []
    seen: dict[str, Any] = {}

    def once(plans: Any) -> Any:
        ways = str({name: (p.reversed, p.kept, p.stored) for name, p in (plans or {}).items()})
        seen[ways] = seen.get(ways) or tried(plans)
        return seen[ways]

    for factor in torch.linspace(1, 4, 12).tolist():
        plans = arrange.Arrangement(int(least * factor), True).chosen(once, model)
        costs.append(next(iter(plans.values())).cost)
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == 0 < costs[0]


def test_the_prediction_of_the_leanest_step() -> None:
    """Interval by interval, the highest is near to what is measured."""
    model = converted(resnet(), arranged=False)
    usage, tracks = arrange.simulated(model, stages_of(model), (IMAGES,), {})
    measured = rg.measure(model, IMAGES, repeats=1).peak
    assert measured <= max(usage) * (1 + RESERVE)
    assert max(usage) <= 1.25 * measured  # what oneDNN takes is bounded, not known
    assert {stage.name for stage in tracks} == {stage.name for stage in stages_of(model)}
    for stage, track in tracks.items():
        assert sorted(track.forward) == sorted(track.backward) == list(range(stage.steps))
        assert max(track.forward.values()) < min(track.backward.values())


def test_each_kind_of_input_has_its_plan() -> None:
    model = converted(first_deep(), budget=4_300_000)
    few, many = IMAGES[:2], IMAGES
    model(many)
    kept = used(model)
    assert set(kept.values()) != {"store"}
    model(few)
    assert set(used(model).values()) == {"store"}
    model(many)
    assert used(model) == kept
    assert len(model.__dict__[ARRANGED].plans) == 2
    with torch.no_grad():
        model(many[:3])
    assert len(model.__dict__[ARRANGED].plans) == 2


def test_without_a_budget_few_kinds_are_planned() -> None:
    model = converted(resnet(3, 3, 1, 1))
    for n in range(1, 8):
        model(IMAGES[:n])
    assert len([plans for plans in model.__dict__[ARRANGED].plans.values() if plans]) == 4


def test_warm_up_from_the_plain_network() -> None:
    """At gamma = 0 nothing can be reversed; later plans are made for what can."""
    model = converted(first_deep(), budget=5_000_000)
    warmup = rg.GammaWarmup(model, steps=3)
    for _ in range(5):
        model(IMAGES).sum().backward()
        warmup.step()
    assert len(model.__dict__[ARRANGED].plans) <= 4  # γ = 0, ⅓, ⅔ and 1 of the way


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
    other = rg.convert(copy.deepcopy(model), memory="store", fraction_bits=20)
    rg.convert(model, budget=10**8, fraction_bits=20)
    assert same(bits(model, x), bits(other, x))
    assert type(model.mask) is Tensor
    assert len(model.seen) == len(other.seen) == 1


def test_a_later_conversion_of_the_whole_takes_over() -> None:
    """A part converted first has its own hook; the plans are those of the whole."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2)]
    model = nn.Sequential(*(nn.TransformerEncoder(layer, 8, enable_nested_tensor=False) for layer in layers))
    rg.convert(model[0], budget=10**9)
    rg.convert(model, stages=["1.layers"], budget=10**9)
    model(torch.randn(2, 5, 16))
    assert model[0].__dict__[ARRANGED].plans == {}
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
    model, x = rg.convert(Siamese(), budget=10**9, fraction_bits=20), torch.randn(2, 5, 16)
    other = rg.convert(rg.revert(copy.deepcopy(model)), memory="store", fraction_bits=20)
    assert same(bits(model, x), bits(other, x))
    assert used(model) == {"encoder.layers.0-11": "reverse"}


def test_copies_pickles_and_revert() -> None:
    model = converted(first_deep(), budget=4_300_000)
    expected = bits(model)
    assert "reverse 3, keep input 2" in used(model).values()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(bits(other), expected)
        assert used(other) == used(model)
    plain = first_deep()
    before = anatomy(plain)
    converted(plain, budget=4_300_000)(IMAGES)
    rg.revert(plain)
    after = anatomy(plain)
    assert {path: found[:3] for path, found in after.items() if path != "parameters"} == {
        path: found[:3] for path, found in before.items() if path != "parameters"
    }


def test_a_pickle_from_before_the_last_plan_was_kept() -> None:
    model = converted(first_deep(), budget=4_300_000)
    expected = bits(model)
    for stage in stages_of(model):
        state = {**stage.__getstate__(), "used": stage.used}
        del state["last"]
        stage.__dict__.clear()
        stage.__setstate__(state)
        assert stage.used == ""
    assert same(bits(model), expected)
    assert "reverse 3, keep input 2" in used(model).values()


class Opaque(nn.Module):
    """x + f(x) that cannot be run without values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * min(float(x.detach().abs().max()), 1)


def test_a_model_that_needs_values() -> None:
    blocks = nn.Sequential(*(Opaque() for _ in range(12)))
    x = torch.randn(64, 8)
    model = rg.convert(blocks, stages=["*"])
    model(x).sum().backward()
    assert set(used(model).values()) == {"reverse"}
    rg.revert(model)
    rg.convert(model, stages=["*"], budget=10**8)
    with pytest.raises(ValueError, match="could not be tried out without values"):
        model(x)


def test_plan_shows_it() -> None:
    plan = rg.plan(first_deep(), IMAGES, budget=4_300_000)
    assert plan.peaks["auto"].peak <= 4_300_000
    model = converted(first_deep(), budget=4_300_000)
    model(IMAGES)
    assert {row.path: row.mode for row in plan.rows if row.mode != "as it is"} == used(model)
    assert any("keep input" in row.mode for row in plan.rows)
    assert any("keep input" in line for line in str(plan).splitlines())
    with pytest.raises(ValueError, match="not enough"):
        rg.plan(first_deep(), IMAGES, budget=100)
    with pytest.raises(ValueError, match="a budget is for memory='auto'"):
        rg.plan(first_deep(), IMAGES, budget=100, memory="reverse")


@pytest.mark.parametrize("wrong", [-1, 0.0, 1.5, True, "1GB"])
def test_wrong_budgets(wrong: Any) -> None:
    model = resnet()
    before = anatomy(model)
    with pytest.raises(ValueError, match="budget must be"):
        rg.convert(model, IMAGES, budget=wrong)
    with pytest.raises(ValueError, match="a budget is for memory='auto'"):
        rg.convert(model, IMAGES, budget=10**6, memory="store")
    assert anatomy(model) == before


class Kept:
    """A plain object with a table of its own."""

    table: Tensor | None = None

    @staticmethod
    @functools.lru_cache
    def ramp(n: int) -> Tensor:
        return torch.linspace(1, 2, n)


@functools.lru_cache
def ramp(n: int) -> Tensor:
    return torch.linspace(0, 1, n)


class Outside(nn.Module):
    """Keeps tensors where modules do not: by lru_cache, in a plain object, in a dictionary of another kind; has a leaf of its own."""

    def __init__(self, kept: Kept, leaf: Tensor) -> None:
        super().__init__()
        self.linear, self.kept, self.ordered, self.leaf = nn.Linear(8, 8), kept, OrderedDict[int, Tensor](), leaf

    def forward(self, x: Tensor) -> Tensor:
        if self.kept.table is None or self.kept.table.shape[0] != len(x):
            self.kept.table = torch.ones(len(x), 1)
        ordered = self.ordered.setdefault(len(x), torch.ones(len(x), 1))
        ramps = ramp(len(x) + 3)[3:, None] * Kept.ramp(len(x))[:, None]
        return x + torch.tanh(self.linear(x)) * ramps * self.kept.table * ordered * self.leaf


@pytest.mark.parametrize("budget", [None, "free", 10**9])
@pytest.mark.parametrize("frozen", [False, True])
def test_tensors_kept_outside_of_modules(budget: Any, frozen: bool) -> None:
    """The step without values leaves nothing there, nor gradients of leaves that are no parameters. Nor if `gc` is told to look past
    all there is, as trainers do."""
    (gc.freeze if frozen else gc.unfreeze)()
    found = {}
    for memory in ("store", "auto"):
        torch.manual_seed(0)
        ramp.cache_clear()
        Kept.ramp.cache_clear()
        leaf, kept = torch.full((1,), 0.5, requires_grad=True), Kept()
        stages = [nn.Sequential(*[Outside(kept, leaf) for _ in range(6)]) for _ in range(2)]
        model = nn.Sequential(stages[0], nn.Linear(8, 8), stages[1])
        rg.convert(
            model, stages=["0", "2"], memory=memory, budget=budget if memory == "auto" else None, fraction_bits=20
        )
        for n in (4, 5):
            model(torch.full((n, 8), 0.3)).square().sum().backward()
        assert leaf.grad is not None
        assert type(leaf.grad) is Tensor
        found[memory] = [leaf.grad, *(p.grad for p in model.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


LEFT: dict[int, Tensor] = {}


class Scale(nn.Module):
    """Keeps a tensor in a global variable, or in a cache that is part of a closure."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        cached = functools.lru_cache(functools.partial(torch.linspace, 1, 2))
        self.table = (lambda n: cached(n)) if hidden else lambda n: LEFT.setdefault(n, torch.linspace(1, 2, n))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table(len(x))[:, None]


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_left_without_values_is_refused(place: int, hidden: bool) -> None:
    """Also outside of stages, where it made the loss one without values: gradients vanished, or the process crashed."""
    LEFT.clear()
    parts: list[nn.Module] = [nn.Sequential(*[Residual() for _ in range(4)]) for _ in range(2)]
    parts.insert(place, Scale(hidden))
    model = nn.Sequential(*parts)
    stages = [str(k) for k, part in enumerate(parts) if isinstance(part, nn.Sequential)]
    rg.convert(model, stages=stages, budget=10**9, fraction_bits=20)
    gc.freeze()

    def steps() -> None:
        for n in (4, 5):
            model(torch.full((n, 8), 0.3)).square().sum().backward()

    with pytest.raises(TypeError, match=r"without values is used.*Clear that, and keep the tensor as a buffer"):
        steps()


class Lazy(ModuleType):
    def __getattribute__(self, name: str) -> Any:
        raise SystemExit("imported")


class Odd(type):
    @property
    def __dict__(cls) -> Any:  # type: ignore[override]
        raise RuntimeError


def test_caches_are_looked_for_without_asking_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """In frozen modules: those that import themselves when asked, classes that answer in their own way, what is no module at all."""
    odd = ModuleType("odd")
    odd.Odd = Odd("Odd", (), {"cached": staticmethod(functools.lru_cache(abs))})
    odd.wrapped = torch.no_grad()(functools.lru_cache(abs))
    for name, entry in {"lazy": Lazy("lazy"), "odd": odd, "nothing": None, "slots": object()}.items():
        monkeypatch.setitem(sys.modules, f"retrograde_test_{name}", entry)
    gc.freeze()
    found = dry._tables([{"own": (own := functools.lru_cache(abs))}])
    assert own in found
    assert odd.wrapped.__wrapped__ in found
    assert type.__dict__["__dict__"].__get__(odd.Odd)["cached"].__func__ in found


def test_a_plan_takes_what_was_thought_or_one_that_keeps_less_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is tried: though every interval is thought to need less than it does, no budget is exceeded."""
    model = converted(resnet())
    tried = functools.partial(arrange.simulated, model, stages_of(model), (IMAGES,), {}, None, None)
    least = max(tried(None)[0])

    def short(plans: Any) -> Any:
        usage, tracks = tried(plans)
        return ([n - least // 5 * (plans is None) for n in usage], tracks)

    for factor in (1.3, 2.5):
        budget = int(least * factor)
        plans = arrange.Arrangement(budget, True).chosen(short, model)
        assert with_reserve(max(tried(plans)[0])) <= budget, factor
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
