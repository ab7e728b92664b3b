"""The stages of `nets.resnet` in form "relu": the outputs of form "block" to the bit, and blocks that run whole where they must."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune

import retrograde as rg
from problems import assert_same_bits, train_step
from retrograde.nets.resnet import (
    BasicBlock,
    Bottleneck,
    MomentumStage,
    RectifiedNet,
    ResNet,
    resnet,
    thin_resnet,
)
from retrograde.reverse.range import holders
from retrograde_experiments.private import put_back, set_gamma, training_ranges, written
from retrograde_experiments.train.learner import compile_blocks

MODES = ["store", "checkpoint", "reverse"]
KINDS: dict[str, type[BasicBlock] | type[Bottleneck]] = {"basic": BasicBlock, "bottleneck": Bottleneck}
IMAGES = torch.randn(3, 3, 7, 5, generator=torch.Generator().manual_seed(1))


def small(form: str | None, block: str = "basic", stages: tuple[int, ...] = (3, 6), **options: Any) -> ResNet:
    """The network with weights of its own seed."""
    torch.manual_seed(0)
    options = {"gamma": 0.9, "fixed_point": rg.FixedPoint(18, torch.int32)} | options
    return ResNet(KINDS[block], stages, width=4, stem="cifar", classes=3, form=form, **options)


def inner(net: nn.Module, stage: str = "layer2") -> Any:
    return getattr(net, stage).__dict__["momentum"]


def step(net: nn.Module, x: Tensor = IMAGES, autocast: bool = False) -> dict[str, Tensor]:
    """Output, gradients and buffers of a step, on the network itself."""
    net.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = net(x)
    y.float().square().mean().backward()
    assert x.grad is not None
    gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    buffers = {f"buffer {name}": b.clone() for name, b in net.named_buffers()}
    return {"output": y.detach(), "input": x.grad} | gradients | buffers


def assert_the_same_network(ours: dict[str, Tensor], theirs: dict[str, Tensor], rounding: float) -> None:
    """Outputs and buffers to the bit, gradients up to rounding."""
    assert ours.keys() == theirs.keys()
    for name, a in ours.items():
        b = theirs[name]
        if name == "output" or name.startswith("buffer"):
            assert torch.equal(a, b), name
        else:
            assert (a - b).norm() <= rounding * b.norm(), name


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The distance of all gradients."""
    names = [name for name in ours if name != "output" and not name.startswith("buffer")]
    return float(torch.cat([(ours[name] - theirs[name]).flatten() for name in names]).norm())


# the same network ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("velocity", [None, "first"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"])
def test_outputs_are_those_of_whole_blocks_and_no_mode_changes_a_bit(
    layout: torch.memory_format, autocast: bool, training: bool, velocity: str | None, masks: list[bool]
) -> None:
    x = IMAGES.contiguous(memory_format=layout)
    for kind in KINDS:
        found: dict[str | None, dict[str, Tensor]] = {}
        for form in ("block", None):
            for memory in MODES:
                masks.clear()
                net = small(form, kind, velocity=velocity, memory=memory).train(training).to(memory_format=layout)  # type: ignore[call-overload]
                now = step(net, x, autocast)
                assert_same_bits(now, found.setdefault(form, now))
                assert set(masks) == {form is None}
        assert_the_same_network(found[None], found["block"], 1.0 if autocast else 1e-5)
        if autocast:  # the forms are no further apart than either is from float32
            exact = step(small("block", kind, velocity=velocity).train(training), x)
            assert apart(found[None], found["block"]) <= apart(found["block"], exact)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", MODES)
def test_gradients_differ_by_rounding_alone(memory: str, kind: str, masks: list[bool]) -> None:
    options: dict[str, Any] = {"memory": memory, "fixed_point": rg.FixedPoint(40, torch.int64), "gamma": 0.5}
    ours, theirs = (step(small(form, kind, **options).double(), IMAGES.double()) for form in ("relu", "block"))
    assert any(masks)
    assert_the_same_network(ours, theirs, 1e-12)


def test_autocast_with_float32_activations_adds_in_float32() -> None:
    """The blocks add without rounding to f's dtype, unlike those that add in place."""
    x, found = torch.randn(2, 8, 5, 5), []
    for form in ("block", "relu"):
        torch.manual_seed(0)
        stage = MomentumStage(
            [BasicBlock(8, 8) for _ in range(4)], 0.5, form=form, fixed_point=rg.FixedPoint(18, torch.int32)
        )
        with torch.autocast("cpu", torch.bfloat16):
            found.append(stage(x))
    assert found[1].dtype == torch.float32
    assert torch.equal(*found)


