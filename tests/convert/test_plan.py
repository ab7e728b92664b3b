"""`plan`: what it lists, how near its bytes are to measured ones, how it prints, and that it touches nothing."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from fractions import Fraction
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, SMALL, hf, tv
from torch import nn

import retrograde as rg
from conversion import anatomy
from retrograde.convert.distance import TOLERANCE
from retrograde.convert.plan import Row
from retrograde.memory import Peak


def encoder(layers: int = 8) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def resnet() -> nn.Module:
    model: nn.Module = tv.resnet.ResNet(tv.resnet.Bottleneck, [3, 4, 2, 1], width_per_group=4)
    return model


def llama() -> nn.Module:
    config = hf.LlamaConfig(**SMALL | {"num_hidden_layers": 6}, use_cache=False)
    model: nn.Module = hf.LlamaForCausalLM(config)
    return model


def gpt2() -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=6, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model: nn.Module = hf.GPT2LMHeadModel(config)
    return model


def vit() -> nn.Module:
    model: nn.Module = tv.VisionTransformer(64, 8, 6, 2, 32, 64, num_classes=5)
    return model


TEXT = {
    "input_ids": torch.randint(3, 60, (8, 48)),
    "attention_mask": torch.arange(48)[None] < torch.linspace(20, 48, 8)[:, None],
}
MEASURED: dict[str, tuple[Any, Any]] = {
    "encoder of 8": (encoder, torch.randn(8, 64, 32)),
    "llama": (llama, TEXT),
    "gpt2": (gpt2, TEXT),
    "torchvision vit": (vit, torch.randn(4, 3, 64, 64)),
}


IMAGES = torch.randn(4, 3, 32, 32)


@functools.cache
def planned(name: str) -> rg.Plan:
    """Trying every way out takes seconds: once for all tests that look at the same plan."""
    if name == "resnet":
        make, example = resnet, IMAGES
    elif name.startswith("encoder of "):
        make, example = lambda: encoder(int(name.split()[2])), torch.randn(8, 64, 32)
    elif name in MEASURED:
        make, example = MEASURED[name]
    else:
        make, example = ARCHITECTURES[name].make, ARCHITECTURES[name].example
    return rg.plan(make(), example, gamma=0.9)


@pytest.mark.parametrize("name", MEASURED)
def test_prediction_against_measurement(name: str) -> None:
    make, example = MEASURED[name]
    model, plan = make(), planned(name)
    measured = {"plain": rg.measure(model, example, repeats=1)}
    for way in ("checkpoint", "reverse", "auto"):
        rg.convert(model, gamma=0 if way == "checkpoint" else 0.9, memory=way)
        measured[way] = rg.measure(model, example, repeats=1)
        rg.revert(model)
    for way, report in measured.items():
        assert plan.peaks[way].held == pytest.approx(report.held, rel=0.02), way
        assert plan.peaks[way].peak == pytest.approx(report.peak, rel=0.10), way


SHALLOW = ["encoder of 6", "transformers Bert", "timm mixer", "transformers T5"]


@pytest.mark.parametrize("name", [*MEASURED, "resnet", "timm vit_tiny", *SHALLOW])
def test_auto_is_never_above_checkpoint(name: str) -> None:
    plan = planned(name)
    slack = 1.07 if name in SHALLOW else 1.0  # a copy of the stage's input and a second gradient, beside very little
    bits = 0
    if name == "resnet":  # too few blocks for reversal: one bit an element and block beside their inputs
        assert {row.form for row in plan.stages} == {"relu"}
        block = rg.plan(resnet(), IMAGES, form="block")
        assert block.peaks["auto"].peak <= plan.peaks["checkpoint"].peak
        bits = plan.peaks["auto"].held - block.peaks["auto"].held
        assert bits == 4 * (2 * 256 * 8 * 8 + 3 * 512 * 4 * 4) // 8
    assert plan.peaks["auto"].peak <= slack * plan.peaks["checkpoint"].peak + bits
    if name == "timm vit_tiny":  # so small that the first convolution is all there is
        assert plan.peaks["auto"].held < plan.peaks["plain"].held
    else:
        assert plan.peaks["auto"].peak < plan.peaks["plain"].peak


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_relus_in_the_steps_take_their_bits_and_no_gradient_more(autocast: torch.dtype | None) -> None:
    """Large images, so that the highest point is where a stage's last block has its gradients."""
    example = torch.empty(16, 3, 96, 96)
    relu, block = (rg.plan(resnet(), example, form=form, autocast=autocast).peaks for form in ("relu", "block"))
    for way in ("reverse", "auto"):
        bits = relu[way].held - block[way].held
        assert bits == 16 * (2 * 256 * 24 * 24 + 3 * 512 * 12 * 12) // 8
        assert relu[way].peak <= block[way].peak + bits


