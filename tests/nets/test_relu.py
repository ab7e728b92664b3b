"""Form "relu": the additions and relus of blocks that return relu(x + f(x)) are taken into the steps.

In `nets.resnet` and in converted models alike: the outputs are those of form "block" to the bit, gradients too but for the order
of sums, and blocks that are not, or no longer, known to be of that kind run whole. Which blocks are is told in `test_relu_source`.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune

import retrograde as rg
from conversion import compile_blocks as compile_converted
from problems import assert_same_bits, train_step
from retrograde.convert.convert import look, stages_of
from retrograde.extras import require
from retrograde.nets.resnet import BasicBlock, Bottleneck, MomentumStage, RectifiedNet, ResNet, resnet, thin_resnet
from retrograde.reverse.range import holders
from retrograde_experiments.private import put_back, set_gamma, training_ranges, written
from retrograde_experiments.train.learner import compile_blocks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    tv = require("torchvision.models")
    timm = require("timm")
    hf = require("transformers")
MODES = ["store", "checkpoint", "reverse"]
COARSE, FINE = rg.FixedPoint(16, torch.int32), rg.FixedPoint(40, torch.int64)
Found = dict[str, Tensor]


def fixed(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


ROWS, IMAGES = fixed(5, 6), fixed(2, 3, 32, 32)
NARROW: dict[str, Any] = {"layers": (3, 3, 1, 1), "channels": (8, 16, 16, 16), "num_classes": 5}


class Block(nn.Module):
    """As people write them."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.act = nn.ReLU()
        self.norm: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.act(self.first(x)))
        if self.norm is not None:
            out = self.norm(out)
        return self.act(out + x)


def blocks_of(kind: Callable[[], nn.Module] = Block) -> nn.Module:
    return nn.Sequential(*(kind() for _ in range(4)))


def torchvision(**options: Any) -> nn.Module:
    model: nn.Module = tv.resnet.ResNet(tv.resnet.Bottleneck, [3, 3, 1, 1], num_classes=5, width_per_group=8, **options)
    return model


def narrow(name: str, **options: Any) -> nn.Module:
    model: nn.Module = timm.create_model(name, **NARROW, zero_init_last=False, **options)
    return model


def hf_resnet() -> nn.Module:
    model: nn.Module = hf.ResNetModel(hf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[3, 3]))
    return model


