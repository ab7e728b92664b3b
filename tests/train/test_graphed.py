"""Forward and backward as a CUDA graph: the same bits as without one, and made anew when what it was made of changes."""

import pytest
import torch
from torch import Tensor, nn

from retrograde.nets.ode import SecondOrderODE
from retrograde_experiments.errors import ExperimentError
from retrograde_experiments.train import Learner, Recipe, build
from retrograde_experiments.train.graphed import WARM_UP, Graphed
from retrograde_experiments.train.learner import momentum_nets, set_gamma

cuda = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))


class Replay:
    """Stands in for a CUDA graph: runs the step again, on the same memory."""

    def __init__(self, graphed: Graphed) -> None:
        self.graphed = graphed
        self.gradients = [p.grad for p in graphed.parameters]

    def replay(self) -> None:
        assert all(p.grad is g for p, g in zip(self.graphed.parameters, self.gradients, strict=True))
        self.graphed.loss.copy_(self.graphed.step(*self.graphed.held))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Replay]:
    """The graphs that have been made, without a GPU."""
    graphs: list[Replay] = []

    def capture(self: Graphed, x: Tensor, y: Tensor) -> None:
        self.held, self.gradients, self.loss = (x.clone(), y.clone()), self._gradients(), torch.zeros(())
        graphs.append(Replay(self))
        self.graph = graphs[-1]

    monkeypatch.setattr(Graphed, "_aside", lambda self, x, y: self.step(x, y))
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

        step, losses = Graphed(both, list(net.parameters()), graph=graph), []
        for size in [16] * count + [7, 16]:
            batch = torch.randn(size, 4, device=device), torch.randint(3, (size,), device=device)
            losses.append(step(*batch).clone())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        assert (step.graph is not None) == graph
        found.append([*losses, *(p.detach() for p in net.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert len({float(loss) for loss in found[0][: count + 2]}) == count + 2


def test_a_graph_is_made_after_a_few_steps_and_anew_for_another_setting(made: list[Replay]) -> None:
    w, setting = torch.ones(2, requires_grad=True), {"value": 1.0}

    def both(x: Tensor, y: Tensor) -> Tensor:
        loss = (w * x).sum() * setting["value"] + y
        loss.backward()
        return loss.detach()

    step, x, y = Graphed(both, [w], lambda: setting["value"]), torch.ones(2), torch.zeros(())
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
    assert step.graph is None
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
        assert {float(part.gamma) for _, part in momentum_nets(net)} == {0.5}
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ExperimentError, match=r"--graph makes CUDA graphs .* cannot on a CPU"):
        Learner(build("thin-resnet8", classes=4, channels=1, gamma=0.9), Recipe(graph=True), steps=9)
    with pytest.raises(ValueError, match="leave one of them out"):
        Recipe(graph=True, compile=True)
