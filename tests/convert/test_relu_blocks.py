"""The form of a stage when none is given: "relu" where every block is proved to compute relu(x + f(x)), else "block"."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

import retrograde as rg
from conversion import compile_blocks
from retrograde.convert.convert import look, stages_of
from retrograde.extras import require
from retrograde.nets.resnet import resnet, thin_resnet

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    tv = require("torchvision.models")
    timm = require("timm")
    hf = require("transformers")
MODES = ["reverse", "checkpoint", "store"]
IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
NARROW: dict[str, Any] = {"layers": (3, 3, 1, 1), "channels": (8, 16, 16, 16), "num_classes": 5}


def torchvision(**options: Any) -> nn.Module:
    model: nn.Module = tv.resnet.ResNet(tv.resnet.Bottleneck, [3, 3, 1, 1], num_classes=5, width_per_group=8, **options)
    return model


def narrow(name: str, **options: Any) -> nn.Module:
    model: nn.Module = timm.create_model(name, **NARROW, zero_init_last=False, **options)
    return model


def hf_resnet() -> nn.Module:
    model: nn.Module = hf.ResNetModel(hf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[3, 3]))
    return model


def forms(model: nn.Module, *args: Any, **options: Any) -> set[str]:
    return {run.form for run in look(model, *args, **options).runs}


def step(model: nn.Module, x: Tensor = IMAGE, seed: int = 3) -> list[Tensor]:
    """Output, gradients and buffers of a training step."""
    torch.manual_seed(seed)
    leaf = x.clone().requires_grad_()
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    y = model(leaf)
    y = y if isinstance(y, Tensor) else y[0]
    grads = torch.autograd.grad(y.float().square().mean(), [leaf, *model.parameters()])
    found = [y.detach(), *grads, *(b.clone() for b in model.buffers()), torch.rand(1)]
    with torch.no_grad():
        for name, b in model.named_buffers():
            b.copy_(buffers[name])
    return found


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def assert_the_same_network(ours: list[Tensor], theirs: list[Tensor], rounding: float = 1e-10) -> None:
    """Outputs to the bit, all else up to rounding."""
    assert torch.equal(ours[0], theirs[0])
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).double().norm() <= rounding * b.double().norm() + rounding * 1e-3


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


def net(kind: type[nn.Module] = Block, **options: Any) -> nn.Module:
    return nn.Sequential(*(kind(**options) for _ in range(4)))


ROWS = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))

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
    "somebody's": net,
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
    assert forms(net(), ROWS) == {"relu"}


def test_one_other_block_and_its_stage_is_of_form_block() -> None:
    model = torchvision()
    model.layer2[2].relu.register_forward_hook(lambda *_: None)
    assert {run.name: run.form for run in look(model).runs} == {"layer1.1-2": "relu", "layer2.1-2": "block"}


# it is the network of form "block" -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16", "autocast", "autocast of float32"])
@pytest.mark.parametrize(
    "make",
    [torchvision, lambda: narrow("seresnet50", drop_path_rate=0.3), hf_resnet, lambda: thin_resnet(20)],
    ids=["torchvision", "timm", "transformers", "ours"],
)
def test_to_the_bit(make: Callable[[], nn.Module], precision: str) -> None:
    dtype = getattr(torch, precision) if not precision.startswith("autocast") else torch.float32
    model, x = make().to(dtype), IMAGE.to(dtype)
    if precision == "autocast of float32":  # x comes to the stages in float32, what their blocks make of it is bfloat16
        first = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
        first.register_forward_hook(lambda *a: a[2].float())
    bits: dict[str, Any] = {
        "gamma": 0.9,
        "fixed_point": rg.FixedPoint(40 if dtype is torch.float64 else 12, torch.int32),
    }
    with torch.autocast("cpu", torch.bfloat16, enabled=precision.startswith("autocast")):
        plain = step(model, x)
        assert forms(model) == {"relu"}
        for memory in ("store", "checkpoint"):
            assert equal(step(rg.convert(copy.deepcopy(model), gamma=0, memory=memory), x), plain)
        found = {memory: step(rg.convert(copy.deepcopy(model), memory=memory, **bits), x) for memory in MODES}
        assert equal(found["reverse"], found["store"])
        assert equal(found["checkpoint"], found["store"])
        theirs = step(rg.convert(copy.deepcopy(model), form="block", memory="store", **bits), x)
    assert not torch.equal(theirs[0], plain[0])
    slack = 1e-11 if dtype is torch.float64 else 1e-4 if precision == "float32" else 0.2
    assert_the_same_network(found["store"], theirs, slack)


@pytest.mark.parametrize("make", [torchvision, lambda: thin_resnet(20)], ids=["torchvision", "ours"])
def test_the_first_block_makes_v0(make: Callable[[], nn.Module]) -> None:
    model, found = make().double(), {}
    for form in ("block", "relu"):
        for memory in [*MODES, "auto"]:
            mine = rg.convert(
                copy.deepcopy(model),
                form=form,
                memory=memory,
                velocity="first",
                fixed_point=rg.FixedPoint(40, torch.int32),
            )
            found[form, memory] = step(mine, IMAGE.double())
    for (form, memory), now in found.items():
        assert equal(now, found[form, "store"]), (form, memory)
    assert_the_same_network(found["relu", "store"], found["block", "store"])


@pytest.mark.parametrize("used", [[1], [2], [0, 3], [1, 2, 3], [3]])
def test_gradients_that_come_in_between(used: list[int]) -> None:
    """A loss of some blocks' outputs: gradients begin in the middle of the stage, and are joined on the way."""
    model, x, found = thin_resnet(26).double(), torch.randn(2, 3, 16, 16, dtype=torch.float64), {}
    for form in ("block", "relu"):
        for memory in MODES:
            mine = rg.convert(
                copy.deepcopy(model), form=form, memory=memory, fixed_point=rg.FixedPoint(40, torch.int32)
            )
            (stage, *_), outputs = stages_of(mine), list[Tensor]()
            blocks = [
                block for path, block in mine.named_modules() if path.rpartition(".")[0] == stage.name.split(".")[0]
            ]
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