@dataclass(frozen=True)
class Subject:
    """A network with momentum stages, made anew with the same weights each time. `block`: one to change, `steps`: all of them."""

    make: Callable[..., nn.Module]
    x: Tensor
    block: str = ""
    steps: tuple[str, ...] = ()

    def __call__(self, form: str | None, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        return self.make(form, **{"gamma": 0.9, "fixed_point": COARSE} | options)


def ours(form: str | None, kind: Any = BasicBlock, **options: Any) -> nn.Module:
    return ResNet(kind, (3, 6), width=4, stem="cifar", classes=3, form=form, **options)


def converted(
    make: Callable[[], nn.Module], form: str | None, dtype: torch.dtype = torch.float32, **options: Any
) -> nn.Module:
    return rg.convert(make().to(dtype), form=form, **options)


SMALL = fixed(3, 3, 7, 5)
LAYERS = tuple(f"layer{stage}.{k}" for stage, blocks in ((1, range(3)), (2, range(1, 6))) for k in blocks)
SUBJECTS: dict[str, Subject] = {
    "ours": Subject(ours, SMALL, "layer2.2", LAYERS),
    "ours, bottleneck": Subject(partial(ours, kind=Bottleneck), SMALL),
    "ours, channels last": Subject(
        lambda *a, **o: ours(*a, **o).to(memory_format=torch.channels_last), SMALL.to(memory_format=torch.channels_last)
    ),
    "ours, converted": Subject(partial(converted, lambda: thin_resnet(20)), IMAGES),
    "torchvision": Subject(
        partial(converted, torchvision), IMAGES, "layer1.1", ("layer1.1", "layer1.2", "layer2.1", "layer2.2")
    ),
    "timm": Subject(partial(converted, lambda: narrow("seresnet50", drop_path_rate=0.3)), IMAGES),
    "transformers": Subject(partial(converted, hf_resnet), IMAGES),
}
CHANGED = ["ours", "torchvision"]


def step(net: nn.Module, x: Tensor, autocast: bool = False) -> Found:
    """Output, gradients, buffers and the next random number of a step, on the network itself, which begins the next one as it began."""
    buffers = {name: b.clone() for name, b in net.named_buffers()}
    net.zero_grad()
    torch.manual_seed(3)
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = net(leaf)
        y = y if isinstance(y, Tensor) else y[0]
    y.float().square().mean().backward()
    assert leaf.grad is not None
    found = {"output": y.detach(), "input": leaf.grad, "next random": torch.rand(1)}
    found |= {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": b.clone() for name, b in net.named_buffers()}
    with torch.no_grad():
        for name, b in net.named_buffers():
            b.copy_(buffers[name])
    return found


def assert_the_same_network(ours: Found, theirs: Found, rounding: float = 1e-10) -> None:
    """The output to the bit, all else up to rounding."""
    assert ours.keys() == theirs.keys()
    assert torch.equal(ours["output"], theirs["output"])
    for name, b in theirs.items():
        assert (ours[name] - b).double().norm() <= rounding * b.double().norm() + rounding * 1e-3, name


def forms(model: nn.Module, *args: Any, **options: Any) -> set[str]:
    return {run.form for run in look(model, *args, **options).runs}


# which form it is ------------------------------------------------------------------------------------------------------

RELU: dict[str, Callable[[], nn.Module]] = {
    "torchvision resnet18": tv.resnet18,
    "torchvision resnet50": torchvision,
    "torchvision resnext": lambda: torchvision(groups=4),
    "torchvision wide": tv.wide_resnet50_2,
    "torchvision dilated": lambda: torchvision(replace_stride_with_dilation=[False, True, True]),
    "torchvision group norm": lambda: torchvision(norm_layer=lambda n: nn.GroupNorm(2, n)),
    "torchvision video": tv.video.r3d_18,
    "torchvision regnet": tv.regnet_y_400mf,
    "timm resnet18": lambda: timm.create_model("resnet18"),
    "timm resnet50": lambda: narrow("resnet50"),
    "timm seresnet50": lambda: narrow("seresnet50"),
    "timm ecaresnet50d": lambda: narrow("ecaresnet50d"),
    "timm resnetaa50": lambda: narrow("resnetaa50"),
    "timm drop path": lambda: narrow("resnet50", drop_path_rate=0.2, drop_block_rate=0.1),
    "timm legacy": lambda: timm.create_model("legacy_seresnet18"),
    "transformers ResNet": hf_resnet,
    "ours": lambda: thin_resnet(20),
    "somebody's": blocks_of,
}
BLOCK: dict[str, Callable[[], nn.Module]] = {
    "timm resnetv2": lambda: timm.create_model("resnetv2_50", layers=(3, 3), channels=(32, 64), stem_chs=16),
    "timm SiLU": lambda: narrow("resnet50", act_layer=nn.SiLU),
    "timm LeakyReLU": lambda: narrow("resnet50", act_layer=nn.LeakyReLU),
    "timm res2net": lambda: narrow("res2net50d"),
    "timm resnest, drop path": lambda: narrow("resnest50d", drop_path_rate=0.2),  # drawn, and thrown away
    "torchvision vit": lambda: tv.VisionTransformer(32, 8, 4, 2, 32, 64, num_classes=5),
    "torchvision mobilenet": lambda: tv.mobilenet_v2(num_classes=5),
}


@pytest.mark.parametrize("name", [*RELU, *BLOCK])
def test_which_form_a_model_gets(name: str) -> None:
    model = {**RELU, **BLOCK}[name]()
    options: dict[str, Any] = {"stages": [""]} if name == "somebody's" else {}
    wanted = "relu" if name in RELU else "block"
    assert forms(model, **options) == {wanted}
    assert forms(model, form="block", **options) == {"block"}
    if name in BLOCK:
        with pytest.raises(ValueError, match=r"not known to compute relu.* Use form='block', or None"):
            rg.convert(model, form="relu", **options)


def test_a_block_found_by_trial() -> None:
    assert forms(blocks_of(), ROWS) == {"relu"}


def test_one_other_block_and_its_stage_is_of_form_block() -> None:
    model = torchvision()
    model.layer2[2].relu.register_forward_hook(lambda *_: None)
    assert {run.name: run.form for run in look(model).runs} == {"layer1.1-2": "relu", "layer2.1-2": "block"}


@pytest.mark.parametrize(
    "make", [partial(thin_resnet, 20), partial(thin_resnet, 29), partial(resnet, 18, size="cifar")]
)
def test_forms_of_our_own_networks(make: Callable[..., ResNet]) -> None:
    for options, wanted in (({}, "relu"), ({"form": "relu"}, "relu"), ({"form": "block"}, "block")):
        net = make(gamma=0.9, **options)
        assert {inner.recurrence.form for _, inner in holders(net)} == {wanted}
        assert {inner.form for _, inner in holders(net)} == {"block"}  # of the blocks themselves
        assert f"form={wanted!r}" in repr(net.layer2.momentum)
        assert list(net.state_dict()) == list(make(gamma=0.9, form="block").state_dict())


def test_a_deep_stage_stays_of_one_size() -> None:
    """A bit an element and block would be more than x and v."""
    forms = {n: thin_resnet(6 * n + 2, gamma=0.9).layer1.momentum.recurrence.form for n in (64, 65)}
    assert forms == {64: "relu", 65: "block"}
    assert thin_resnet(6 * 65 + 2, gamma=0.9, form="relu").layer1.momentum.recurrence.form == "relu"


# it is the network of form "block" -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16", "autocast", "autocast of float32"])
@pytest.mark.parametrize("velocity", [None, "first"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_to_the_bit(name: str, velocity: str | None, precision: str, masks: list[bool]) -> None:
    subject, autocast = SUBJECTS[name], precision.startswith("autocast")
    dtype = torch.float32 if autocast else getattr(torch, precision)
    x = subject.x.to(dtype)

    def found(form: str | None, training: bool, **options: Any) -> Found:
        net = subject(form, **options).to(dtype).train(training)
        if (
            precision == "autocast of float32"
        ):  # x comes to the stages in float32, what their blocks make of it is bfloat16
            first = next(m for m in net.modules() if isinstance(m, nn.BatchNorm2d))
            first.register_forward_hook(lambda *a: a[2].float())
        return step(net, x, autocast)

    options: dict[str, Any] = {"velocity": velocity, "fixed_point": FINE if dtype is torch.float64 else COARSE}
    slack = 1e-11 if dtype is torch.float64 else 1e-4 if precision == "float32" else 1.0
    for training in (True, False):
        whole = found("block", training, memory="store", **options)
        for memory in MODES:
            masks.clear()
            now = found(None, training, memory=memory, **options)
            assert masks
            assert all(masks)
            if memory == "store":
                stored = now
                assert_the_same_network(now, whole, slack)
            assert_same_bits(now, stored)


@pytest.mark.parametrize("name", SUBJECTS)
def test_gamma_zero_is_the_plain_network(name: str) -> None:
    subject = SUBJECTS[name]
    torch.manual_seed(0)
    if "converted" in name or not name.startswith("ours"):
        plain = step(rg.revert(subject(None)), subject.x)
    else:
        kind = Bottleneck if "bottleneck" in name else BasicBlock
        plain_net = ResNet(kind, (3, 6), width=4, stem="cifar", classes=3)
        plain_net.load_state_dict(subject(None, gamma=0, memory="store").state_dict())
        plain = step(plain_net.to(memory_format=torch.channels_last) if "last" in name else plain_net, subject.x)
    for form in ("block", None):
        for memory in ("store", "checkpoint"):
            assert_same_bits(step(subject(form, gamma=0, memory=memory), subject.x), plain)


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("options", [{"fixed_point": "int16"}, {"verify": "strict", "memory": "reverse"}], ids=str)
def test_other_options(options: dict[str, Any], name: str) -> None:
    subject = SUBJECTS[name]
    assert_the_same_network(
        step(subject(None, **options), subject.x), step(subject("block", **options), subject.x), 1e-4
    )


@pytest.mark.parametrize("used", [[1], [2], [0, 3], [1, 2, 3], [3]])
def test_gradients_that_come_in_between(used: list[int]) -> None:
    """A loss of some blocks' outputs: gradients begin in the middle of the stage, and are joined on the way."""
    model, x, found = thin_resnet(26).double(), torch.randn(2, 3, 16, 16, dtype=torch.float64), {}
    for form in ("block", "relu"):
        for memory in MODES:
            mine = rg.convert(copy.deepcopy(model), form=form, memory=memory, fixed_point=FINE)
            (stage, *_), outputs = stages_of(mine), list[Tensor]()
            blocks = list(mine.get_submodule(stage.name.split(".")[0]))
            for k in used:
                blocks[k].register_forward_hook(lambda m, a, y, to=outputs: to.append(y))
            leaf = x.clone().requires_grad_()
            mine(leaf)
            loss = sum(y.square().mean() for y in outputs)
            wanted = [leaf, *(p for block in blocks[: used[-1] + 1] for p in block.parameters())]
            found[form, memory] = torch.autograd.grad(loss, wanted, allow_unused=True)
    for (form, memory), now in found.items():
        for a, b, c in zip(now, found[form, "store"], found["block", "store"], strict=True):
            assert torch.equal(a, b), (form, memory)
            assert (a - c).norm() <= 1e-11 * c.norm()


def both(
    model: nn.Module, change: Callable[[Any], Any] = lambda model: None, x: Tensor = ROWS, **options: Any
) -> list[Found]:
    """What a model of blocks gives in float64 in form "block" and in the form it gets, in one mode or another."""
    options = {"stages": [""], "fixed_point": FINE, "memory": "reverse", **options}
    found = []
    for form in ("block", None):
        mine = rg.convert(copy.deepcopy(model).double(), form=form, **options)
        change(mine)
        found.append(step(mine, x.double()))
    assert_the_same_network(found[1], found[0])
    return found


def pooled() -> nn.Module:
    block = Block()
    block.norm = nn.Sequential(nn.AdaptiveAvgPool1d(1))
    return block


def test_a_sum_that_is_broadcast(masks: list[bool]) -> None:
    both(blocks_of(pooled))
    assert masks == [False] * 4 + [True] * 4


def test_autocast_with_float32_activations_adds_in_float32() -> None:
    """The blocks add without rounding to f's dtype, unlike those that add in place."""
    x, found = torch.randn(2, 8, 5, 5), []
    for form in ("block", "relu"):
        torch.manual_seed(0)
        stage = MomentumStage([BasicBlock(8, 8) for _ in range(4)], 0.5, form=form, fixed_point=COARSE)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(stage(x))
    assert found[1].dtype == torch.float32
    assert torch.equal(*found)


def test_the_inverse() -> None:
    torch.manual_seed(0)
    net = RectifiedNet([BasicBlock(4, 4) for _ in range(6)], fixed_point=COARSE, velocity="first").eval()
    x = torch.randn(2, 4, 5, 5)
    wanted = net.encode(x).fixed
    for hook in (False, True):
        if hook:
            net.blocks[2].register_forward_hook(lambda m, a, y: y * 0.5)
        state = net.encode(x)
        assert torch.equal(net.inverse(state), wanted.decode(wanted.encode(x), x.dtype))


# blocks that run whole -------------------------------------------------------------------------------------------------


def twice(block: Any) -> Any:
    return type("Twice", (nn.ReLU,), {"forward": lambda self, x: F.relu(x) * 2})()


def bn_of(block: Any) -> Any:
    return block.bn3 if hasattr(block, "bn3") else block.bn2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook on its relu": lambda b: b.relu.register_forward_hook(lambda m, a, y: y * 0.5),
    "pre-hook on its relu": lambda b: b.relu.register_forward_pre_hook(lambda m, a: a[0] * 0.5),
    "relu patched": lambda b: setattr(b.relu, "forward", lambda x: F.relu(x) * 0.5),
    "another relu": lambda b: setattr(b, "relu", nn.LeakyReLU(0.5)),
    "a class of relu": lambda b: setattr(b, "relu", twice(b)),
    "hook on its first module, which writes to x": lambda b: b.conv1.register_forward_pre_hook(lambda m, a: a[0].mul_(0.5)),
    "first module patched": lambda b: setattr(b.conv1, "forward", lambda x, own=b.conv1.forward: own(x.mul_(0.5))),
    "first module writes": lambda b: setattr(b, "conv1", nn.Sequential(nn.Hardtanh(0, 0.1, inplace=True), b.conv1)),
    "shortcut": lambda b: setattr(b, "downsample", nn.BatchNorm2d(bn_of(b).num_features).double()),
    "first convolution pruned": lambda b: prune.l1_unstructured(b.conv1, "weight", 0.5),
    "hook on the block": lambda b: b.register_forward_hook(lambda m, a, y: y * 0.5),
    "pre-hook on the block": lambda b: b.register_forward_pre_hook(lambda m, a: (a[0] * 0.5,)),
    "backward hook on the block": lambda b: b.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,)),
    "forward of its own": lambda b: setattr(b, "forward", lambda x, b=b: b.branch(x)),
    "branch of its own": lambda b: setattr(b, "branch", lambda x: x * 0.25),
}  # fmt: skip
OF_OURS = {
    "hook on the block",
    "pre-hook on the block",
    "backward hook on the block",
    "forward of its own",
    "branch of its own",
}
"""Changes of the block itself: a converted block is a module whose hooks are called around a step, and has no branch of that name."""


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize(
    ("name", "how"), [(n, how) for n in CHANGED for how in CHANGES if n == "ours" or how not in OF_OURS]
)
def test_a_changed_block_runs_as_it_is(name: str, how: str, memory: str, masks: list[bool]) -> None:
    """A block that is changed once the stage is made. In ours the first one, which makes v₀, too."""
    subject, found = SUBJECTS[name], list[Found]()
    for path in (subject.block, subject.steps[0]) if name == "ours" else (subject.block,):
        found.clear()
        for form in ("block", None):
            velocity = "first" if name == "ours" else None
            net = subject(form, memory=memory, fixed_point=FINE, velocity=velocity).double()
            before = step(net, subject.x.double())
            CHANGES[how](net.get_submodule(path))
            masks.clear()
            found.append(step(net, subject.x.double()))
            assert not torch.equal(found[-1]["output"], before["output"]) or "backward" in how
        assert masks == [other != path for other in subject.steps]
        assert_the_same_network(found[1], found[0], 1e-11)


@pytest.mark.parametrize("how", [how for how in CHANGES if how not in OF_OURS | {"shortcut"}])
def test_a_block_changed_before_makes_a_stage_of_form_block(how: str, masks: list[bool]) -> None:
    found = []
    for form in ("block", None):
        torch.manual_seed(0)
        model = torchvision().double()
        CHANGES[how](model.layer1[1])
        rg.convert(model, form=form, memory="reverse", fixed_point=FINE)
        masks.clear()
        found.append(step(model, IMAGES.double()))
    assert masks == [False, False, True, True]
    assert_the_same_network(found[1], found[0], 1e-11)


def test_a_hook_that_is_gone_again(masks: list[bool]) -> None:
    net = SUBJECTS["torchvision"](None)
    handle = CHANGES["hook on its relu"](net.layer1[1])
    step(net, IMAGES)
    handle.remove()
    step(net, IMAGES)
    assert masks == [False, True, True, True] + [True] * 4


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
        found.append(step(MomentumStage(blocks, 0.9, form=form, fixed_point=COARSE, memory="reverse"), x))
    assert any(masks) == all(masks) == (kind is Longer)
    if kind is Longer:
        assert_the_same_network(found[1], found[0], 1e-5)
    else:
        assert_same_bits(*found)
        with pytest.raises(ValueError, match=f"{kind.__name__} is not known to compute relu"):
            MomentumStage([kind(4, 4)], 0.9, form="relu")


class Gained(Block):
    """A factor, or None: of what kind it is says `kind`."""

    def __init__(self, kind: str = "none") -> None:
        super().__init__()
        if kind == "parameter":
            self.gain = nn.Parameter(torch.full((6,), 0.5))
        elif kind == "buffer":
            self.register_buffer("gain", torch.full((6,), 0.5))
        else:
            self.gain = None

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.act(self.first(x)))
        if self.gain is not None:
            out = out * self.gain
        return self.act(out + x)