@pytest.mark.parametrize("form", ["block", None])
def test_gamma_zero_is_the_plain_network(form: str | None) -> None:
    net = small(form, gamma=0, memory="checkpoint")
    plain = ResNet(BasicBlock, (3, 6), width=4, stem="cifar", classes=3)
    plain.load_state_dict(net.state_dict())
    assert_same_bits(step(net), step(plain))


@pytest.mark.parametrize("options", [{"fixed_point": "int16"}, {"verify": "strict", "memory": "reverse"}])
def test_other_options_of_a_stage(options: dict[str, Any]) -> None:
    assert_the_same_network(step(small(None, **options)), step(small("block", **options)), 1e-5)


def test_the_inverse() -> None:
    torch.manual_seed(0)
    net = RectifiedNet(
        [BasicBlock(4, 4) for _ in range(6)], fixed_point=rg.FixedPoint(18, torch.int32), velocity="first"
    ).eval()
    x = torch.randn(2, 4, 5, 5)
    wanted = net.encode(x).fixed
    for hook in (False, True):
        if hook:
            net.blocks[2].register_forward_hook(lambda m, a, y: y * 0.5)
        state = net.encode(x)
        assert torch.equal(net.inverse(state), wanted.decode(wanted.encode(x), x.dtype))


# which form it is ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [partial(thin_resnet, 20), partial(thin_resnet, 29), partial(resnet, 18, size="cifar")]
)
def test_forms(make: Callable[..., ResNet]) -> None:
    for options, wanted in (({}, "relu"), ({"form": "relu"}, "relu"), ({"form": "block"}, "block")):
        net = make(gamma=0.9, **options)
        assert {inner.recurrence.form for _, inner in holders(net)} == {wanted}
        assert {inner.form for _, inner in holders(net)} == {"block"}  # of the blocks themselves
        assert f"form={wanted!r}" in repr(inner(net))
        assert list(net.state_dict()) == list(make(gamma=0.9, form="block").state_dict())


class Twice(BasicBlock):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + 2 * self.branch(x))


class Halved(BasicBlock):
    """Another f, through a function: it cannot be followed."""

    def branch(self, x: Tensor) -> Tensor:
        return torch.mul(super().branch(x), 0.5)


class Longer(BasicBlock):
    """Another f, of submodules."""

    def branch(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(self.relu(self.bn1(self.conv2(self.conv1(x))))))


class PreActivation(BasicBlock):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


@pytest.mark.parametrize("kind", [Twice, Halved, Longer, PreActivation])
@pytest.mark.parametrize("which", [[0, 1, 2, 3], [2]], ids=["all", "one of them"])
def test_blocks_of_other_classes(kind: type[BasicBlock], which: list[int], masks: list[bool]) -> None:
    x, found = torch.randn(2, 4, 5, 5), []
    for form in ("block", None):
        torch.manual_seed(0)
        blocks = [kind(4, 4) if k in which else BasicBlock(4, 4) for k in range(4)]
        masks.clear()
        found.append(
            step(MomentumStage(blocks, 0.9, form=form, fixed_point=rg.FixedPoint(18, torch.int32), memory="reverse"), x)
        )
    assert any(masks) == all(masks) == (kind is Longer)
    if kind is Longer:
        assert_the_same_network(found[1], found[0], 1e-5)
    else:
        assert_same_bits(*found)
        with pytest.raises(ValueError, match=f"{kind.__name__} is not known to compute relu"):
            MomentumStage([kind(4, 4)], 0.9, form="relu")


# blocks that are no longer as they were --------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook on the block": lambda b: b.register_forward_hook(lambda m, a, y: y * 0.5),
    "pre-hook on the block": lambda b: b.register_forward_pre_hook(lambda m, a: (a[0] * 0.5,)),
    "backward hook on the block": lambda b: b.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,)),
    "hook on its relu": lambda b: b.relu.register_forward_hook(lambda m, a, y: y * 0.5),
    "another relu": lambda b: setattr(b, "relu", nn.Hardtanh(0, 0.5)),
    "forward of its own": lambda b: setattr(b, "forward", lambda x, b=b: b.branch(x)),
    "branch of its own": lambda b: setattr(b, "branch", lambda x: x * 0.25),
    "first module writes": lambda b: setattr(b, "conv1", nn.Sequential(nn.Hardtanh(0, 0.1, inplace=True), b.conv1)),
    "shortcut": lambda b: setattr(b, "downsample", nn.BatchNorm2d(b.bn2.num_features).double()),
    "first convolution pruned": lambda b: prune.l1_unstructured(b.conv1, "weight", 0.5),
}


