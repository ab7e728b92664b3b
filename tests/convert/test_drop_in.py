"""A converted model is the model it was to everything around it: optimizers, checkpoints, hooks, copies, casts."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import retrograde as rg
from conversion import MODES, anatomy, converted_in, step
from problems import assert_same_bits
from retrograde.convert.convert import stages_of
from retrograde.extras import require

X = torch.linspace(-2, 2, 80).view(2, 5, 8)
FIXED = rg.FixedPoint(20, torch.int32)


class Model(nn.Module):
    """An encoder and a decoder of PyTorch's, and a head."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, dropout, batch_first=True), 3)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.decoder(x, self.encoder(x)))
        return out


def call(model: nn.Module) -> Tensor:
    out: Tensor = model(X)
    return out


def same_in_reverse(model: nn.Module, run: Callable[[nn.Module], Tensor] = call, **options: Any) -> dict[str, Tensor]:
    """A step of the model converted to each of two modes, compared."""
    return converted_in(MODES[:2], model, run, **options)


def test_the_same_parameters_and_an_optimizer_made_before() -> None:
    model: Any = Model()
    parameters, names = list(model.parameters()), [name for name, _ in model.named_modules()]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    assert rg.convert(model, memory="reverse") is model
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert [name for name, _ in model.named_modules()] == names
    before = [p.detach().clone() for p in parameters]
    losses = []
    for _ in range(12):
        loss = (call(model) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not any(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


def test_blocks_are_still_of_their_class_and_say_what_they_do() -> None:
    model: Any = rg.convert(Model())
    assert isinstance(model.encoder.layers[0], nn.TransformerEncoderLayer)
    assert type(model.encoder.layers[0]).__name__ == "TransformerEncoderLayer"
    assert "encoder.layers.0-3: momentum, gamma=1/8" in repr(model)
    assert repr(model).count("momentum") == 2  # a line for each stage: equal blocks are printed once
    assert "momentum" not in repr(rg.revert(model))


def test_state_dicts_go_both_ways() -> None:
    plain, converted = Model(), rg.convert(Model())
    converted.load_state_dict(plain.state_dict())
    rg.revert(converted)
    plain.eval()
    converted.eval()
    assert torch.equal(plain(X), converted(X))
    file = io.BytesIO()
    torch.save(rg.convert(converted).state_dict(), file)
    file.seek(0)
    fresh = Model().eval()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(fresh(X), plain(X))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_casts(dtype: torch.dtype) -> None:
    model: Any = Model().to(dtype)
    found = same_in_reverse(model, lambda m: m(X.to(dtype)), verify="strict" if dtype == torch.float64 else "off")
    assert found["output"].dtype == dtype
    model = rg.convert(Model()).eval()
    model(X)  # finds the range
    first = model(X)
    assert model.double()(X.double()).dtype == torch.float64
    assert torch.equal(model.float()(X), first)


def test_train_and_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.backends.mha, "_is_fastpath_enabled", False
    )  # PyTorch's kernel for evaluation, in other bits
    model: Any = rg.convert(Model(0.5))
    assert not torch.equal(model(X), model(X))
    assert torch.equal(model.eval()(X), model(X))
    with torch.no_grad():
        quiet = model(X)
    with torch.inference_mode():
        assert torch.equal(model(X), quiet)
    assert torch.equal(quiet, model(X).detach())


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": lambda m: _saved(m),
}


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("used", [False, True])
def test_copies_are_converted_and_independent(how: str, used: bool) -> None:
    model: Any = rg.convert(Model(), gamma=0.8, memory="reverse")
    if used:
        step(model, call)
    other: Any = COPIES[how](model)
    assert_same_bits(step(model, call), step(other, call))
    assert not set(stages_of(model)) & set(stages_of(other))
    assert all(stage.gamma == stages_of(model)[0].gamma for stage in stages_of(other))
    rg.revert(other)
    assert type(other.encoder.layers[0]) is nn.TransformerEncoderLayer
    assert len(stages_of(model)) == 2
    assert call(model).shape == (2, 5, 3)


def test_averaged_copies() -> None:
    model: Any = rg.convert(Model(), fixed_point=FIXED)
    average = AveragedModel(model)
    step(model, call)
    average.update_parameters(model)
    assert torch.equal(average.eval()(X), model.eval()(X))


def test_hooks_see_every_block_once_and_change_nothing() -> None:
    def run(model: nn.Module) -> Tensor:
        out: Tensor = model(X.clone().requires_grad_())
        return out

    model: Any = rg.convert(Model(), memory="reverse")
    expected = step(model, run)
    rg.revert(model)
    seen: list[str] = []
    for name, module in model.encoder.layers.named_children():
        module.register_forward_pre_hook(lambda *_, n=name: seen.append(f"pre {n}"))
        module.register_forward_hook(lambda *_, n=name: seen.append(f"post {n}"))
        module.register_full_backward_hook(lambda *_, n=name: seen.append(f"back {n}"))
        module.register_full_backward_pre_hook(lambda *_, n=name: seen.append(f"before {n}"))
    rg.convert(model, memory="reverse")
    found = step(model, run)
    assert_same_bits(found, expected)
    forwards = [s for n in "0123" for s in (f"pre {n}", f"post {n}")]
    assert seen[:8] == forwards
    assert sorted(seen[8:]) == sorted(f"{kind} {n}" for n in "0123" for kind in ("back", "before"))


