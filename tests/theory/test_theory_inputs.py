"""Wrong input is refused with what was given, what is allowed and what to do; SciPy is needed only on use; the page runs."""

import doctest
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import retrograde as rg
from retrograde import theory
from retrograde.theory.scalar import Inverse

PAGE = Path(__file__).parents[2] / "docs" / "theory.md"
OF_A_MATRIX = [
    theory.psi, theory.linear_flow, theory.is_representable, theory.obstacles, theory.represent, theory.largest_multiple,
]  # fmt: skip
OF_EPS = [theory.lambda_min, lambda eps: theory.G(0.0, eps), lambda eps: theory.universal_velocity(abs, eps)]
I2 = np.eye(2)
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("function", OF_A_MATRIX)
@pytest.mark.parametrize(
    ("matrix", "error", "message"),
    [
        (np.zeros((2, 3)), ValueError, r"shape \(2, 3\): expected a square matrix"),
        (np.zeros(4), ValueError, r"shape \(4,\)"),
        (np.zeros((2, 2, 2)), ValueError, r"shape \(2, 2, 2\)"),
        (np.zeros((0, 0)), ValueError, "is empty"),
        (np.array([[1.0, NAN], [0.0, INF]]), ValueError, "2 NaN or infinite entries"),
        (torch.tensor([[NAN]]), ValueError, "1 NaN or infinite entries"),
        (I2 * 1j, TypeError, "complex128: expected real"),
        (torch.eye(2, dtype=torch.complex64), TypeError, "complex64: expected real"),
        ([["a"]], TypeError, "expected real"),
        (torch.eye(2, requires_grad=True), TypeError, "detach"),
    ],
)
def test_matrices(function, matrix, error, message):
    with pytest.raises(error, match=message):
        function(matrix, 1.0)


@pytest.mark.parametrize("function", [*(lambda eps, f=f: f(I2, eps) for f in OF_A_MATRIX), *OF_EPS])
@pytest.mark.parametrize(
    ("eps", "error", "message"),
    [
        (-1.0, ValueError, r"eps = -1\.0: expected .*eps = 1/\(1 − γ\)"),
        (1e-9, ValueError, "eps = 1e-09"),
        (NAN, ValueError, "eps = nan: expected a finite number"),
        (INF, ValueError, "finite"),
        ("1", TypeError, r"eps is '1' \(str\)"),
        (1j, TypeError, "expected a real number"),
        (True, TypeError, "expected a real number"),
    ],
)
def test_eps(function, eps, error, message):
    with pytest.raises(error, match=message):
        function(eps)


WRONG = [
    *((lambda f=f: f(0.0), r"eps = 0\.0: expected 1e-06 ≤ eps") for f in OF_EPS),
    *((lambda f=f, rtol=rtol: f(I2, 1.0, rtol=rtol), f"rtol = {rtol}: expected 0 < rtol < 0.1")
      for f in (theory.is_representable, theory.represent, theory.largest_multiple) for rtol in (0.0, -1e-10, 0.5)),
    (lambda: theory.linear_flow(I2, 1.0, t=-1.0), "t = -1"),
    (lambda: theory.represent(I2, 1.0, max_residual=0.0), "max_residual"),
    (lambda: theory.revnet_eigenvalue(I2, np.ones((2, 2))), "B has rank 1 of 2"),
    (lambda: theory.revnet_jacobian(I2, np.eye(3)), "equal shapes"),
    (lambda: theory.momentum_jacobian(I2, 1.5), "0 ≤ gamma ≤ 1"),
    (lambda: theory.first_order_flow(np.sin, [[1.0]], [1.0]), "x0 has shape"),
    (lambda: theory.frictionless_flow(np.sin, [1.0], [1.0, 2.0], [1.0]), "v0"),
    (lambda: theory.first_order_flow(np.sin, [1.0], [1.0, 0.5]), "increasing times"),
    (lambda: theory.second_order_flow(np.sin, [1.0], [1.0], 0.0, [1.0]), "eps = 0"),
    (lambda: theory.first_order_gap(np.sin, [1.0], [1.0], 0.1, horizon=-1.0), "horizon"),
    (lambda: theory.obstruction(lambda x: x, [-1.0]), "x₀ > 0"),
    (lambda: theory.negative_pair(1.0), "lam ≠ 1"),
]  # fmt: skip


@pytest.mark.parametrize(("act", "message"), WRONG, ids=[message for _, message in WRONG])
def test_other_arguments(act, message):
    with pytest.raises(ValueError, match=message):
        act()


@pytest.mark.parametrize(
    "function", [lambda A: theory.psi(A, 0.5), lambda A: theory.represent(A, 0.5), lambda A: theory.G(A, 0.5)]
)
def test_what_is_returned_is_of_the_kind_that_was_given(function):
    exact = function(np.eye(2))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = function(torch.eye(2, dtype=dtype))
        assert isinstance(found, torch.Tensor)
        assert found.dtype == torch.float64
        np.testing.assert_array_equal(found.numpy(), exact)
    assert isinstance(function([[1, 0], [0, 1]]), np.ndarray)
    assert exact.shape == (2, 2)


def test_eps_zero_is_the_exponential_and_its_logarithm():
    assert [Inverse.of(0.0).root(z) for z in (-2.0, 1 - 1j)] == [np.log(-2 + 0j), np.log(1 - 1j)]
    assert [theory.largest_multiple([[x]], 0.0) for x in (-1.0, 2.0)] == [0.0, INF]


def test_every_public_name_is_there():
    assert all(callable(getattr(theory, name)) for name in theory.__all__)
    assert rg.theory is theory
    with pytest.raises(AttributeError, match="nothing"):
        _ = rg.nothing


def test_without_scipy_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['scipy'] = None; import retrograde as rg\n"
        "try: rg.theory\n"
        "except ImportError as error: print(error)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 'pip install "retrograde[theory]"' in shown


def test_the_page_is_right():
    result = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert result.attempted > 30
    assert result.failed == 0