class NormMethod(Block):
    """A method where blocks have a submodule, or None."""

    def __init__(self) -> None:
        super().__init__()
        del self.norm

    def norm(self, x: Tensor) -> Tensor:
        return x * 0.25


class NormOfClass(NormMethod):
    """The same that comes before the submodule."""

    norm = staticmethod(torch.cos)

    def __init__(self) -> None:
        super().__init__()
        self._modules["norm"] = nn.LayerNorm(6, elementwise_affine=False)


def normed() -> Block:
    block = Block()
    block.norm = nn.LayerNorm(6)
    return block


CACHED: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "a parameter for None": (Gained, lambda: Gained("parameter")),
    "a buffer for None": (Gained, lambda: Gained("buffer")),
    "a method for None": (Block, NormMethod),
    "a function for a submodule": (normed, NormOfClass),
}


@pytest.mark.parametrize("which", [[0, 1, 2, 3], [2]], ids=["all", "one of them"])
@pytest.mark.parametrize("name", CACHED)
def test_a_proof_is_not_taken_for_a_block_with(name: str, which: list[int], masks: list[bool]) -> None:
    """Blocks of the same forward, of which others were proved before."""
    proved, other = CACHED[name]
    first = blocks_of(proved)
    assert forms(first, stages=[""]) == {"relu"}
    step(rg.convert(first, stages=[""], memory="reverse"), ROWS)
    masks.clear()
    both(nn.Sequential(*(other() if k in which else proved() for k in range(4))))
    assert masks == [False] * 8