def test_rows_and_reasons() -> None:
    plan = rg.plan(resnet(), torch.randn(4, 3, 32, 32), memory="reverse")
    assert [(row.path, row.blocks, row.form, row.mode) for row in plan.stages] == [
        ("layer1.1-2", 2, "relu", "reverse"),
        ("layer2.1-3", 3, "relu", "reverse"),
    ]
    assert {row.path: row.mode for row in plan.left} == dict.fromkeys(
        ["layer1.0", "layer2.0", "layer3.0", "layer3.1", "layer4.0"], "checkpoint"
    )
    reasons = {row.path: row.reason for row in plan.left}
    assert "downsample" in reasons["layer2.0"]
    assert reasons["layer3.1"]
    assert [row.path for row in plan.rows] == sorted(row.path for row in plan.rows)
    assert all(row.kept < row.plain for row in plan.rows)


def test_modes_asked_for() -> None:
    stored = rg.plan(encoder(), torch.randn(8, 64, 32), memory="store")
    assert stored.peaks["store"].held > stored.peaks["checkpoint"].held
    assert [row.mode for row in stored.rows] == ["store"]
    assert set(planned("encoder of 8").peaks) == {"plain", "checkpoint", "reverse", "auto"}


def test_auto_takes_what_holds_less() -> None:
    modes = {n: planned(f"encoder of {n}").stages[0].mode for n in (2, 8)}
    assert modes == {2: "checkpoint", 8: "reverse"}  # two inputs of 4 bytes, or 9 bytes of integers


def test_reverse_does_not_grow_with_depth() -> None:
    shallow, deep = (planned(f"encoder of {layers}").peaks for layers in (8, 16))
    assert deep["reverse"].held == pytest.approx(
        shallow["reverse"].held, rel=0.001
    )  # the range is watched layer by layer
    assert deep["checkpoint"].held > 1.5 * shallow["checkpoint"].held
    assert deep["plain"].held > 1.5 * shallow["plain"].held


def test_printed() -> None:
    plan = planned("resnet")
    verdict, _, title, _, header, *lines = str(plan).splitlines()
    assert verdict == plan.verdict
    assert title == "ResNet: 5 blocks in 2 momentum stages, gamma = 0.9"
    table = lines[: len(plan.rows)]
    assert "left out; changes the shape of its input (downsample)" in " ".join(" ".join(lines).split())
    for column in ("form", "mode"):  # text begins where its header does; numbers end there
        at = header.index(column)
        assert all(line[at - 1] == " " and line[at] != " " for line in table)
    end = header.index("plain") + len("plain")
    assert all(line[end - 1] != " " and line[end] == " " for line in table)
    assert any("parameters" in line for line in lines)