def test_a_sum_that_is_broadcast() -> None:
    class Pooled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.Sequential(nn.AdaptiveAvgPool1d(1))

    model, x = net(Pooled).double(), ROWS.double()
    options: dict[str, Any] = {"stages": [""], "fixed_point": rg.FixedPoint(40, torch.int64), "memory": "reverse"}
    assert forms(model, stages=[""]) == {"relu"}
    ours = step(rg.convert(copy.deepcopy(model), **options), x)
    theirs = step(rg.convert(copy.deepcopy(model), form="block", **options), x)
    assert_the_same_network(ours, theirs)


def test_the_blocks_add_nothing_themselves_unless_gamma_is_zero() -> None:
    model, called = torchvision(), []
    model.layer1[1].relu.register_forward_hook(lambda *_: called.append(1))
    with pytest.raises(ValueError, match=r"layer1\.1, a torchvision.* the last one without hooks"):
        rg.convert(model, form="relu")
    model.layer1[1].relu._forward_hooks.clear()
    rg.convert(model, form="relu", memory="store")
    x = torch.randn(2, 3, 32, 32)
    model(x)
    model.layer1[1].relu.register_forward_hook(lambda *_: called.append(1))
    model(x)  # that block runs as it is
    assert len(called) == 3  # of a Bottleneck, all
    for stage in stages_of(model):
        stage.gamma = 0
    model(x)
    assert len(called) == 6


# blocks that are changed ----------------------------------------------------------------------------------------------


def changed(how: str, block: Any) -> None:
    """Do something to a torchvision block, which it then is not one to be taken apart for."""
    if how == "relu hook":
        block.relu.register_forward_hook(lambda *a: a[2] * 0.5)
    elif how == "relu pre-hook":
        block.relu.register_forward_pre_hook(lambda m, a: a[0] * 0.5)
    elif how == "relu backward hook":
        block.relu.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))
    elif how == "relu patched":
        block.relu.forward = lambda x: F.relu(x) * 0.5
    elif how == "another relu":
        block.relu = nn.LeakyReLU(0.5)
    elif how == "derived relu":
        block.relu = type("Twice", (nn.ReLU,), {"forward": lambda self, x: F.relu(x) * 2})()
    elif how == "first hook":  # writes to x
        block.conv1.register_forward_pre_hook(lambda m, a: a[0].mul_(0.5))
    elif how == "first patched":
        block.conv1.forward = lambda x, own=block.conv1.forward: own(x.mul_(0.5))
    elif how == "shortcut":
        block.downsample = nn.BatchNorm2d(block.bn3.num_features).double()


