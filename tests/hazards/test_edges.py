"""What blocks and loops do beside computing x: threads, side losses, caches, the model's own checkpoints. Right, or a clear error."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import retrograde as rg
from retrograde.convert.convert import stages_of
from retrograde.reverse.tape import Tape
from ways import Event

X = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
REPLAYING = ["reverse", "checkpoint"]


class Residual(nn.Module):
    """x + tanh(Ax)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Looped(nn.Module):
    """Blocks that return x + f(x), or f(x), which the loop adds."""

    def __init__(self, branch: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scaled(branch) for _ in range(5)])
        self.branch = branch
        self.between: Callable[[int, Tensor, Tensor], None] = lambda k, x, f: None

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            f = layer(x)
            self.between(k, x if self.branch else f, f)
            x = x + f if self.branch else f
        return x


class Scaled(nn.Module):
    def __init__(self, branch: bool) -> None:
        super().__init__()
        self.scale, self.branch = nn.Parameter(torch.full((), 0.5, dtype=torch.float64)), branch

    def forward(self, x: Tensor) -> Tensor:
        f = torch.tanh(self.scale * x)
        return f if self.branch else x + f


def loop(**options: Any) -> nn.Sequential:
    return rg.convert(nn.Sequential(*[Residual() for _ in range(5)]), stages=["*"], gamma=0.9, **options)  # type: ignore[return-value]


@pytest.fixture
def impatient() -> Iterator[None]:
    """Threads are switched as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(jobs: list[Callable[[], None]]) -> None:
    failed: list[Exception] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failed:
        raise failed[0]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_threads_that_share_one_model(training: bool, converted: bool) -> None:
    model = loop(memory="reverse")
    if not converted:
        model = rg.MomentumNet(list(rg.revert(model)), form="block", memory="reverse")
    model.train(training)
    weight = next(model.parameters())
    model(4 * X)  # finds a range that holds what all of them will ask for

    def found(x: Tensor) -> list[Tensor]:
        with torch.set_grad_enabled(training):
            y = model(x)
        return [y, *(torch.autograd.grad(y.square().sum(), [weight]) if training else ())]

    expected = [found(X + k) for k in range(4)]

    def work(k: int) -> None:
        for _ in range(50):
            for a, b in zip(found(X + k), expected[k], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)

    in_threads([lambda k=k: work(k) for k in range(4)])  # type: ignore[misc]
    assert len(found(X)) == len(expected[0])


@pytest.mark.parametrize("memory", [*REPLAYING, "store"])
def test_a_model_that_checkpoints_with_reentry_is_refused(memory: str) -> None:
    """v goes on from a segment that ran without gradients; its own gradient would be lost."""
    with pytest.raises(rg.ReplayError, match=r"use_reentrant=True.*Pass use_reentrant=False"):
        checkpoint_sequential(loop(memory=memory), 2, X.clone().requires_grad_(), use_reentrant=True).sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_x_changed_in_place_between_blocks_is_seen_without_gradients(mode: Callable[[], Any]) -> None:
    model, found = loop(), []
    for in_place in (True, False):

        def half(module: nn.Module, args: Any, x: Tensor, in_place: bool = in_place) -> Tensor:
            return x.mul_(0.5) if in_place else x * 0.5

        handle = model[2].register_forward_hook(half)
        with mode(), pytest.warns(UserWarning, match="velocity starts from 0") if in_place else mode():
            found.append(model(X.clone()))
        handle.remove()
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["verify", "overflow", "memory"])
def test_options_are_checked_where_they_are_set(name: str) -> None:
    net = rg.MomentumNet([nn.Linear(8, 8)])
    with pytest.raises(ValueError, match="bogus"):
        setattr(net, name, "bogus")


def test_a_pass_is_open_in_its_own_thread_alone() -> None:
    """What the test above shows by luck of timing."""
    model, seen = loop(), []
    (stage,) = stages_of(model)
    passes = lambda: seen.append(len(stage.open.passes))  # noqa: E731

    def look(module: nn.Module, args: Any, x: Tensor) -> None:
        in_threads([passes])
        passes()

    model[2].register_forward_hook(look)
    model(X)
    assert seen == [0, 1]


@pytest.mark.parametrize("velocity", ["first", nn.Linear(8, 8).double()])
def test_nothing_is_run_again_where_everything_is_stored(velocity: Any) -> None:
    """What makes the initial velocity included."""
    calls = [0]
    blocks = [nn.Linear(8, 8).double() for _ in range(3)]
    for block in (*blocks, *([velocity] if isinstance(velocity, nn.Module) else [])):
        block.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    y = rg.MomentumNet(blocks, velocity=velocity, memory="store")(X)
    before = calls[0]
    y.square().sum().backward()
    assert calls[0] == before == 4


def test_a_named_stage_may_have_a_block_several_times() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
            self.blocks = nn.ModuleList([block, block, nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    found = []
    for memory in ("store", "reverse"):
        torch.manual_seed(0)
        model = rg.convert(Doubled(), stages=["blocks"], gamma=0.9, memory=memory)
        y = model(torch.randn(2, 3, 8))
        y.square().sum().backward()
        found.append([y, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))


def by_data(x: Tensor) -> None:
    x.data.mul_(0.5)


def by_numpy(x: Tensor) -> None:
    x.detach().numpy()[1] += 1


def few_rows(x: Tensor) -> None:
    x.data[2:3] = 0


@pytest.mark.parametrize("verify", ["auto", "strict"])
@pytest.mark.parametrize("form", ["block", "branch"])
@pytest.mark.parametrize("change", [by_data, by_numpy, few_rows])
@pytest.mark.parametrize("memory", [*REPLAYING, "store", "evaluated"])
def test_x_changed_between_blocks_behind_pytorchs_back_is_refused(
    change: Callable[[Tensor], None], form: str, memory: str, verify: str
) -> None:
    model = Looped(form == "branch")
    rg.convert(
        model,
        stages=["layers"],
        gamma=0.9,
        form=form,
        verify=verify,
        memory="auto" if memory == "evaluated" else memory,
    )
    x = torch.randn(4, 3000, dtype=torch.float64)
    with torch.set_grad_enabled(memory != "evaluated"):
        model(x)
        for at in (0, 1):
            model.between = lambda k, x, f, at=at: change((x, f)[at]) if k == 3 else None
            if at == 0 or form == "branch":
                with pytest.raises(rg.ReplayError, match="was changed between two blocks of this pass"):
                    model(x)


def test_changes_are_told_of_an_accelerator_without_waiting() -> None:
    from retrograde.convert.next_x import Unseen
    from retrograde.reverse.deferred import Deferred

    deferred = Deferred(event_on=lambda device: Event())
    x = [torch.randn(3, 70_000) for _ in range(3)]
    for changed in (None, 1):
        unseen = Unseen("auto", deferred)
        hashes = [unseen.hashed(t) for t in x]
        if changed is not None:
            x[changed].data.view(-1)[1000 : 1000 + 509] += 1
        for k, (t, hashed) in enumerate(zip(x, hashes, strict=True)):
            unseen.compare(t, hashed, f"x {k}", wait=False)
        unseen.end()
        if changed is None:
            deferred.settle()
    with pytest.raises(rg.ReplayError, match="x 1 was changed between two blocks of an earlier pass"):
        deferred.settle()


class Collecting(nn.Module):
    """Puts something into lists and dictionaries, of its own and given ones, and reads what others left."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()
        self.own: list[Tensor] = []

    def forward(self, x: Tensor, given: list[Tensor], named: dict[str, Any]) -> Tensor:
        f = torch.tanh(self.linear(x)) * (1 + 0.1 * len(self.own))
        self.own.append(f.square().mean())
        given.append(f.sum())
        named["inner"].append(f)
        named["first"] = named.get("first", f)
        return f + 0.1 * named["first"] + 0.01 * named["inner"][0] + 0.001 * given[-1]


