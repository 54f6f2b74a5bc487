"""Rates that fit measured steps, against scipy's."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from weft.generate.step_curve import nonnegative_rates


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(6, 40))
def test_rates_are_as_near_as_any_can_be(seed: int, kinds: int, steps: int) -> None:
    drawn = np.random.default_rng(seed)
    # of very different sizes, one of them absent, and two of them alike
    work = drawn.exponential(size=(steps, kinds)) * 10.0 ** drawn.integers(-3, 4, kinds)
    if seed % 3 == 0:
        work[:, 0] = 0
    if seed % 4 == 0:
        work[:, -1] = 2 * work[:, 0]
    seconds = work @ np.maximum(drawn.normal(size=kinds), 0) + drawn.normal(size=steps)
    rates = nonnegative_rates(work, seconds)
    assert (rates >= 0).all()
    ours = np.linalg.norm(work @ rates - seconds)
    scipys = np.linalg.norm(work @ nnls(work, seconds)[0] - seconds)
    # as near up to rounding, of which the least is taken for none
    assert ours**2 <= scipys**2 + 2e-12 * (seconds @ seconds)
