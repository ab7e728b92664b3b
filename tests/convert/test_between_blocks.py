"""What a model does to x between two converted blocks, and to its gradient: compared with the recurrence written out."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

import retrograde as rg
from retrograde.nets.revnet import RevNet

Between = Callable[["Loop", int, Tensor, list[Tensor]], Tensor]
"""What is done to x before block k, and a list for what is to be compared."""
GAMMA = 0.9
MODES = ("reverse", "checkpoint", "store")
FIXED = rg.FixedPoint(20, torch.int32)
FINE = rg.FixedPoint(40, torch.int64)


class Residual(nn.Module):
    def __init__(self, branch: bool = False) -> None:
        super().__init__()
        self.inner, self.outer, self.branch = nn.Linear(6, 9), nn.Linear(9, 6), branch

    def forward(self, x: Tensor) -> Tensor:
        f = self.outer(torch.tanh(self.inner(x)))
        return f if self.branch else x + f


class Loop(nn.Module):
    """Blocks one after another, and what is done in between: `recorded[k]` says whether block k records gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Residual() for _ in range(7))
        self.between: Between = lambda model, k, x, seen: x
        self.recorded, self.seen = [True] * 7, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for k, layer in enumerate(self.layers):
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.recorded[k]):
                x = layer(self.between(self, k, x, self.seen))
        return x


def written_out(model: Loop, x: Tensor, restarts: tuple[int, ...] = ()) -> Tensor:
    """The same recurrence in plain PyTorch."""
    x = model.stem(x)
    v = torch.zeros_like(x)
    for k, layer in enumerate(model.layers):
        with torch.set_grad_enabled(model.recorded[k]):
            x = model.between(model, k, x, model.seen)
            v = torch.zeros_like(x) if k in restarts else v
            v = GAMMA * v + (1 - GAMMA) * (layer(x) - x)
            x = x + v
    return x


def loss(y: Tensor) -> Tensor:
    return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum() + y.square().sum()


