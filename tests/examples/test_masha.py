"""MASHA converges with compressors with which the plain method does not."""

import pytest
import torch

from examples.masha import masha, naive, random_saddle
from weft.sync.compress import build_compressor


@pytest.mark.slow
@pytest.mark.parametrize("word", [
    "randk:0.2", pytest.param("topk:0.2", marks=pytest.mark.soak)
])  # fmt: skip
def test_it_converges_where_naive_compression_does_not(word: str) -> None:
    """MASHA1 with an unbiased compressor and MASHA2 with a contractive one come near, others go away or stay away."""
    problem, compressor = random_saddle(), build_compressor(word)
    step = 0.1 / problem.lipschitz
    found = masha(
        problem, compressor, 2500, step, feedback=not compressor.unbiased, keep=0.8
    )
    assert found.apart[-1] < 3e-3 and found.apart[-1] < 0.1 * found.apart[1000]
    for factor in (10, 1):
        other = naive(problem, compressor, 1300, factor * step)
        assert min(other.apart[-100:]) > 0.2
    if compressor.unbiased:  # errors as large as the operators drive it away
        assert naive(problem, compressor, 1300, 10 * step).apart[-1] > 1e6


def test_nothing_compressed_is_the_extragradient_method() -> None:
    """With a new reference point in every round; and the solution is one."""
    problem, none = random_saddle(), build_compressor("none")
    solution = problem.solution()
    assert sum(problem.operator(i, solution) for i in range(4)).abs().max() < 1e-9
    step = 0.5 / problem.lipschitz
    ours, plain = (
        masha(problem, none, 50, step, False, 0.0),
        naive(problem, none, 50, step),
    )
    assert ours.apart == pytest.approx(plain.apart, rel=1e-9)
    assert (
        ours.sent == 50 * 4 * 2 * 40 * 8 and torch.get_default_dtype() == torch.float32
    )
