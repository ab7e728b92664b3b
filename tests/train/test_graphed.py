"""Forward and backward as a CUDA graph: the same bits as without one, and made anew when what it was made of changes."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from retrograde.nets.ode import SecondOrderODE
from retrograde_experiments.errors import ExperimentError
from retrograde_experiments.private import stacks
from retrograde_experiments.train import Learner, Recipe, build
from retrograde_experiments.train.graphed import WARM_UP, Graphed, Step
from retrograde_experiments.train.learner import set_gamma
from retrograde_experiments.train.setting import Setting

cuda = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))


class Replay:
    """Stands in for a CUDA graph: runs the step again, on the same memory."""

    def __init__(self, graphed: Graphed, step: Step) -> None:
        self.graphed, self.step = graphed, step
        self.gradients = [p.grad for p in graphed.parameters]

    def replay(self) -> None:
        assert all(p.grad is g for p, g in zip(self.graphed.parameters, self.gradients, strict=True))
        self.graphed.loss.copy_(self.step(*self.graphed.held))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Replay]:
    """The graphs that have been made, without a GPU."""
    graphs: list[Replay] = []

    def capture(self: Graphed, step: Step, x: Tensor, y: Tensor) -> None:
        self.held, self.gradients, self.loss = (x.clone(), y.clone()), self._gradients(), torch.zeros(())
        graphs.append(Replay(self, step))
        self.graph = graphs[-1]

    monkeypatch.setattr(Graphed, "_aside", lambda self, step, x, y: step(x, y))
    monkeypatch.setattr(Graphed, "_capture", capture)
    return graphs


@pytest.mark.parametrize("device", ["cpu", cuda])
def test_steps_have_the_bits_of_plain_ones(device: str, request: pytest.FixtureRequest) -> None:
    if device == "cpu":
        request.getfixturevalue("made")
    found = []
    for graph in (False, True):
        torch.manual_seed(0)
        f = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        net = nn.Sequential(
            SecondOrderODE(f, velocity="first", solver="rk4", steps=2, gradient="direct"), nn.Linear(4, 3)
        ).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        count = WARM_UP + 3

        def both(x: Tensor, y: Tensor, net: nn.Module = net) -> Tensor:
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            return loss.detach()

        graphed, losses = Graphed(list(net.parameters()), graph=graph), []
        for size in [16] * count + [7, 16]:
            batch = torch.randn(size, 4, device=device), torch.randint(3, (size,), device=device)
            losses.append(graphed(both, *batch).clone())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        assert (graphed.graph is not None) == graph
        found.append([*losses, *(p.detach() for p in net.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert len({float(loss) for loss in found[0][: count + 2]}) == count + 2


def test_a_graph_is_made_after_a_few_steps_and_anew_for_another_setting(made: list[Replay]) -> None:
    w, setting = torch.ones(2, requires_grad=True), {"value": 1.0}

    def both(x: Tensor, y: Tensor) -> Tensor:
        loss = (w * x).sum() * setting["value"] + y
        loss.backward()
        return loss.detach()

    graphed, x, y = Graphed([w], lambda: setting["value"]), torch.ones(2), torch.zeros(())

    def step(x: Tensor, y: Tensor) -> Tensor:
        return graphed(both, x, y)

    for count in range(1, WARM_UP + 4):
        assert float(step(x, y)) == 2.0
        assert float(w.grad[0]) == count  # added to what is there
        assert len(made) == (count > WARM_UP)
    setting["value"] = 3.0
    for count in range(1, WARM_UP + 2):
        assert float(step(x, y)) == 6.0
        assert len(made) == 1 + (count > WARM_UP)
    w.grad = None  # not zeroed: the graph would add to what nobody has
    step(x, y)
    assert torch.equal(w.grad, torch.full((2,), 3.0))
    assert graphed.graph is None
    step(torch.ones(1), y)  # another shape
    assert len(made) == 2


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_with_and_without(accumulate: int, made: list[Replay], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for graph in (False, True):
        torch.manual_seed(0)
        net = build("thin-resnet20", classes=4, channels=1, gamma=0.9, memory="reverse")
        recipe = Recipe(epochs=2, batch=8, rate=0.1, schedule="constant", accumulate=accumulate, graph=graph)
        monkeypatch.setattr(Learner, "_check_graph", lambda self: None)
        learner, losses = Learner(net, recipe, steps=9), []
        for k in range(13):
            if k == 6:
                set_gamma(net, 0.5)
            learner.step(torch.randn(8, 1, 8, 8), torch.randint(4, (8,)))
            losses.append(learner.loss())
        if graph:
            assert len(made) == 2  # set_gamma has it made anew
        found.append([torch.tensor(losses), *net.state_dict().values(), *(p.detach() for p in net.parameters())])
        assert {float(part.gamma) for part in stacks(net)} == {0.5}
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_shape_that_comes_most_gets_the_graph(made: list[Replay]) -> None:
    w = torch.ones(2, requires_grad=True)

    def both(x: Tensor, y: Tensor) -> Tensor:
        loss = (w[: len(x)] * x).sum() + y
        loss.backward()
        return loss.detach()

    graphed, y = Graphed([w]), torch.zeros(())
    for size in [1, *[2] * (WARM_UP + 1), 1, 2]:
        assert float(graphed(both, torch.ones(size), y)) == size
    assert len(made) == 1
    assert graphed.held[0].shape == (2,)
    assert torch.equal(w.grad, torch.tensor([WARM_UP + 4.0, WARM_UP + 2.0]))


def test_a_learner_is_let_go_of_at_once() -> None:
    net = build("thin-resnet8", classes=4, channels=1, gamma=0.9, memory="reverse")
    learner = Learner(net, Recipe(), steps=9)
    learner.step(torch.randn(4, 1, 8, 8), torch.randint(4, (4,)))
    held, gc_was_on = weakref.ref(learner), gc.isenabled()
    gc.disable()
    try:
        del learner
        assert held() is None
    finally:
        if gc_was_on:
            gc.enable()


def test_what_cannot_be_captured_is_said_before_anything_is_trained() -> None:
    with pytest.raises(ExperimentError, match="there are none on cpu"):
        Learner(build("thin-resnet8", classes=4, channels=1, gamma=0.9), Recipe(graph=True), steps=9)
    with pytest.raises(ValueError, match="leave one of them out"):
        Recipe(graph=True, compile=True)
    with pytest.raises(ValueError, match="or use verify=auto"):
        Setting(graph=True, verify="strict")