class Tables(HTMLParser):
    VOID = ("br", "hr", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.rows += tag == "tr"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html() -> None:
    plan = planned("resnet")
    page = plan._repr_html_()
    parser = Tables()
    parser.feed(page)
    assert not parser.open
    assert parser.rows == len(plan.rows) + 1 + len(plan.peaks) + 1 + len(plan.gammas) + 1
    assert all(row.path in page for row in plan.rows)
    assert not re.search(r"<(?!/?(p|b|table|thead|tbody|tr|th|td)>)", page)


@pytest.mark.parametrize("name", ["encoder of 8", "resnet"])
def test_by_gamma(name: str) -> None:
    """What another γ would take in reverse is what a plan at that γ predicts, to the byte."""
    plan = planned(name)
    assert [row.gamma for row in plan.gammas] == [
        Fraction(1, 16),
        Fraction(1, 8),
        Fraction(1, 4),
        Fraction(1, 2),
        Fraction(9, 10),
    ]
    assert [row.bits for row in plan.gammas] == pytest.approx([4, 3, 2, 1, 0.152], abs=1e-4)
    make, example = (resnet, IMAGES) if name == "resnet" else MEASURED[name]
    row, other = plan.gammas[0], rg.plan(make(), example, gamma=1 / 16).peaks["reverse"]
    assert (row.peak, row.held) == (other.peak, other.held)
    assert row.held > plan.gammas[-1].held
    table = str(plan).rpartition("\n\n")[2].splitlines()
    assert [line.split()[:2] for line in table[1:]] == [
        ["1/16", "4"],
        ["1/8", "3"],
        ["1/4", "2"],
        ["1/2", "1"],
        ["0.9", "0.15"],
    ]
    assert all(len(line) <= 80 for line in table)


def test_the_model_is_untouched() -> None:
    model = resnet()
    model(torch.randn(4, 3, 32, 32)).sum().backward()
    before, state = anatomy(model), {name: value.clone() for name, value in model.state_dict().items()}
    grads: list[Any] = [p.grad for p in model.parameters()]
    values = [g.clone() for g in grads]
    torch.manual_seed(3)
    planned = rg.plan(model, torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)), gamma="auto")
    assert planned.gamma in [row.gamma for row in planned.gammas if row.distance <= TOLERANCE]
    assert max(map(len, str(planned).rpartition("\n\n")[2].splitlines())) <= 80
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    assert anatomy(model) == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(g, v) for g, v in zip(grads, values, strict=True))


def test_a_model_found_by_trial() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.linear(x))

    plan = rg.plan(nn.Sequential(*[Block() for _ in range(12)]), torch.randn(64, 16), memory="reverse")
    assert [(row.path, row.blocks) for row in plan.stages] == [("0-11", 12)]
    assert plan.peaks["reverse"].held < plan.peaks["plain"].held


def test_wrong_options_leave_the_model_alone() -> None:
    model = encoder()
    before = anatomy(model)
    for wrong in ({"memory": "none"}, {"stages": ["layer"]}, {"gamma": 2}):
        with pytest.raises(ValueError, match=r"got|Did you mean|2"):
            rg.plan(model, torch.randn(8, 64, 32), **wrong)
    with pytest.raises(AssertionError, match="expecting embedding dimension"):  # the model itself fails on it
        rg.plan(model, torch.randn(8, 64, 7))
    assert anatomy(model) == before


def told(plain: int, checkpoint: int, auto: int, mode: str = "reverse", room: int | None = None) -> str:
    """The verdict on such peaks."""
    peaks = {"plain": plain, "checkpoint": checkpoint, "reverse": auto, "auto": auto}
    times = {"plain": 1.0, "checkpoint": 1.3, "reverse": 1.365, "auto": 1.365}
    row = Row("blocks", 9, "block", plain, auto, mode)
    made = {way: Peak(10**6 * peak, 0) for way, peak in peaks.items()}
    return rg.Plan(
        "Model", 0.9, (row,), made, times, "auto", 0, 0, 0, room=None if room is None else 10**6 * room
    ).verdict


def test_the_verdict() -> None:
    assert told(100, 40, 20) == "converting saves 50 % over checkpointing at about 1.05× its time"
    assert told(100, 40, 39, "checkpoint") == "checkpointing is as good here: stages are short"
    assert told(100, 40, 45, "checkpoint") == "checkpointing is as good here: stages are short"
    assert told(100, 40, 39) == "checkpointing is as good here: the peak is outside of the stages"
    assert told(100, 99, 98).startswith("plain is as good here")
    assert told(100, 40, 20, room=106) == "plain fits: nothing to do (105.0 MB of 106.0 MB)"
    assert told(100, 40, 20, room=50) == "converting saves 50 % over checkpointing at about 1.05× its time"
    assert told(100, 40, 20, room=30) == "converting fits where checkpointing does not, at about 1.05× its time"
    assert told(100, 40, 20, room=20) == "nothing fits: the least is 21.0 MB, and there are 20.0 MB"


