"""What could make a gradient silently wrong: each is right to the bit, or refused."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import retrograde as rg
from problems import Mlp, same_in_every_mode
from retrograde.memory import peak_memory
from retrograde.stack.momentum import Momentum

REPLAYING = ["reverse", "checkpoint"]


def nets(blocks: list[nn.Module], **options: object) -> list[rg.MomentumNet]:
    """The same network with stored activations and in the two modes that replay."""
    modes = ["store", *REPLAYING]
    return [rg.MomentumNet(copy.deepcopy(blocks), memory=m, fraction_bits=22, **options) for m in modes]


def assert_all_equal(found: list[list[Tensor]]) -> None:
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_functional_call() -> None:
    blocks, x, found = [Mlp() for _ in range(5)], torch.randn(3, 8), []
    for net in nets(blocks):
        swapped = {n: (p.detach() * 1.5).requires_grad_() for n, p in net.named_parameters()}
        functional_call(net, swapped, (x,)).square().sum().backward()
        found.append([p.grad for p in swapped.values()])
    assert_all_equal(found)


def test_parameters_replaced_between_forward_and_backward() -> None:
    blocks, x, found = [Mlp() for _ in range(4)], torch.randn(3, 8), []
    for net in nets(blocks):
        y, old = net(x), net.blocks[2].inner.weight
        net.blocks[2].inner.weight = nn.Parameter(torch.zeros(12, 8))
        y.square().sum().backward()
        assert net.blocks[2].inner.weight.grad is None
        found.append([old.grad, *(p.grad for n, p in net.named_parameters() if n != "blocks.2.inner.weight")])
    assert_all_equal(found)


class Ema(nn.Module):
    """Scales by a buffer; `how` says what its forward does to it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        if self.how == "replace":
            self.scale = 0.9 * self.scale + 0.1 * y.detach().mean(0)
        elif self.how == "update":
            self.scale.mul_(0.9)
        return y * self.scale


@pytest.mark.parametrize("memory", REPLAYING)
@pytest.mark.parametrize("how", ["replace", "update"])
def test_buffers_of_their_own_are_refused(memory: str, how: str) -> None:
    net = rg.MomentumNet([Mlp(), Ema(how)], memory=memory, fraction_bits=20)
    with pytest.raises(rg.ReplayError, match=r"block 1 (replaced|changed) .*memory='store'"):
        net(torch.randn(3, 8))


@pytest.mark.parametrize("memory", REPLAYING)
def test_buffers_changed_between_forward_and_backward(memory: str) -> None:
    net = rg.MomentumNet([Mlp(), Ema("keep"), nn.BatchNorm1d(8)], memory=memory, fraction_bits=20).eval()
    y = net(torch.randn(3, 8))
    net.blocks[1].scale.mul_(2)
    with pytest.raises(rg.ReplayError, match="block 1 was changed"):
        y.sum().backward()
    y = net(torch.randn(3, 8))
    net.train()
    with torch.no_grad():
        net.blocks[2](torch.randn(3, 8))
    with pytest.raises(rg.ReplayError, match="block 2 was changed"):
        y.sum().backward()


def test_a_norm_whose_output_depends_on_its_statistics_is_refused() -> None:
    class Renorm(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            return (x - self.running_mean) / (self.running_var + self.eps).sqrt() * self.weight

    with pytest.raises(rg.ReplayError, match="block 0 changed"):
        rg.MomentumNet([Renorm(8)], memory="reverse", fraction_bits=20)(torch.randn(4, 8))


class WritesToInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(0.5))


@pytest.mark.parametrize("form", ["branch", "block"])
@pytest.mark.parametrize("velocity", ["first", "module", torch.sin])
def test_velocity_and_first_block_that_write_to_their_input(form: str, velocity: object) -> None:
    launcher = WritesToInput() if velocity == "module" else velocity
    blocks = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)), Mlp(), Mlp()]
    net = rg.MomentumNet(blocks, form=form, velocity=launcher, fraction_bits=22, verify="end")
    x = torch.randn(3, 8, requires_grad=True)
    found = same_in_every_mode(net, x)
    with torch.no_grad():
        assert torch.equal(net(x), found["output"])