def test_a_hook_that_replaces_the_output_restarts_the_velocity_and_warns() -> None:
    model: Any = Model(0.0)
    model.encoder.layers[1].register_forward_hook(lambda module, args, out: out * 1.5)
    with pytest.warns(
        UserWarning, match=r"encoder\.layers\.2 was given something other than the output of the block before"
    ):
        found = same_in_reverse(model)
    halves = [
        rg.MomentumNet(list(copy.deepcopy(model.encoder.layers[a:b])), gamma=1 / 8, form="block", fixed_point=FIXED)
        for a, b in ((0, 2), (2, 4))
    ]
    for layer in halves[0].blocks:
        layer._forward_hooks.clear()
    seen: list[Tensor] = []
    model.decoder.register_forward_pre_hook(lambda module, args: seen.append(args[1].detach()))
    rg.convert(model, memory="store", fixed_point=FIXED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call(model)
    assert torch.equal(seen[-1], halves[1](halves[0](X) * 1.5).detach())
    assert found["output"].isfinite().all()


def test_apply_reaches_blocks() -> None:
    def zeroed(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)

    model: Any = rg.convert(Model())
    model.apply(zeroed)
    assert not model.encoder.layers[0].linear1.weight.any()


def test_two_conversions_compose() -> None:
    model, at_once = Model(), Model()
    at_once.load_state_dict(model.state_dict())
    rg.convert(model, stages=["encoder.layers"], memory="reverse")
    rg.convert(model, stages=["decoder.layers"], memory="reverse")
    rg.convert(at_once, memory="reverse")
    assert_same_bits(step(model, call), step(at_once, call))
    rg.revert(model)
    assert not stages_of(model)
    assert not model._forward_pre_hooks


def test_part_of_a_model() -> None:
    model: Any = Model()
    before = anatomy(model)
    rg.convert(model.encoder, memory="reverse")
    assert len(stages_of(model)) == 1
    found = {"reverse": step(model, call)}
    rg.revert(model.encoder)
    assert anatomy(model) == before
    rg.convert(model, stages=["encoder.layers"], memory="store")
    assert_same_bits(step(model, call), found["reverse"])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_afterwards(backend: str) -> None:
    model: Any = Model(0.0)
    expected = same_in_reverse(model)
    rg.convert(model, memory="reverse")
    compiled = torch.compile(model, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler
        torch.manual_seed(7)
        y = compiled(X)
        (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    assert torch.equal(y.detach(), expected["output"])
    assert torch.equal(
        model.encoder.layers[0].linear1.weight.grad, expected["gradient encoder.layers.0.linear1.weight"]
    )


def test_memory_goes_with_the_graph() -> None:
    """What a pass keeps is freed when its output is dropped, and does not grow with depth."""
    held = {}
    for layers in (4, 12):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 64, 0.0, batch_first=True), layers)
        x = torch.randn(4, 32, 8)
        for mode in ("reverse", "store"):
            rg.convert(model, gamma=0.9, memory=mode)
            held[mode, layers] = rg.measure(model, x, repeats=1).held
            assert not any(stage.open.passes for stage in stages_of(model))
            rg.revert(model)
    assert held["reverse", 12] < 1.2 * held["reverse", 4]
    assert held["store", 12] > 2 * held["store", 4]


def test_lora() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = require("peft")
    model: Any = Model()
    found = {}
    for mode in ("store", "reverse"):
        converted = rg.convert(copy.deepcopy(model), memory=mode)
        torch.manual_seed(1)
        tuned = peft.get_peft_model(
            converted, peft.LoraConfig(target_modules=["linear1", "linear2"], init_lora_weights=False)
        )
        found[mode] = step(tuned, call)
    assert_same_bits(found["store"], found["reverse"])
    trained = [name for name in found["reverse"] if name.startswith("gradient")]
    assert trained
    assert all("lora" in name for name in trained)


@pytest.mark.parametrize("memory", ["reverse", "auto"])
def test_a_converted_model_goes_with_its_last_reference(memory: str) -> None:
    """Without waiting for the garbage collector: a user who deletes a model wants its memory back."""
    model = rg.convert(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3), memory=memory)
    gc.collect()
    gc.disable()
    try:
        model(torch.randn(2, 5, 16)).sum().backward()
        weight = weakref.ref(model.layers[0].linear1.weight)
        del model
        assert weight() is None
    finally:
        gc.enable()
