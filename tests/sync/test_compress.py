"""Compressors: errors within what they declare, right means, bytes as the formulas, and words that are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from math import ceil, prod
from threading import Barrier
from unittest import mock

import hypothesis.extra.numpy as arrays
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import UsageError, WeftError
from weft.sync import rounded
from weft.sync.compress import build_compressor, encode_with_feedback
from weft.sync.compressor import Compressor

T = torch.Tensor
WORDS = ("none", "int8", "int7", "int6", "int5", "int4", "int8:random", "int5:random", "int4:random", "topk:0.01",
         "topk:0.3", "randk:0.1", "randk:0.5", "powersgd:1", "powersgd:4", "sign", "cocktail")  # fmt: skip
#: Those whose errors are as declared for every single seed; of the others it is the mean over seeds.
SURE = ("none", "int8", "int7", "int6", "int5", "int4", "topk:0.01", "topk:0.3", "sign")
SHAPES = ((1,), (7,), (128,), (300,), (12, 31), (33, 5, 4))


@st.composite
def tensors(draw: st.DrawFn) -> T:
    """Of many scales at once, with zeros, in both types."""
    shape = draw(st.sampled_from(SHAPES))
    kind = draw(st.sampled_from(("float32", "float64")))
    numbers = st.floats(-1e6, 1e6, width=32, allow_subnormal=False).map(
        lambda x: x if abs(x) > 1e-20 else 0.0
    )
    return torch.from_numpy(
        draw(arrays.arrays(kind, shape, elements=numbers, fill=st.just(0.0)))
    )


def decoded(compressor: Compressor, x: T, seed: int) -> T:
    return compressor.decode(compressor.encode(x, seed), x.shape, seed)


def square(x: T) -> float:
    return float(x.double().square().sum())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("word", SURE)
@given(tensors(), st.integers(0, 2**40))
@settings(max_examples=40, deadline=None)
def test_errors_are_within_what_is_declared(word: str, x: T, seed: int) -> None:
    compressor = build_compressor(word)
    error = compressor.error(x.shape)
    assert 0 <= error < 1
    assert square(decoded(compressor, x, seed) - x) <= error * square(x) * (1 + 1e-5)


@pytest.mark.parametrize("word", [word for word in WORDS if word not in SURE])
@pytest.mark.parametrize("feedback", [False, True])
def test_errors_are_within_what_is_declared_on_average(
    word: str, feedback: bool
) -> None:
    """The mean over 200 seeds, of a tensor with few large elements and of a full one, against its own spread."""
    compressor = build_compressor(word)
    if feedback:
        compressor = compressor.for_feedback
    for x in (torch.randn(24, 20).pow(5), torch.eye(24, 20)):
        errors = torch.tensor(
            [
                square(decoded(compressor, x, seed) - x) / square(x)
                for seed in range(200)
            ]
        )
        above = 4 * float(errors.std()) / len(errors) ** 0.5 + 1e-6
        assert float(errors.mean()) <= compressor.error(x.shape) + above
        assert not feedback or compressor.error(x.shape) < 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "word", [word for word in WORDS if build_compressor(word).unbiased]
)
@given(st.integers(0, 2**20), st.sampled_from(SHAPES))
@settings(max_examples=5, deadline=None)
def test_unbiased_ones_are_right_on_average(
    word: str, start: int, shape: tuple[int, ...]
) -> None:
    """The mean over seeds comes nearer as one over their root, as far as the declared error says."""
    compressor, count = build_compressor(word), 600
    x = torch.randn(shape, generator=torch.Generator().manual_seed(start)).pow(3)
    mean = sum(decoded(compressor, x, start + i).double() for i in range(count)) / count
    # A mean of independent errors has the mean square of one of them over their number. Where one number of the tensor
    # outweighs the others that is four deviations from it: one run of ten thousand is beyond them.
    assert square(mean - x) <= 16 * compressor.error(shape) / count * square(
        x
    ) + 1e-12 * square(x)


@pytest.mark.parametrize("bits", [2, 3])
@given(tensors())
@settings(max_examples=20, deadline=None)
def test_fewer_bits_lose_less_than_the_tensor_and_less_than_without_clipping(
    bits: int, x: T
) -> None:
    """What L-GreCo may choose for a tensor where nobody can name it: 2 and 3 bits, whose scale clips the largest."""
    compressor = replace(build_compressor("int4"), bits=bits)
    lost = square(decoded(compressor, x, 0) - x)
    assert lost <= compressor.error(x.shape) * square(x) * (1 + 1e-5)
    assert compressor.error(x.shape) < 1
    payload = compressor.encode(x, 0)
    assert sum(part.nbytes for part in payload) == bytes_of(f"int{bits}", x.shape, 4)
    with mock.patch.object(rounded, "SHARES", (1.0,)):
        assert lost <= square(decoded(compressor, x, 0) - x) * (1 + 1e-6)


def test_contractive_ones_are_biased() -> None:
    """What the flag says is so: their mean over seeds stays away from the tensor."""
    x = torch.randn(24, 20, generator=torch.Generator().manual_seed(0)).pow(3)
    for word in ("int4", "topk:0.3", "powersgd:4", "sign", "cocktail"):
        compressor = build_compressor(word)
        mean = sum(decoded(compressor, x, seed) for seed in range(200)) / 200
        assert not compressor.unbiased and square(mean - x) > 1e-3 * square(x), word


def bytes_of(word: str, shape: Sequence[int], width: int) -> int:
    """The formulas, written apart from the code: ``width`` bytes in a number of the tensor."""
    n = prod(shape)
    blocks, name, (m, w) = ceil(n / 128), word.split(":")[0], (shape[0], n // shape[0])

    def positions(k: int, n: int) -> int:
        return min(4 * k, ceil(n / 8))

    if name.startswith("int"):
        return ceil(n * int(name[3:]) / 8) + 2 * blocks
    if name == "sign":
        return ceil(n / 8) + 2 * blocks
    if name in ("topk", "randk"):
        k = min(n, max(1, round(float(word.split(":")[1]) * n)))
        return k * width + (positions(k, n) if name == "topk" else 0)
    if name == "powersgd" and len(shape) > 1 and int(word.split(":")[1]) * (m + w) < n:
        return int(word.split(":")[1]) * (m + w) * width
    if name == "cocktail":
        masked = ceil(n / 10)
        k = max(1, round(0.2 * masked))
        return ceil(k / 2) + 2 * ceil(k / 128) + positions(k, masked)
    return n * width


@pytest.mark.parametrize("word", WORDS)
def test_payloads_have_the_bytes_of_the_formula(word: str) -> None:
    compressor = build_compressor(word)
    for shape in (*SHAPES, (400, 300)):
        for dtype in (torch.float32, torch.float64):
            payload = compressor.encode(torch.randn(shape, dtype=dtype), 3)
            wanted = bytes_of(word, shape, dtype.itemsize)
            assert (
                sum(x.numel() * x.element_size() for x in payload)
                == wanted
                == compressor.nbytes(shape, dtype)
            )
            assert all(x.is_contiguous() for x in payload)
            assert [(tuple(x.shape), x.dtype) for x in payload] == compressor.specs(
                shape, dtype
            )


def test_four_bits_are_less_than_a_seventh_and_a_half() -> None:
    """With ``every = 20`` that is less than 1/150 of what synchronous training sends; Cocktail's mix 1/117."""
    shape = (1024, 1024)
    assert 4 * prod(shape) / build_compressor("int4").nbytes(shape) > 7.7
    assert 4 * prod(shape) / build_compressor("cocktail").nbytes(shape) > 117