def test_random_numbers_under_fork_rng_and_from_a_generator() -> None:
    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
            with torch.random.fork_rng():
                y = F.dropout(self.linear(x), 0.5)
            return y * torch.rand(8, generator=generator)

    blocks, x, found = [Forked() for _ in range(4)], torch.randn(3, 8), []
    for net in nets(blocks, verify="end"):
        torch.manual_seed(11)
        generator = torch.Generator().manual_seed(5)
        net(x, generator).square().sum().backward()
        found.append([*(p.grad for p in net.parameters()), torch.rand(1), torch.rand(1, generator=generator)])
    assert_all_equal(found)


@pytest.mark.parametrize(("step", "which"), [("pull", 1), ("recede", 2), ("retreat", 1), ("advance", 2)])
def test_an_interrupted_step_is_not_gone_on_from(step: str, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [nn.Sequential(Mlp(), nn.Tanh()) for _ in range(5)]  # each keeps its output anyway: steps back are joined
    net = rg.MomentumNet(blocks, memory="reverse", fraction_bits=20)
    loss = net(torch.randn(3, 8)).square().sum()
    if step in ("retreat", "advance"):
        loss.backward(retain_graph=True)  # the next pass seeks forward
    original, calls = getattr(Momentum, step), []

    def fails(self: Momentum, *args: object) -> object:
        calls.append(1)
        if len(calls) == which:
            raise MemoryError
        return original(self, *args)

    monkeypatch.setattr(Momentum, step, fails)
    with pytest.raises(MemoryError):
        loss.backward(retain_graph=True)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="Run the forward pass again"):
        loss.backward()


@pytest.mark.parametrize("memory", REPLAYING)
def test_in_place_changes_that_autograd_refuses(memory: str) -> None:
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(self.linear(x)).add_(1)

    net = rg.MomentumNet([Mlp(), Overwrites()], memory=memory, fraction_bits=20)
    with pytest.raises(rg.ReplayError, match="block 1 changed a tensor in place"):
        net(torch.randn(3, 8)).sum().backward()


