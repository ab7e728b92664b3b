"""A deployed model computes what the converted one does, by ordinary operations: for every form and γ, and for whoever traces it."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, SMALL, fixed, hf, ids, timm, tv
from torch import Tensor, nn

import retrograde as rg
from conversion import anatomy
from problems import Mlp, assert_same_bits, conv, float_recurrence, train_step
from retrograde.convert.convert import stages_of
from retrograde.nets import CouplingNet, HamiltonianNet, IRevNet
from retrograde.nets.resnet import resnet

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, and of the exporters' own imports
ROWS = fixed(3, 8).double()


def near(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> bool:
    """float64 states are held to 2⁻⁴⁰ or so, and a float64 rounds at 2⁻⁵³: there is nothing else between the two."""
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


class Block(nn.Module):
    """f(x), x + f(x), relu(x + f(x)), or x + f(x) written over x, and something besides if it is asked for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.f = Mlp()
        self.relu = nn.ReLU()
        self.kind = kind

    def forward(self, x: Tensor, also: Tensor | None = None) -> Any:
        f = self.f(x) if also is None else self.f(x) + also
        if self.kind == "branch":
            return f
        if self.kind == "in place":
            x += f
            return x
        y = self.relu(x + f) if self.kind == "relu" else x + f
        return y if also is None else (y, f)


class Loop(nn.Module):
    """Runs its blocks; all of them, or the first ones. `between`: what it does to x after the second."""

    def __init__(
        self, kind: str, depth: int = 5, repeats: int = 1, between: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(depth))
        self.adds = kind == "branch"
        self.repeats, self.between = repeats, between

    def forward(self, x: Tensor, only: int | None = None, also: Tensor | None = None) -> Tensor:
        x = x * 1
        for k, block in enumerate([*self.blocks][:only] * self.repeats):
            y = block(x) if also is None or self.adds else block(x=x, also=also)[0]
            x = x + y if self.adds else y
            if k == 1 and self.between is not None:
                x = self.between(x)
        return x


def converted(kind: str, gamma: Any, velocity: str | None = None, **options: Any) -> Any:
    torch.manual_seed(1)
    model = Loop(kind, **options).double().eval()
    form = {"branch": "branch", "block": "block"}.get(kind)
    return rg.convert(model, stages=["blocks"], gamma=gamma, form=form, velocity=velocity)