@pytest.mark.parametrize("memory", ["store", "checkpoint", "reverse"])
@pytest.mark.parametrize("which", [0, 2])  # the first block makes v₀, too
@pytest.mark.parametrize("how", CHANGES)
def test_a_changed_block_runs_as_it_is(how: str, which: int, memory: str, masks: list[bool]) -> None:
    found = []
    for form in ("block", None):
        net = small(form, memory=memory, fixed_point=rg.FixedPoint(40, torch.int32), velocity="first").double()
        before = step(net, IMAGES.double())
        CHANGES[how](inner(net).blocks[which])
        masks.clear()
        found.append(step(net, IMAGES.double()))
        assert not torch.equal(found[-1]["output"], before["output"]) or "backward" in how
    assert masks == [True] * 3 + [k != which for k in range(5)]  # layer1, and layer2 without its first block
    assert_the_same_network(found[1], found[0], 1e-11)


@pytest.mark.parametrize("form", ["block", None])
def test_what_hooks_on_a_block_see(form: str | None, masks: list[bool]) -> None:
    """relu(x + f(x)), the block's own output, in forward and once more when the block is run again."""
    net, seen = small(form, memory="reverse"), list[tuple[Tensor, Tensor]]()
    hook = net.layer2[2].register_forward_hook(lambda m, a, y: seen.append((a[0].clone(), y.detach().clone())))
    net(IMAGES).sum().backward()
    (x, y), (x_again, y_again) = seen
    assert torch.equal(x, x_again)
    assert torch.equal(y, y_again)
    hook.remove()
    with torch.no_grad():
        statistics = copy.deepcopy(net.layer2[2])
        assert torch.equal(statistics(x), y)
    masks.clear()
    net(IMAGES).sum().backward()
    assert len(seen) == 2
    assert set(masks) == {form is None}


def test_what_was_run_in_forward_is_run_again_in_backward() -> None:
    """Though there is a hook by then, or none any more."""
    for memory in MODES:
        wanted = step(small(None, memory=memory))
        net = small(None, memory=memory)
        x = IMAGES.clone().requires_grad_()
        y = net(x)
        hook = net.layer2[2].register_forward_hook(lambda m, a, y: None)
        y.square().mean().backward()
        hook.remove()
        assert x.grad is not None
        assert torch.equal(x.grad, wanted["input"])


def test_hooks_on_every_module_hear_the_last_relu(masks: list[bool]) -> None:
    net, heard = small(None, memory="store"), []
    handle = register_module_forward_hook(lambda m, a, y: heard.append(m))
    try:
        step(net)
    finally:
        handle.remove()
    assert heard.count(net.layer2[3].relu) == 2
    assert heard.count(net.layer2[3]) == 1
    assert not any(masks)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own imports
