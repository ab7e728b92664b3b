"""Training steps on one GPU against plain autograd and per-block checkpointing: time and peak memory, interleaved.

    PYTHONPATH=src python benchmarks/gpu_step.py [--repeats 10] [--only transformer] [--write PATH]

Networks: pre-norm transformers (d 1024, 512 tokens) and torchvision's ResNet-152 with its residual stages as momentum
networks. Peak memory is what a step allocates above parameters, gradients and batch (weights cast by autocast included,
for every method). Ratios are against `torch.utils.checkpoint` of every block of the plain network.
"""

from __future__ import annotations

import argparse
import copy
import platform
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from retrograde.measure import interleave


class Layer(nn.Module):
    """A pre-norm transformer layer: x + attention, then + MLP."""

    def __init__(self, width: int = 1024, heads: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Plain(nn.Module):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Checkpointed(Plain):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def transformer(depth: int, batch: int) -> tuple[dict[str, nn.Module], Tensor]:
    blocks = nn.ModuleList(Layer() for _ in range(depth)).cuda()
    networks: dict[str, nn.Module] = {"plain": Plain(blocks), "checkpoint": Checkpointed(blocks)}
    for memory in ("reverse", "checkpoint", "store"):
        networks[f"momentum {memory}"] = rg.MomentumNet(blocks, gamma=0.9, form="block", memory=memory)
    return networks, torch.randn(batch, 512, 1024, device="cuda")


def resnet152(batch: int) -> tuple[dict[str, nn.Module], Tensor]:
    from torchvision.models import resnet152 as build

    plain = build().cuda().to(memory_format=torch.channels_last)
    networks: dict[str, nn.Module] = {"plain": plain}
    for name, wrap in (
        ("checkpoint", Checkpointed),
        ("momentum reverse", lambda b: rg.MomentumNet(b, gamma=0.9, form="block", memory="reverse")),
        ("momentum auto", lambda b: rg.MomentumNet(b, gamma=0.9, form="block", memory="auto")),
    ):
        net = copy.copy(plain)
        net._modules = dict(plain._modules)
        for stage in ("layer1", "layer2", "layer3", "layer4"):
            first, *rest = getattr(plain, stage)
            head = Checkpointed(nn.ModuleList([first]))
            net._modules[stage] = nn.Sequential(head, wrap(nn.ModuleList(rest)))
        networks[name] = net
    return networks, torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)


CASES: dict[str, tuple[Callable[[], tuple[dict[str, nn.Module], Tensor]], torch.dtype | None]] = {
    "transformer L24 64×512 bf16": (lambda: transformer(24, 64), torch.bfloat16),
    "transformer L96 32×512 bf16": (lambda: transformer(96, 32), torch.bfloat16),
    "transformer L96 32×512 fp32": (lambda: transformer(96, 32), None),
    "ResNet-152 64×224² fp32": (lambda: resnet152(64), None),
    "ResNet-152 320×224² fp32": (lambda: resnet152(320), None),
    "ResNet-152 320×224² bf16": (lambda: resnet152(320), torch.bfloat16),
}


def step(net: nn.Module, x: Tensor, autocast: torch.dtype | None) -> Callable[[], Any]:
    def run() -> None:
        with torch.autocast("cuda", dtype=autocast) if autocast else nullcontext():
            loss = net(x).float().square().mean()
        loss.backward()

    return run


def peak(run: Callable[[], Any]) -> float:
    """GB above what was allocated before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", default="")
    parser.add_argument("--write")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}; TF32 on; medians of "
        f"{options.repeats} interleaved steps.\n",
        "| case | method | step ms | × | peak GB | × |",
        "|---|---|---:|---:|---:|---:|",
    ]
    print(*lines, sep="\n", flush=True)
    for case, (build, dtype) in CASES.items():
        if options.only.lower() not in case.lower():
            continue
        networks, x = build()
        for p in networks["plain"].parameters():
            p.grad = torch.zeros_like(p)
        runs = {name: step(net, x, dtype) for name, net in networks.items()}
        peaks = {}
        for name, run in runs.items():
            try:
                run()
                peaks[name] = peak(run)
            except torch.OutOfMemoryError:
                print(f"{case}: {name} does not fit", flush=True)
                torch.cuda.empty_cache()
        times = interleave({n: runs[n] for n in peaks}, repeats=options.repeats, warmup=1, device="cuda")
        for name in peaks:
            t, base = times[name], times["checkpoint"]
            row = (
                f"| {case} | {name} | {t.median * 1e3:.0f} | {t.ratio(base):.3f} | {peaks[name]:.2f} | "
                f"{peaks[name] / peaks['checkpoint']:.3f} |"
            )
            lines.append(row)
            print(row, flush=True)
        del networks, x, runs, times
        torch.cuda.empty_cache()
    if options.write:
        with open(options.write, "w") as file:
            file.write(
                "\n".join(["# Training steps on one GPU\n", "`PYTHONPATH=src python benchmarks/gpu_step.py`\n", *lines])
                + "\n"
            )


if __name__ == "__main__":
    main()