def gradients(model: nn.Module, y: Tensor) -> dict[str, Tensor | None]:
    loss(y).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def compare(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> None:
    for name, g in wanted.items():
        assert (found[name] is None) == (g is None), name
        if g is not None:
            torch.testing.assert_close(found[name], g, rtol=1e-10, atol=1e-10)


def built(memory: str, between: Between | None = None, recorded: str = "1" * 7, **options: Any) -> tuple[Loop, Loop]:
    """The converted model and the plain one."""
    torch.manual_seed(3)
    model = Loop().double()
    model.between, model.recorded = between or model.between, [mark == "1" for mark in recorded]
    plain = copy.deepcopy(model)
    rg.convert(model, gamma=GAMMA, memory=memory, stages=["layers"], **options)
    return model, plain


X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def at(which: Sequence[int], do: Callable[[Tensor, list[Tensor]], Any]) -> Between:
    """Something that is done with x before these blocks, where it has a gradient. What is no tensor leaves x."""

    def between(model: Loop, k: int, x: Tensor, seen: list[Tensor]) -> Tensor:
        if k not in which or not torch.is_grad_enabled():
            return x
        made = do(x, seen)
        return made if isinstance(made, Tensor) else x

    return between


def leaf(x: Tensor, seen: list[Tensor]) -> None:
    seen.append(x.requires_grad_())


def taken(model: Loop, k: int, x: Tensor, seen: list[Tensor]) -> Tensor:
    """As in a gradient penalty on an intermediate x: the pass goes on from where it was."""
    if k in (2, 5) and x.requires_grad:
        seen += torch.autograd.grad(x.square().sum(), list(model.stem.parameters()), retain_graph=True)
    return x


def hooked(hook: Callable[[Tensor], Any]) -> Callable[[Tensor, list[Tensor]], Any]:
    return lambda x, seen: (x.register_hook(hook), None)[1]


def unseen(change: Callable[[Tensor], Any]) -> Between:
    return at((3,), hooked(lambda g: (change(g), None)[1]))


class Scale(Function):
    """Gradient reversal and the like: nothing but another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return -0.1 * g


HOOKS: dict[str, Callable[[Tensor, list[Tensor]], Any]] = {
    "sees and changes": lambda x, seen: x.register_hook(lambda g: seen.append(g.clone()) or 0.5 * g),  # type: ignore[func-returns-value]
    "retained": lambda x, seen: (x.retain_grad(), seen.append(x)),  # type: ignore[func-returns-value]
    "of several tensors": lambda x, seen: register_multi_grad_hook((x,), lambda grads: seen.append(grads[0].clone())),
    "writes to the gradient": hooked(lambda g: (g.mul_(0.5), None)[1]),
    "torch.neg": hooked(torch.neg),
    "torch.zeros_like": hooked(torch.zeros_like),
    "hardtanh": hooked(nn.functional.hardtanh),
    "a module": hooked(nn.Hardtanh()),
}  # fmt: skip
RESTARTS: dict[str, Any] = {"restarts": (4,), "warns": "its velocity starts from 0 again"}
NOT_SEEN: dict[str, Any] = {"verify": "off"}
BETWEEN: dict[str, tuple[Between | None, dict[str, Any]]] = {
    **{f"recorded {r}": (None, {"recorded": r}) for r in ("0001111", "1110011", "0010011", "1111110")},
    "a leaf made of x after a frozen trunk": (at((3,), leaf), {"recorded": "0001111"}),
    **{f"{name} at {k}": (at(k, hook), {}) for name, hook in HOOKS.items() for k in ((0,), (3,), (2, 5, 6))},
    **{f"a gradient taken, verify={v}": (taken, {"verify": v}) for v in ("auto", "strict", "off")},
    "views": (lambda model, k, x, seen: x.view(-1).view(x.shape) if k == 4 else x.view(x.shape), {}),
    "another gradient": (at((4,), lambda x, seen: Scale.apply(x)), RESTARTS),
    "another gradient, then a view": (at((4,), lambda x, seen: Scale.apply(x).view(x.shape)), RESTARTS),
    "a view, another gradient, a view": (at((4,), lambda x, seen: Scale.apply(x.view(-1)).view(x.shape)), RESTARTS),
    "cut off, then a view": (at((4,), lambda x, seen: x.detach().requires_grad_().view(x.shape)), RESTARTS),
    # what changes a gradient and leaves no trace, as collectives do: the version of a tensor does not move
    "through data": (unseen(lambda g: g.data.mul_(3)), NOT_SEEN),
    "through NumPy": (unseen(lambda g: g.detach().numpy().__imul__(3)), NOT_SEEN),
    "through its storage": (unseen(lambda g: torch.empty(0, dtype=g.dtype).set_(g.untyped_storage()).mul_(3)), NOT_SEEN),
    "data assigned": (unseen(lambda g: setattr(g, "data", 3 * g)), NOT_SEEN),
}  # fmt: skip


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("name", BETWEEN)
def test_the_recurrence_written_out(name: str, memory: str) -> None:
    """Outputs, gradients, and what is seen of gradients between blocks, in the first pass and in one that has its range."""
    between, options = BETWEEN[name]
    options = dict(options)
    restarts, warns = options.pop("restarts", ()), options.pop("warns", None)
    model, plain = built(memory, between, **options)
    for turn in range(2):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            y, wanted = model(X), written_out(plain, X, restarts)
        texts = [str(w.message) for w in said]
        assert all(warns is not None and warns in text for text in texts), texts
        assert texts or warns is None or turn
        torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
        assert y.requires_grad == wanted.requires_grad
        if y.requires_grad:
            compare(gradients(model, y), gradients(plain, wanted))
        assert len(model.seen) == len(plain.seen)
        for ours, theirs in zip(model.seen, plain.seen, strict=True):
            ours, theirs = (t.grad if t.retains_grad or t.requires_grad else t for t in (ours, theirs))
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        for net in (model, plain):
            net.zero_grad()
            net.seen.clear()


@pytest.mark.parametrize("verify", ["auto", "strict"])
def test_a_pass_that_begins_without_gradients_is_verified(verify: str) -> None:
    """A block past the prefix that does not repeat itself is found."""

    class Restless(Residual):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Restless.calls += 1
            return super().forward(x) + 1e-3 * Restless.calls

    model = Loop().double()
    model.layers[5] = Restless().double()
    model.recorded = [k > 2 for k in range(7)]
    rg.convert(model, gamma=GAMMA, memory="reverse", stages=["layers"], verify=verify)
    with pytest.raises(rg.ReplayError):
        loss(model(X)).backward()


def retained(block: nn.Module) -> tuple[list[Tensor], RemovableHandle]:
    """The first input of a block, which retains its gradient; and the hook that sees to it."""
    kept: list[Tensor] = []

    def retain(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].requires_grad and torch.is_grad_enabled() and not kept:
            args[0].retain_grad()
            kept.append(args[0])

    return kept, block.register_forward_pre_hook(retain)


@pytest.mark.parametrize("form", ["branch", "block", "relu"])
@pytest.mark.parametrize("memory", MODES)
def test_a_momentum_net_s_block_may_retain_the_gradient_of_its_input(memory: str, form: str) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double() for _ in range(6)]
    net = rg.MomentumNet(blocks, GAMMA, form=form, memory=memory)
    kept, handle = retained(blocks[3])
    x0 = X.abs().requires_grad_()
    loss(net(x0)).backward()
    handle.remove()
    x, v = x0, torch.zeros_like(x0)
    for k, block in enumerate(blocks):
        if k == 3:
            x.retain_grad()
            wanted = x
        y = block(x)
        f = y if form == "branch" else y - x if form == "block" else torch.relu(x + y) - x
        v = GAMMA * v + (1 - GAMMA) * f
        x = x + v
    loss(x).backward()
    torch.testing.assert_close(kept[0].grad, wanted.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("memory", MODES)
def test_a_rev_net_s_block_may_retain_the_gradient_of_its_input(memory: str) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double() for _ in range(6)]
    net = RevNet(blocks[::2], blocks[1::2], memory=memory)
    kept, handle = retained(blocks[3])
    loss(net(X)).backward()
    handle.remove()
    streams = list(X.chunk(2, 1))
    for k, block in enumerate(blocks):
        if k == 3:
            streams[1 - k % 2].retain_grad()
            wanted = streams[1 - k % 2]
        streams[k % 2] = streams[k % 2] + block(streams[1 - k % 2])
    loss(torch.cat(streams, 1)).backward()
    torch.testing.assert_close(kept[0].grad, wanted.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("memory", MODES)
def test_full_backward_hooks_are_given_all_of_the_gradient(memory: str) -> None:
    model, plain = built(memory)
    model.layers[2].register_full_backward_hook(lambda module, given, out: model.seen.append(out[0].clone()))
    plain.between = at((3,), lambda x, seen: (x.register_hook(lambda g: (seen.append(g.clone()), None)[1]), None)[1])
    compare(gradients(model, model(X)), gradients(plain, written_out(plain, X)))
    assert len(model.seen) == len(plain.seen) == 1
    torch.testing.assert_close(model.seen[0], plain.seen[0], rtol=1e-10, atol=1e-10)


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "retained": lambda x: x.retain_grad(),
    "hook": lambda x: x.register_hook(lambda g: None),
    "a hook that gives what it got": lambda x: x.register_hook(lambda g: g),
}
ALIASES: dict[str, Between] = {
    "alias": lambda model, k, x, seen: x.view(-1).view(x.shape),
    "alias with a hook": lambda model, k, x, seen: looked_at(x.view_as(x)),
    "hook and alias": lambda model, k, x, seen: looked_at(x).view_as(x),
}


def looked_at(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda g: None)
    return x


@pytest.mark.parametrize("form", ["branch", "block", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("velocity", [None, "first"])
@pytest.mark.parametrize("look", LOOKS)
def test_a_block_that_looks_at_its_input_changes_no_more_than_the_order_of_sums(
    look: str, velocity: str | None, dtype: torch.dtype, form: str
) -> None:
    """Blocks use x more than once, so that the order of sums shows."""

    class Block(Residual):
        def forward(self, x: Tensor) -> Tensor:
            f = super().forward(x) * torch.sigmoid(x)
            return x + f if form == "block" else f

    def looks(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].requires_grad:
            LOOKS[look](args[0])

    torch.manual_seed(0)
    blocks = [Block(branch=True).to(dtype) for _ in range(6)]
    net = rg.MomentumNet(blocks, GAMMA, form=form, velocity=velocity, memory="reverse", fixed_point=FIXED)

    def run(create_graph: bool = False) -> list[Tensor]:
        x = X.abs().to(dtype).requires_grad_()
        return list(torch.autograd.grad(loss(net(x)), [x, *net.parameters()], create_graph=create_graph))

    quiet, traced = run(), run(create_graph=True)
    for at in ((5,), (3,), (0, 2, 3), range(6)):
        handles = [blocks[k].register_forward_pre_hook(looks) for k in at]
        assert_close_to_rounding(run(), quiet)
        assert_close_to_rounding(run(create_graph=True), traced)
        for handle in handles:
            handle.remove()


def assert_close_to_rounding(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Of a sum in every layer."""
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() <= 16 * torch.finfo(b.dtype).eps * b.abs().max()


def test_a_hook_that_writes_to_a_batch_of_gradients() -> None:
    model, _ = built("store", at((3,), hooked(lambda g: g.mul_(2))), verify="off")
    y = model(X)
    seeds = torch.randn(4, *y.shape, dtype=y.dtype)
    weight = next(model.parameters())
    (batched,) = torch.autograd.grad(y, weight, seeds, retain_graph=True, is_grads_batched=True)
    for seed, found in zip(seeds, batched, strict=True):
        (one,) = torch.autograd.grad(y, weight, seed, retain_graph=True)
        torch.testing.assert_close(found, one, rtol=1e-9, atol=1e-9)


def test_a_sum_without_gradients_has_none() -> None:
    """Form "branch": x + f under `no_grad`, of an x and an f that have gradients."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Residual(branch=True) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                f = layer(x)
                with torch.no_grad():
                    target = x + f
                assert not target.requires_grad
                x = x + f
                assert torch.allclose(target, x)
            return x

    net = rg.convert(Net().double(), stages=["layers"], form="branch", gamma=GAMMA)
    net(X.clone().requires_grad_()).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ALIASES)
def test_aliases_change_no_bit(way: str, dtype: torch.dtype) -> None:
    model, _ = built("reverse", fixed_point=FIXED)
    model.to(dtype)
    quiet = torch.autograd.grad(loss(model(X.to(dtype))), list(model.parameters()))
    model.between = ALIASES[way]
    found = torch.autograd.grad(loss(model(X.to(dtype))), list(model.parameters()))
    assert_close_to_rounding(found, quiet)
    assert dtype == torch.bfloat16 or all(map(torch.equal, found, quiet))


@pytest.mark.parametrize("memory", MODES)
def test_what_is_looked_at_in_several_backward_passes(memory: str) -> None:
    """One that fails on its way, one to a part of the graph, two through all of it."""
    fails: list[bool] = []

    def fail(g: Tensor) -> None:
        if fails:
            raise ZeroDivisionError

    def kept(x: Tensor, seen: list[Tensor]) -> None:
        seen.append(x)
        x.register_hook(lambda g: None)

    model, plain = built(memory, at((3, 5), kept), verify="off")
    found: list[list[Tensor]] = []
    for net, run in ((model, model), (plain, lambda x: written_out(plain, x))):
        net.layers[3].inner.register_forward_hook(
            lambda m, args, y: y.register_hook(fail) and None if y.requires_grad else None
        )
        y, xs, parameters = run(X), net.seen, list(net.parameters())
        fails.append(True)
        with pytest.raises(ZeroDivisionError):
            torch.autograd.grad(loss(y), parameters, retain_graph=True)
        fails.clear()
        to_x = torch.autograd.grad(loss(y), xs, retain_graph=True)
        of_x = torch.autograd.grad(loss(xs[0]), parameters[:2], retain_graph=True)
        found.append(
            [*to_x, *of_x, *(g for _ in range(2) for g in torch.autograd.grad(loss(y), parameters, retain_graph=True))]
        )
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_pass_cannot_go_on_once_its_graph_is_freed() -> None:
    model, _ = built("reverse", at((5,), lambda x, seen: x.sum().backward()))
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        model(X)


def test_blocks_of_inference_mode_are_not_gone_on_with() -> None:
    model, _ = built("reverse")
    with torch.inference_mode():
        x = model.layers[0](model.stem(X))
    with pytest.raises(RuntimeError, match=r"Use torch.no_grad\(\)"), torch.no_grad():
        model.layers[1](x)


@pytest.mark.parametrize("memory", MODES)
def test_a_momentum_net_s_block_may_make_a_leaf_of_its_input(memory: str) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double().requires_grad_(k >= 3) for k in range(6)]
    leaves: list[Tensor] = []

    def leaf(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            leaves.append(args[0].requires_grad_())

    net = rg.MomentumNet(blocks, GAMMA, memory=memory)
    handle = blocks[3].register_forward_pre_hook(leaf)
    loss(net(X)).backward()
    handle.remove()
    x, v = X, torch.zeros_like(X)
    for k, block in enumerate(blocks):
        if k == 3:
            start = x = x.detach().requires_grad_()
        v = GAMMA * v + (1 - GAMMA) * block(x)
        x = x + v
    loss(x).backward()
    torch.testing.assert_close(leaves[0].grad, start.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("pattern", ["000111", "110011"])
def test_a_transformer_s_fast_path_without_gradients_is_replayed_as_it_was(memory: str, pattern: str) -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for mark, layer in zip(pattern, self.layers, strict=True):
                with torch.set_grad_enabled(torch.is_grad_enabled() and mark == "1"):
                    x = layer(x)
            return x

    torch.manual_seed(0)
    model = rg.convert(Stack(), gamma=GAMMA, memory=memory, verify="strict", stages=["layers"]).eval()
    x = torch.randn(2, 5, 8)
    for _ in range(2):
        loss(model(x)).backward()


class Sum(nn.Module):
    """x = x + block(x); after block 2 in so many words."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layers = how, nn.ModuleList(Residual(branch=True) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            how = self.how if k == 2 else "x + f"
            with torch.set_grad_enabled(torch.is_grad_enabled() and how != "f without gradients"):
                f = layer(x)
            if how == "changed in between":
                x.mul_(0.5)
            elif how == "f changed":
                f.mul_(0.5)
            if how == "cut off":
                x = x.detach() + f
            elif how == "x += f":
                x += f
            elif how == "add_":
                x.add_(f)
            elif how == "f += x":
                f += x
                x = f
            else:
                x = x + f
            del f
        return x


@pytest.mark.parametrize("how", ["x + f", "cut off", "changed in between", "x += f", "add_", "f += x"])
def test_additions_mean_what_they_say(how: str) -> None:
    """Near γ = 0 the momentum network is the plain one, whatever the velocity starts from."""
    torch.manual_seed(5)
    plain = Sum(how).double()
    model = rg.convert(copy.deepcopy(plain), gamma=1e-5, form="branch", stages=["layers"])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for _ in range(2):
            torch.testing.assert_close(model(X.clone()), plain(X.clone()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["x + f", "cut off", "f += x", "f without gradients"])
@pytest.mark.parametrize("memory", ["reverse", "store"])
def test_gradients_of_additions_mean_what_they_say(how: str, memory: str) -> None:
    torch.manual_seed(5)
    plain = Sum(how).double()
    model = rg.convert(copy.deepcopy(plain), gamma=1e-5, form="branch", stages=["layers"], memory=memory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = [X.clone().requires_grad_() for _ in range(2)]
        found, wanted = gradients(model, model(inputs[0] * 1)), gradients(plain, plain(inputs[1] * 1))
    found, wanted = found | {"x": inputs[0].grad}, wanted | {"x": inputs[1].grad}
    for name, g in wanted.items():
        assert (found[name] is None) == (g is None)
        if g is not None:
            torch.testing.assert_close(found[name], g, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("how", ["hook", "retained", "alias"])
def test_hooks_on_what_a_branch_gives_and_aliases_of_what_it_gets(how: str) -> None:
    """The pass goes on, with the bits of one that nobody looks at."""
    torch.manual_seed(5)
    model = rg.convert(Sum("x + f").double(), gamma=GAMMA, form="branch", stages=["layers"])
    quiet = gradients(model, model(X))
    expected = {name: g.clone() for name, g in quiet.items() if g is not None}
    model.zero_grad()
    seen: list[Any] = []

    def after(module: nn.Module, args: Any, f: Tensor) -> None:
        if f.requires_grad:
            seen.append(f)
            f.retain_grad() if how == "retained" else f.register_hook(lambda g: seen.append(g.clone()))

    if how == "alias":
        model.layers[2].register_forward_pre_hook(lambda module, args: (args[0].view_as(args[0]),))
    else:
        model.layers[2].register_forward_hook(after)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gradients(model, model(X))
    assert all(torch.equal(g, found[name]) for name, g in expected.items())  # type: ignore[arg-type]
    if how == "hook":
        assert len(seen) == 2
    elif how == "retained":
        assert seen[0].grad is not None


@pytest.mark.parametrize("memory", ["checkpoint", "store"])
def test_a_kept_input_that_is_added_to_is_noticed(memory: str) -> None:
    torch.manual_seed(5)
    model = rg.convert(Sum("x += f").double(), gamma=0.5, form="branch", stages=["layers"], memory=memory)
    x = X.clone()
    with pytest.raises((rg.ReplayError, RuntimeError), match=r"changed|inplace"):
        loss(model(x)).backward()


class Written(nn.Module):
    """x = x + block(x), where something is done to f and then to x, in place."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.write, self.stem = write, nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Tanh(), Residual(branch=True)) for _ in range(5))
        self.look: Callable[[Tensor], Any] = lambda f: None

    def forward(self, x: Tensor, written_out: bool = False) -> Tensor:
        x = self.stem(x)
        v = torch.zeros_like(x)
        for k, layer in enumerate(self.layers):
            f = layer(x)
            if written_out:
                v = GAMMA * (0 if k == 3 and self.write != "x += f" else v) + (1 - GAMMA) * f
                f = v.clone()
            if k == 2:
                self.look(f)
            if self.write == "x += f" and k in (2, 3):
                x += f
            else:
                x = x + f
            del f  # nobody but a hook has it
            if self.write == "relu_" and k == 2:
                torch.relu_(x)
            elif self.write == "x += 1" and k == 2:
                x += 1
        return x


def step_of(model: Written, look: str, **options: Any) -> tuple[Tensor, list[Tensor], dict[str, Tensor | None]]:
    """What a step gives: y, the gradients of f that were seen, and those of parameters."""
    seen: list[Tensor] = []

    def looks(f: Tensor) -> None:
        if f.requires_grad and look == "retained":
            f.retain_grad()
            seen.append(f)
        elif f.requires_grad and look == "hook":
            f.register_hook(lambda g: seen.append(g.clone()))

    model.zero_grad()
    model.look = looks
    y = model(X, **options)
    found = gradients(model, y)
    return y, [f.grad if look == "retained" else f for f in seen], found  # type: ignore[misc]


@pytest.mark.parametrize("write", ["relu_", "x += 1", "x += f"])
@pytest.mark.parametrize("look", ["retained", "hook"])
@pytest.mark.parametrize("memory", MODES)
def test_an_x_made_of_a_branch_that_is_looked_at_can_be_written_to(memory: str, look: str, write: str) -> None:
    """With the result, and the bits, of one that nobody looks at."""
    torch.manual_seed(5)
    model = Written(write).double()
    y, seen, wanted = step_of(copy.deepcopy(model), look, written_out=True)
    other = rg.convert(
        copy.deepcopy(model), gamma=GAMMA, form="branch", stages=["layers"], memory="store", fixed_point=FINE
    )
    rg.convert(model, gamma=GAMMA, form="branch", stages=["layers"], memory=memory, fixed_point=FINE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if write != "x += f" else "error")  # the velocity starts from 0 again
        if memory == "checkpoint" and write == "x += f":
            for how in ("not at all", look):
                with pytest.raises(rg.ReplayError, match="was changed"):
                    step_of(model, how)
            return
        for _ in range(2):
            found, stored, quiet = step_of(model, look), step_of(other, look), step_of(model, "not at all")
            torch.testing.assert_close(found[0], y, rtol=1e-10, atol=1e-10)
            compare(found[2], wanted)
            assert len(found[1]) == len(seen) == 1
            torch.testing.assert_close(found[1][0], seen[0], rtol=1e-10, atol=1e-10)
            assert torch.equal(found[0], stored[0])
            assert torch.equal(found[0], quiet[0])
            assert torch.equal(found[1][0], stored[1][0])
            assert all(torch.equal(g, stored[2][name]) for name, g in found[2].items())  # type: ignore[arg-type]
            assert all(torch.equal(g, quiet[2][name]) for name, g in found[2].items())  # type: ignore[arg-type]


def test_an_x_that_was_written_to_is_not_handed_out_again() -> None:
    torch.manual_seed(5)
    block = rg.convert(Sum("x + f").double(), gamma=GAMMA, form="branch", stages=["layers"]).layers[0]
    f = block(X)
    x1 = X + f
    expected = x1.clone()
    x1.zero_()
    torch.testing.assert_close(X + f, expected, rtol=1e-10, atol=1e-10)