KINDS = ["block", "relu", "branch", "in place"]
GAMMAS: list[Any] = [Fraction(1, 8), 0.9, 1, [0.5, 0, 1, 0.25, 0.9]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gamma", GAMMAS, ids=str)
@pytest.mark.parametrize("velocity", [None, "first"])
def test_the_same_network(kind: str, gamma: Any, velocity: str | None) -> None:
    model = converted(kind, gamma, velocity)
    parameters, keys = list(model.parameters()), list(model.state_dict())
    with torch.no_grad():
        exact = model(ROWS)
        assert rg.deploy(model) is model
        found = [model(ROWS) for _ in range(3)]
        with torch.inference_mode():
            found.append(model(ROWS))
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            found.append(other(ROWS))
            assert near(rg.revert(other)(ROWS), Loop.forward(rg.revert(model) if other is None else other, ROWS))
    assert all(near(y, exact) for y in found)
    assert not near(rg.revert(copy.deepcopy(model))(ROWS), exact, 1e-3)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_gamma_0_is_the_plain_model_itself(kind: str) -> None:
    torch.manual_seed(1)
    model = Loop(kind).double().eval()
    plain, before = model(ROWS), anatomy(model)
    rg.convert(model, stages=["blocks"], gamma=0, form="branch" if kind == "branch" else None, memory="1GB")
    rg.deploy(model)
    assert anatomy(model) == before
    assert torch.equal(model(ROWS), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_back(kind: str) -> None:
    torch.manual_seed(1)
    model = Loop(kind).double().eval()
    plain, before = model(ROWS), anatomy(model)
    rg.convert(model, stages=["blocks"], gamma=0.5, form="branch" if kind == "branch" else None, memory="1GB")
    rg.deploy(rg.deploy(model))
    assert "momentum in floats, gamma=1/2" in repr(model)
    with pytest.raises(ValueError, match="already converted"):
        rg.convert(model)
    rg.revert(model)
    assert anatomy(model) == before
    assert torch.equal(model(ROWS), plain)


NETS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    **{
        f"MomentumNet {form}, gamma={gamma}": (
            lambda form=form, gamma=gamma: rg.MomentumNet([Mlp() for _ in range(5)], gamma, form=form, velocity="first"), ROWS,
        )
        for form in ("branch", "block", "relu") for gamma in (0.9, 0, (0.5, 0, 1, 0.25, 0.9))
    },
    "own velocity": (lambda: rg.MomentumNet([Mlp() for _ in range(5)], 0.5, velocity=Mlp()), ROWS),
    "in place": (lambda: rg.MomentumNet([Block("in place") for _ in range(5)], 0.5, form="block"), ROWS),
    "HamiltonianNet": (lambda: HamiltonianNet([Mlp() for _ in range(5)], 0.1), ROWS),
    "CouplingNet": (lambda: CouplingNet([Mlp(4) for _ in range(5)]), ROWS),
    "IRevNet": (lambda: IRevNet([2, 1]), fixed(2, 3, 8, 8).double()),
    "resnet": (lambda: resnet(18, size="cifar", width=4, classes=3, gamma=0.9), fixed(2, 3, 8, 8).double()),
}  # fmt: skip


@pytest.mark.parametrize("name", NETS)
def test_networks_of_our_own(name: str) -> None:
    make, x = NETS[name]
    torch.manual_seed(0)
    net = make().double().eval()
    classes = [type(m) for m in net.modules()]
    with torch.no_grad():
        exact = net(x)
        rg.deploy(net)
        assert all(near(y, exact) for y in (net(x), net(x), copy.deepcopy(net)(x), pickle.loads(pickle.dumps(net))(x)))
        if name.endswith("gamma=0"):
            assert torch.equal(net(x), exact)
        assert near(torch.export.export(net, (x,)).module()(x), exact)
        assert near(rg.revert(net)(x), exact)
    assert [type(m) for m in net.modules()] == classes


@pytest.mark.parametrize("name", [name for k, name in enumerate(ARCHITECTURES) if k % 9 == 4])
def test_architectures(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.make().eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        exact = architecture.call(architecture.convert(model, gamma=0.5))
        found = architecture.call(rg.deploy(model))
    assert near(found, exact, 1e-5)


# tracers and exporters -------------------------------------------------------------------------------------------------


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


SHIPPED: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "resnet": (
        lambda: tv.resnet.ResNet(tv.resnet.Bottleneck, (3, 1, 1, 1), num_classes=5, width_per_group=4),
        fixed(2, 3, 32, 32),
    ),
    "vit": (
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2, num_heads=2),
        fixed(2, 3, 32, 32),
    ),
    "gpt2": (lambda: Logits(hf.GPT2LMHeadModel(hf.GPT2Config(**SMALL | {"num_hidden_layers": 2}))), ids(2, 7)),
    "llama": (lambda: Logits(hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL | {"num_hidden_layers": 3}))), ids(2, 7)),
}


def run_onnx(model: nn.Module, x: Tensor) -> Tensor:
    import onnxruntime

    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), model(x))
    file = io.BytesIO()
    torch.onnx.export(program, (), dynamo=True, optimize=False, verbose=False).save(file)
    session = onnxruntime.InferenceSession(file.getvalue())
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