def shadowed(model: Any) -> None:
    model[1].__dict__["act"] = F.gelu


def gained(model: Any) -> None:
    model[1].gain = nn.Parameter(torch.full((6,), 0.5).double())


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("change", [shadowed, gained])
def test_what_a_converted_block_is_given_is_looked_up(change: Any, memory: str, masks: list[bool]) -> None:
    """As Python does: its own attributes come before its submodules, and a parameter is not None."""

    def after_a_step(model: nn.Module) -> None:
        step(model, ROWS.double())
        change(model)
        masks.clear()

    both(blocks_of(Gained), after_a_step, memory=memory)
    assert masks == [True, False, True, True]


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.act(self.first(x)))
        out += x
        return self.act(out)


@pytest.mark.parametrize("inner", [False, True], ids=["on the module", "inside of it"])
def test_a_hook_that_keeps_what_x_is_added_to_in_place(inner: bool) -> None:
    """It is left with the sum, and the loss may depend on that."""
    model, found = blocks_of(InPlace).double(), []
    for block in model if inner else ():
        block.second = nn.Sequential(block.second)
    assert forms(model, stages=[""]) == {"relu"}
    for form in ("block", None):
        kept: list[Tensor] = []
        mine = rg.convert(copy.deepcopy(model), stages=[""], form=form, memory="store", fixed_point=FINE)
        for block in mine:
            (block.second[0] if inner else block.second).register_forward_hook(lambda m, a, y, to=kept: to.append(y))
        x = ROWS.double().requires_grad_()
        with torch.no_grad():
            mine(x)
        kept.clear()
        loss = mine(x).sum() + sum(f.square().sum() for f in kept)
        found.append([*torch.autograd.grad(loss, [x, *mine.parameters()]), *kept])
        assert len(kept) == 4
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("velocity", [None, "first"])
@pytest.mark.parametrize("which", [[0], [3], [1, 2], [0, 1, 2, 3]])
def test_steps_of_both_kinds_in_one_pass(which: list[int], velocity: str | None, masks: list[bool]) -> None:
    """The gradient of a step is handed on right whatever the next step is."""

    def hooked(model: Any) -> None:
        for k in which:
            model[k].act = nn.ReLU()
            model[k].act.register_forward_hook(lambda *_: None)

    model = blocks_of()
    stored = both(model, hooked, velocity=velocity, memory="store")
    assert masks[-4:] == [k not in which for k in range(4)]
    for memory in ("reverse", "checkpoint"):
        for now, wanted in zip(both(model, hooked, velocity=velocity, memory=memory), stored, strict=True):
            assert_same_bits(now, wanted)


