"""How much each residual block of a ResNet does: the size of f beside that of x, and the scale of the BatchNorm that ends f."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from retrograde.nets.resnet import BasicBlock, BasicSum, Bottleneck, BottleneckSum


def blocks(net: nn.Module) -> list[nn.Module]:
    """The blocks that take a momentum step where there is a γ, in order, of a network of `retrograde.nets.resnet`."""
    found = [m for m in net.modules() if isinstance(m, BasicBlock | Bottleneck) and m.downsample is None]
    sums = [
        m for m in found if isinstance(m, BasicSum | BottleneckSum)
    ]  # beside them a stage's first block is He's, and takes no step
    return list(sums or found)


def last_norm(block: nn.Module) -> nn.BatchNorm2d:
    """The BatchNorm whose output is f."""
    return [m for m in block.modules() if isinstance(m, nn.BatchNorm2d)][-1]


@torch.no_grad()
def sizes(net: nn.Module, x: Tensor) -> dict[str, list[float]]:
    """Of every block, on these images in eval mode: `share`, the mean of ‖f‖/‖x‖; `scale`, the root mean square of the weight of its
    last BatchNorm."""
    chosen, inputs = blocks(net), dict[int, Tensor]()
    shares: dict[int, Tensor] = {}

    def before(k: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            inputs[k] = args[0].flatten(1).float().norm(dim=1)

        return hook

    def after(k: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], f: Tensor) -> None:
            shares[k] = (f.flatten(1).float().norm(dim=1) / inputs[k]).mean()

        return hook

    handles = []
    for k, block in enumerate(chosen):
        handles.append(block.get_submodule("conv1").register_forward_pre_hook(before(k)))
        handles.append(last_norm(block).register_forward_hook(after(k)))
    training = net.training
    try:
        net.eval()(x)
    finally:
        net.train(training)
        for handle in handles:
            handle.remove()
    scale = torch.stack([last_norm(block).weight.float().square().mean().sqrt() for block in chosen])
    share = torch.stack([shares[k] for k in range(len(chosen))])
    return {"share": share.tolist(), "scale": scale.tolist()}
