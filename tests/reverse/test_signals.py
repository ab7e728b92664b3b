"""A step that a signal stops leaves no trace in the user's modules, wherever it is stopped."""

import random
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import retrograde as rg
from problems import conv
from retrograde.nets.coupling import CouplingNet

PASSES = 400


class Stopped(BaseException):
    """What the signal raises."""


def stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


@pytest.mark.skipif(sys.platform == "win32", reason="there are no interval timers")
@pytest.mark.parametrize("way", ["reverse", "checkpoint", "inverse", "inverse of two streams"])
def test_a_stopped_pass_leaves_the_modules_as_they_were(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)  # a signal inside of a destructor
    net, run = subject(way)
    for _ in range(3):
        run()
    start = time.perf_counter()
    run()
    length = time.perf_counter() - start
    held: dict[str, torch.Tensor | nn.Parameter] = {**dict(net.named_buffers()), **dict(net.named_parameters())}
    draw, stopped = random.Random(0), 0
    before = signal.signal(signal.SIGALRM, stop)
    try:
        for _ in range(PASSES):
            try:
                start = time.perf_counter()
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(2e-4, length))
                run()
                length = min(length, time.perf_counter() - start)  # the first one was slow, with other work beside it
            except (Stopped, RuntimeError):
                stopped += 1
            finally:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Stopped:
                    stopped += 1
            now = {**dict(net.named_buffers()), **dict(net.named_parameters())}
            assert all(now[name] is t for name, t in held.items()), "a buffer or a parameter was left exchanged"
            assert all(module.training for module in net.modules())
            assert torch.is_grad_enabled()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert stopped > PASSES // 2


def subject(way: str) -> tuple[nn.Module, Callable[[], Any]]:
    """A network, and a pass through it that takes this way."""
    x = torch.randn(2, 4, 6, 6)
    if way == "inverse of two streams":
        coupled = CouplingNet([conv(2) for _ in range(8)], dim=1)
        both = coupled.encode(x)
        return coupled, lambda: coupled.inverse(both)
    net = rg.MomentumNet([conv() for _ in range(8)], memory="auto" if way == "inverse" else way)
    state = net.encode(x)
    return net, (lambda: net.inverse(state)) if way == "inverse" else lambda: net(x).sum().backward()