HOW = [
    "relu hook", "relu pre-hook", "relu patched", "another relu", "derived relu", "first hook", "first patched", "shortcut",
]  # fmt: skip


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("later", [False, True], ids=["before", "after conversion"])
def test_changed_blocks_run_as_they_are(how: str, later: bool, masks: list[bool]) -> None:
    """Done before: the stage is of form "block". Done later: that one step is. Outputs and gradients are those of form "block"."""
    later |= how == "shortcut"  # a block with one is left out of the stages
    found = {}
    model = torchvision().double()
    for form in ("block", None):
        for memory in MODES:
            mine = copy.deepcopy(model)
            options: dict[str, Any] = {"form": form, "memory": memory, "fixed_point": rg.FixedPoint(40, torch.int64)}
            if not later:
                changed(how, mine.layer1[1])
            rg.convert(mine, **options)
            if later:
                changed(how, mine.layer1[1])
            masks.clear()
            found[form, memory] = step(mine, IMAGE.double())
            if form is None:
                assert masks == [False, later, True, True]
            else:
                assert not any(masks)
            if later and form is None and how == "relu hook":
                mine.layer1[1].relu._forward_hooks.clear()
                masks.clear()
                step(mine, IMAGE.double())
                assert masks == [True] * 4
    for (form, memory), now in found.items():
        assert equal(now, found[form, "store"]), (form, memory)
    assert_the_same_network(found[None, "store"], found["block", "store"])


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
def test_a_proof_is_not_taken_for_a_block_with(name: str, which: list[int]) -> None:
    """Blocks of the same forward, of which others were proved before."""
    proved, other = CACHED[name]
    first = nn.Sequential(*(proved() for _ in range(4)))
    assert forms(first, stages=[""]) == {"relu"}
    step(rg.convert(first, stages=[""], memory="reverse"), ROWS)
    model = nn.Sequential(*(other() if k in which else proved() for k in range(4))).double()
    found = []
    for form in ("block", None):
        mine = copy.deepcopy(model)
        rg.convert(mine, stages=[""], form=form, memory="reverse", fixed_point=rg.FixedPoint(40, torch.int32))
        assert {stage.settings.form for stage in stages_of(mine)} == {"block"}
        found.append(step(mine, ROWS.double()))
    assert equal(*found)


def shadowed(block: Any) -> None:
    block.__dict__["act"] = F.gelu


def gained(block: Any) -> None:
    block.gain = nn.Parameter(torch.full((6,), 0.5).double())


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("change", [shadowed, gained])
def test_what_a_converted_block_is_given_is_looked_up(
    change: Callable[[Any], None], memory: str, masks: list[bool]
) -> None:
    """As Python does: its own attributes come before its submodules, and a parameter is not None."""
    model, found = net(Gained).double(), []
    for form in ("block", None):
        mine = rg.convert(
            copy.deepcopy(model), stages=[""], form=form, memory=memory, fixed_point=rg.FixedPoint(40, torch.int32)
        )
        step(mine, ROWS.double())
        change(mine[1])
        masks.clear()
        found.append(step(mine, ROWS.double()))
    assert sorted(masks) == [False, True, True, True]
    assert_the_same_network(*found)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.act(self.first(x)))
        out += x
        return self.act(out)


@pytest.mark.parametrize("inner", [False, True], ids=["on the module", "inside of it"])
def test_a_hook_that_keeps_what_x_is_added_to_in_place(inner: bool) -> None:
    """It is left with the sum, and the loss may depend on that."""
    model, found = net(InPlace).double(), {}
    for block in model if inner else ():
        block.second = nn.Sequential(block.second)
    assert forms(model, stages=[""]) == {"relu"}
    for form in ("block", None):
        kept: list[Tensor] = []
        mine = rg.convert(
            copy.deepcopy(model), stages=[""], form=form, memory="store", fixed_point=rg.FixedPoint(40, torch.int32)
        )
        for block in mine:
            (block.second[0] if inner else block.second).register_forward_hook(lambda m, a, y, to=kept: to.append(y))
        x = ROWS.double().requires_grad_()
        with torch.no_grad():
            mine(x)
        kept.clear()
        loss = mine(x).sum() + sum(f.square().sum() for f in kept)
        found[form] = [*torch.autograd.grad(loss, [x, *mine.parameters()]), *kept]
        assert len(kept) == 4
    assert equal(found["block"], found[None])


