"""Layers in parts: attention and MLP as steps of their own, of the architectures that allow it; and why others are left whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from torch import Tensor, nn

import retrograde as rg
from conversion import MODES, anatomy, compile_blocks, converted_in, step
from problems import assert_same_bits
from retrograde.convert.convert import stages_of
from retrograde.convert.find import find
from retrograde.convert.split import Parts, parts_of
from retrograde.convert.sums import Whole
from retrograde.extras import require
from retrograde.memory.budget import observe
from retrograde.memory.fake import fake_copy
from retrograde.memory.step import as_call

hf = require("transformers")

IN_TWO = (
    "torchvision vit", "torchvision swin", "timm vit_tiny", "timm beit_base", "timm swin_tiny", "timm mixer",
    "transformers ModernBert", "transformers GPT2", "transformers GPTNeo", "transformers OPT", "transformers Llama",
    "transformers Mistral", "transformers Qwen2", "transformers Qwen3", "transformers Gemma2", "transformers Gemma3",
    "transformers Phi3", "transformers Mixtral", "transformers ViT", "transformers Dinov2", "transformers CLIP",
    "transformers Swin", "transformers Whisper", "torch encoder, pre-norm batch first",
)  # fmt: skip
IN_THREE = ("timm xcit_nano_12_p16", "torch decoder, pre-norm time first")
SPLIT = dict.fromkeys(IN_TWO, 2) | dict.fromkeys(IN_THREE, 3)
WHOLE = {
    "transformers GPTJ": "it does not add to x twice",
    "transformers Phi": "it does not add to x twice",
    "transformers GPTNeoX": "it does not add to x twice",
    "transformers Bert": "what it returns is not known to be a sum with x",
    "transformers T5": "what it returns is not known to be a sum with x",
    "torch encoder, post-norm batch first": "what it returns is not known to be a sum with x",
    "timm convnext_atto": "what it returns is not known to be a sum with x",
}


@pytest.mark.parametrize("name", SPLIT)
def test_same_network_in_more_steps(name: str) -> None:
    """The same at γ = 0 to the bit; reverse equal to store; and everything as it was after `revert`."""
    architecture = ARCHITECTURES[name]
    model, call = architecture.make(), architecture.call
    plain, before = step(model, call), anatomy(model)
    layer = dict(model.named_modules())[find(model).blocks[0]]
    assert parts_of(layer).steps == SPLIT[name]
    split = converted_in(MODES, model, call, gamma=1 / 8, split=True, verify="strict")
    whole = converted_in(["store"], model, call, gamma=1 / 8)
    assert not torch.equal(whole["output"], split["output"])
    rg.convert(model, gamma=0, memory="checkpoint", split=True)
    assert_same_bits(step(model, call), plain)
    rg.revert(model)
    assert anatomy(model) == before
    assert_same_bits(step(model, call), plain)


@pytest.mark.parametrize("name", WHOLE)
def test_layers_left_whole(name: str) -> None:
    model = ARCHITECTURES[name].make()
    before = anatomy(model)
    with pytest.raises(ValueError, match=f"there is no layer to split.*{WHOLE[name]}"):
        rg.convert(model, split=True)
    assert anatomy(model) == before


class Layer(nn.Module):
    """A pre-norm layer, whose parts are written out by `halves`."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh())
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.norm = nn.LayerNorm(width)
        self.parallel = False

    def forward(self, x: Tensor, scale: float = 1.0, **more: Tensor) -> Any:
        residual = x
        shape = x.shape
        h = self.attention(x)
        weights = h.mean(-1)
        half = scale / 2
        h = h * scale
        if "bias" in more:
            h = h + more["bias"]
        if self.parallel:
            return residual + h + self.mlp(x), weights
        x = residual + h
        x = x.reshape(-1, shape[-1])
        x = x + self.mlp(x) * (half + half)
        return x.reshape(shape), weights

    def halves(self) -> tuple[Callable[..., Tensor], ...]:
        def first(x: Tensor, bias: Tensor) -> Tensor:
            return x + (self.attention(x) * 0.5 + bias)

        return first, lambda x, bias: x + self.mlp(x) * 0.5


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        every = []
        for layer in self.layers:
            x, weights = layer(x, scale=0.5, bias=bias)
            every.append(weights)
        return x, torch.stack(every)


