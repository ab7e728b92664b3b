"""Wrong input is refused with what was given, what is allowed and what to do; SciPy is needed only on use; the page runs."""

import doctest
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import retrograde as rg
import retrograde.theory as theory
from retrograde.theory import G, is_representable, lambda_min, largest_multiple, linear_flow, obstacles, psi, represent

PAGE = Path(__file__).parents[2] / "docs" / "theory.md"
OF_A_MATRIX = [psi, linear_flow, is_representable, obstacles, represent, largest_multiple]
OF_EPS = [lambda_min, lambda eps: G(0.0, eps)]


@pytest.mark.parametrize("function", OF_A_MATRIX)
@pytest.mark.parametrize(
    ("matrix", "error", "message"),
    [
        (np.zeros((2, 3)), ValueError, r"shape \(2, 3\): expected a square matrix"),
        (np.zeros(4), ValueError, r"shape \(4,\)"),
        (np.zeros((2, 2, 2)), ValueError, r"shape \(2, 2, 2\)"),
        (np.zeros((0, 0)), ValueError, "is empty"),
        (np.array([[1.0, np.nan], [0.0, np.inf]]), ValueError, "2 NaN or infinite entries"),
        (torch.tensor([[float("nan")]]), ValueError, "1 NaN or infinite entries"),
        (np.eye(2) * 1j, TypeError, "complex128: expected real"),
        (torch.eye(2, dtype=torch.complex64), TypeError, "complex64: expected real"),
        ([["a"]], TypeError, "expected real"),
        (torch.eye(2, requires_grad=True), TypeError, "detach"),
    ],
)
def test_matrices(function, matrix, error, message):
    with pytest.raises(error, match=message):
        function(matrix, 1.0)


@pytest.mark.parametrize("function", [*(lambda eps, f=f: f(np.eye(2), eps) for f in OF_A_MATRIX), *OF_EPS])
@pytest.mark.parametrize(
    ("eps", "error", "message"),
    [
        (-1.0, ValueError, r"eps = -1\.0: expected .*eps = 1/\(1 − γ\)"),
        (1e-9, ValueError, "eps = 1e-09"),
        (float("nan"), ValueError, "eps = nan: expected a finite number"),
        (float("inf"), ValueError, "finite"),
        ("1", TypeError, r"eps is '1' \(str\)"),
        (1j, TypeError, "expected a real number"),
        (True, TypeError, "expected a real number"),
    ],
)
def test_eps(function, eps, error, message):
    with pytest.raises(error, match=message):
        function(eps)


@pytest.mark.parametrize("function", OF_EPS)
def test_eps_zero_is_refused_where_it_means_nothing(function):
    with pytest.raises(ValueError, match=r"eps = 0\.0: expected 1e-06 ≤ eps"):
        function(0.0)


@pytest.mark.parametrize("rtol", [0.0, -1e-10, 0.5])
def test_rtol(rtol):
    for function in (is_representable, represent, largest_multiple):
        with pytest.raises(ValueError, match=f"rtol = {rtol}: expected 0 < rtol < 0.1"):
            function(np.eye(2), 1.0, rtol=rtol)


def test_other_arguments():
    with pytest.raises(ValueError, match="t = -1"):
        linear_flow(np.eye(2), 1.0, t=-1.0)
    with pytest.raises(ValueError, match="max_residual"):
        represent(np.eye(2), 1.0, max_residual=0.0)


def test_low_precision_tensors_are_taken():
    assert psi(torch.eye(2, dtype=torch.bfloat16), 1.0).dtype == torch.float64


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
