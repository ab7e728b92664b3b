"""Networks whose bits are recorded: outputs, gradients and buffers of a training step, as one hash each.

    python tests/recorded.py            # compare this machine with tests/recorded_bits.json
    python tests/recorded.py --write    # record anew: only after a change that is meant to change bits

Matrix products differ between processors, so next to each hash stands that of the same blocks run as plain PyTorch ("probe"): where the
probe differs, the record says nothing. The cases named "portable" use additions and multiplications alone and hold everywhere.
Every case gives its range, so that how a range is found has no part in it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from problems import Attention, Mlp, Residual, conv, float_recurrence

RECORDS = Path(__file__).with_name("recorded_bits.json")
BITS = 18


class Portable(nn.Module):
    """f(x) = c·clamp(a·x + b, −1, 1), element by element: the same bits on every processor."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(3, width))
        self.b = nn.Parameter(torch.randn(3, width))
        self.c = nn.Parameter(torch.randn(3, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.c * torch.clamp(self.a * x + self.b, -1.0, 1.0)


class Conditioned(nn.Module):
    """f(x, c): an extra input with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(8, 8), nn.Linear(5, 8)

    def forward(self, x: Tensor, condition: Tensor, *, scale: float = 1.0) -> Tensor:
        return torch.tanh(self.f(x) + scale * self.g(condition))


def digest(tensors: dict[str, Tensor]) -> str:
    sha = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].detach().contiguous()
        sha.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        sha.update(t.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:24]


def step_of(call: Callable[[], Tensor], named: dict[str, Tensor], buffers: dict[str, Tensor]) -> str:
    """The hash of a training step: its output, its gradients, what it left in the buffers."""
    torch.manual_seed(7)
    y = call()
    y.float().square().mean().backward()
    found = {"output": y, "next random": torch.rand(1)}
    found |= {name: t.grad for name, t in named.items() if t.grad is not None}
    return digest(found | {f"buffer {name}": b for name, b in buffers.items()})


def options(memory: str, bits: int = BITS, narrow: bool = False) -> dict[str, Any]:
    """The options for a memory mode and a given range."""
    return {"memory": memory, "fixed_point": rg.FixedPoint(bits, torch.int16 if narrow else torch.int32)}


def net_case(
    make: Callable[[], nn.Module], shape: tuple[int, ...], depth: int = 12, gamma: Any = 0.9, form: str = "branch",
    velocity: Any = None, dtype: torch.dtype = torch.float32, narrow: bool = False, autocast: bool = False,
    bits: int = BITS, condition: bool = False, train: bool = True,
) -> Callable[[str | None], str]:  # fmt: skip
    def run(memory: str | None) -> str:
        torch.manual_seed(3)
        blocks = [make() for _ in range(depth)]
        x = torch.randn(shape)
        first = Mlp(shape[-1], 6) if velocity == "module" else velocity
        extra: tuple[Tensor, ...] = (torch.randn(shape[0], 5, requires_grad=True),) if condition else ()
        net = nn.ModuleList(blocks) if memory is None else rg.MomentumNet(
            blocks, gamma, form=form, velocity=first, **options(memory, bits, narrow)
        )  # fmt: skip
        net.to(dtype).train(train)
        x = x.to(dtype).requires_grad_()
        named = {"x": x, **{f"extra {k}": t for k, t in enumerate(extra)}, **dict(net.named_parameters())}
        kwargs = {"scale": 0.5} if condition else {}

        def call() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                if memory is not None:
                    return net(x, *extra, **kwargs)
                wrapped = [lambda z, b=b: b(z, *extra, **kwargs) for b in blocks]
                return float_recurrence(wrapped, rg.MomentumNet([nn.Identity()], 0.5).gamma, x, form)

        return step_of(call, named, dict(net.named_buffers()))

    return run


def model_case(
    make: Callable[[], tuple[nn.Module, Any]], gamma: Any = 0.9, **given: Any
) -> Callable[[str | None], str]:
    def run(memory: str | None) -> str:
        torch.manual_seed(3)
        model, batch = make()
        if memory is not None:
            rg.convert(
                model,
                gamma=gamma,
                **options(memory, given.get("bits", BITS)),
                **{k: v for k, v in given.items() if k != "bits"},
            )

        def call() -> Tensor:
            out = model(**batch) if isinstance(batch, dict) else model(batch)
            return out if isinstance(out, Tensor) else out[0]

        return step_of(call, dict(model.named_parameters()), dict(model.named_buffers()))

    return run


def coupling_case(
    make: Callable[[], nn.Module], shape: tuple[int, ...], depth: int, **given: Any
) -> Callable[[str | None], str]:
    def run(memory: str | None) -> str:
        from retrograde.nets.coupling import CouplingNet

        torch.manual_seed(3)
        blocks = [make() for _ in range(depth)]
        x = torch.randn(shape, requires_grad=True)
        if memory is None:
            call = lambda: sum(b(x.chunk(2, 1)[0]).sum() for b in blocks)  # noqa: E731
            return step_of(call, {"x": x}, {})
        net = CouplingNet(blocks, **options(memory), **given)
        return step_of(lambda: net(x), {"x": x, **dict(net.named_parameters())}, dict(net.named_buffers()))

    return run


def resnet() -> tuple[nn.Module, Any]:
    from retrograde.nets.resnet import thin_resnet

    return thin_resnet(32, classes=7, gamma=None), torch.randn(2, 3, 16, 16)


def torchvision_resnet() -> tuple[nn.Module, Any]:
    from retrograde.extras import require

    return require("torchvision").models.resnet50(num_classes=7), torch.randn(2, 3, 64, 64)


def vit() -> tuple[nn.Module, Any]:
    from retrograde.extras import require

    models = require("timm")
    return models.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=5, num_classes=7, drop_rate=0.1
    ), torch.randn(2, 3, 32, 32)


def llama() -> tuple[nn.Module, Any]:
    from retrograde.extras import require

    transformers = require("transformers")

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config), {"input_ids": torch.randint(0, 64, (2, 9)), "use_cache": False}


class OwnLoop(nn.Module):
    """A loop of one's own over branches that the model adds itself, and blocks that add themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.layers = nn.ModuleList(Residual(Mlp(8, 12)) for _ in range(7))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def own_loop() -> tuple[nn.Module, Any]:
    return OwnLoop(), torch.randn(4, 6)


def encoder() -> tuple[nn.Module, Any]:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 6, enable_nested_tensor=False
    ), torch.randn(2, 5, 16)


def _cases() -> dict[str, Callable[[str | None], str]]:
    cases: dict[str, Callable[[str | None], str]] = {}
    for gamma in (0.1, 0.125, 0.3, 0.5, 0.9, 0.99, 1.0):
        cases[f"portable gamma={gamma}"] = net_case(Portable, (3, 24), gamma=gamma)
    cases["portable depth=100"] = net_case(Portable, (3, 24), depth=100, bits=14)
    cases["portable block"] = net_case(lambda: Residual(Portable()), (3, 24), form="block", bits=16)
    cases["portable relu"] = net_case(Portable, (3, 24), form="relu", bits=16)
    cases["portable relu wide ratio"] = net_case(Portable, (3, 24), gamma=1 - 1 / 50_000, form="relu", bits=16)
    cases["portable float64"] = net_case(Portable, (3, 24), dtype=torch.float64, bits=40)
    cases["portable velocity"] = net_case(Portable, (3, 24), velocity="first")
    cases["portable int16"] = net_case(Portable, (3, 24), narrow=True, bits=9)
    cases["portable per-layer gamma"] = net_case(Portable, (3, 24), gamma=[0.1, 0.5, 0.9] * 4)
    for form in ("branch", "block", "relu"):
        for gamma in (0.5, 0.9):
            make = (lambda: Residual(Mlp(8, 12))) if form == "block" else (lambda: Mlp(8, 12))
            cases[f"mlp {form} gamma={gamma}"] = net_case(make, (3, 8), gamma=gamma, form=form)
    cases["mlp float64 gamma=0.3"] = net_case(lambda: Mlp(8, 12), (3, 8), gamma=0.3, dtype=torch.float64, bits=40)
    cases["mlp bfloat16"] = net_case(lambda: Mlp(8, 12), (3, 8), dtype=torch.bfloat16)
    cases["mlp bfloat16 int16"] = net_case(lambda: Mlp(8, 12), (3, 8), dtype=torch.bfloat16, narrow=True, bits=10)
    cases["mlp autocast"] = net_case(lambda: Mlp(8, 12), (3, 8), autocast=True)
    cases["mlp velocity module"] = net_case(lambda: Mlp(8, 12), (3, 8), velocity="module")
    cases["mlp velocity first relu"] = net_case(lambda: Mlp(8, 12), (3, 8), velocity="first", form="relu")
    cases["mlp gamma=0"] = net_case(lambda: Mlp(8, 12), (3, 8), gamma=0.0)
    cases["mlp per-layer gamma"] = net_case(lambda: Mlp(8, 12), (3, 8), gamma=[0.25, 0.9, 0.0, 0.5] * 3)
    cases["condition"] = net_case(Conditioned, (3, 8), condition=True)
    cases["convolution"] = net_case(conv, (2, 4, 5, 5), depth=6)
    cases["convolution relu"] = net_case(conv, (2, 4, 5, 5), depth=6, form="relu")
    cases["convolution eval"] = net_case(conv, (2, 4, 5, 5), depth=6, train=False)
    cases["attention dropout"] = net_case(Attention, (2, 5, 8), depth=6)
    cases["coupling"] = coupling_case(lambda: Mlp(4, 6), (3, 8), 8)
    cases["coupling squeezed"] = coupling_case(Pixels, (2, 4, 8, 8), 4, squeezes=(1, 2, 1, 1))
    cases["resnet-32"] = model_case(resnet, bits=14)
    cases["resnet-32 gamma=1/8"] = model_case(resnet, gamma=0.125, bits=14)
    cases["resnet-50 torchvision"] = model_case(torchvision_resnet, bits=14)
    cases["vit timm"] = model_case(vit)
    cases["llama"] = model_case(llama)
    cases["own loop"] = model_case(own_loop, stages=["layers"])
    cases["encoder"] = model_case(encoder)
    return cases


class Pixels(nn.Module):
    """The same function of every channel: fits any number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.scale * x + self.shift)


CASES = _cases()
MODES = ("reverse", "checkpoint", "store")


def modes_of(name: str) -> tuple[str, ...]:
    """The memory modes that a case has: a plain step cannot be reversed."""
    return MODES[1:] if name in ("mlp gamma=0", "mlp per-layer gamma") else MODES


def probe(name: str) -> str:
    """The hash of the case's blocks without the library: what this processor makes of them."""
    return "" if name.startswith("portable") else CASES[name](None)


def main() -> None:
    torch.set_num_threads(1)
    records = {} if "--write" in sys.argv else json.loads(RECORDS.read_text())
    differ = []
    for name, run in CASES.items():
        found = {mode: run(mode) for mode in modes_of(name) if mode != "store"}  # tests/test_recorded_bits.py has it
        if len(set(found.values())) > 1:
            differ.append(f"{name}: the modes differ, {found}")
        here = {"bits": found["checkpoint"], "probe": probe(name)}
        if "--write" in sys.argv:
            records[name] = here
        elif records[name]["probe"] != here["probe"]:
            print(f"{name}: another processor, nothing to compare")
        elif records[name] != here:
            differ.append(f"{name}: other bits than recorded")
    if "--write" in sys.argv:
        RECORDS.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")
    print("\n".join(differ) or f"{len(CASES)} cases, all equal")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
