"""γ for the tests of the kernels."""

from fractions import Fraction

from hypothesis import strategies as st

from retrograde.core.rational import LIMIT

ratios = st.one_of(
    st.sampled_from([Fraction(9, 10), Fraction(99, 100), Fraction(1, 2), Fraction(1, 10), Fraction(1), Fraction(0)]),
    st.tuples(st.integers(1, LIMIT - 1), st.integers(2, LIMIT - 1)).map(lambda p: Fraction(min(p), max(p))),
)