@pytest.mark.parametrize("retain", [False, True])
def test_lists_that_blocks_change(retain: bool) -> None:
    """Each replay finds them as they were, and what it does to them is dropped."""
    found = []
    for memory in ("store", *REPLAYING):
        torch.manual_seed(0)
        blocks, seen = [Collecting() for _ in range(4)], list[Any]()
        net = rg.MomentumNet(blocks, memory=memory, fixed_point=rg.FixedPoint(40, torch.int64))
        for _ in range(3):
            for block in blocks:
                block.own.clear()
            given, named = [], {"inner": list[Tensor]()}
            loss = net(X, given, named).square().mean() + sum(given) + sum(b.own[-1] for b in blocks)
            for k in range(1 + retain):
                loss.backward(retain_graph=retain and not k)
            seen += [len(given), len(named["inner"]), *(len(b.own) for b in blocks)]
        found.append((seen, [p.grad for p in net.parameters()]))
    assert found[0][0] == found[1][0] == found[2][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))
    assert all(map(torch.equal, found[0][1], found[2][1]))
    assert all(g.abs().sum() > 0 for g in found[0][1])


def test_a_tensor_in_a_list_that_a_block_writes_to_is_refused() -> None:
    class Adding(Collecting):
        def forward(self, x: Tensor, given: list[Tensor]) -> Tensor:  # type: ignore[override]
            given[0] += 1
            return self.linear(x)

    with pytest.raises(rg.ReplayError, match="changed a parameter or an extra input while it ran"):
        rg.MomentumNet([Adding()], memory="reverse")(X, [torch.zeros(())])


def test_a_graph_of_lists_that_is_dropped_is_freed() -> None:
    def tapes() -> list[weakref.ref[Tape]]:
        return [weakref.ref(o) for o in gc.get_objects() if type(o) is Tape]

    before = tapes()
    net = rg.MomentumNet([Collecting() for _ in range(4)], memory="reverse")
    given: list[Tensor] = []
    y = net(X, given, {"inner": []})
    for block in net.blocks:
        block.own.clear()
    given.clear()
    gone = [tape for tape in tapes() if tape not in before]
    assert gone
    del y
    gc.collect()
    assert all(tape() is None for tape in gone)


class Repeated(nn.Module):
    """Two blocks, as often as that, with dropout in between."""

    def __init__(self, times: int, rate: float) -> None:
        super().__init__()
        self.layers, self.dropout, self.times = nn.ModuleList([Residual(), Residual()]), nn.Dropout(rate), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            for layer in self.layers:
                x = self.dropout(layer(x)) if self.dropout.p else layer(x)
        return x


@pytest.mark.parametrize(
    ("times", "rate", "stages", "modes", "words"),
    [
        (1, 0.0, "layers", "te", ""),
        (1, 0.0, "layers.*", "te", ""),
        (3, 0.0, "layers", "t", "several times in a row"),
        (3, 0.0, "layers", "e", "several times in a row"),
        (1, 0.1, "layers", "t", "velocity starts from 0 again"),
        (1, 0.1, "layers", "te", "another network than the trained one"),
    ],
)
def test_a_network_that_is_another_than_it_seems_is_said_to_be(
    times: int, rate: float, stages: str, modes: str, words: str
) -> None:
    model = rg.convert(Repeated(times, rate), stages=[stages], gamma=0.9)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for mode in modes:
            model.train(mode == "t")(X)
    texts = [str(w.message) for w in said]
    assert len(texts) == (len(modes) if words else 0)
    assert not words or words in texts[-1]