def test_the_range_is_that_of_form_block_where_every_block_is_run_as_it_is() -> None:
    found = []
    for form in ("block", None):
        torch.manual_seed(0)
        model = rg.convert(blocks_of(), stages=[""], form=form, gamma=0.3, memory="store")
        for block in model:
            block.act = nn.Hardtanh(0, 1e3)
        step(model, 10 * ROWS)
        found.append([stage.range.found for stage in stages_of(model)])
    assert found[0] == found[1]
    assert found[0][0] is not None


# hooks, compilers, tracers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["block", None])
def test_what_hooks_on_a_block_see(form: str | None, masks: list[bool]) -> None:
    """relu(x + f(x)), the block's own output, in forward and once more when the block is run again."""
    subject = SUBJECTS["ours"]
    net, seen = subject(form, memory="reverse"), list[tuple[Tensor, Tensor]]()
    hook = net.layer2[2].register_forward_hook(lambda m, a, y: seen.append((a[0].clone(), y.detach().clone())))
    net(SMALL).sum().backward()
    (x, y), (x_again, y_again) = seen
    assert torch.equal(x, x_again)
    assert torch.equal(y, y_again)
    hook.remove()
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(net.layer2[2])(x), y)
    masks.clear()
    net(SMALL).sum().backward()
    assert len(seen) == 2
    assert set(masks) == {form is None}