def test_compiled_blocks_run_whole(masks: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    own, compiled = nn.Module.compile, list[nn.Module]()

    def noted(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        compiled.append(self)
        own(self, backend="eager")

    monkeypatch.setattr(nn.Module, "compile", noted)
    wanted, net = step(small("block", memory="reverse")), small(None, memory="reverse")
    compile_blocks(net)
    assert compiled == [*net.layer1, *list(net.layer2)[1:]]
    masks.clear()
    assert_same_bits(step(net), wanted)
    assert masks == [False] * 8


# what is done to networks ----------------------------------------------------------------------------------------------


def test_settings_are_changed_between_steps() -> None:
    net = small(None).eval()
    wanted = step(net)
    for memory in MODES:
        inner(net).memory = memory
        assert_same_bits(step(net), wanted)
    set_gamma(net, 0.5)
    assert_the_same_network(step(net), step(small("block", gamma=0.5).eval()), 1e-5)
    assert inner(net).recurrence.form == "relu"


def test_ranges_are_found_and_put_back() -> None:
    found = {}
    for form in ("block", None):
        net = small(form, fixed_point="auto")
        assert [name for name, _ in holders(net)] == ["layer1", "layer2"]
        step(net)
        found[form] = written(training_ranges(net))
        other = small(form, fixed_point="auto")
        put_back(training_ranges(other), found[form])
        assert written(training_ranges(other)) == found[form]
    assert found[None] == found["block"]
    assert all(found[None].values())


@pytest.mark.parametrize("hooked", [False, True])
def test_a_budget(hooked: bool, masks: list[bool]) -> None:
    torch.manual_seed(0)
    blocks, x = [BasicBlock(8, 8) for _ in range(8)], torch.randn(4, 8, 9, 9)
    if hooked:
        blocks[2].register_forward_hook(lambda m, a, y: None)
    wanted = train_step(RectifiedNet(blocks, memory="store", fixed_point=rg.FixedPoint(18, torch.int32)), x)
    modes = set()
    for budget in (200_000, 400_000, 10_000_000):
        net = RectifiedNet(copy.deepcopy(blocks), memory=budget, fixed_point=rg.FixedPoint(18, torch.int32))
        masks.clear()
        assert_same_bits(train_step(net, x), wanted)
        assert masks == [not (hooked and k == 2) for k in range(8)] * 2  # first without values, for the plan
        net(x)
        modes.add(str(net.plan))
        masks.clear()
        net(x)
        net.blocks[5].register_forward_hook(lambda m, a, y: None)
        net(x)
        assert len(masks) == 8 + 16  # with blocks of another kind it is planned anew
    assert len(modes) > 1


def test_a_bit_an_element_and_block_is_held_besides() -> None:
    held = {}
    for form in ("block", "relu"):
        torch.manual_seed(0)
        net = MomentumStage([BasicBlock(8, 8) for _ in range(8)], 0.9, form=form, memory="reverse")
        held[form] = rg.measure(net, torch.randn(16, 8, 16, 16), repeats=1).held
    assert held["relu"] - held["block"] == pytest.approx(8 * 16 * 8 * 16 * 16 / 8, rel=0.02)


def test_a_deep_stage_stays_of_one_size() -> None:
    """A bit an element and block would be more than x and v."""
    forms = {n: thin_resnet(6 * n + 2, gamma=0.9).layer1.momentum.recurrence.form for n in (64, 65)}
    assert forms == {64: "relu", 65: "block"}
    assert thin_resnet(6 * 65 + 2, gamma=0.9, form="relu").layer1.momentum.recurrence.form == "relu"


@pytest.mark.parametrize("form", ["block", "relu"])
def test_an_exchanged_block_is_the_one_that_runs(form: str) -> None:
    def anew() -> Tensor:
        return MomentumStage(list(stage), 0.9, form=form)(x)

    x, stage = torch.randn(2, 4, 5, 5), MomentumStage([BasicBlock(4, 4) for _ in range(3)], 0.9, form=form)
    stage(x)
    stage[1] = BasicBlock(4, 4)
    assert torch.equal(stage(x), anew())
    for change in (lambda: stage.append(BasicBlock(4, 4)), lambda: stage.__delitem__(-2)):
        change()
        with pytest.raises(ValueError, match=f"has {len(stage)} blocks now"):
            stage(x)
        stage.momentum.gamma = 0.9
        assert torch.equal(stage(x), anew())


def test_evaluation_has_a_range_of_its_own() -> None:
    stage = MomentumStage([BasicBlock(4, 4) for _ in range(3)], 0.9)
    stage(torch.randn(2, 4, 5, 5))
    stage.eval()
    stage(1e4 * torch.randn(2, 4, 5, 5))  # beyond what training was seen to need
    stage.train()(torch.randn(2, 4, 5, 5)).sum().backward()


@pytest.mark.parametrize("form", ["block", "relu"])
def test_a_copy_with_other_blocks_leaves_the_original_alone(form: str) -> None:
    """As replicas are made, each for a thread of its own."""
    x, stage = torch.randn(2, 4, 5, 5), MomentumStage([BasicBlock(4, 4) for _ in range(3)], 0.9, form=form)
    net, replica = stage.momentum, stage._replicate_for_data_parallel()
    for k, block in enumerate(stage):
        replica._modules[str(k)] = BasicBlock(4, 4)
        assert replica[k] is not block
    wanted = MomentumStage(list(replica), 0.9, form=form)
    assert torch.equal(replica(x), wanted(x))
    assert list(net.blocks) == list(stage)
    assert stage.momentum is net
    assert list(replica.momentum.blocks) == list(replica)


def test_a_copy_keeps_its_range() -> None:
    stage = MomentumStage([BasicBlock(4, 4) for _ in range(3)], 0.9)
    stage(torch.randn(2, 4, 5, 5))
    copied = copy.deepcopy(stage)
    assert copied.momentum.range.found == stage.momentum.range.found != {}
    assert list(copied.momentum.blocks) == list(copied)
