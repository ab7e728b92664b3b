"""ISTA solves the Lasso; its learned forms start from it, share parameters, train and are reversible."""

import pytest
import torch

from problems import fitted
from retrograde.nets.lista import Lista, dictionary, ista, lasso, samples

LAM = 0.1


def test_ista_reaches_the_optimum() -> None:
    """At a solution −Dᵀ(Dx − y) is a subgradient of λ‖x‖₁."""
    D = dictionary(6, 10).double()
    y = samples(5, D)
    x = ista(y, D, LAM, 20_000)
    dual = (y - x @ D.t()) @ D
    assert (dual.abs() <= LAM * (1 + 1e-9)).all()
    active = x != 0
    assert active.any()
    torch.testing.assert_close(dual[active], LAM * x[active].sign(), rtol=1e-7, atol=1e-9)
    costs = [float(lasso(ista(y, D, LAM, k), y, D, LAM).mean()) for k in range(0, 30, 3)]
    assert costs == sorted(costs, reverse=True)


def test_samples_are_scaled_as_the_paper_says() -> None:
    D = dictionary()
    y = samples(20, D)
    assert D.shape == (16, 32)
    torch.testing.assert_close(D.norm(dim=0), torch.ones(32))
    torch.testing.assert_close((y @ D).abs().amax(1), torch.ones(20))
    assert not ista(y, D, 1.0 + 1e-6, 50).any()
    assert ista(y, D, 0.99, 50).any()


def test_untrained_lista_is_ista() -> None:
    D = dictionary(6, 10).double()
    y = samples(5, D)
    torch.testing.assert_close(Lista(D, LAM, depth=7)(y), ista(y, D, LAM, 7))
    slow = Lista(D, LAM, depth=400, form="momentum", gamma=0.5)
    assert float(slow.loss(y).detach()) == pytest.approx(float(lasso(ista(y, D, LAM, 400), y, D, LAM).mean()), rel=1e-3)


def test_resnet_and_momentum_share_parameters_and_revnet_has_twice_as_many() -> None:
    D = dictionary(4, 6)
    nets = {form: Lista(D, LAM, depth=5, form=form) for form in ("resnet", "momentum", "revnet")}
    counts = {form: sum(p.numel() for p in net.parameters()) for form, net in nets.items()}
    nets["momentum"].load_state_dict(nets["resnet"].state_dict())
    assert counts["momentum"] == counts["resnet"] == counts["revnet"] / 2


def test_the_forms_are_the_equations() -> None:
    D = dictionary(4, 6).double()
    y = samples(3, D)
    revnet, momentum = Lista(D, LAM, depth=5, form="revnet"), Lista(D, LAM, depth=5, form="momentum", gamma=0.75)
    x, v = torch.zeros(3, 6).double(), torch.zeros(3, 6).double()
    for k in range(0, 10, 2):
        v = v + revnet.net.blocks[k](x, y)
        x = x + revnet.net.blocks[k + 1](v, y)
    torch.testing.assert_close(revnet.net.blocks[0](x, y) + x, momentum.net.blocks[0](x, y))
    torch.testing.assert_close(revnet(y), x, rtol=1e-9, atol=1e-9)
    x, v = torch.zeros(3, 6).double(), torch.zeros(3, 6).double()
    for block in momentum.net.blocks:
        v = 0.75 * v + 0.25 * (block(x, y) - x)
        x = x + v
    torch.testing.assert_close(momentum(y), x, rtol=1e-9, atol=1e-9)


def test_training_helps_and_momentum_beats_the_revnet() -> None:
    """In small what Fig. 10 shows: the RevNet cannot converge."""
    generator = torch.Generator().manual_seed(0)
    D = dictionary(8, 16, generator=generator)
    test, after = samples(500, D, generator=generator), {}
    best = float(lasso(ista(test, D, LAM, 3_000), test, D, LAM).mean())
    plain = float(lasso(ista(test, D, LAM, 10), test, D, LAM).mean())
    for form in ("resnet", "momentum", "revnet"):
        net = Lista(D, LAM, depth=10, form=form, gamma=0.3)
        fitted(net, lambda net=net: net.loss(samples(100, D, generator=generator)), 1e-3, 40)
        after[form] = float(net.loss(test).detach())
    assert best < after["resnet"] < plain
    assert after["momentum"] < after["revnet"]
