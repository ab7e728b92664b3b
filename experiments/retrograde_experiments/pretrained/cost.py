"""Memory and time of a training step of pretrained networks: plain, checkpointed, offloaded, and converted.

plain         every activation is stored
checkpoint    `torch.utils.checkpoint` around each block
offload       every activation goes to pinned host memory and comes back: `torch.autograd.graph.save_on_cpu`
to-host       both: the inputs of blocks go to pinned host memory, and blocks are run again from there
reverse       converted
split         converted, with attention and MLP as two steps

The peak is what a step needs of the device's memory above parameters and gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from retrograde.extras import require

from ..config import Settings
from ..metrics import Key
from . import weights
from .deploy import with_lora
from .transfer import placed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BLOCKS = ("LlamaDecoderLayer", "Bottleneck", "BertLayer", "Block")
CHUNK = 256  # tokens whose logits are in memory at a time
LLAMA = {
    "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
"""Of Llama's form, with random weights."""


@dataclass(frozen=True)
class Config(Settings):
    nets: tuple[str, ...] = ("smollm2", "llama", "smollm2-long", "smollm2-lora", "resnet50", "resnet56", "minilm")
    methods: tuple[str, ...] = ("plain", "checkpoint", "reverse", "split", "to-host", "offload")
    gammas: tuple[float, ...] = (1 / 8, 1 / 16, 1 / 4, 1 / 2, 0.9)  # of smollm2; of the others:
    one_gamma: float = 1 / 8
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    repeats: int = 5
    scale: int = 1  # inputs and networks are made smaller by this

    @classmethod
    def small(cls) -> Config:
        """For a CPU."""
        return cls(("smollm2",), ("plain", "checkpoint", "reverse"), (1 / 8,), dtypes=("float32",), repeats=2, scale=8)

    @classmethod
    def smoke(cls) -> Config:
        nets = ("smollm2", "smollm2-lora", "resnet50", "resnet56", "minilm")
        return cls(nets, gammas=(1 / 8,), repeats=1, scale=32)

    def setting(self) -> str:
        return (
            f"A training step, median of {self.repeats} after two that are not counted; the peak is what it needs above parameters "
            f"and gradients. Language models with the logits of {CHUNK} tokens at a time, in every row."
        )

    def split(self, net: str) -> bool:
        return net.startswith(("smollm2", "llama"))


SHAPES = {
    "smollm2": (8, 1024), "smollm2-lora": (8, 1024), "smollm2-long": (1, 8192), "llama": (4, 2048), "resnet50": (64, 224),
    "resnet56": (1024, 32), "minilm": (256, 48),
}  # fmt: skip
"""Rows and tokens, or images and their sides."""
DTYPE_OF = {
    "smollm2-lora": "bfloat16", "smollm2-long": "bfloat16", "llama": "bfloat16", "resnet50": "float32", "resnet56": "float32",
    "minilm": "float32",
}  # fmt: skip
"""The one that a network is measured in; SmolLM2 in every one of the setting."""


def units(config: Config) -> list[Key]:
    found: list[Key] = []
    for net in config.nets:
        for dtype in config.dtypes:
            if net != "smollm2" and dtype != DTYPE_OF[net]:
                continue
            point = {"net": net, "dtype": dtype}
            for method in config.methods:
                if net == "smollm2-lora" and method == "to-host":  # reentrant checkpoints need inputs with gradients
                    continue
                several = config.gammas if net == "smollm2" else (config.one_gamma,)
                gammas = {"reverse": several, "split": (config.one_gamma,) if config.split(net) else ()}
                found += [{**point, "method": method, "gamma": g} for g in gammas.get(method, (0.0,))]
    return found


