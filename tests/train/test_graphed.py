"""Forward and backward as a CUDA graph: the same bits as without one."""

import pytest
import torch
from torch import nn

from retrograde.nets.ode import SecondOrderODE
from retrograde_experiments.train.graphed import graphed

cuda = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))


@pytest.mark.parametrize("device", ["cpu", cuda])
def test_steps_have_the_bits_of_plain_ones(device: str) -> None:
    found = []
    for graph in (False, device == "cuda"):
        torch.manual_seed(0)
        f = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        net = nn.Sequential(
            SecondOrderODE(f, velocity="first", solver="rk4", steps=2, gradient="direct"), nn.Linear(4, 3)
        ).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        batches = [(torch.randn(16, 4, device=device), torch.randint(3, (16,), device=device)) for _ in range(5)]
        step = graphed(lambda x, y: nn.functional.cross_entropy(net(x), y), *batches[0], list(net.parameters()), graph)  # noqa: B023
        losses = []
        for batch in batches:
            losses.append(step(*batch).clone())
            optimizer.step()
        found.append([*losses, *(p.detach() for p in net.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert len({float(loss) for loss in found[0][:5]}) == 5


def test_every_call_makes_gradients_anew() -> None:
    w = torch.ones(2, requires_grad=True)
    step = graphed(lambda x, y: (w * x).sum() + y, torch.ones(2), torch.zeros(()), [w], graph=False)
    for scale in (1.0, 3.0):
        step(torch.full((2,), scale), torch.zeros(()))
        assert torch.equal(w.grad, torch.full((2,), scale))