@pytest.mark.parametrize("velocity", [None, "first"])
@pytest.mark.parametrize("which", [[0], [3], [1, 2], [0, 1, 2, 3]])
def test_steps_of_both_kinds_in_one_pass(which: list[int], velocity: str | None) -> None:
    """The gradient of a step is handed on right whatever the next step is."""
    model, called = net().double(), list[int]()
    for k in which:
        model[k].act = nn.ReLU()
    found = {}
    for form in ("block", None):
        for memory in MODES:
            mine = copy.deepcopy(model)
            rg.convert(
                mine,
                stages=[""],
                form=form,
                memory=memory,
                velocity=velocity,
                fixed_point=rg.FixedPoint(40, torch.int32),
            )
            for k in which:
                mine[k].act.register_forward_hook(lambda *_: called.append(1))
            found[form, memory] = step(mine, ROWS.double())
    assert called
    assert all(equal(now, found[form, "store"]) for (form, _), now in found.items())
    assert_the_same_network(found[None, "store"], found["block", "store"])


def test_the_survey_knows_which_steps_are_whole() -> None:
    """The range is that of form "block", where every block is run as it is."""
    found = []
    for form in ("block", None):
        torch.manual_seed(0)
        model = rg.convert(net(), stages=[""], form=form, gamma=0.3, memory="store")
        for block in model:
            block.act = nn.Hardtanh(0, 1e3)
        step(model, 10 * ROWS)
        found.append([stage.range.found for stage in stages_of(model)])
    assert found[0] == found[1]
    assert found[0][0] is not None


def test_hooks_on_the_block_and_inside_it_are_called(masks: list[bool]) -> None:
    seen: dict[str, list[Any]] = {}
    found = []
    for form in ("block", None):
        torch.manual_seed(0)
        model, name = torchvision(), str(form)
        seen[name] = []
        model.layer1[1].register_forward_pre_hook(lambda m, a, n=name: seen[n].append(a[0].detach().clone()))
        model.layer1[1].register_forward_hook(lambda m, a, y, n=name: seen[n].append(y.detach().clone()))
        model.layer1[1].bn3.register_forward_hook(lambda m, a, y, n=name: seen[n].append(y.detach().clone()))
        rg.convert(model, form=form, fixed_point=rg.FixedPoint(16, torch.int32), memory="store")
        found.append(step(model))
    assert len(seen["None"]) == len(seen["block"]) == 3
    assert all(torch.equal(a, b) for a, b in zip(seen["None"], seen["block"], strict=True) if a.shape == b.shape)
    assert any(masks)


def test_hooks_on_every_module_hear_the_last_relu(masks: list[bool]) -> None:
    model, heard = rg.convert(torchvision(), memory="store"), []
    handle = register_module_forward_hook(lambda m, a, y: heard.append(type(m)))
    try:
        step(model)
    finally:
        handle.remove()
    plain, also = rg.revert(model), []
    handle = register_module_forward_hook(lambda m, a, y: also.append(type(m)))
    try:
        step(plain)
    finally:
        handle.remove()
    assert not any(masks)
    assert heard.count(nn.ReLU) % also.count(nn.ReLU) == 0  # the survey runs the model once more