@pytest.mark.parametrize("memory", ["auto", "store", 10**9])
def test_a_conversion_that_saves_nothing_is_never_advised(memory: str | int) -> None:
    plan = rg.plan(encoder(3), torch.randn(8, 64, 32), memory=memory)
    assert not plan.verdict.startswith("converting")
    assert plan.verdict.startswith("plain fits: nothing to do" if memory == 10**9 else "checkpointing is as good here")


def test_the_times_are_relative_to_plain() -> None:
    times = planned("encoder of 16").times
    assert times["plain"] == 1
    assert 1.2 < times["checkpoint"] < times["reverse"] < 1.6


def test_every_line_fits_80_columns() -> None:
    names = nn.ModuleDict(
        {"a_part_of_the_model_with_a_long_name": nn.ModuleDict({"and_another_one_within_that": encoder(8)})}
    )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = names

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner["a_part_of_the_model_with_a_long_name"]["and_another_one_within_that"](x)
            return y

    for plan in (rg.plan(Model(), torch.randn(8, 64, 32), memory=7_000_000), planned("resnet")):
        assert max(map(len, str(plan).splitlines())) <= 80, str(plan)


def test_a_model_that_looks_at_its_mask() -> None:
    """PyTorch's encoder asks whether a mask is causal; without values it is taken not to be."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]))
            return y

    plan = rg.plan(Masked(), torch.randn(8, 64, 32))
    assert [row.blocks for row in plan.stages] == [8]
    assert plan.peaks["auto"].peak < plan.peaks["plain"].peak


def test_a_cache_with_tensors_of_its_own() -> None:
    """A sliding window is one; it has no values in a plan."""
    config = hf.MistralConfig(**SMALL, sliding_window=4)
    plan = rg.plan(hf.MistralForCausalLM(config).train(), {"input_ids": torch.arange(2, 22).view(2, 10)})
    assert len(plan.stages) == 1


def test_experts_in_float32() -> None:
    """Without values PyTorch knows their product in bfloat16 alone."""
    mixtral = ARCHITECTURES["transformers Mixtral"]
    model = mixtral.make()
    plan = rg.plan(model, mixtral.example)
    assert plan.peaks["plain"].held == pytest.approx(rg.measure(model, mixtral.example, repeats=1).held, rel=0.1)


def test_a_model_that_cannot_be_run_without_values() -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.encoder(x[x[:, 0, 0].nonzero()[:, 0]])
            return y

    model, x = Sorted(), torch.randn(8, 8, 32)
    with pytest.raises(RuntimeError, match=r"Sorted failed in a step on tensors without values.*rg\.measure"):
        rg.plan(model, x)
    rg.convert(model, memory=10**9)(x).sum().backward()


class Dropped(nn.Module):
    """Leaves layers out while it is trained."""

    def __init__(self, kept: Callable[[], Any]) -> None:
        super().__init__()
        self.layers = encoder(3).layers
        self.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not self.training or self.kept():
                x = layer(x)
        return x


DRAWS: dict[str, Callable[[], Any]] = {
    "dropped if less": lambda: not torch.rand([]) < 0.1,
    "kept if more": lambda: torch.rand(1) > 0.1,
    "kept if less": lambda: torch.rand(1).item() < 0.9,
    "in place": lambda: torch.empty(1).uniform_() > 0.1,
    "a coin": lambda: torch.bernoulli(torch.tensor(0.9)) == 1,
}


@pytest.mark.parametrize("draw", DRAWS)
def test_layers_left_out_at_random_are_planned_as_there(draw: str) -> None:
    x = torch.randn(8, 8, 32)
    plan, whole = (rg.plan(Dropped(kept), x) for kept in (DRAWS[draw], lambda: True))
    assert {way: peak.held for way, peak in plan.peaks.items()} == {way: peak.held for way, peak in whole.peaks.items()}
    rg.convert(Dropped(DRAWS[draw]), memory=10**9)(x).sum().backward()


def test_a_plan_leaves_nothing_in_the_caches_of_a_library() -> None:
    """DINOv3 has its coordinates from a cache, by a decorator of transformers."""
    config = hf.DINOv3ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8
    )
    model, images = hf.DINOv3ViTModel(config).train(), torch.randn(2, 3, 32, 32)
    rg.plan(model, images)
    model(images).last_hidden_state.sum().backward()
