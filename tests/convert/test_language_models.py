"""Language models of transformers, converted: generation with and without a cache, masks, other outputs, dropped layers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, PAIR, SEQ, TOKENS, hf
from torch import nn

import retrograde as rg
from conversion import MODES, converted_in, step
from problems import assert_same_bits


def make(family: str, **options: Any) -> Any:
    model = ARCHITECTURES[f"transformers {family}"].make()
    for name, value in options.items():
        setattr(model.config, name, value)
    return model


def causal(family: str) -> Any:
    if family != "T5":
        return make(family)
    torch.manual_seed(0)
    return hf.T5ForConditionalGeneration(make("T5").config)


@pytest.mark.parametrize("family", ["Llama", "GPT2", "T5"])
def test_generation_with_a_cache_gives_the_tokens_of_one_without(family: str) -> None:
    model = causal(family).eval()
    tokens = {"input_ids": TOKENS["input_ids"][:, :6], "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    plain = model.generate(**tokens)
    rg.convert(model, gamma=0.5)
    cached = model.generate(**tokens, use_cache=True)
    assert torch.equal(cached, model.generate(**tokens, use_cache=False))
    assert cached.shape == plain.shape
    rg.revert(model)
    assert torch.equal(model.generate(**tokens), plain)


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Bloom"])
def test_training_with_the_cache_left_on(family: str) -> None:
    model = make(family, use_cache=True)
    converted_in(MODES, model, lambda m: m(**TOKENS).logits)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_what_makes_the_initial_velocity_leaves_the_cache_alone(attention: str) -> None:
    """Block 0 is run twice then, on the same tokens."""
    model = make("Llama").eval()
    model.set_attn_implementation(attention)
    rg.convert(model, gamma=0.5, velocity="first", fixed_point=rg.FixedPoint(24, torch.int32))
    tokens = TOKENS["input_ids"]
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask, use_cache=False).logits
        first = model(tokens[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
        lengths = {layer.get_seq_length() for layer in first.past_key_values.layers}
        assert lengths == {tokens.shape[1] - 1}
        last = model(tokens[:, -1:], attention_mask=mask, past_key_values=first.past_key_values, use_cache=True).logits
    torch.testing.assert_close(last[:, 0], whole[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
def test_training_from_an_initial_velocity_with_the_cache_left_on(padded: bool) -> None:
    model = make("Llama", use_cache=True)
    mask = torch.ones_like(TOKENS["input_ids"])
    mask[0, :3] = 1 - int(padded)
    converted_in(MODES, model, lambda m: m(TOKENS["input_ids"], attention_mask=mask).logits, velocity="first")


def test_a_filled_cache_while_gradients_are_recorded_is_refused() -> None:
    model: Any = rg.convert(make("Llama").eval(), memory="reverse")
    with torch.no_grad():
        cache = model(TOKENS["input_ids"], use_cache=True).past_key_values
    assert cache.get_seq_length() == 10
    with pytest.raises(ValueError, match=r"key-value cache with something in it.*use_cache=False"):
        model(TOKENS["input_ids"][:, :1], past_key_values=cache)


def test_hidden_states_and_attentions() -> None:
    model: Any = ARCHITECTURES["transformers Bert"].make()
    model.set_attn_implementation("eager")
    found: dict[str, Any] = {}
    for mode in ("store", "reverse"):
        rg.convert(model, memory=mode)
        torch.manual_seed(7)
        out = model(**TOKENS, output_hidden_states=True, output_attentions=True)
        sum(t.square().mean() for t in (*out.hidden_states, *out.attentions)).backward()
        found[mode] = {
            f"{kind} {k}": t.detach() for kind in ("hidden_states", "attentions") for k, t in enumerate(out[kind])
        }
        found[mode] |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        rg.revert(model)
    assert_same_bits(found["store"], found["reverse"])
    assert len([name for name in found["store"] if name.startswith("attentions")]) == 4
    assert len([name for name in found["store"] if name.startswith("hidden_states")]) == 5


def test_embeddings_as_inputs_get_gradients() -> None:
    model, found = make("Llama"), {}
    for mode in ("store", "reverse"):
        rg.convert(model, memory=mode)
        torch.manual_seed(7)
        embedded = model.get_input_embeddings()(TOKENS["input_ids"]).detach().requires_grad_()
        model(inputs_embeds=embedded, attention_mask=TOKENS["attention_mask"]).logits.sin().sum().backward()
        found[mode] = {"embeddings": embedded.grad}
        rg.revert(model)
    assert found["store"]["embeddings"].abs().sum() > 0
    assert_same_bits(found["store"], found["reverse"])


def test_masks_reach_the_blocks() -> None:
    model = rg.convert(
        ARCHITECTURES["transformers Bert"].make().eval(), memory="reverse", fixed_point=rg.FixedPoint(20, torch.int32)
    )
    mask = TOKENS["attention_mask"]
    other = torch.where(mask, TOKENS["input_ids"], 5)
    a, b = (model(input_ids=ids, attention_mask=mask)[0][1, :7] for ids in (TOKENS["input_ids"], other))
    assert torch.equal(a, b)  # what is masked does not matter
    assert not torch.equal(model(TOKENS["input_ids"])[0][1, :7], model(other)[0][1, :7])


def test_encoder_gets_gradients_through_the_decoder() -> None:
    found = converted_in(MODES, make("Bart"), lambda m: m(**PAIR)[0], verify="strict")
    assert found["gradient encoder.layers.0.fc1.weight"].abs().sum() > 0


def test_dropped_layers() -> None:
    """LayerDrop leaves blocks out: a pass is then shorter, and what comes after continues it."""
    config = hf.BartConfig(**{**SEQ, "encoder_layers": 6}, encoder_layerdrop=0.5, decoder_layerdrop=0.3)
    torch.manual_seed(0)
    model, found = hf.BartModel(config).train(), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for mode in ("store", "reverse"):
            rg.convert(model, memory=mode)
            found[mode] = [step(model, lambda m: m(**PAIR)[0]) for _ in range(2)]
            rg.revert(model)
    for a, b in zip(*found.values(), strict=True):
        assert_same_bits(a, b)


def test_shared_layers_of_albert() -> None:
    config = hf.AlbertConfig(
        vocab_size=64, embedding_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4,
        max_position_embeddings=40, hidden_dropout_prob=0.1,
    )  # fmt: skip
    model: nn.Module = hf.AlbertModel(config).train()
    converted_in(MODES, model, lambda m: m(TOKENS["input_ids"])[0], {"input_ids": TOKENS["input_ids"]})
