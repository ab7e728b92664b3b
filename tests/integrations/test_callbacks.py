"""The callbacks convert, once, and move γ; plugins of packages that want other versions than the tests have are tried on stand-ins."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from problems import assert_same_bits, train_step
from retrograde.convert.convert import stages_of
from retrograde.extras import require

with warnings.catch_warnings():  # what these packages warn of when imported
    warnings.simplefilter("ignore")
    hf = require("transformers")
    lightning = require("lightning")
    accelerate = require("accelerate")
    from retrograde.integrations import lightning as for_lightning
    from retrograde.integrations import transformers as for_transformers
    from retrograde.integrations.accelerate import remember

X = torch.linspace(-2, 2, 80).view(2, 5, 8)
pytestmark = pytest.mark.filterwarnings("ignore")  # of loggers, workers, paths and pinned memory


def encoder(layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def gamma_of(model: nn.Module) -> Any:
    return stages_of(model)[0].gamma


class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, gamma: float | None = None) -> None:
        super().__init__()
        self.net, self.other = encoder(), encoder(2)
        if gamma is not None:
            rg.convert(self.net, gamma=gamma)
        self.gammas: list[Any] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.gammas.append(gamma_of(self))
        return self.net(batch[0]).square().mean() + 0 * self.other(batch[0]).mean()

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.log("loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def loader() -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X.repeat(4, 1, 1)), 2)


def lightning_trainer(tmp_path: Path, *callbacks: Any, **options: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
        default_root_dir=tmp_path, enable_checkpointing=False, **options,
    )  # fmt: skip


# Lightning -------------------------------------------------------------------------------------------------------------


def test_lightning_converts(tmp_path: Path) -> None:
    module = Lit()
    lightning_trainer(tmp_path, for_lightning.Reversible(gamma=0.5, part="net", memory="reverse"), max_steps=2).fit(
        module, loader()
    )
    assert [stage.name for stage in stages_of(module)] == ["layers.0-3"]
    assert (gamma_of(module), stages_of(module)[0].used) == (Fraction(1, 2), "reverse")
    by_hand = Lit(gamma=0.5)
    lightning_trainer(tmp_path, max_steps=2).fit(by_hand, loader())
    assert_same_bits(dict(module.state_dict()), dict(by_hand.state_dict()))
    lightning_trainer(tmp_path, for_lightning.Reversible(gamma=0.9)).test(module, loader(), verbose=False)
    assert gamma_of(module) == Fraction(1, 2)  # as it was
    tested = Lit()
    lightning_trainer(tmp_path, for_lightning.Reversible()).test(tested, loader(), verbose=False)
    assert [stage.name for stage in stages_of(tested)] == ["net.layers.0-3", "other.layers.0-1"]


@pytest.mark.parametrize("gamma", [0.9, None])
def test_lightning_moves_gamma(tmp_path: Path, gamma: float | None) -> None:
    """Of a module converted before, or by the callback."""

    def callback() -> Any:
        return for_lightning.Reversible(None if gamma else 0.9, schedule={0: 0, 6: 1}, part="net")

    one, other = Lit(gamma), Lit(gamma)
    first = lightning_trainer(tmp_path, callback(), max_steps=4)
    first.fit(one, loader())
    first.save_checkpoint(tmp_path / "four.ckpt")
    lightning_trainer(tmp_path, callback(), max_steps=8).fit(
        other, loader(), ckpt_path=tmp_path / "four.ckpt", weights_only=False
    )
    assert one.gammas + other.gammas == [Fraction(9, 10) * Fraction(min(t, 6), 6) for t in range(8)]


# the Trainer of transformers ----------------------------------------------------------------------------------------------


class Task(nn.Module):
    def __init__(self, gamma: float | None = None) -> None:
        super().__init__()
        self.net = encoder() if gamma is None else rg.convert(encoder(), gamma=gamma)
        self.gammas: list[Any] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.gammas.append(gamma_of(self))
        y = self.net(x)
        return {"loss": y.square().mean(), "logits": y}


def trainer_of(tmp_path: Path, model: Any, callback: Any, steps: int, **options: Any) -> Any:
    arguments = hf.TrainingArguments(
        str(tmp_path), max_steps=steps, per_device_train_batch_size=2, save_steps=4, report_to=[], use_cpu=True, disable_tqdm=True,
        logging_strategy="no", save_only_model=False,
    )  # fmt: skip
    data = [{"x": x} for x in X.repeat(8, 1, 1)]
    return hf.Trainer(model, arguments, train_dataset=data, callbacks=[callback], **options)


@pytest.mark.parametrize("gamma", [0.9, None])
def test_the_trainer_moves_gamma(tmp_path: Path, gamma: float | None) -> None:
    def callback() -> Any:
        return for_transformers.Reversible(None if gamma else 0.9, schedule={0: 0, 6: 1}, memory="reverse")

    one, other = Task(gamma), Task(gamma)
    trainer_of(tmp_path, one, callback(), 4).train()
    trainer_of(tmp_path, other, callback(), 8).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert one.gammas + other.gammas == [Fraction(9, 10) * Fraction(min(t, 6), 6) for t in range(8)]


def test_the_trainer_makes_the_model(tmp_path: Path) -> None:
    made: list[Task] = []

    def model_init() -> Task:
        made.append(Task())
        return made[-1]

    trainer = trainer_of(tmp_path, None, for_transformers.Reversible(0.5), 2, model_init=model_init)
    trainer.train()
    assert len(made) == 2  # one to begin with, one for the training
    assert trainer.model is made[-1]
    assert made[-1].gammas == [Fraction(1, 2)] * 2


# Accelerate --------------------------------------------------------------------------------------------------------------


def test_what_accelerate_saves(tmp_path: Path) -> None:
    def prepared(gamma: float, schedule: bool = False) -> Any:
        require("accelerate.state").AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True)
        model = accelerator.prepare(rg.convert(encoder(), gamma=gamma, fixed_point=rg.FixedPoint(18, torch.int32)))
        made = rg.GammaSchedule(model, {0: 0, 4: 1}) if schedule else None
        if made is not None:
            accelerator.register_for_checkpointing(made)
        remember(accelerator, model)
        return accelerator, model, made

    def load(accelerator: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerator.load_state(str(tmp_path))
        return [str(w.message) for w in caught if "another network" in str(w.message)]

    accelerator, model, _ = prepared(0.5)
    exact = model.eval()(X)
    accelerator.save_state(str(tmp_path))
    accelerator, again, _ = prepared(0.5)
    with torch.no_grad():
        for p in again.parameters():
            p.add_(1)
    assert not load(accelerator)
    assert torch.equal(again.eval()(X), exact)
    (said,) = load(prepared(0.25)[0])
    assert "saved with layers.0-3: gamma = 1/2, and the model has layers.0-3: gamma = 1/4" in said
    accelerator, model, schedule = prepared(0.5, schedule=True)
    schedule.step()
    accelerator.save_state(str(tmp_path))
    accelerator, model, schedule = prepared(0.5, schedule=True)
    assert not load(accelerator)
    assert (gamma_of(model), schedule.t) == (Fraction(1, 8), 1)
    require("accelerate.state").AcceleratorState._reset_state(True)


# torchtitan and Axolotl, whose versions of other packages exclude each other's -------------------------------------------------


class Configurable:
    """torchtitan.config.Configurable, as far as policies use it."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type | None] = None

        def build(self, **kwargs: Any) -> Any:
            assert self._owner is not None
            return self._owner(config=self, **kwargs)

    def __init_subclass__(cls) -> None:
        cls.Config._owner = cls