def test_hooks_on_a_converted_block_and_inside_it_are_called(masks: list[bool]) -> None:
    seen: dict[str | None, list[Tensor]] = {"block": [], None: []}
    for form, noted in seen.items():
        torch.manual_seed(0)
        model = torchvision()
        model.layer1[1].register_forward_pre_hook(lambda m, a, to=noted: to.append(a[0].detach().clone()))
        model.layer1[1].register_forward_hook(lambda m, a, y, to=noted: to.append(y.detach().clone()))
        model.layer1[1].bn3.register_forward_hook(lambda m, a, y, to=noted: to.append(y.detach().clone()))
        step(rg.convert(model, form=form, fixed_point=COARSE, memory="store"), IMAGES)
    assert len(seen[None]) == len(seen["block"]) == 3
    assert all(torch.equal(a, b) for a, b in zip(seen[None], seen["block"], strict=True) if a.shape == b.shape)
    assert any(masks)


def test_what_was_run_in_forward_is_run_again_in_backward() -> None:
    """Though there is a hook by then, or none any more."""
    subject = SUBJECTS["ours"]
    for memory in MODES:
        wanted, net = step(subject(None, memory=memory), SMALL), subject(None, memory=memory)
        x = SMALL.clone().requires_grad_()
        y = net(x)
        hook = net.layer2[2].register_forward_hook(lambda m, a, y: None)
        y.square().mean().backward()
        hook.remove()
        assert x.grad is not None
        assert torch.equal(x.grad, wanted["input"])


