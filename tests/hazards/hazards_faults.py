"""Faults: what comes after an exception."""

from __future__ import annotations

import torch
from hazard_blocks import WIDTH, Mlp, batch
from hazard_registry import Found, Setting, collect, hazard, square, step
from torch import Tensor, nn

THEME = "faults"


class Fragile(Mlp):
    """Fails at one call, if armed."""

    fuse, rate = 0, 0.0
    error: type[BaseException] = RuntimeError

    def forward(self, x: Tensor) -> Tensor:
        self.fuse -= 1
        if self.fuse == 0:
            raise self.error("planned")
        return nn.functional.dropout(super().forward(x), self.rate)


def _after(h: Setting, error: type[BaseException], call: int) -> Found:
    """A step that fails at the given call of block 2, and the step after it."""
    blocks = [Fragile() for _ in range(4)]
    net = h.net(list(blocks))
    square(net(batch())).backward()  # the same range from here on, disturbed or not
    rng = torch.get_rng_state()
    if h.disturbed:
        blocks[2].fuse, blocks[2].error = call, error
        try:
            square(net(batch())).backward()
        except error as e:
            if "planned" not in str(e):
                raise
        blocks[2].fuse = 0
    net.zero_grad()
    torch.set_rng_state(rng)
    torch.manual_seed(8)
    return step(net, batch())


@hazard(THEME, undisturbed=True)
def exception_in_forward(h: Setting) -> Found:
    """an exception in a block in forward, then a step"""
    return _after(h, RuntimeError, 1)


@hazard(THEME, undisturbed=True)
def exception_in_replay(h: Setting) -> Found:
    """an exception in a block run again in backward, then a step"""
    return _after(h, RuntimeError, 2)


@hazard(THEME, undisturbed=True)
def interrupt_in_replay(h: Setting) -> Found:
    """KeyboardInterrupt in a block run again in backward, then a step"""
    return _after(h, KeyboardInterrupt, 2)


@hazard(THEME, undisturbed=True)
def out_of_memory_in_replay(h: Setting) -> Found:
    """out of memory in a block run again in backward, then a step"""
    return _after(h, torch.OutOfMemoryError, 2)


@hazard(THEME, undisturbed=True)
def backward_again_after_failed_replay(h: Setting) -> Found:
    """a replay fails; the same backward is asked for again"""
    blocks = [Fragile() for _ in range(4)]
    net, x = h.net(list(blocks)), batch()
    loss = square(net(x))
    if h.disturbed:
        blocks[2].fuse = 1
        try:
            loss.backward(retain_graph=True)
        except RuntimeError as e:
            if "planned" not in str(e):
                raise
        blocks[2].fuse = 0
    net.zero_grad()
    x.grad = None
    loss.backward()
    return {k: t for k, t in collect(net).items() if "gradient" in k}


@hazard(THEME, undisturbed=True)
def random_state_after_failed_replay(h: Setting) -> Found:
    """the random state after a replay that failed"""
    blocks = [Fragile() for _ in range(4)]
    for block in blocks:
        block.rate = 0.3
    net, x = h.net(list(blocks)), batch()
    loss = square(net(x))
    torch.manual_seed(21)
    if h.disturbed:
        blocks[1].fuse = 1
        try:
            loss.backward()
        except RuntimeError as e:
            if "planned" not in str(e):
                raise
    return {"random": torch.rand(3)}


@hazard(THEME, undisturbed=True)
def statistics_after_failed_replay(h: Setting) -> Found:
    """running statistics after a replay that failed"""
    blocks = [nn.Sequential(nn.BatchNorm1d(WIDTH), Fragile()) for _ in range(4)]
    net, x = h.net(list(blocks)), batch()
    loss = square(net(x))
    if h.disturbed:
        blocks[1][1].fuse = 1  # type: ignore[assignment]
        try:
            loss.backward()
        except RuntimeError as e:
            if "planned" not in str(e):
                raise
    return {f"{name.rpartition('.')[2]} {k}": b.clone() for k, (name, b) in enumerate(net.named_buffers())}


@hazard(THEME, undisturbed=True)
def graph_dropped_without_backward(h: Setting) -> Found:
    """forward passes whose backward never comes, then a step"""
    net = h.net([Fragile() for _ in range(4)])
    square(net(batch())).backward()  # the same range from here on, disturbed or not
    net.zero_grad()
    for _ in range(3 if h.disturbed else 0):
        net(batch())
    torch.manual_seed(8)
    return step(net, batch())