class ActivationCheckpointing(Configurable):
    """torchtitan.distributed.activation_checkpoint.ActivationCheckpointing."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        preserve_rng_state: bool = True

    def __init__(self, config: Any, dump_folder: str = "") -> None:
        self.config = config

    def apply(self, model: nn.Module) -> None:
        raise NotImplementedError


class BasePlugin:
    """axolotl.integrations.base.BasePlugin."""

    def get_input_args(self) -> str | None: ...

    def post_model_load(self, cfg: Any, model: Any) -> None: ...


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real packages, where they can be imported."""
    held = {
        "torchtitan.distributed.activation_checkpoint": ActivationCheckpointing,
        "axolotl.integrations.base": BasePlugin,
    }
    for name, base in held.items():
        try:
            require(name)
            continue
        except ModuleNotFoundError:
            pass
        parts = name.split(".")
        for k in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:k]), ModuleType(".".join(parts[:k])))
        setattr(sys.modules[name], base.__name__, base)
    for name in ("torchtitan", "axolotl"):
        monkeypatch.delitem(sys.modules, f"retrograde.integrations.{name}", raising=False)


class Decoder(nn.Module):
    """A model of torchtitan's kind: layers in a ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(k): layer for k, layer in enumerate(encoder(6).layers)})  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def test_torchtitan(stand_ins: None) -> None:
    from retrograde.integrations.torchtitan import ReversibleAC

    model = Decoder()
    ReversibleAC.Config(gamma=0.5, memory="reverse").build(dump_folder="").apply(model)
    (stage,) = stages_of(model)
    assert (stage.name, stage.gamma, stage.settings.memory) == ("layers.0-5", Fraction(1, 2), "reverse")
    stored = rg.convert(Decoder(), stages=["layers.*"], gamma=0.5, memory="store")
    for layer in model.layers.values():
        layer.compile(backend="eager", fullgraph=True)  # as torchtitan does next
    assert_same_bits(train_step(model, X), train_step(stored, X))


def test_axolotl(stand_ins: None) -> None:
    from retrograde.integrations.axolotl import Arguments, ReversiblePlugin

    plugin = ReversiblePlugin()
    assert plugin.get_input_args() == "retrograde.integrations.axolotl.Arguments"
    for cfg, expected in (
        ({"retrograde_gamma": 0.25, "retrograde_memory": "reverse", "other": 1}, (Fraction(1, 4), "reverse")),
        ({"retrograde_gamma": None}, (Fraction(1, 8), "auto")),
    ):
        model = encoder()
        plugin.post_model_load(cfg, model)
        (stage,) = stages_of(model)
        assert (stage.gamma, stage.settings.memory) == expected
    with pytest.raises(ValueError, match="retrograde_gamma"):
        Arguments(retrograde_gamma="much")


@pytest.mark.parametrize(
    ("package", "install"), [("lightning", r"retrograde\[train\]"), ("transformers", r"retrograde\[hf\]")]
)
def test_a_package_that_is_missing(package: str, install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"retrograde.integrations.{package}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"needs {package}, not found here: pip install .*{install}"):
        import_module(f"retrograde.integrations.{package}")