TRACED: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "onnx": run_onnx,
    "export": lambda model, x: torch.export.export(model, (x,)).module()(x),
    "compile": lambda model, x: torch.compile(model, fullgraph=True, backend="eager")(x),
    "jit": lambda model, x: torch.jit.trace(model, (x,), check_trace=False)(x),
}


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped(name: str) -> None:
    make, x = SHIPPED[name]
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        plain = model(x)
        exact = rg.convert(model, gamma=0.5)(x)
        assert not near(plain, exact, 1e-4)
        rg.deploy(model)
        for how in ("onnx", "compile", "jit"):
            assert near(TRACED[how](model, x), exact, 1e-5), how


@pytest.mark.parametrize(
    ("kind", "called"), [("block", False), ("branch", True), ("in place", False), ("in place", True)]
)
def test_every_form_is_traced(kind: str, called: bool) -> None:
    """Before the first call it is not known whether a block writes to its input."""
    model = converted(kind, 0.5, depth=3)
    with torch.no_grad():
        exact = model(ROWS)
        rg.deploy(model)
        assert not called or near(model(ROWS), exact)
        for how in ("export", "compile", "jit"):
            assert near(TRACED[how](model, ROWS), exact), how
        torch._dynamo.reset()
        for block in model.blocks:
            block.compile(backend="eager", fullgraph=True)
        assert all(near(model(ROWS), exact) for _ in range(2))


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("velocity", [None, "first"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_generate(family: str, velocity: str | None) -> None:
    torch.manual_seed(0)
    model: Any = SHIPPED[family][0]().double().eval().model
    how: Any = {
        "max_new_tokens": 9,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
        "pad_token_id": 0,
    }
    prompt = ids(2, 5)
    exact = rg.convert(model, gamma=0.5, velocity=velocity).generate(prompt, use_cache=False, **how)
    rg.deploy(model)
    for use_cache in (False, True):
        found = model.generate(prompt, use_cache=use_cache, **how)
        assert torch.equal(found.sequences, exact.sequences)
        assert all(
            near(a, b, 1e-6) for a, b in zip(found.logits, exact.logits, strict=True)
        )  # the cache's own rounding


# how v gets from block to block ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["block", "branch"])
def test_a_pass_that_ends_early_leaves_nothing(kind: str) -> None:
    model = converted(kind, 0.9)
    exact = [model(ROWS, only) for only in (None, 2, 1)]
    rg.deploy(model)
    for k in (0, 1, 0, 2, 2, 0):
        with torch.no_grad():
            assert near(model(ROWS, (None, 2, 1)[k]), exact[k])


@pytest.mark.parametrize("kind", ["block", "branch"])
def test_a_pass_that_fails_leaves_nothing(kind: str) -> None:
    model = converted(kind, 0.9)
    exact = model(ROWS)
    rg.deploy(model)
    handle = model.blocks[2].f.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ROWS)
    handle.remove()
    assert near(model(ROWS), exact)


@pytest.mark.parametrize("kind", ["block", "branch"])
def test_several_threads(kind: str) -> None:
    """Each block waits until both threads are there."""
    model = converted(kind, 0.9)
    inputs = [ROWS, ROWS.flip(1)]
    exact = [model(x) for x in inputs]
    rg.deploy(model)
    barrier, found = threading.Barrier(2, timeout=30), [ROWS, ROWS]
    for block in model.blocks:
        block.register_forward_hook(lambda *_: (barrier.wait(), None)[1])

    def run(k: int) -> None:
        found[k] = model(inputs[k])

    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(near, found, exact))


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {"another": lambda x: x * 2, "in place": lambda x: x.mul_(2)}


@pytest.mark.parametrize("how", CHANGES)
def test_x_changed_between_blocks_begins_a_pass(how: str) -> None:
    model = converted("block", 0.9, between=CHANGES[how])
    with torch.no_grad():
        with pytest.warns(UserWarning, match=r"blocks\.2 was given something other"):
            exact = model(ROWS)
        other = rg.deploy(converted("block", 0.9, between=CHANGES[how]))
        with pytest.warns(UserWarning, match=r"blocks\.2 was given something other"):
            found = other(ROWS)
    assert near(found, exact)