@pytest.mark.parametrize(
    "word", [word for word in WORDS if build_compressor(word).linear]
)
def test_linear_ones_average_payloads(word: str) -> None:
    """Islands that average thin tensors get the mean of what each one sends of its own, which is what is fed back."""
    compressor = build_compressor(word)
    given_ = [torch.randn(12, 31, dtype=torch.float64) for _ in range(4)]
    mean, mine = islands_agreed(compressor, given_, seed=5)
    assert (mean - sum(mine) / 4).abs().max() < 1e-12
    # the product that the mean matrix itself has with the same random start
    if compressor.in_rings:
        alone = decoded(compressor, sum(given_) / 4, 5)
        assert (mean - alone).abs().max() < 1e-12


def islands_agreed(
    compressor: Compressor, given_: list[T], seed: int
) -> tuple[T, list[T]]:
    """The agreed mean, and each island's part: a thread is an island, and they meet to average."""
    told: dict[int, T] = {}
    together = Barrier(len(given_))

    def agreed(island: int) -> tuple[list[T], list[T]]:
        def average(mine: T) -> T:
            told[island] = mine
            together.wait(60)
            mean = sum(told[i] for i in range(len(given_))) / len(given_)
            together.wait(60)
            return mean

        return compressor.agreed(given_[island], seed, average)

    with ThreadPoolExecutor(len(given_)) as islands:
        found = list(islands.map(agreed, range(len(given_))))
    shape = given_[0].shape
    assert all(
        torch.equal(x, y)
        for mean, _ in found
        for x, y in zip(mean, found[0][0], strict=True)
    )
    return compressor.decode(found[0][0], shape, seed), [
        compressor.decode(own, shape, seed) for _, own in found
    ]


