"""What the experiments of this folder measure with: paired tests, LISTA side by side, time in ODE blocks, a learned γ."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from retrograde.nets.lista import Lista, Shrink
from retrograde_experiments import learned_gamma, lista, memory_depth, ode, paradigms, statements
from retrograde_experiments.findings import Difference, compared
from retrograde_experiments.train import build


def test_a_target_is_met_or_missed_by_the_whole_interval() -> None:
    def met(apart: list[float], **asked: float) -> bool | None:
        return compared("x", apart, [0.0] * len(apart), **asked).met

    assert met([1.0, 1.1, 0.9], least=0) is True
    assert met([-1.0, -1.1, -0.9], least=0) is False
    assert met([1.0, -1.1, 0.9], least=0) is None
    assert met([1.0, 1.1], least=0) is None  # too few pairs
    assert met([0.1, 0.0, -0.1, 0.05], least=-0.5, most=0.5) is True
    assert met([0.4, 0.5, 0.6], least=-0.5, most=0.5) is None
    assert compared("x", [1.0, 2.0, 4.0], [0.0, 0.0, 0.0]).target == ""


def test_the_interval_is_students() -> None:
    d = Difference.of([1.0, 2.0, 3.0, 4.0], [0.0] * 4)
    error = (5 / 3) ** 0.5 / 2
    assert d.error == pytest.approx(error)
    assert d.high - d.mean == pytest.approx(3.182446 * error, rel=1e-6)  # t of 3 degrees of freedom


@pytest.mark.parametrize("form", lista.NETS)
def test_networks_side_by_side_are_those_of_the_library(form: str) -> None:
    """Outputs and gradients of each, for two dictionaries and two step sizes, against `retrograde.nets.lista.Lista`."""
    config = replace(lista.Config.smoke(), repeats=2)
    D, _, y = lista.problems(config)
    etas = (0.5, 1.0)
    side = lista.Side(D, 0.1, 3, form, 0.3, etas)
    costs = side(y)
    costs.sum().backward()
    for k, one in enumerate(D):
        for e, eta in enumerate(etas):
            net = Lista(one, 0.1, 3, form, 0.3, memory="store")
            layers = [m for m in net.modules() if isinstance(m, Shrink)]
            with torch.no_grad():
                for layer in layers:
                    identity = torch.eye(one.shape[1])
                    layer.W1.copy_(identity + eta * (layer.W1 - identity))
                    layer.W2.mul_(eta)
                    layer.threshold *= eta
            loss = net.loss(y[k])
            loss.backward()
            torch.testing.assert_close(costs[k, e], loss, rtol=1e-4, atol=1e-5)
            named: Any = dict(net.named_parameters())
            first = next(p.grad for n, p in named.items() if n.endswith("W1"))
            torch.testing.assert_close(side.W1[0].grad[k, e], first, rtol=1e-3, atol=1e-5)  # type: ignore[index]


def test_the_best_step_size_is_not_chosen_on_the_test_samples() -> None:
    record: Any = {"etas": [1.0, 2.0], "choosing": [[0.5, 0.6], [None, 0.4]], "test": [[0.7, 0.1], [0.2, 0.8]]}
    assert lista.best(record) == [0.7, 0.8]
    assert lista.common(record) == [0.7, 0.2]


def test_ode_blocks_see_the_time() -> None:
    config = replace(ode.Config.smoke(), repeats=2, velocity="zero")
    net = ode.Side(config, "first", channels=2, colours=1, classes=10)
    block: Any = net.blocks[0]
    x = torch.randn(3, 4, 2, 2)
    assert not torch.equal(block.derivative(torch.tensor(0.0), x), block.derivative(torch.tensor(1.0), x))
    blind: Any = ode.Side(replace(config, time=False), "first", channels=2, colours=1, classes=10).blocks[0]
    assert torch.equal(blind.derivative(torch.tensor(0.0), x), blind.derivative(torch.tensor(1.0), x))


def test_the_paper_s_ode_has_a_time_channel_and_the_default_solver() -> None:
    paper = ode.Config.paper()
    assert (paper.time, paper.solver, paper.tolerance, paper.steps) == (True, "dopri5", 1e-3, 0)
    block: Any = ode.Side(replace(paper, repeats=1), "second", channels=1, colours=3, classes=10).blocks[0]
    assert (block.solver, block.rtol, block.atol, block.options) == ("dopri5", 1e-3, 1e-3, {})


def test_float_stages_compute_what_momentum_stages_do() -> None:
    torch.manual_seed(0)
    ours = build("thin-resnet14", classes=10, channels=1, gamma=0.9, memory="store", residual="branch").eval()

    class Source:
        classes, channels = 10, 1

    torch.manual_seed(0)
    floats = learned_gamma.network(learned_gamma.Config.smoke(), True, Source()).eval()  # type: ignore[arg-type]
    x = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(floats(x), ours(x), rtol=1e-4, atol=1e-4)
    floats(x).sum().backward()
    assert all(m.a.grad is not None for m in floats.modules() if isinstance(m, learned_gamma.FloatStage))


def test_trajectories_that_cross_are_counted() -> None:
    assert paradigms.crossings([[0.0, 1.0], [1.0, 2.0]]) == 0
    assert paradigms.crossings([[0.0, 3.0], [1.0, 2.0], [2.0, 4.0]]) == 1


def test_segments_compute_what_single_checkpoints_do() -> None:
    f, x = memory_depth.Branch(6, 3), torch.randn(4, 6)
    outputs = [memory_depth.network(way, f, 9)(x) for way in ("resnet", "checkpoint", "sqrt")]
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[1], outputs[2])


@pytest.mark.parametrize("name", ["psi", "revnet_jacobian", "momentum_jacobian"])
def test_a_wrong_function_would_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function of the theory broken on purpose: a statement that uses it exceeds its bound."""
    real = getattr(statements.theory, name)
    monkeypatch.setattr(statements.theory, name, lambda *args, **options: 1.05 * real(*args, **options))
    over = [
        said for said in ("Prop. 1: RevNets repel", "Prop. 4: Ψ_ε", "Sec. 3.3: Momentum ResNets attract") if _over(said)
    ]
    assert over


def _over(statement: str) -> bool:
    error, bound = statements.CHECKS[statement](20)
    return error > bound


def test_no_statement_is_missing() -> None:
    said = " ".join(statements.CHECKS)
    for part in (
        "Prop. 1",
        "Prop. 2",
        "Prop. 3",
        "Prop. 4",
        "Theorem 1",
        "Lemma 1",
        "Lemma 2",
        *(f"App. B.{k}" for k in range(1, 8)),
    ):
        assert part in said