def measure(config: Config, unit: Key, device: torch.device, root: Path) -> dict[str, Any]:
    net, step_of, example = problem(unit["net"], DTYPES[unit["dtype"]], device, root, config.scale)
    net.train()
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    to_host = partial(torch.autograd.graph.save_on_cpu, pin_memory=device.type == "cuda")
    match unit["method"]:
        case "checkpoint":
            checkpointed(net)
        case "to-host":
            checkpointed(net, reentrant=True)  # its inputs pass through the hooks of `save_on_cpu`, the other's do not
            around = to_host
        case "offload":
            around = to_host
        case "reverse" | "split":
            rg.convert(net, example, gamma=unit["gamma"], memory="reverse", split=unit["method"] == "split")
    if unit["net"] == "smollm2-lora":
        net = with_lora(net, 16)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]

    def step() -> float:
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad.zero_()
        _wait(device)
        begun = time.perf_counter()
        with around():
            loss = step_of(net)
        loss.backward()
        _wait(device)
        return time.perf_counter() - begun

    for _ in range(2):  # gradients, workspaces, the fixed-point range
        step()
    base = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = [step() for _ in range(config.repeats)]
    peak = torch.cuda.max_memory_allocated(device) - base if device.type == "cuda" else None
    return {"peak": peak, "seconds": median(seconds)}


Step = Callable[[Any], Tensor]


def problem(
    name: str, dtype: torch.dtype, device: torch.device, root: Path, scale: int
) -> tuple[Any, Step, Tensor | None]:
    """A network, its loss on a batch, and an example where its class is not known; the same for the same name."""
    rows, size = (max(2, of // scale) if of > 1 else 1 for of in SHAPES[name])
    draw = torch.Generator().manual_seed(0)
    if name in ("resnet50", "resnet56"):
        net = weights.resnet50(root) if name == "resnet50" else weights.cifar_resnet(56 if scale == 1 else 14, root)
        x = placed(torch.randn(rows, 3, size, size, generator=draw).to(dtype), device)
        labels = torch.randint(10, (rows,), generator=draw).to(device)
        return placed(net.to(dtype), device), lambda net: cross_entropy(net(x).float(), labels), x[:2]
    if name == "minilm":
        bert: Any = weights.minilm(root).to(device, dtype)
        size = min(size, bert.config.max_position_embeddings)
        ids = torch.randint(bert.config.vocab_size, (rows, size), generator=draw).to(device)
        mask = torch.ones_like(ids)
        return bert, lambda net: weights.embedded(net, ids, mask).float().square()[:, 0].sum(), None
    causal: Any = llama(device, dtype) if name == "llama" else weights.smollm2(root).to(device, dtype)
    batch = torch.randint(causal.config.vocab_size, (rows, size + 1), generator=draw).to(device)
    return causal, lambda net: loss_in_chunks(net, batch), None


def llama(device: torch.device, dtype: torch.dtype) -> Any:
    """32 layers of Llama's form, made where they are used."""
    transformers = require("transformers")
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).to(dtype)


def checkpointed(net: nn.Module, reentrant: bool = False) -> None:
    """`torch.utils.checkpoint` around each block, as each library does it for its own."""
    for block in _blocks(net):
        block.forward = _again(block.forward, reentrant)


def _again(forward: Callable[..., Any], reentrant: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=reentrant)

    return run


def _blocks(net: nn.Module) -> Iterator[nn.Module]:
    return (module for module in net.modules() if type(module).__name__ in BLOCKS)


def loss_in_chunks(net: Any, batch: Tensor) -> Tensor:
    """`language.loss`, with the logits of a few tokens at a time: those of all would be most of the memory."""
    causal = net.get_base_model() if hasattr(net, "get_base_model") else net
    hidden = causal.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
    wanted = batch[:, 1:].flatten()

    def part(hidden: Tensor, wanted: Tensor) -> Tensor:
        return cross_entropy(causal.lm_head(hidden).float(), wanted, reduction="sum")

    pairs = zip(hidden.split(CHUNK), wanted.split(CHUNK), strict=True)
    losses: list[Tensor] = [checkpoint(part, h, y, use_reentrant=False) for h, y in pairs]
    return torch.stack(losses).sum() / len(wanted)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
