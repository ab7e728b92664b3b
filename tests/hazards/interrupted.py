"""Training steps stopped by signals: what they leave behind, counted.

python tests/hazards/interrupted.py              # 3,000 signals for each memory mode
python tests/hazards/interrupted.py --signals 100 --modes reverse

A quarter of the signals each for small and large blocks, in a `MomentumNet` and in a converted model. Half come from an
interval timer, half from another process. They stop a whole step, or a backward pass before which modes or parameters were
exchanged, or whose forward pass ran under autocast. After each, everything must be as it was, except for what a whole
forward pass would have moved, too; and the next step must have the bits of a step that was never stopped.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg

MODES = ("reverse", "checkpoint", "store")
SIZES = {False: (3, 8), True: (32, 6)}  # channels and depth; large or not
KINDS = ("step", "modes", "parameters", "autocast")


class Block(nn.Module):
    """x + f(x) with everything that a replay must put back: running statistics, random numbers, modes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.relu(self.norm(self.conv(x))))


def network(memory: str, converted: bool, channels: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    fixed = rg.FixedPoint(18, torch.int32)
    blocks = [Block(channels) for _ in range(depth)]
    if converted:
        return rg.convert(nn.Sequential(*blocks), stages=["*"], memory=memory, fixed_point=fixed)
    return rg.MomentumNet(blocks, form="block", memory=memory, fixed_point=fixed)


class Subject:
    """A network, what a step of it gives, and what must not change when one is stopped."""

    def __init__(self, net: nn.Module, x: Tensor) -> None:
        self.net = net
        self.x = x
        self.start = {name: b.clone() for name, b in net.named_buffers()}
        self.bits = self.step()
        self.moved = {name: b.clone() for name, b in net.named_buffers()}
        self.values = [p.detach().clone() for p in net.parameters()]
        self.note()

    def note(self) -> None:
        """Everything is as it should be now."""
        self.parts = [*self.net.parameters(), *self.net.buffers()]
        self.training = [m.training for m in self.net.modules()]

    def reset(self) -> None:
        torch.manual_seed(1)
        self.net.zero_grad()
        with torch.no_grad():
            for name, b in self.net.named_buffers():
                b.copy_(self.start[name])

    def step(self) -> list[Tensor]:
        self.reset()
        y = self.net(self.x)
        y.square().mean().backward()
        return [y.detach(), *(p.grad.clone() for p in self.net.parameters() if p.grad is not None)]

    def wrong(self) -> str:
        """What is not as it was; of running statistics, what no step would have made of them."""
        now = [*self.net.parameters(), *self.net.buffers()]
        if any(a is not b for a, b in zip(now, self.parts, strict=True)):
            return "exchanged"
        if not all(map(torch.equal, self.net.parameters(), self.values)):
            return "parameters"
        for name, b in self.net.named_buffers():
            if not torch.equal(b, self.start[name]) and not torch.equal(b, self.moved[name]):
                return "statistics"
        if [m.training for m in self.net.modules()] != self.training:
            return "modes"
        if not torch.is_grad_enabled():
            return "grad mode"
        if torch.is_autocast_enabled("cpu"):
            return "autocast"
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return "hooks"
        return ""

    def next_step_differs(self) -> str:
        return "" if all(map(torch.equal, self.step(), self.bits)) else "next step"


class Stopper:
    """Stops what is run, after a while: by a timer in this process, or from another one."""

    def __init__(self) -> None:
        self.sent = mmap.mmap(-1, 8)  # how many the other process has sent: a line from it could be lost to a signal
        self.asked = 0
        self.armed = False
        for number in (signal.SIGALRM, signal.SIGINT):
            signal.signal(number, self.stop)
        read, self.pipe = os.pipe()
        parent = os.getpid()
        self.other = os.fork()
        if not self.other:
            for number in (signal.SIGALRM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            os.close(self.pipe)
            while line := os.read(read, 8):
                time.sleep(struct.unpack("d", line)[0])
                os.kill(parent, signal.SIGINT)
                struct.pack_into("q", self.sent, 0, struct.unpack_from("q", self.sent)[0] + 1)
            os._exit(0)

    def stop(self, number: int, frame: FrameType | None) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def run(self, job: Callable[[], Any], after: float, other_process: bool) -> bool:
        """Whether it was stopped."""
        stopped = False
        self.asked += other_process
        try:
            self.armed = True
            if other_process:
                os.write(self.pipe, struct.pack("d", after))
            else:
                signal.setitimer(signal.ITIMER_REAL, after)
            job()
            self.armed = False
        except KeyboardInterrupt:
            stopped = True
        except RuntimeError as error:  # out of a Function's backward in which the signal came
            if "Interrupt" not in str(error):
                raise
            stopped = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        while struct.unpack_from("q", self.sent)[0] < self.asked:
            time.sleep(1e-4)
        return stopped


def prepared(subject: Subject, kind: str) -> Callable[[], Any]:
    """What is to be stopped."""
    net, x = subject.net, subject.x
    subject.reset()
    if kind == "step":
        return lambda: net(x).square().mean().backward()
    if kind == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(x).float().square().mean()
    else:
        loss = net(x).square().mean()
    if kind == "modes":
        net.eval()
    if kind == "parameters":
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                module.weight = nn.Parameter(module.weight.detach().clone())
    if kind != "autocast":
        subject.note()
    return loss.backward


def stopped_passes(
    memory: str, converted: bool, large: bool, signals: int, seed: int, stopper: Stopper
) -> Counter[str]:
    """How many passes were stopped, and what was wrong after them."""
    subject = Subject(
        network(memory, converted, *((32, 6) if large else (3, 10))), torch.randn(4, 32 if large else 3, 12, 12)
    )
    draw, found = random.Random(seed), Counter[str]()
    lengths: dict[str, float] = {}
    for kind in KINDS:
        for _ in range(2):
            job = prepared(subject, kind)
            begin = time.perf_counter()
            job()
            lengths[kind] = time.perf_counter() - begin
            subject.net.train()
            subject.note()
        if kind == "autocast":
            autocast_moved = {name: b.clone() for name, b in subject.net.named_buffers()}
    exact = subject.moved
    while found["stopped"] < signals:
        kind = draw.choice(KINDS)
        subject.moved = autocast_moved if kind == "autocast" else exact
        job = prepared(subject, kind)
        places = torch.get_rng_state()
        after = draw.uniform(1e-4, 1.1 * lengths[kind])
        if not stopper.run(job, after, draw.random() < 0.5):
            found["too late"] += 1
        else:
            found["stopped"] += 1
        wrong = subject.wrong()
        if not wrong and kind != "step" and not torch.equal(torch.get_rng_state(), places):
            wrong = "random numbers"
        subject.net.train()
        subject.note()
        wrong = wrong or subject.next_step_differs()
        found["corrupt"] += bool(wrong)
        if wrong:
            found[f"{wrong} after {kind}"] += 1
            subject = Subject(network(memory, converted, *SIZES[large]), subject.x)
            exact = subject.moved
            while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
                torch._C._autograd._pop_saved_tensors_default_hooks()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signals", type=int, default=3000, help="for each memory mode")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.unraisablehook = lambda *_: None  # a signal inside of a destructor
    stopper, corrupt = Stopper(), 0
    for memory in options.modes:
        total = Counter[str]()
        for at, (converted, large) in enumerate([(False, False), (False, True), (True, False), (True, True)]):
            total += stopped_passes(memory, converted, large, options.signals // 4, options.seed + at, stopper)
        corrupt += total["corrupt"]
        print(f"{memory}: {total['stopped']} stopped, {total['corrupt']} corrupt", dict(total), flush=True)
    os.close(stopper.pipe)
    return int(corrupt > 0)


if __name__ == "__main__":
    sys.exit(main())