def test_blocks_called_by_keyword_and_with_more_than_x(masks: list[bool]) -> None:
    class Named(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            return self.act(self.first(hidden) + hidden)

    class Loop(nn.Module):
        def __init__(self, keyword: bool) -> None:
            super().__init__()
            self.blocks, self.keyword = nn.Sequential(*(Named() for _ in range(4))), keyword
            for block in self.blocks:
                del block.second

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(hidden=x) if self.keyword else block(x)
            return x

    found = []
    for keyword in (True, False):
        torch.manual_seed(0)
        found.append(step(rg.convert(Loop(keyword), stages=["blocks"], gamma=0.5), ROWS))
    assert masks == [True] * 8
    assert equal(*found)
    with pytest.raises(TypeError):
        rg.convert(net(), stages=[""], fixed_point=rg.FixedPoint(20, torch.int32))[0](ROWS, 1)


# what is left of the model ---------------------------------------------------------------------------------------------


def test_copies_pickles_and_the_way_back(masks: list[bool]) -> None:
    model = narrow("seresnet50").eval()
    keys, before, classes = list(model.state_dict()), model(IMAGE), [type(m) for m in model.modules()]
    rg.convert(model, fixed_point=rg.FixedPoint(16, torch.int32))
    assert list(model.state_dict()) == keys
    wanted = step(model)
    assert any(masks)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert {stage.settings.form for stage in stages_of(other) if not stage.checkpointed} == {"relu"}
        assert equal(step(other), wanted)
    rg.revert(model)
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(model(IMAGE), before)


def test_a_traced_block() -> None:
    """One that torch.fx made is either taken apart or run as it is."""
    model = torchvision().double()
    for k in (1, 2):
        model.layer1[k] = torch.fx.symbolic_trace(model.layer1[k])
    options: dict[str, Any] = {"stages": ["layer1.[12]"], "fixed_point": rg.FixedPoint(40, torch.int64)}
    found = {
        form: step(rg.convert(copy.deepcopy(model), form=form, **options), IMAGE.double()) for form in ("block", None)
    }
    assert_the_same_network(found[None], found["block"])


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own imports
def test_blocks_compiled() -> None:
    model, x = resnet(18, size="cifar", classes=3, width=4), torch.randn(2, 3, 8, 8)
    wanted = step(rg.convert(copy.deepcopy(model), fixed_point=rg.FixedPoint(16, torch.int32)), x)
    rg.convert(model, fixed_point=rg.FixedPoint(16, torch.int32))
    compile_blocks(model, backend="eager")
    found = step(model, x)
    assert equal(found, wanted)


def test_gamma_set_to_zero_runs_the_blocks_themselves() -> None:
    model = torchvision()
    plain = step(model)
    rg.convert(model, memory="store")
    for stage in stages_of(model):
        stage.gamma = 0
    assert equal(step(model), plain)


def test_a_budget() -> None:
    model, x = resnet(18, size="cifar", classes=3, width=4), torch.randn(2, 3, 16, 16)
    wanted = step(
        rg.convert(copy.deepcopy(model), form="relu", fixed_point=rg.FixedPoint(18, torch.int32), memory="store"), x
    )
    assert equal(
        step(rg.convert(model, form="relu", fixed_point=rg.FixedPoint(18, torch.int32), memory=10**9), x), wanted
    )


# plans -----------------------------------------------------------------------------------------------------------------


def test_a_plan_is_of_the_form_that_is_used() -> None:
    model = torchvision()
    found = {form: rg.plan(model, IMAGE, form=form, memory="checkpoint") for form in (None, "relu", "block")}
    assert {row.form for row in found[None].stages} == {"relu"}
    assert "relu" in str(found[None])
    assert found[None].peaks == found["relu"].peaks
    assert {row.form for row in found["block"].stages} == {"block"}
    assert {row.mode for row in found[None].stages} == {"checkpoint"}
    ours, theirs = (found[form].peaks["checkpoint"].held for form in (None, "block"))
    assert (
        ours - theirs == (2 * 2 * 256 * 8 * 8 + 2 * 2 * 512 * 4 * 4) // 8
    )  # the masks: blocks × elements, one bit each
    assert not stages_of(model)


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_the_prediction_is_what_is_measured(memory: str) -> None:
    model, x = torchvision(), torch.randn(8, 3, 64, 64)
    plan = rg.plan(model, x, memory=memory)
    report = rg.measure(rg.convert(model, memory=memory), x, repeats=1)
    assert plan.peaks[memory].held == pytest.approx(report.held, rel=0.02)
    assert plan.peaks[memory].peak == pytest.approx(report.peak, rel=0.10)