def problem() -> tuple[Model, Tensor, Tensor]:
    torch.manual_seed(0)
    return Model(), torch.randn(2, 5, 8), torch.randn(8, requires_grad=True)


def test_equal_to_a_momentum_net_of_the_halves() -> None:
    """The steps are those of a MomentumNet whose blocks are the halves, written out. What layers return besides has its gradient."""
    model, x, bias = problem()

    class Half(nn.Module):
        def __init__(self, layer: Layer, which: int) -> None:
            super().__init__()
            self.layer, self.which = layer, which

        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            return self.layer.halves()[self.which](x, bias)

    net = rg.MomentumNet([Half(layer, k) for layer in model.layers for k in (0, 1)], gamma=1 / 8, form="block")
    y = net(x, bias)
    y.square().sum().backward()
    expected = [p.grad.clone() for p in (bias, *model.layers[0].attention.parameters()) if p.grad is not None]
    model.zero_grad()
    bias.grad = None
    rg.convert(model, stages="layers", gamma=1 / 8, memory="reverse", split=True)
    got, weights = model(x, bias)
    assert torch.equal(got, y)
    got.square().sum().backward()
    found = [p.grad for p in (bias, *model.layers[0].attention.parameters()) if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    (gradient,) = torch.autograd.grad(model(x, bias)[1].sum(), bias)
    rg.revert(model)
    assert weights.shape == (3, 2, 5)
    assert gradient.abs().sum() > 0


def test_parts_need_what_they_read() -> None:
    first, second = parts_of(Layer()).parts
    assert (first.needs, first.rest, first.uses) == (("scale",), "more", ("attention",))
    assert (second.needs, second.carried, second.rest, second.uses) == (
        ("shape", "weights", "half"),
        ("shape", "weights", "half"),
        "",
        ("mlp",),
    )


def test_a_layer_that_changes_is_refused() -> None:
    model, x, bias = problem()
    rg.convert(model, stages="layers", split=True)
    model(x, bias)
    model.layers[1].parallel = True
    with pytest.raises(
        RuntimeError,
        match=r"layers\.1 was split when it was converted, and cannot be any more: it does not add to x twice",
    ):
        model(x, bias)
    model.layers[1].parallel = False
    model(x, bias)


def test_wrong_arguments_raise_as_in_a_call() -> None:
    layer = Layer()
    parts = parts_of(layer)
    with pytest.raises(TypeError, match="too many positional arguments"):
        parts.walk(lambda *_: None, layer, torch.zeros(1), (1.0, 2.0), {})
    with pytest.raises(TypeError, match="multiple values for argument 'scale'"):
        parts.walk(lambda *_: None, layer, torch.zeros(1), (1.0,), {"scale": 1.0})


class Normalised(Layer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = self.norm(x + self.attention(x))
        return self.norm(x + self.mlp(x))


class Before(Layer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        h = self.norm(x)
        x = x + self.attention(h)
        return x + self.mlp(h)


class Changes(Layer):
    def forward(self, x: Tensor, **more: Any) -> Tensor:  # type: ignore[override]
        x = x + self.attention(x) * more.pop("scale", 1.0)
        return x + self.mlp(x) * more.get("scale", 1.0)


class Transposed(Layer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = x.transpose(1, 2)
        x = x + self.attention(x)
        x = x + self.mlp(x)
        return x.transpose(1, 2)


class FirstSum(Layer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        first = x
        x = x + self.attention(x)
        return first + self.mlp(x)


class Loop(Layer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        for part in (self.attention, self.mlp):
            x = x + part(x)
        return x


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Normalised, "what it returns is not known to be a sum with x"),
        (Before, "'h' is made before a sum with x and used after it"),
        (Changes, r"it changes its \*\*more"),
        (Transposed, "it adds to x in another shape"),
        (FirstSum, "'first' is made before a sum with x and used after it"),
        (Loop, "what it returns is not known to be a sum with x"),
    ],
)
def test_why_a_layer_is_left_whole(kind: type[Layer], why: str) -> None:
    with pytest.raises(Whole, match=why):
        parts_of(kind())


class Optional(Layer):
    """One sum more, if it is given something to look at."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:  # type: ignore[override]
        x = x + self.attention(x)
        if other is not None:
            h = self.norm(x)
            h = h * other
            x = x + h
        h = self.mlp(x)
        h += x
        return h


@pytest.mark.parametrize("given", [None, 2.0])
def test_a_part_that_is_not_always_there(given: float | None) -> None:
    torch.manual_seed(0)
    layer = Optional()
    parts: Parts = parts_of(layer)
    x, other = torch.randn(2, 3, 8), None if given is None else torch.tensor(given)
    seen: list[int] = []

    def take(k: int, part: Any, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(k)
        return part.run(layer, x, *args, **kwargs)

    assert parts.steps == 3
    assert torch.equal(parts.walk(take, layer, x, (other,), {}), layer(x, other))
    assert seen == ([0, 1] if given is None else [0, 1, 2])


def test_hooks_on_submodules_fire_once() -> None:
    model, x, bias = problem()
    seen: list[str] = []
    for name, module in model.layers[1].named_children():
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
        module.register_full_backward_hook(lambda *_, name=name: seen.append(f"{name} backward"))
    model.layers[1].register_forward_hook(lambda *_: seen.append("layer"))
    rg.convert(model, stages="layers", memory="store", split=True)
    model(x, bias)[0].sum().backward()
    assert seen == ["attention", "mlp", "layer", "mlp backward", "attention backward"]


def test_an_optimizer_that_steps_in_backward() -> None:
    """The MLP is updated before attention is run again: that part has nothing of it."""
    after = {}
    for memory in ("store", "reverse"):
        torch.manual_seed(0)
        model = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, norm_first=True), 6, enable_nested_tensor=False
        )
        rg.convert(model, memory=memory, split=True)
        for p in model.parameters():

            def update(p: Tensor) -> None:
                with torch.no_grad():
                    p.sub_(0.1 * p.grad)  # type: ignore[operator]
                p.grad = None

            p.register_post_accumulate_grad_hook(update)
        model(torch.linspace(-1, 1, 80).view(5, 2, 8)).square().sum().backward()
        after[memory] = {name: p.detach() for name, p in model.named_parameters()}
    assert_same_bits(after["store"], after["reverse"])


def test_a_method_replaced_on_the_object() -> None:
    """It may use any submodule, so running statistics of all of them move once and not twice."""

    class Methods(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(8)

        def feed(self, x: Tensor) -> Tensor:
            y: Tensor = self.mlp(x)
            return y

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            x = x + self.attention(x)
            return x + self.feed(x)

    found = {}
    for memory in ("store", "reverse"):
        torch.manual_seed(0)
        model = nn.Sequential(*(Methods() for _ in range(6)))
        for layer in model:
            layer.feed = lambda x, layer=layer: layer.batch_norm(x).tanh()
        rg.convert(model, stages="*", memory=memory, split=True)
        found[memory] = step(model, lambda model: model(torch.linspace(-1, 1, 80).view(10, 8)))
    assert_same_bits(found["store"], found["reverse"])
    assert any("running_mean" in name for name in found["store"])


@pytest.mark.parametrize("split", [False, True])
def test_routers_route_as_before(split: bool) -> None:
    """The loss that balances the experts, made of what routers gave in the first run, has the same gradient."""
    found, tokens = {}, torch.arange(3, 23).view(2, 10)
    for memory in ("store", "reverse"):
        model = ARCHITECTURES["transformers Mixtral"].make()
        rg.convert(model, memory=memory, split=split, verify="strict")
        found[memory] = step(
            model, lambda model: model(tokens, labels=tokens, output_router_logits=True, use_cache=False).loss
        )
    gate = next(name for name in found["store"] if "gate" in name)
    assert found["store"][gate].abs().sum() > 0
    assert_same_bits(found["store"], found["reverse"])


@pytest.mark.parametrize("name", ["transformers Llama", "transformers Whisper", "torch encoder, pre-norm batch first"])
def test_deployed(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.make().eval()
    with torch.no_grad():
        plain = architecture.call(model)
        y = architecture.call(rg.convert(model, gamma=1 / 4, split=True))
        floats = architecture.call(rg.deploy(model))
        assert (floats - y).abs().max() < 1e-5 < (plain - y).abs().max()
        assert torch.equal(architecture.call(rg.revert(model)), plain)


@pytest.mark.parametrize("gamma", [0, 1 / 8])
def test_generates_the_same_with_a_cache(gamma: float) -> None:
    model = ARCHITECTURES["transformers Llama"].make().eval()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    start = torch.tensor([[5, 9, 30, 41]])
    plain = model.generate(start, **options)
    rg.convert(model, gamma=gamma, split=True)
    tokens = model.generate(start, **options)
    assert torch.equal(tokens, model.generate(start, use_cache=False, **options))
    assert gamma or torch.equal(tokens, plain)


def test_random_signs_evaluate_as_the_plain_network() -> None:
    architecture = ARCHITECTURES["torch encoder, pre-norm batch first"]
    model = architecture.make().eval()
    with torch.no_grad():
        plain = architecture.call(model)  # by the kernel for whole layers
        rg.convert(model, gamma=rg.RandomSign(1 / 8), split=True)
        assert torch.equal(architecture.call(model), plain)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own imports
def test_an_initial_velocity_and_compiled_parts() -> None:
    architecture = ARCHITECTURES["transformers Llama"]
    model = architecture.make()
    found = []
    for memory, compiled in (("store", False), ("reverse", False), ("reverse", True)):
        rg.convert(model, velocity="first", split=True, memory=memory)
        if compiled:
            compile_blocks(model, backend="eager")
        found.append(step(model, architecture.call))
        rg.revert(model)
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[1], found[2])


def test_saved_with_the_model(tmp_path: Any) -> None:
    model = rg.convert(ARCHITECTURES["transformers Llama"].make().eval(), gamma=1 / 4, split=True)
    tokens = torch.tensor([[5, 9, 30, 41]])
    model.save_pretrained(tmp_path)
    loaded = rg.convert(type(model).from_pretrained(tmp_path).eval())
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    whole = rg.convert(rg.revert(loaded), gamma=1 / 4)
    with pytest.warns(UserWarning, match="saved with .*split = True"):
        whole.load_state_dict(model.state_dict())
    copied = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(copied(tokens).logits, model(tokens).logits)


def peak(**options: Any) -> int:
    """Bytes that a step of a Llama of 32 layers takes at its highest point, on 1,024 tokens."""
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=128, num_hidden_layers=32, num_attention_heads=4, num_key_value_heads=4
    )  # fmt: skip
    model = rg.convert(hf.LlamaForCausalLM(config), **options)
    tokens = {"input_ids": torch.zeros(1, 1024, dtype=torch.long), "use_cache": False}
    with fake_copy(model, (), tokens) as fake:
        stacks = [stage.stack for stage in stages_of(fake.model)]
        return observe(fake, stacks, loss=lambda out: out[0].mean()).peak


def test_less_memory_on_long_sequences() -> None:
    """At most 0.75 of per-layer checkpoints with whole layers, 0.6 with layers in two."""
    checkpoints = peak(gamma=0, memory="checkpoint")
    assert peak(memory="reverse") <= 0.75 * checkpoints
    assert peak(memory="reverse", split=True) <= 0.6 * checkpoints
    assert peak(memory="store", split=True) > 5 * checkpoints


def test_plan_says_what_is_split() -> None:
    model = nn.Sequential(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, norm_first=True), 3, enable_nested_tensor=False),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False),
    )
    args, _ = as_call(torch.zeros(5, 2, 8))
    first, second = rg.plan(model, args, split=True).stages
    assert (first.blocks, first.form, first.reason) == (3, "block, 6 steps", "")
    assert (second.form, second.reason) == (
        "block",
        "TransformerEncoderLayer: what it returns is not known to be a sum with x",
    )
    rg.convert(model, split=True)
    model(*args).sum().backward()