@pytest.mark.parametrize("word", WORDS)
def test_feedback_loses_nothing_in_the_end(word: str) -> None:
    """All that was decoded, and the residual, are all that was given; and the residual stays bounded."""
    compressor = build_compressor(word).for_feedback
    x = torch.randn(
        24, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    residual, warm, total, worst = torch.zeros_like(x), None, torch.zeros_like(x), 0.0
    for seed in range(300):
        payload, residual = encode_with_feedback(compressor, x, seed, residual, warm)
        warm = compressor.warm(payload)
        total += compressor.decode(payload, x.shape, seed)
        worst = max(worst, square(residual))
    assert (total + residual - 300 * x).abs().max() < 1e-9
    # |e'|^2 <= error |e + x|^2 has the fixed point |e| <= |x| root / (1 - root); within twice that is bounded.
    root = compressor.error(x.shape) ** 0.5
    assert worst <= 4 * square(x) * (root / (1 - root)) ** 2


def test_feedback_refuses_what_would_grow() -> None:
    x = torch.randn(100)
    with pytest.raises(ValueError, match="for_feedback"):
        encode_with_feedback(build_compressor("randk:0.1"), x, 0, torch.zeros(100))
    assert encode_with_feedback(build_compressor("randk:0.1"), x, 0)[1] is None


def test_warm_starts_find_the_best_product() -> None:
    """Turns of the power method on one matrix end at its truncated singular values."""
    x = torch.randn(
        30, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    values *= 0.7 ** torch.arange(20)
    x = left @ values.diag() @ right
    best, compressor, warm = square(values[4:]), build_compressor("powersgd:4"), None
    errors = []
    for seed in range(60):
        payload = compressor.encode(x, seed, warm)
        warm = compressor.warm(payload)
        errors.append(square(compressor.decode(payload, x.shape, seed) - x))
    assert (
        all(b <= a * (1 + 1e-9) for a, b in pairwise(errors))
        and errors[0] > 1.05 * best
    )
    assert errors[-1] == pytest.approx(best, rel=1e-6)


def test_warm_starts_outlive_a_gradient_of_zeros() -> None:
    compressor, x = build_compressor("powersgd:4"), torch.randn(30, 20)
    warm = compressor.warm(compressor.encode(torch.zeros(30, 20), 0))
    for seed in range(20):
        payload = compressor.encode(x, seed, warm)
        warm = compressor.warm(payload)
    assert square(compressor.decode(payload, x.shape, 0) - x) < 0.9 * square(x)


def test_the_mask_rolls_over_all_elements() -> None:
    compressor = build_compressor("cocktail")
    for count in (10, 101, 999):
        for first in (0, 40):
            masks = [compressor._mask(count, first + turn) for turn in range(10)]  # type: ignore[attr-defined]
            assert torch.cat(masks).unique().numel() == count and {
                len(mask) for mask in masks
            } == {ceil(count / 10)}


@pytest.mark.parametrize("word", WORDS)
def test_garbage_is_not_decoded(word: str) -> None:
    """A payload of another tensor, one with a tensor too few, and positions that are nowhere."""
    compressor = build_compressor(word)
    payload = compressor.encode(torch.randn(12, 31), 0)
    for wrong in (
        compressor.encode(torch.randn(40, 40), 0),
        payload[:-1],
        [x.to(torch.int16) for x in payload],
    ):
        with pytest.raises(WeftError, match="came as"):
            compressor.decode(wrong, (12, 31), 0)
    if word.startswith("topk"):
        payload[1].fill_(-1)
        with pytest.raises(WeftError, match="positions"):
            compressor.decode(payload, (12, 31), 0)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(word: str, bad: float) -> None:
    compressor = build_compressor(word)
    found = torch.cat(
        [
            decoded(compressor, torch.full((12, 31), bad), seed).flatten()
            for seed in range(10)
        ]
    )
    assert not bool(found.isfinite().all())


@pytest.mark.parametrize("word", WORDS)
def test_nothing_and_zeros_go_through(word: str) -> None:
    compressor = build_compressor(word)
    assert square(decoded(compressor, torch.zeros(12, 31), 0)) == 0
    assert (
        decoded(compressor, torch.zeros(0), 0).shape == (0,)
        and compressor.nbytes((0,)) == 0
    )


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("topq:0.1", "did you mean 'topk'"), ("", "choose from: none"), ("none:3", "write 'none'"),
        ("cocktail:0.1", "write 'cocktail'"), ("topk", "share of elements"), ("topk:0", "above 0 and at most 1"),
        ("topk:1.5", "above 0"), ("randk:nan", "above 0"), ("randk:-1", "above 0"), ("powersgd", "'powersgd:4'"),
        ("powersgd:0", "at least 1"), ("powersgd:2.5", "at least 1"), ("powersgd:inf", "at least 1"),
        ("int8:4", "'int8:random'"), ("sign:", "write 'sign'"),
    ],
)  # fmt: skip
def test_wrong_words_are_one_line(word: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_compressor(word)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_rank_above_the_matrix_is_one_line() -> None:
    compressor = build_compressor("powersgd:9")
    with pytest.raises(
        UsageError,
        match=r"rank above the 8 x 64 matrix blocks.0.wk; use at most 'powersgd:8'",
    ):
        compressor.check("blocks.0.wk", (8, 64))
    compressor.check("norm", (64,))  # vectors are sent as they are
    compressor.check("blocks.0.wq", (64, 64))