def test_blocks_that_are_run_again() -> None:
    gammas = [0.5, 0.25, 0.9, 1, 0.125, 0.75]
    torch.manual_seed(0)
    model = Loop("block", 2, repeats=3).double().eval()
    exact = rg.convert(model, ROWS, gamma=gammas)(ROWS)
    assert stages_of(model)[0].blocks == 2
    assert near(rg.deploy(model)(ROWS), exact)
    adds = Loop("branch", 2, repeats=3).double().eval()
    rg.convert(adds, ROWS, gamma=0.5)
    before = anatomy(adds)
    with pytest.raises(ValueError, match=r"2 blocks in 6 steps, .* not seen where a pass begins"):
        rg.deploy(adds)
    assert anatomy(adds) == before


def test_other_inputs_and_outputs() -> None:
    model = converted("block", 0.5)
    exact = model(ROWS, also=ROWS)
    rg.deploy(model)
    assert near(model(ROWS, also=ROWS), exact)
    assert type(model.blocks[0](ROWS, also=ROWS)) is tuple
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        model.blocks[0]()


def test_nothing_stays_with_the_tensors() -> None:
    model = rg.deploy(converted("block", 0.5))
    seen: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda m, args, y: seen.append(y))
    with torch.no_grad():
        model(ROWS)
    assert not any(vars(x) for x in seen)
    assert all(not torch.equal(a, b) for a, b in pairwise(seen))


def test_a_block_that_begins_to_write_to_its_input() -> None:
    model = rg.deploy(converted("block", 0.5))
    exact = model(ROWS)
    model.blocks[2].kind = "in place"
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="wrote to its input, which it had not done before"):
            model(ROWS)
        assert near(model(ROWS), exact)


# training --------------------------------------------------------------------------------------------------------------


def test_gradients() -> None:
    model = converted("block", 0.5)
    exact = train_step(model, ROWS)
    found = train_step(rg.deploy(model), ROWS)
    assert exact.keys() == found.keys()
    assert all(near(found[name], exact[name], 1e-9) for name in exact)
    net = rg.MomentumNet([conv() for _ in range(3)], 0.5).double()
    x = fixed(2, 4, 5, 5).double()
    assert_same_bits({"y": rg.deploy(net)(x)}, {"y": rg.deploy(copy.deepcopy(net))(x)})
    assert near(net.eval()(x), float_recurrence(net.blocks, Fraction(1, 2), x))


@pytest.mark.filterwarnings("ignore:.*blocks.1 was given")
def test_reentrant_checkpoints_are_refused() -> None:
    from torch.utils.checkpoint import checkpoint

    def run(use_reentrant: bool) -> dict[str, Tensor]:
        model: Any = rg.deploy(converted("block", 0.5))
        x = ROWS.clone().requires_grad_()
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        x.square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    with pytest.raises(RuntimeError, match=r"no velocity with one: .*use_reentrant=True"):
        run(True)
    exact = train_step(converted("block", 0.5), ROWS)
    found = run(False)
    assert all(near(found[name], exact[name], 1e-9) for name in found)


# wrong input -----------------------------------------------------------------------------------------------------------


def test_nothing_to_deploy() -> None:
    with pytest.raises(ValueError, match=r"nothing to deploy in this Loop: it is not converted"):
        rg.deploy(Loop("block"))
    with pytest.raises(TypeError, match=r"must be an nn\.Module; got int"):
        rg.deploy(3)  # type: ignore[arg-type]


def test_branches_with_x_changed_between_them() -> None:
    model = converted("branch", 0.9, between=lambda x: x * 2)
    with pytest.warns(UserWarning, match=r"blocks\.2 was given something other"):
        model(ROWS)
    with pytest.raises(ValueError, match="starts from 0 again in its middle"):
        rg.deploy(model)
    assert "momentum, gamma=9/10" in repr(model)
