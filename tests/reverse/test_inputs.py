"""What is refused before anything runs says what was given, what is allowed and what to do, and leaves gradients alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import retrograde as rg
from problems import Mlp
from retrograde.nets.coupling import CouplingNet


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        *(({"gamma": g}, ValueError, "gamma") for g in (-0.1, 1.5, math.nan, math.inf, 1 - 1e-8, Fraction(1, 10**7))),
        *(({"gamma": g}, TypeError, "gamma") for g in ("0.9", None, True, object())),
        ({"gamma": [0.5, 0.5]}, ValueError, "2 values for 1 blocks"),
        ({"gamma": 0, "memory": "reverse"}, ValueError, r"gamma = 0 .* memory='checkpoint'"),
        ({"form": "residual"}, ValueError, "form must be one of .*'relu'"),
        ({"memory": "magic"}, ValueError, "memory"),
        *(({"verify": v}, ValueError, "verify must be") for v in (True, "end", "blocks", None)),
        ({"overflow": "warn"}, ValueError, "overflow must be"),
        *(({"velocity": v}, ValueError, "velocity must be") for v in ("zero", 3)),
        *(({"fixed_point": b}, ValueError, r"fixed_point must be 'auto', 'int16' or a retrograde\.FixedPoint")
          for b in (22, 1.5, "many", True, None, "int32")),
        *(({name: 1}, TypeError, name) for name in ("fraction_bits", "state_bits", "every", "budget")),
    ],
)  # fmt: skip
def test_options(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        rg.MomentumNet([Mlp()], **options)


def test_gamma_zero_cannot_be_reversed() -> None:
    net = rg.MomentumNet([Mlp()] * 2, gamma=[0.5, 0])
    with pytest.raises(ValueError, match="gamma = 0"):
        net.memory = "reverse"
    with pytest.raises(ValueError, match="gamma = 0"):
        net.encode(torch.ones(1, 8))
    assert net.memory == "auto"
    net(torch.ones(1, 8)).sum().backward()


def test_blocks() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        rg.MomentumNet([])
    with pytest.raises(TypeError, match=r"\[block\] \* depth"):
        rg.MomentumNet(nn.Linear(3, 3))
    with pytest.raises(TypeError, match=r"block 1 must be an nn\.Module; got function"):
        rg.MomentumNet([Mlp(), lambda x: x])
    net = rg.MomentumNet([Mlp()])
    net.blocks.append(Mlp())
    with pytest.raises(ValueError, match=r"2 blocks now, and 1 values of gamma"):
        net(torch.randn(2, 8))
    net.gamma = 0.9
    net(torch.randn(2, 8))
    assert len(list(rg.MomentumNet([Mlp()] * 9).parameters())) == 3  # tied
    x, blocks = torch.randn(3, 8), [Mlp() for _ in range(4)]
    outputs = [
        rg.MomentumNet(b)(x) for b in (blocks, nn.ModuleList(blocks), nn.Sequential(*blocks), (b for b in blocks))
    ]
    assert all(torch.equal(y, outputs[0]) for y in outputs)


class Breaks(nn.Module):
    def __init__(self, how: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.how(self.linear(x))


@pytest.mark.parametrize("memory", ["reverse", "checkpoint", "store"])
@pytest.mark.parametrize("fixed_point", [rg.FixedPoint(20, torch.int32), "auto", "int16"])
@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        (lambda y: y[:, :4], ValueError, r"block 2 turned a \(3, 8\) .* into a \(3, 4\)"),
        (lambda y: y.double(), ValueError, r"block 2 turned .*float64"),
        (lambda y: y.to("meta"), ValueError, r"block 2 turned .* on meta"),
        (lambda y: (y, y), TypeError, "block 2 returned tuple"),
        (lambda y: y * math.nan, rg.RangeOverflow, "NaN or Inf out of block 2"),
        (lambda y: y / 0, rg.RangeOverflow, "NaN or Inf out of block 2"),
    ],
)
def test_blocks_that_break(how: Any, error: type[Exception], says: str, fixed_point: Any, memory: str) -> None:
    net = rg.MomentumNet([Mlp(), Mlp(), Breaks(how), Mlp()], memory=memory, fixed_point=fixed_point)
    weights = [p.clone() for p in net.parameters()]
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(error, match=says):
            net(torch.randn(3, 8))
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(p, w) for p, w in zip(net.parameters(), weights, strict=True))


NESTED = [torch.randn(2, 8), torch.randn(3, 8)]


@pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning", "ignore:.*beta state:UserWarning")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        *((lambda x=x: x, "floating-point tensor") for x in (torch.ones(2, 8, dtype=torch.int64), [1.0], None)),
        (lambda: torch.ones(2, 8, dtype=torch.complex64), r"floating-point tensor.*view_as_real"),
        (lambda: torch.eye(8).to_sparse(), r"dense .*sparse_coo one\. Pass x\.to_dense"),
        (lambda: torch.eye(8).to_sparse_csr(), r"dense .*sparse_csr one\. Pass x\.to_dense"),
        (lambda: torch.nested.nested_tensor(NESTED), r"dense .*nested one\. Pass x\.to_padded_tensor"),
        (
            lambda: torch.nested.nested_tensor(NESTED, layout=torch.jagged),
            r"dense .*nested one\. Pass x\.to_padded_tensor",
        ),
    ],
)
def test_inputs(make: Callable[[], Any], says: str) -> None:
    for net in (rg.MomentumNet([Mlp()]), rg.MomentumNet([Mlp()], gamma=0), CouplingNet([nn.Linear(4, 4)])):
        with pytest.raises(TypeError, match=says):
            net(make())


def test_16_bit_state_is_not_for_float64() -> None:
    with pytest.raises(ValueError, match="float64"):
        rg.MomentumNet([Mlp()], fixed_point="int16").double()(torch.randn(2, 8, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("training", [True, False])
def test_inputs_without_values(training: bool, dtype: torch.dtype) -> None:
    """Nothing is asked of the values without gradients: as in a plain network, the output is of the right kind."""
    x = torch.empty(2, 8, device="meta", dtype=dtype)
    for net in (rg.MomentumNet([Mlp() for _ in range(3)]), CouplingNet([nn.Linear(4, 4)] * 2)):
        net = net.to("meta", dtype).train(training)
        with torch.no_grad():
            y = net(x)
        assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
        assert net.fixed_point == "auto"
        assert not net.range.deferred.waiting
    rg.MomentumNet([Mlp()], gamma=0).to("meta", dtype)(x).sum().backward()


def traced(net: nn.Module, x: Tensor) -> object:
    return torch.jit.trace(net, x)


def exported(net: nn.Module, x: Tensor) -> object:
    return torch.export.export(net, (x,), strict=False)


def made_fx(net: nn.Module, x: Tensor) -> object:
    return make_fx(net)(x)


def dual(net: nn.Module, x: Tensor) -> object:
    with forward_ad.dual_level():
        return net(forward_ad.make_dual(x, torch.ones_like(x)))


def transformed(net: nn.Module, x: Tensor) -> object:
    return torch.func.grad(lambda x: net(x).sum())(x)


SURROUNDINGS: list[tuple[Callable[[nn.Module, Tensor], object], str]] = [
    (traced, r"torch\.jit\.trace does not see .* write its recurrence out"),
    (exported, r"torch\.export does not see"),
    (made_fx, "make_fx does not see"),
    (dual, r"forward-mode derivatives .* torch\.autograd\.functional\.jvp"),
    (transformed, r"torch\.func's transforms .* torch\.autograd"),
]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("run", "says"), SURROUNDINGS)
def test_what_does_not_see_through_the_integers(
    run: Callable[[nn.Module, Tensor], object], says: str, grad: bool
) -> None:
    if run is exported and not hasattr(torch.compiler, "is_exporting"):
        pytest.skip("this torch does not say that it exports")
    x = torch.randn(2, 8)
    layers = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(3)))
    converted = rg.convert(layers, stages=["*"])
    for net in (rg.MomentumNet([Mlp() for _ in range(3)]), CouplingNet([nn.Linear(4, 4)] * 2), converted):
        net(x)
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=says):
            run(net, x)
    if run is traced and not grad:
        plain = rg.MomentumNet([Mlp() for _ in range(3)], gamma=0)
        with torch.no_grad():
            assert torch.equal(torch.jit.trace(plain, x)(x + 1), plain(x + 1))


def test_states_of_another_network() -> None:
    net = rg.MomentumNet([Mlp() for _ in range(3)])
    x = torch.randn(2, 8)
    state = net.encode(x)
    others = (
        rg.MomentumNet([Mlp()] * 4),
        rg.MomentumNet(net.blocks, gamma=0.5),
        rg.MomentumNet(net.blocks, form="block"),
    )
    for other in others:
        with pytest.raises(ValueError, match="not a state of this network: depth=3, gamma=9/10"):
            other.inverse(state)
    with pytest.raises(ValueError, match="did not rewind"):
        rg.MomentumNet([Mlp() for _ in range(3)]).inverse(state)
    with pytest.raises(ValueError, match="not a state"):
        net.inverse(x)
