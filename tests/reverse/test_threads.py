import threading

import torch
from torch import nn

import retrograde as rg
from retrograde.stack.momentum import Momentum
from retrograde.stack.thread import SameThread


def test_backward_stays_on_its_thread_while_needed() -> None:
    enabled = torch._C._is_multithreading_enabled
    assert enabled()
    first, second = SameThread(), SameThread()
    assert not enabled()
    elsewhere = []
    threading.Thread(target=lambda: elsewhere.append(enabled())).start()
    del first
    assert not enabled()
    del second
    assert enabled()
    assert elsewhere == [True]


def test_a_users_own_setting_is_put_back() -> None:
    with torch.autograd.set_multithreading_enabled(False):
        keeper = SameThread()
        del keeper
        assert not torch._C._is_multithreading_enabled()
    assert torch._C._is_multithreading_enabled()


def test_the_setting_comes_back_with_the_end_of_the_graph(monkeypatch) -> None:
    """On CUDA tensors, passes hold a `SameThread`; here every pass is made to."""
    net = rg.MomentumNet([nn.Linear(4, 4).requires_grad_() for _ in range(3)], memory="reverse", fraction_bits=20)
    made = Momentum.__init__

    def init(self, *args, **kwargs) -> None:
        made(self, *args, **kwargs)
        self.thread = SameThread()

    monkeypatch.setattr(Momentum, "__init__", init)
    enabled = torch._C._is_multithreading_enabled
    loss = net(torch.randn(2, 4)).sum()
    assert not enabled()
    loss.backward()
    del loss
    assert enabled()
    net(torch.randn(2, 4))
    assert enabled()
