"""Faults: what comes after an exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hazard_blocks import WIDTH, Mlp, batch, several
from hazard_registry import Found, Theme, collect, square, step, undisturbed
from torch import Tensor, nn


class Fragile(Mlp):
    """Fails at one call, if armed."""

    fuse, rate = 0, 0.0
    error: type[BaseException] = RuntimeError

    def forward(self, x: Tensor) -> Tensor:
        self.fuse -= 1
        if self.fuse == 0:
            raise self.error("planned")
        return nn.functional.dropout(super().forward(x), self.rate)


def failing(h: Theme, block: Any, call: int, job: Callable[[], Any], error: type[BaseException] = RuntimeError) -> None:
    """Run a job in which the block fails at that call. The undisturbed truth is without the job."""
    if h.disturbed:
        block.fuse, block.error = call, error
        try:
            job()
        except error as raised:
            if "planned" not in str(raised):
                raise
        block.fuse = 0


def after(h: Theme, error: type[BaseException], call: int) -> Found:
    """A step that fails at the given call of block 2, and the step after it."""
    blocks = several(Fragile)
    net = h.net(blocks)
    square(net(batch())).backward()  # the same range from here on, disturbed or not
    rng = torch.get_rng_state()
    failing(h, blocks[2], call, lambda: square(net(batch())).backward(), error)
    net.zero_grad()
    torch.set_rng_state(rng)
    torch.manual_seed(8)
    return step(net)


class Faults(Theme):
    theme = "faults"

    @undisturbed
    def exception_in_forward(self) -> Found:
        """an exception in a block in forward, then a step"""
        return after(self, RuntimeError, 1)

    @undisturbed
    def exception_in_replay(self) -> Found:
        """an exception in a block run again in backward, then a step"""
        return after(self, RuntimeError, 2)

    @undisturbed
    def interrupt_in_replay(self) -> Found:
        """KeyboardInterrupt in a block run again in backward, then a step"""
        return after(self, KeyboardInterrupt, 2)

    @undisturbed
    def out_of_memory_in_replay(self) -> Found:
        """out of memory in a block run again in backward, then a step"""
        return after(self, torch.OutOfMemoryError, 2)

    @undisturbed
    def backward_again_after_failed_replay(self) -> Found:
        """a replay fails; the same backward is asked for again"""
        blocks = several(Fragile)
        net, x = self.net(blocks), batch()
        loss = square(net(x))
        failing(self, blocks[2], 1, lambda: loss.backward(retain_graph=True))
        net.zero_grad()
        x.grad = None
        loss.backward()
        return {k: t for k, t in collect(net).items() if "gradient" in k}

    @undisturbed
    def random_state_after_failed_replay(self) -> Found:
        """the random state after a replay that failed"""
        blocks = several(Fragile)
        for block in blocks:
            block.rate = 0.3
        loss = square(self.net(blocks)(batch()))
        torch.manual_seed(21)
        failing(self, blocks[1], 1, loss.backward)
        return {"random": torch.rand(3)}

    @undisturbed
    def statistics_after_failed_replay(self) -> Found:
        """running statistics after a replay that failed"""
        blocks = several(lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), Fragile()))
        net = self.net(blocks)
        loss = square(net(batch()))
        failing(self, blocks[1][1], 1, loss.backward)
        return {f"{name.rpartition('.')[2]} {k}": b.clone() for k, (name, b) in enumerate(net.named_buffers())}

    @undisturbed
    def graph_dropped_without_backward(self) -> Found:
        """forward passes whose backward never comes, then a step"""
        net = self.net(several(Fragile))
        square(net(batch())).backward()  # the same range from here on, disturbed or not
        net.zero_grad()
        for _ in range(3 if self.disturbed else 0):
            net(batch())
        torch.manual_seed(8)
        return step(net)