def test_inputs_that_are_kept_may_not_be_changed() -> None:
    seen = []
    blocks = [Mlp(), Mlp()]
    blocks[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    net = rg.MomentumNet(blocks, memory="checkpoint", fraction_bits=20)
    y = net(torch.randn(3, 8))
    with torch.no_grad():
        seen[-1].mul_(3)
    with pytest.raises(rg.ReplayError, match=r"input of block 1, kept .* was changed"):
        y.sum().backward()
    x = torch.randn(3, 8)
    y = rg.MomentumNet([Mlp(), Mlp()], gamma=0, memory="checkpoint")(x)
    x.mul_(3)
    with pytest.raises(rg.ReplayError, match="input of block 0, kept"):
        y.sum().backward()


def test_overflow_as_nan_reaches_the_velocity() -> None:
    state = rg.MomentumNet([Mlp() for _ in range(3)], fraction_bits=20, overflow="nan").encode(torch.randn(3, 8) * 1e4)
    assert state.x.isnan().all()
    assert state.v.isnan().all()


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_weights_cast_by_autocast_are_held_for_one_block_only(inside: bool) -> None:
    """16 blocks with 4 MB of weights each; x is small."""
    x = torch.randn(2, 1_000, requires_grad=True)
    net = rg.MomentumNet([nn.Linear(1_000, 1_000) for _ in range(16)], memory="reverse")

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(x).float().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()

    step()
    assert peak_memory(step).peak < 5 * 2e6


def test_calibration_under_autocast_leaves_no_weights_without_gradients() -> None:
    net = rg.MomentumNet([nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    for memory in ("store", *REPLAYING):
        net.memory = memory
        net.range.fixed.clear()
        net.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = net(torch.randn(3, 8))
        y.square().sum().backward()
        assert all(p.grad is not None for p in net.parameters())
        assert torch.is_autocast_cache_enabled()


def test_lazy_layers() -> None:
    for memory in ("store", *REPLAYING):
        net = rg.MomentumNet([nn.LazyLinear(8), nn.Tanh()], memory=memory, fraction_bits=20)
        net(torch.randn(3, 8)).sum().backward()


@pytest.mark.filterwarnings("ignore:.*nested tensor.*")
def test_inverse_takes_the_same_kernels_and_moves_no_statistics() -> None:
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval() for _ in range(2)]
    net, x = rg.MomentumNet(layers, form="block"), torch.randn(2, 5, 8)
    net.inverse(net.encode(x))
    with torch.no_grad():
        state = net.encode(x)
    net.inverse(state)
    norms = rg.MomentumNet([nn.BatchNorm1d(8) for _ in range(3)])
    norms.inverse(norms.encode(torch.randn(16, 8)))
    assert [int(b.num_batches_tracked) for b in norms.blocks] == [1, 1, 1]


def test_auxiliary_losses() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mlp(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            self.auxiliary = y.square().mean()
            return y

    blocks, found = [Auxiliary() for _ in range(6)], []
    for net in nets(blocks):
        y = net(torch.ones(32, 64))
        (y.sum() + sum(b.auxiliary for b in net.blocks)).backward()
        found.append([p.grad for p in net.parameters()])
    assert_all_equal(found)


def test_vectorised_jacobian() -> None:
    x, found = torch.randn(2, 4), []
    for net in nets([Mlp(4, 4) for _ in range(3)]):
        found.append([torch.autograd.functional.jacobian(net, x, vectorize=True)])
        assert torch.allclose(found[-1][0], torch.autograd.functional.jacobian(net, x), atol=1e-6)
    assert_all_equal(found)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
@pytest.mark.parametrize("memory", ["store", *REPLAYING])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks_and_networks(memory: str, backend: str) -> None:
    blocks, x = [Mlp() for _ in range(3)], torch.randn(3, 8)
    plain = rg.MomentumNet(copy.deepcopy(blocks), memory="store", fraction_bits=22)
    plain(x).square().sum().backward()
    whole = torch.compile(rg.MomentumNet(copy.deepcopy(blocks), memory=memory, fraction_bits=22), backend=backend)
    parts = [torch.compile(b, backend=backend) for b in copy.deepcopy(blocks)]
    for net in (whole, rg.MomentumNet(parts, memory=memory, fraction_bits=22)):
        net(x).square().sum().backward()
        for p, q in zip(plain.parameters(), net.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-7)


class Counts(nn.Module):
    """Counts its runs, and saves nothing."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + 1


def test_a_replay_from_a_kept_input_stops_at_the_last_tensor_it_is_run_for() -> None:
    for memory, verify, runs in (("checkpoint", "off", 1), ("checkpoint", "end", 2), ("reverse", "off", 2)):
        counts = [Counts() for _ in range(3)]
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), count) for count in counts]
        net = rg.MomentumNet(blocks, memory=memory, verify=verify, fraction_bits=20)
        loss = net(torch.randn(3, 8)).sum()
        before = torch.get_rng_state()
        loss.backward()
        assert [count.runs for count in counts] == [runs] * 3
        assert torch.equal(torch.get_rng_state(), before)  # wherever the replay stopped


@pytest.mark.parametrize("converted", [False, True])
def test_evaluation_before_training_has_a_range_of_its_own(converted: bool) -> None:
    """Lightning's sanity check, say: running statistics that are far off make other activations than training."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(8)]
    for block in blocks:
        block[1].running_var.fill_(1e4)  # type: ignore[union-attr, operator]
    net = rg.MomentumNet(blocks, memory="reverse")
    model: nn.Module = net
    if converted:
        model = nn.Sequential(*[Sum(block) for block in blocks])
        rg.convert(model, stages=["*"], form="block", memory="reverse")
    x = torch.randn(16, 8)
    with torch.no_grad():
        model.eval()(x)
    model.train()(x).square().mean().backward()
    with torch.no_grad():
        model.eval()(x)
    model.train()(x).square().mean().backward()


class Sum(nn.Module):
    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


def test_the_first_pass_takes_no_more_memory_than_later_ones() -> None:
    """It surveys the network for its range, in floats."""
    blocks = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(8)]
    net, x = rg.MomentumNet(blocks, memory="reverse"), torch.randn(8, 16, 32, 32)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    first, second = (peak_memory(lambda: net(x).sum(), lambda loss: loss.backward()).peak for _ in range(2))
    assert first <= second * 1.02
