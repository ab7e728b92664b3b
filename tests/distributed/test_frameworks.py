"""Accelerate, Lightning, the Hugging Face Trainer and peft, each used as its manual says, around a model with a momentum stack.

Nothing of theirs is told about the stack. Under each, reverse and checkpoint mode must train to the bits of store mode.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pair import WORLD, Case, Outcomes, launch
from subjects import MODES, SUBJECTS
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from problems import assert_same_bits
from retrograde.extras import require

pytestmark = pytest.mark.slow  # importing them takes most of it
KIND = "attention+dropout"


def dataset(kind: str = KIND) -> Dataset[Any]:
    x, target = zip(*(SUBJECTS[kind].batch(step) for step in range(4)), strict=True)
    return TensorDataset(torch.cat(x), torch.cat(target))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def every_mode(fit: Callable[[nn.Module], None], kind: str = KIND, seed: int = 0) -> dict[str, Tensor]:
    """The trained weights, the same in every memory mode, and other than those before."""
    found = {}
    for mode in MODES:
        model = SUBJECTS[kind].build(mode, "strict")
        before = weights(model)
        torch.manual_seed(seed)
        fit(model)
        found[mode] = weights(model)
        moved = [name for name in before if not torch.equal(before[name], found[mode][name])]
        assert len(moved) == len(before), f"not trained: {sorted(before.keys() - set(moved))}"
    assert_same_bits(found["store"], found["reverse"])
    assert_same_bits(found["store"], found["checkpoint"])
    return found["reverse"]


@contextmanager
def as_under_torchrun(rank: int) -> Iterator[None]:
    """The environment that torchrun gives its workers. The process group is up already, and is taken as it is."""
    variables: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": WORLD,
        "LOCAL_WORLD_SIZE": WORLD,
        "GROUP_RANK": 0,
    }
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29400, "TORCHELASTIC_RUN_ID": "pair"}
    with patch.dict(os.environ, {name: str(value) for name, value in variables.items()}):
        yield


def accelerate_fit(model: nn.Module, **options: Any) -> None:
    """The loop of Accelerate's quick tour."""
    accelerator = require("accelerate").Accelerator(cpu=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset(), batch_size=4))
    assert accelerator.num_processes == (dist.get_world_size() if dist.is_initialized() else 1)
    for x, target in loader:
        with accelerator.accumulate(prepared):
            loss = (prepared(x) - target).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.unwrap_model(prepared) is model
    if accelerator.num_processes > 1:
        assert isinstance(prepared, nn.parallel.DistributedDataParallel)
    accelerator.free_memory()
    require("accelerate.state").AcceleratorState._reset_state(True)  # else it is the first one's for good


def lightning_fit(model: nn.Module, **options: Any) -> None:
    lightning = require("lightning")

    class Lit(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return (self.model(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        enable_model_summary=False,
        barebones=False,
        gradient_clip_val=1.0,
        **quiet,
        **options,
    )
    trainer.fit(Lit(), DataLoader(dataset(), batch_size=4))


class WithLoss(nn.Module):
    """What the Hugging Face Trainer wants: the loss first, if there are labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.model(x)
        return {"loss": (y - labels).square().mean(), "logits": y}


class Named(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, labels = dataset()[index]
        return {"x": x, "labels": labels}


def trainer_fit(folder: Path, model: nn.Module) -> None:
    transformers = require("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4,
        learning_rate=0.01, save_strategy="no", report_to=[], disable_tqdm=True, logging_strategy="no", optim="sgd",
    )  # fmt: skip
    transformers.Trainer(model=WithLoss(model), args=arguments, train_dataset=Named()).train()


def case_accelerate(options: dict[str, Any], rank: int) -> dict[str, Tensor]:
    with as_under_torchrun(rank):
        return every_mode(partial(accelerate_fit, **options), seed=100 + rank)


def case_lightning(options: dict[str, Any], rank: int) -> dict[str, Tensor]:
    with as_under_torchrun(rank):
        return every_mode(partial(lightning_fit, strategy="ddp", devices=2, **options), seed=100 + rank)


CASES: dict[str, Case] = {
    "accelerate": partial(case_accelerate, {}),
    "accelerate, accumulation": partial(case_accelerate, {"gradient_accumulation_steps": 2}),
    "accelerate, bf16": partial(case_accelerate, {"mixed_precision": "bf16"}),
    "lightning": partial(case_lightning, {}),
    "lightning, accumulation": partial(case_lightning, {"accumulate_grad_batches": 2}),
    "lightning, bf16": partial(case_lightning, {"precision": "bf16-mixed"}),
}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return launch(CASES)


@pytest.mark.parametrize("name", CASES)
def test_two_processes(outcomes: Outcomes, name: str) -> None:
    zero, one = outcomes.of(name)
    assert_same_bits(zero, one)


def test_accumulation_and_precision_were_on(outcomes: Outcomes) -> None:
    for framework in ("accelerate", "lightning"):
        plain, _ = outcomes.of(framework)
        for option in ("accumulation", "bf16"):
            other, _ = outcomes.of(f"{framework}, {option}")
            assert any(not torch.equal(plain[name], other[name]) for name in plain), option


@pytest.mark.filterwarnings("default")
def test_one_process_accelerate() -> None:
    every_mode(accelerate_fit)


@pytest.mark.filterwarnings("default")
def test_one_process_lightning() -> None:
    trained = every_mode(partial(lightning_fit, devices=1))
    model = SUBJECTS[KIND].build("store")
    torch.manual_seed(0)
    accelerate_fit(model)  # the same loop in another framework
    assert_same_bits(trained, weights(model))


@pytest.mark.filterwarnings("default")
def test_hugging_face_trainer(tmp_path: Path) -> None:
    every_mode(partial(trainer_fit, tmp_path))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("targets", [r"body\.blocks\.\d+\.(inner|outer)", r"body\.blocks\.[35]\.inner"])
def test_lora_on_a_frozen_stack(targets: str) -> None:
    """peft's get_peft_model on a plain module: adapters inside frozen blocks, in all of the MLPs or in two blocks only."""
    require("transformers")  # peft imports it, and it torchvision
    peft = require("peft")
    found = {}
    for mode in MODES:
        model = SUBJECTS[KIND].build(mode, "strict")
        before = weights(model)
        torch.manual_seed(4)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, lora_dropout=0.1))
        trainable = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
        assert trainable
        assert all("lora_" in name for name in trainable)
        optimizer = torch.optim.SGD(trainable.values(), lr=0.5)
        for step in range(3):
            x, target = SUBJECTS[KIND].batch(step)
            optimizer.zero_grad()
            (adapted(x) - target).square().mean().backward()
            optimizer.step()
        found[mode] = {name: p.detach().clone() for name, p in trainable.items()}
        merged = adapted.merge_and_unload()
        changed = {name for name, t in weights(merged).items() if not torch.equal(t, before[name])}
        assert len(changed) == len(trainable) // 2  # an A and a B per adapted weight
    assert_same_bits(found["store"], found["reverse"])
    assert_same_bits(found["store"], found["checkpoint"])
