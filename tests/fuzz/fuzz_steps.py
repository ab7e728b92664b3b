"""What is done with a random network, in every memory mode, and the comparison of the bits.

found = outcome(case, mode)      outputs, gradients, parameters, buffers and the random numbers that come next
compared(case)                   whether that is the same as with stored activations, and what is not
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

import torch
from fuzz_case import Case, build, inputs
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import retrograde as rg

Found = dict[str, Tensor]


def _loss(y: Tensor) -> Tensor:
    return y.float().square().sum() if y.dtype != torch.float64 else y.square().sum()


class Program:
    """One run of a case in one mode."""

    def __init__(self, case: Case, net: rg.MomentumNet) -> None:
        self.case, self.net, self.found = case, net, Found()
        self.x, self.args, self.kwargs, self.leaves = inputs(case)

    def forward(self, x: Tensor | None = None) -> Tensor:
        with self.autocast():
            y = self.net(self.x if x is None else x, *self.args, **self.kwargs)
        self.found[f"output {len(self.found)}"] = y.detach().clone()
        return y

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.case.autocast is None else torch.autocast("cpu", dtype=self.case.autocast)

    def backward(self, loss: Tensor, **options: Any) -> None:
        if loss.requires_grad:
            with self.autocast() if self.case.backward_inside else nullcontext():
                loss.backward(**options)

    def grad(self, loss: Tensor, wanted: Sequence[Tensor], **options: Any) -> list[Tensor]:
        if not loss.requires_grad or not wanted:
            return []
        with self.autocast() if self.case.backward_inside else nullcontext():
            got = torch.autograd.grad(loss, wanted, allow_unused=True, **options)
        for k, g in enumerate(got):
            self.found[f"grad {len(self.found)} of {k}"] = torch.zeros(()) if g is None else g.detach().clone()
        return [g for g in got if g is not None]

    def trained(self) -> list[Tensor]:
        return [*self.leaves, *(p for p in self.net.parameters() if p.requires_grad)]

    def run(self) -> Found:
        torch.manual_seed(self.case.seed ^ 0x5EED)
        getattr(self, "do_" + self.case.program.replace(" ", "_"))()
        self.found["next random"] = torch.rand(1)
        for k, leaf in enumerate(self.leaves):
            if leaf.grad is not None:
                self.found[f"input gradient {k}"] = leaf.grad
        for name, p in self.net.named_parameters():
            self.found[f"parameter {name}"] = p.detach()
            if p.grad is not None:
                self.found[f"gradient {name}"] = p.grad
        if self.case.program != "checkpointed":  # torch's checkpoint moves statistics twice, in "store" mode only
            self.found |= {f"buffer {name}": b for name, b in self.net.named_buffers()}
        return self.found

    def do_backward(self) -> None:
        self.backward(_loss(self.forward()))

    def do_grad(self) -> None:
        wanted = self.trained()
        some = wanted[:: max(1, len(wanted) // 3)] if self.case.seed % 2 else wanted[len(wanted) // 2 :]
        self.grad(_loss(self.forward()), some)

    def do_retain(self) -> None:
        loss = _loss(self.forward())
        self.backward(loss, retain_graph=True)
        self.grad(loss, self.trained(), retain_graph=True)
        self.backward(loss)

    def do_create_graph(self) -> None:
        wanted = self.trained()
        first = self.grad(_loss(self.forward()), wanted[:6], create_graph=True)
        self.backward(sum((g.float().square().sum() for g in first), torch.zeros(())))

    def do_two_losses(self) -> None:
        y = self.forward()
        self.backward(y.float().sum(), retain_graph=True)
        self.backward(_loss(y))

    def do_two_forwards(self) -> None:
        with torch.no_grad():
            other = (self.x.detach() * 0.5).requires_grad_(self.x.requires_grad)
        a, b = _loss(self.forward()), _loss(self.forward(other))
        for loss in (a, b) if self.case.seed % 2 else (b, a):
            self.backward(loss)

    def do_twice(self) -> None:
        self.backward(_loss(self.forward(self.forward())))

    def do_steps(self) -> None:
        optimizer = torch.optim.SGD([p for p in self.net.parameters() if p.requires_grad] or [torch.zeros(1)], lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            self.backward(_loss(self.forward()))
            for p in optimizer.param_groups[0]["params"]:
                if p.grad is not None:
                    p.grad.nan_to_num_(0.0, 1.0, -1.0).clamp_(-1, 1)
            optimizer.step()

    def do_optimizer_in_backward(self) -> None:
        def step(p: Tensor) -> None:
            with torch.no_grad():
                p.sub_(p.grad.clamp(-1, 1), alpha=0.01)  # type: ignore[union-attr]
            p.grad = None

        for p in self.net.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(step)
        self.backward(_loss(self.forward()))

    def do_between(self) -> None:
        """The world moves on between forward and backward."""
        y = self.forward()
        self.net.train(self.case.seed % 2 == 0)
        torch.rand(5)
        self.backward(_loss(y))

    def do_functional(self) -> None:
        swapped = {n: (p.detach() * 1.25).requires_grad_(p.requires_grad) for n, p in self.net.named_parameters()}
        with self.autocast():
            y = functional_call(self.net, swapped, (self.x, *self.args), self.kwargs)
        self.grad(_loss(y), [*self.leaves, *(p for p in swapped.values() if p.requires_grad)])

    def do_offload(self) -> None:
        with save_on_cpu():
            y = self.forward()
        self.backward(_loss(y))

    def do_checkpointed(self) -> None:
        with torch.no_grad():
            for _ in range(3):
                self.forward()  # so that a pass run again begins with the range that the first one began with
        if self.case.signed:  # other signs, other magnitudes: the range would move in between
            self.net.range.setting = self.net.range.now
        with self.autocast():
            y = checkpoint(self.net, self.x, *self.args, use_reentrant=False, **self.kwargs)
        self.found["output"] = y.detach()
        self.backward(_loss(y))

    def do_thread(self) -> None:
        loss, failed = _loss(self.forward()), []

        def work() -> None:
            try:
                self.backward(loss)
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    def do_encode(self) -> None:
        with self.autocast():
            state = self.net.encode(self.x, *self.args, **self.kwargs)
        self.found |= {"x": state.x.detach(), "v": state.v.detach()}
        self.found |= {"integer x": state.held.x, "integer v": state.held.v}
        widenings = state.held.widenings
        first = widenings[min(widenings)].before if widenings else state.fixed  # the pass may have widened its range
        if self.case.repeatable and self.case.overflow == "raise":
            with self.autocast():
                x0 = self.net.inverse(state, *self.args, **self.kwargs)
            self.found["x0"] = x0
            assert torch.equal(x0, first.decode(first.encode(self.x.detach()), self.x.dtype)), "inverse"
        self.backward(_loss(state.x) + state.v.float().sum())

    def do_hooks(self) -> None:
        seen = []
        for k, block in enumerate(dict.fromkeys(self.net.blocks)):
            for p in list(block.parameters())[:1]:
                if p.requires_grad:
                    p.register_hook(lambda g, k=k: seen.append(f"{k}") or g * 0.5)  # type: ignore[func-returns-value]
        y = self.forward()
        if y.requires_grad:
            y.register_hook(lambda g: g * 2)
        self.backward(_loss(y))
        self.found["order of hooks"] = torch.tensor([int(k) for k in seen])

    def do_failed_first(self) -> None:
        """A pass that fails half-way, then one that does not."""
        blocks = list(self.net.blocks)
        victim = blocks[self.case.seed % len(blocks)]
        fuse = [2 if self.case.seed % 3 else 1]

        def blow(*_: Any) -> None:
            fuse[0] -= 1
            if fuse[0] == 0:
                raise KeyboardInterrupt

        handle = victim.register_forward_pre_hook(blow)
        rng = torch.get_rng_state()
        buffers = [b.clone() for b in self.net.buffers()]
        with ExitStack() as stack:
            stack.callback(handle.remove)
            stack.enter_context(suppress(KeyboardInterrupt))
            self.backward(_loss(self.forward()))
        torch.set_rng_state(rng)
        with torch.no_grad():
            for b, before in zip(self.net.buffers(), buffers, strict=True):
                b.copy_(before)
        self.net.zero_grad()
        for leaf in self.leaves:
            leaf.grad = None
        self.found.clear()
        self.backward(_loss(self.forward()))


def outcome(case: Case, net: rg.MomentumNet, mode: str) -> Found | Exception:
    """What a copy of the network gives in this mode, or the error it raises."""
    net = copy.deepcopy(net)
    net.memory = mode
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Program(case, net).run()
    except Exception as error:
        return error


def difference(expected: Found, found: Found) -> str | None:
    """What differs, in one line."""
    if expected.keys() != found.keys():
        return f"only one of them has {sorted(expected.keys() ^ found.keys())[:4]}"
    wrong = [name for name in expected if not same(expected[name], found[name])]
    if not wrong:
        return None
    a, b = expected[wrong[0]], found[wrong[0]]
    size = (a.double() - b.double()).abs().max() if a.shape == b.shape and a.numel() else f"{b.dtype} {tuple(b.shape)}"
    return f"{len(wrong)} of {len(expected)} tensors differ, first {wrong[0]!r} by {size}"


def same(a: Tensor, b: Tensor) -> bool:
    """Equal dtypes, shapes and values, NaN being equal to NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def compared(case: Case) -> tuple[str, str]:
    """How the modes compare: "same", "refused" (by all) or "mismatch", and a line about it."""
    net = build(case)
    expected = outcome(case, net, "store")
    verdict = "refused" if isinstance(expected, Exception) else "same"
    for mode in case.modes:
        found = outcome(case, net, mode)
        if isinstance(expected, Exception) and isinstance(found, Exception):
            continue
        if isinstance(expected, Exception) or isinstance(found, Exception):
            return "mismatch", f"{mode}: {_short(found)}; store: {_short(expected)}"
        if (text := difference(expected, found)) is not None:
            return "mismatch", f"{mode}: {text}"
    return verdict, ""


def _short(result: Found | Exception) -> str:
    return f"{type(result).__name__}: {str(result)[:160]!r}" if isinstance(result, Exception) else "no error"
