"""γ travels with the weights: in the metadata of a `state_dict`, and in the config of a transformers model."""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import SMALL, VISION, fixed, hf, ids, timm, tv
from torch import Tensor, nn

import retrograde as rg
from problems import Mlp
from retrograde.convert.convert import stages_of
from retrograde.extras import require
from retrograde.nets.resnet import resnet

FIXED = rg.FixedPoint(18, torch.int32)
ROWS, IMAGES = fixed(2, 5, 8), fixed(2, 3, 32, 32)
hf.utils.logging.disable_progress_bar()


class Own(nn.Module):
    """A loop over blocks that return f(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, Any], str]] = {
    "torch": (encoder, ROWS, {}, "layers.1"),
    "own": (Own, ROWS, {"stages": ["blocks"], "form": "branch"}, "blocks.1"),
    "torchvision": (
        lambda: tv.resnet.ResNet(tv.resnet.BasicBlock, (3, 1, 1, 1), num_classes=5), IMAGES, {}, "layer1.1",
    ),
    "timm": (
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=4, num_heads=2), IMAGES, {}, "blocks.1",
    ),
}  # fmt: skip
SETTINGS: list[dict[str, Any]] = [{"gamma": Fraction(1, 8)}, {"gamma": 0.9, "velocity": "first"}, {"gamma": 0}]


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def loaded(model: nn.Module, state: Any, warns: str | None = None) -> None:
    """Load weights, and see that it warns, once, or not at all."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert model.load_state_dict(state) == ([], [])
    said = [str(warning.message) for warning in caught]
    assert len(said) == (warns is not None), said
    assert warns is None or warns in said[0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("deployed", [False, True])
def test_state_dicts(name: str, settings: dict[str, Any], deployed: bool) -> None:
    make, x, options, block = MODELS[name]
    torch.manual_seed(0)
    plain = make().eval()
    keys = list(plain.state_dict())
    model = rg.convert(copy.deepcopy(plain), **options, **settings, fixed_point=FIXED)
    exact = model(x)
    if deployed:
        rg.deploy(model)
    state = model.state_dict()
    assert list(state) == keys
    state = through_a_file(state)
    if not settings["gamma"]:  # the weights of a plain network, which may go anywhere
        assert "retrograde" not in state._metadata[block]
        for other in (make(), rg.convert(make(), **options, gamma=0.5)):
            loaded(other, state)
        return
    noted = state._metadata[block]["retrograde"]
    assert Fraction(noted["gamma"]) == Fraction(settings["gamma"]).limit_denominator(10)
    assert noted["velocity"] == settings.get("velocity")
    assert noted["form"] == options.get("form", "block")
    again = rg.convert(make().eval(), **options, **settings, fixed_point=FIXED)
    loaded(again, state)
    assert torch.equal(again(x), exact)
    other = rg.convert(make(), **options, gamma=0.5)
    for _ in range(2):  # each time
        loaded(other, state, f"saved with gamma = {noted['gamma']}")
    loaded(nn.ModuleDict({"net": rg.convert(make(), **options, gamma=0.5)}), within("net.", state), "gamma = 1/2")
    loaded(again, plain.state_dict())  # of no γ
    loaded(again, dict(state))  # what is no state_dict of torch's has no metadata
    loaded(make(), state)
    loaded(rg.revert(other), state)
    assert "retrograde" not in rg.revert(model).state_dict()._metadata[block]


def within(prefix: str, state: Any) -> Any:
    """The same weights of a part of a model."""
    moved = type(state)((prefix + key, value) for key, value in state.items())
    moved._metadata = {prefix + key: value for key, value in state._metadata.items()}
    return moved


def test_what_is_compared() -> None:
    def saved(**options: Any) -> Any:
        return rg.convert(encoder(), **{"gamma": 0.5, **options}).state_dict()

    model = rg.convert(encoder(), gamma=0.5)
    loaded(model, saved(form="block", memory="store", fixed_point="int16", verify="off"))
    loaded(model, saved(velocity="first"), "velocity = first, and it has velocity = None")
    loaded(model, saved(gamma=[0.5, 0.5, 0.25, 0.5]), "gamma = 1/2, 1/2, 1/4, 1/2, and it has gamma = 1/2")
    loaded(model, saved(stages=["layers.[123]"]), "step = 0, and it has step = 1")
    stages_of(model)[0].gamma = 0.25
    loaded(model, saved(), "saved with gamma = 1/2, and it has gamma = 1/4")
    loaded(model, model.state_dict())


NETS: dict[str, Callable[[Any], nn.Module]] = {
    "MomentumNet": lambda gamma: rg.MomentumNet([Mlp() for _ in range(3)], gamma),
    "resnet": lambda gamma: resnet(18, size="cifar", width=4, classes=3, gamma=gamma),
}


@pytest.mark.parametrize("name", NETS)
def test_networks_of_our_own(name: str) -> None:
    make = NETS[name]
    net = make(0.9)
    state = through_a_file(net.state_dict())
    loaded(make(0.9), state)
    with pytest.warns(UserWarning, match=r"saved with gamma = 9/10, and it has gamma = 1/2.*Set net.gamma"):
        make(0.5).load_state_dict(state)
    loaded(rg.deploy(make(0.9)), rg.deploy(net).state_dict())
    with pytest.warns(UserWarning, match="saved with gamma = 9/10, and it has gamma = 1/2"):
        rg.deploy(make(0.5)).load_state_dict(state)
    if name == "MomentumNet":
        own = rg.MomentumNet([Mlp() for _ in range(3)], 0.9, form="block", velocity=lambda x: x)
        loaded(own, state, "form = branch, velocity = None, and it has form = block, velocity = own")
    else:
        loaded(resnet(18, size="cifar", width=4, classes=3), state)  # the plain network cannot know


# files of each ecosystem -------------------------------------------------------------------------------------------------


def resnet_of(gamma: float, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = tv.resnet.ResNet(tv.resnet.BasicBlock, (4, 1, 1, 1), num_classes=5)
    return rg.convert(model, gamma=gamma, fixed_point=FIXED).eval()


def vit_of(gamma: float, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return rg.convert(MODELS["timm"][0](), gamma=gamma, fixed_point=FIXED).eval()


def by_torch(model: nn.Module, path: Path) -> Callable[[nn.Module], Any]:
    torch.save(model.state_dict(), path)
    return lambda other: other.load_state_dict(torch.load(path, weights_only=True))


def by_ddp(model: nn.Module, path: Path) -> Callable[[nn.Module], Any]:
    torch.save(nn.parallel.DistributedDataParallel(model).state_dict(), path)
    return lambda other: nn.parallel.DistributedDataParallel(other).load_state_dict(torch.load(path, weights_only=True))


def by_safetensors(model: nn.Module, path: Path) -> Callable[[nn.Module], Any]:
    from safetensors.torch import load_model, save_model

    save_model(model, str(path))
    return lambda other: load_model(other, str(path))


def by_timm(model: nn.Module, path: Path) -> Callable[[nn.Module], Any]:
    """As its train.py saves, and `create_model(checkpoint_path=…)` loads."""
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, path)
    return lambda other: timm.models.load_checkpoint(other, str(path))


def by_accelerate(model: nn.Module, path: Path) -> Callable[[nn.Module], Any]:
    accelerate = require("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.save_model(accelerator.prepare(model), str(path))
    return lambda other: accelerate.load_checkpoint_in_model(other, str(path))


def by_lightning(model: nn.Module, path: Path) -> Callable[[nn.Module], Any]:
    lightning = require("lightning")
    trainer = lightning.Trainer(accelerator="cpu", logger=False, barebones=True)

    class Task(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

    trainer.strategy.connect(Task(model))
    trainer.save_checkpoint(path)
    return lambda other: Task.load_from_checkpoint(path, net=other)


FILES: dict[str, tuple[Any, Callable[..., Any], bool]] = {  # ..., whether they say γ
    "torchvision, torch.save": (resnet_of, by_torch, True),
    "torchvision, DDP": (resnet_of, by_ddp, True),
    "torchvision, safetensors": (resnet_of, by_safetensors, False),
    "timm": (vit_of, by_timm, False),
    "timm, torch.save": (vit_of, by_torch, True),
    "timm, Lightning": (vit_of, by_lightning, True),
    "timm, Accelerate": (vit_of, by_accelerate, False),
}


@pytest.mark.filterwarnings("ignore")  # those of Lightning, of workers and paths
@pytest.mark.parametrize("name", FILES)
def test_files(name: str, tmp_path: Path) -> None:
    """Equal bits where the model is converted with the same γ. With another, a warning, if the file says."""
    make, save, says = FILES[name]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = make(0.25)
        exact = model(IMAGES)
        load = save(model, tmp_path / "file.pth")
        for gamma in (0.25, 0.5):
            again = make(gamma, seed=1)
            assert not torch.equal(again(IMAGES), exact)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                load(again)
            told = [str(w.message) for w in caught if "another network" in str(w.message)]
            stages = [stage for stage in stages_of(again) if not stage.checkpointed]
            assert len(told) == (len(stages) if says and gamma != 0.25 else 0)
            assert torch.equal(again.eval()(IMAGES), exact) == (gamma == 0.25)
    finally:
        dist.destroy_process_group()
        if "accelerate" in name.lower():
            require("accelerate.state").AcceleratorState._reset_state(True)


# transformers ----------------------------------------------------------------------------------------------------------

TOKENS = ids(2, 7)
SAVED = {"blocks": "model.layers.0-3", "gamma": "1/4", "form": "block", "velocity": None}


def llama(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)).eval()


def logits(model: Any) -> Tensor:
    out: Tensor = model(TOKENS, use_cache=False).logits
    return out


@pytest.mark.parametrize("velocity", [None, "first"])
@pytest.mark.parametrize("deployed", [False, True])
def test_saved_and_converted_again(tmp_path: Path, velocity: str | None, deployed: bool) -> None:
    model = rg.convert(llama(), gamma=0.25, velocity=velocity, fixed_point=FIXED)
    exact = logits(model)
    if deployed:
        rg.deploy(model)
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.retrograde == {"stages": [{**SAVED, "velocity": velocity}]}
    assert not torch.equal(logits(again), exact)  # the plain network, so far
    rg.convert(again, fixed_point=FIXED)
    assert torch.equal(logits(again), exact)
    again.save_pretrained(tmp_path)
    base = rg.convert(hf.AutoModel.from_pretrained(tmp_path).eval(), fixed_point=FIXED)
    assert torch.equal(again.lm_head(base(TOKENS)[0]), exact)
    base.save_pretrained(tmp_path / "base")
    headed = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    assert [stage.name for stage in stages_of(rg.convert(headed))] == ["model.layers.0-3"]
    assert stages_of(headed)[0].gamma == Fraction(1, 4)


def test_stages_and_forms_of_ones_own(tmp_path: Path) -> None:
    model = rg.convert(llama(), stages=["model.layers.[123]"], gamma=[0.5, 0.25, 0.125], fixed_point=FIXED)
    exact = logits(model)
    model.save_pretrained(tmp_path)
    again = rg.convert(hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), fixed_point=FIXED)
    assert stages_of(again)[0].name == "model.layers.1-3"
    assert torch.equal(logits(again), exact)
    apart = rg.convert(llama(), stages=["model.layers.[02]"], gamma=0.5)
    (record,) = apart.config.retrograde["stages"]
    assert record["blocks"] == ["model.layers.0", "model.layers.2"]


def test_another_gamma_is_taken_and_said(tmp_path: Path) -> None:
    rg.convert(llama(), gamma=0.25).save_pretrained(tmp_path)

    def fresh() -> Any:
        return hf.AutoModelForCausalLM.from_pretrained(tmp_path)

    with pytest.warns(
        UserWarning, match=r"'model.layers.0-3' was saved with gamma = 1/4, and is converted with gamma = 0.5"
    ):
        model = rg.convert(fresh(), gamma=0.5)
    assert model.config.retrograde == {"stages": [{**SAVED, "gamma": "1/2"}]}
    same = rg.convert(fresh(), gamma=0.25)  # no warning: they are errors
    assert stages_of(same)[0].gamma == Fraction(1, 4)
    named = rg.convert(fresh(), stages=["model.layers.[123]"])
    assert [(stage.name, stage.gamma) for stage in stages_of(named)] == [("model.layers.1-3", Fraction(1, 4))]
    plain = rg.revert(fresh())
    assert not hasattr(plain.config, "retrograde")
    with pytest.raises(ValueError, match="not converted"):
        rg.revert(plain)


def test_the_entry_follows_gamma() -> None:
    model = rg.convert(llama(), gamma=0.25)
    other = copy.deepcopy(model)
    stages_of(model)[0].gamma = 0.5
    assert model.config.retrograde == {"stages": [{**SAVED, "gamma": "1/2"}]}
    assert other.config.retrograde == {"stages": [SAVED]}
    schedule = rg.GammaSchedule(other, {0: 0, 2: 1})
    assert other.config.retrograde["stages"][0]["gamma"] == "0"
    schedule.step()
    assert other.config.retrograde["stages"][0]["gamma"] == "1/8"
    assert not hasattr(rg.revert(model).config, "retrograde")


def test_several_models_in_one(tmp_path: Path) -> None:
    """A wrapper, a config within a config."""
    parts = {"text_config": {**SMALL, "num_hidden_layers": 2}, "vision_config": {**VISION, "num_hidden_layers": 3}}
    config = hf.CLIPConfig(projection_dim=16, **parts)
    model = rg.convert(hf.CLIPModel(config), gamma=0.25)
    blocks = [record["blocks"] for record in model.config.retrograde["stages"]]
    model.save_pretrained(tmp_path)
    again = hf.CLIPModel.from_pretrained(tmp_path)
    wrapped = rg.convert(nn.ModuleDict({"clip": again, "other": nn.Linear(2, 2)}))
    assert [stage.name for stage in stages_of(wrapped)] == [f"clip.{path}" for path in blocks]
    assert {stage.gamma for stage in stages_of(wrapped)} == {Fraction(1, 4)}
    assert [record["blocks"] for record in again.config.retrograde["stages"]] == blocks
    assert len(again.vision_model.config.retrograde["stages"]) == 1


def test_adapters_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = rg.convert(peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"])), gamma=0.25)
    assert model.base_model.model.config.retrograde == {"stages": [SAVED]}
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert stages_of(rg.convert(again))[0].gamma == Fraction(1, 4)


def test_adapters_alone(tmp_path: Path) -> None:
    """Their file knows nothing of the model below. Saved with it, or converted with the same γ, it is the network that was trained."""
    peft = require("peft")
    adapters = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(rg.convert(llama(), gamma=0.25, fixed_point=FIXED), adapters).eval()
    exact = logits(model)
    model.save_pretrained(tmp_path / "adapters")
    model.get_base_model().config.save_pretrained(tmp_path / "config")
    plain = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapters").eval()
    assert not torch.equal(logits(plain), exact)
    assert torch.equal(logits(rg.convert(plain, gamma=0.25, fixed_point=FIXED)), exact)
    base = llama()
    base.config = hf.AutoConfig.from_pretrained(tmp_path / "config")  # says γ
    again = peft.PeftModel.from_pretrained(rg.convert(base, fixed_point=FIXED), tmp_path / "adapters").eval()
    assert torch.equal(logits(again), exact)


def test_blocks_that_the_model_does_not_have() -> None:
    model = llama()
    model.config.retrograde = {"stages": [{**SAVED, "blocks": "model.layers.0-9"}]}
    with pytest.raises(
        ValueError,
        match=r"says that model\.layers\.0-9 are a stage .* has no such blocks\. rg\.revert\(model\) removes",
    ):
        rg.convert(model)
    rg.convert(rg.revert(model), gamma=0.25)
    assert model.config.retrograde == {"stages": [SAVED]}


def test_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "saving.md").read_text(encoding="utf-8")
    snippet = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(snippet, "docs/saving.md", "exec"), {})
    assert len(caught) == 4  # stages
    assert all("saved with gamma = 1/4, and it has gamma = 1/8" in str(w.message) for w in caught)