@pytest.mark.parametrize("name", CHANGED)
def test_hooks_on_every_module_hear_the_last_relu(name: str, masks: list[bool]) -> None:
    subject = SUBJECTS[name]
    net, heard = subject(None, memory="store"), []
    handle = register_module_forward_hook(lambda m, a, y: heard.append(m))
    try:
        step(net, subject.x)
    finally:
        handle.remove()
    block = net.get_submodule(subject.block)
    assert heard.count(block.relu) == (2 if isinstance(block, BasicBlock) else 3)
    assert heard.count(block) == 1
    assert not any(masks)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own imports
def test_compiled_blocks_run_whole(masks: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    own, compiled, subject = nn.Module.compile, list[nn.Module](), SUBJECTS["ours"]

    def noted(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        compiled.append(self)
        own(self, backend="eager")

    monkeypatch.setattr(nn.Module, "compile", noted)
    wanted, net = step(subject("block", memory="reverse"), SMALL), subject(None, memory="reverse")
    compile_blocks(net)
    assert compiled == [*net.layer1, *list(net.layer2)[1:]]
    masks.clear()
    assert_same_bits(step(net, SMALL), wanted)
    assert masks == [False] * 8


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own imports
def test_converted_blocks_compiled() -> None:
    model, x = resnet(18, size="cifar", classes=3, width=4), torch.randn(2, 3, 8, 8)
    wanted = step(rg.convert(copy.deepcopy(model), fixed_point=COARSE), x)
    rg.convert(model, fixed_point=COARSE)
    compile_converted(model, backend="eager")
    assert_same_bits(step(model, x), wanted)


def test_a_traced_block() -> None:
    """One that torch.fx made is either taken apart or run as it is."""
    model = torchvision()
    for k in (1, 2):
        model.layer1[k] = torch.fx.symbolic_trace(model.layer1[k])
    both(model, x=IMAGES, stages=["layer1.[12]"])


def test_the_blocks_add_nothing_themselves_unless_gamma_is_zero() -> None:
    model, called = torchvision(), []
    model.layer1[1].relu.register_forward_hook(lambda *_: called.append(1))
    with pytest.raises(ValueError, match=r"layer1\.1, a torchvision.* the last one without hooks"):
        rg.convert(model, form="relu")
    model.layer1[1].relu._forward_hooks.clear()
    rg.convert(model, form="relu", memory="store")
    model(IMAGES)
    model.layer1[1].relu.register_forward_hook(lambda *_: called.append(1))
    model(IMAGES)  # that block runs as it is
    assert len(called) == 3  # of a Bottleneck, all
    for stage in stages_of(model):
        stage.gamma = 0
    model(IMAGES)
    assert len(called) == 6


class Named(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.act(self.first(hidden) + hidden)


class Loop(nn.Module):
    def __init__(self, keyword: bool) -> None:
        super().__init__()
        self.blocks, self.keyword = blocks_of(Named), keyword
        for block in self.blocks:
            del block.second

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(hidden=x) if self.keyword else block(x)
        return x


def test_blocks_called_by_keyword_and_with_more_than_x(masks: list[bool]) -> None:
    found = []
    for keyword in (True, False):
        torch.manual_seed(0)
        found.append(step(rg.convert(Loop(keyword), stages=["blocks"], gamma=0.5), ROWS))
    assert masks == [True] * 8
    assert_same_bits(*found)
    with pytest.raises(TypeError):
        rg.convert(blocks_of(), stages=[""], fixed_point=COARSE)[0](ROWS, 1)


# what is done to networks ----------------------------------------------------------------------------------------------


def test_copies_pickles_and_the_way_back(masks: list[bool]) -> None:
    model = narrow("seresnet50").eval()
    keys, before, classes = list(model.state_dict()), model(IMAGES), [type(m) for m in model.modules()]
    rg.convert(model, fixed_point=COARSE)
    assert list(model.state_dict()) == keys
    wanted = step(model, IMAGES)
    assert any(masks)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert {stage.settings.form for stage in stages_of(other) if not stage.checkpointed} == {"relu"}
        assert_same_bits(step(other, IMAGES), wanted)
    rg.revert(model)
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(model(IMAGES), before)


def test_settings_are_changed_between_steps() -> None:
    subject = SUBJECTS["ours"]
    net = subject(None).eval()
    wanted = step(net, SMALL)
    for memory in MODES:
        net.layer2.momentum.memory = memory
        assert_same_bits(step(net, SMALL), wanted)
    set_gamma(net, 0.5)
    assert_the_same_network(step(net, SMALL), step(subject("block", gamma=0.5).eval(), SMALL), 1e-5)
    assert net.layer2.momentum.recurrence.form == "relu"


def test_ranges_are_found_and_put_back() -> None:
    found = {}
    for form in ("block", None):
        net, other = (SUBJECTS["ours"](form, fixed_point="auto") for _ in range(2))
        assert [name for name, _ in holders(net)] == ["layer1", "layer2"]
        step(net, SMALL)
        found[form] = written(training_ranges(net))
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
    wanted = train_step(RectifiedNet(blocks, memory="store", fixed_point=COARSE), x)
    modes = set()
    for budget in (200_000, 400_000, 10_000_000):
        net = RectifiedNet(copy.deepcopy(blocks), memory=budget, fixed_point=COARSE)
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


def test_a_budget_of_a_converted_model() -> None:
    subject = SUBJECTS["ours, converted"]
    wanted = step(subject("relu", memory="store"), IMAGES)
    assert_same_bits(step(subject("relu", memory=10**9), IMAGES), wanted)


def test_a_bit_an_element_and_block_is_held_besides() -> None:
    held = {}
    for form in ("block", "relu"):
        torch.manual_seed(0)
        net = MomentumStage([BasicBlock(8, 8) for _ in range(8)], 0.9, form=form, memory="reverse")
        held[form] = rg.measure(net, torch.randn(16, 8, 16, 16), repeats=1).held
    assert held["relu"] - held["block"] == pytest.approx(8 * 16 * 8 * 16 * 16 / 8, rel=0.02)


def test_a_plan_is_of_the_form_that_is_used() -> None:
    model = torchvision()
    found = {form: rg.plan(model, IMAGES, form=form, memory="checkpoint") for form in (None, "relu", "block")}
    assert "relu" in str(found[None])
    assert found[None].peaks == found["relu"].peaks
    for form, plan in found.items():
        assert {(row.form, row.mode) for row in plan.stages} == {(form or "relu", "checkpoint")}
    ours, theirs = (found[form].peaks["checkpoint"].held for form in (None, "block"))
    masks = (2 * 2 * 256 * 8 * 8 + 2 * 2 * 512 * 4 * 4) // 8  # blocks × elements, one bit each
    assert ours - theirs == masks
    assert not stages_of(model)


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_the_prediction_is_what_is_measured(memory: str) -> None:
    model, x = torchvision(), torch.randn(8, 3, 64, 64)
    plan = rg.plan(model, x, memory=memory)
    report = rg.measure(rg.convert(model, memory=memory), x, repeats=1)
    assert plan.peaks[memory].held == pytest.approx(report.held, rel=0.02)
    assert plan.peaks[memory].peak == pytest.approx(report.peak, rel=0.10)


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


def test_evaluation_has_a_range_of_its_own_and_a_copy_keeps_it() -> None:
    stage = MomentumStage([BasicBlock(4, 4) for _ in range(3)], 0.9)
    stage(torch.randn(2, 4, 5, 5))
    stage.eval()
    stage(1e4 * torch.randn(2, 4, 5, 5))  # beyond what training was seen to need
    stage.train()(torch.randn(2, 4, 5, 5)).sum().backward()
    copied = copy.deepcopy(stage)
    assert copied.momentum.range.found == stage.momentum.range.found != {}
    assert list(copied.momentum.blocks) == list(copied)


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
