"""Weights without their zeros, against dense ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.test_products import build, logits
from weft.errors import UsageError
from weft.generate.engine import Engine
from weft.generate.sampling import GREEDY
from weft.models import sparse_weights
from weft.models.products import read_only
from weft.models.sparse_matrix import dense_rows, sparse_matrix
from weft.models.sparse_weights import FEW, Sparse, read_sparse_word

#: Options of the compiler: this machine's instructions, those of older ones, and none for several numbers.
BUILDS = [
    (),
    *(
        pytest.param((f"-march={processor}",), marks=pytest.mark.soak)
        for processor in ("x86-64-v3", "x86-64")
    ),
]


def drawn(rows: int, columns: int, share: float, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=gen)
    return weight * (torch.rand(rows, columns, generator=gen) >= share)


@pytest.mark.parametrize("options", BUILDS)
@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 70), columns=st.integers(1, 100), count=st.integers(0, FEW + 2), narrow=st.booleans(),
    share=st.sampled_from([0.0, 0.5, 0.9, 1.0]), threads=st.sampled_from([1, 3]), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_kernel_multiplies_like_the_dense_weight(
    options: tuple[str, ...], rows: int, columns: int, count: int, narrow: bool, share: float, threads: int, seed: int
) -> None:  # fmt: skip
    """Also the last rows, behind whose values nothing may be read, and rows without a value."""
    weight = drawn(rows, columns, share, seed)
    weight = weight.bfloat16().float() if narrow else weight
    sparse, x = Sparse(weight, False, *options), drawn(count, columns, 0, seed + 1)
    if options and sparse.kernel is None:
        pytest.skip("the compiler does not know the processor")
    before, shared = torch.get_num_threads(), sparse_weights.SHARED
    torch.set_num_threads(threads)
    sparse_weights.SHARED = 0
    try:
        torch.testing.assert_close(sparse(x), x @ weight.t(), rtol=1e-4, atol=1e-4)
    finally:
        torch.set_num_threads(before)
        sparse_weights.SHARED = shared
    assert torch.equal(sparse.dense(0, rows).float(), weight)
    assert torch.equal(dense_rows(sparse.matrix, 0, rows).float(), weight)
    kept = int((weight != 0).sum())
    itemsize = 2 if narrow or not kept else 4
    assert sparse.nbytes == rows * -(-columns // 8) + kept * itemsize + 8 * (rows + 1)


def test_a_row_alone_and_beside_others_has_the_same_bits() -> None:
    sparse, x = Sparse(drawn(37, 45, 0.6)), drawn(7, 45, 0)
    if sparse.kernel is None:
        pytest.skip("no compiler")
    alone = torch.cat([sparse(row[None]) for row in x])
    assert torch.equal(sparse(x), alone)


def test_parts_of_rows_become_dense_alone() -> None:
    weight = drawn(9, 21, 0.5)
    matrix = sparse_matrix(weight.double())
    assert matrix.values.dtype == torch.float64
    assert torch.equal(dense_rows(matrix, 3, 7), weight[3:7].double())


@pytest.mark.parametrize("kernel", [True, False])
def test_no_sparsity_writes_the_dense_models_tokens(
    kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        monkeypatch.setattr(sparse_weights, "sparse_kernel", lambda narrow: None)
    prompts = ([3, 5, 7], [9] * 40)

    def written(word: str | None) -> list[list[int]]:
        model = build()
        if word is not None:
            read_only(model, word)
        engine = Engine(model)
        requests = [engine.submit(prompt, 8, GREEDY)[0] for prompt in prompts]
        engine.run()
        return [request.written for request in requests]

    assert written("sparse:0") == written("sparse") == written(None)


def test_a_share_is_pruned_of_each_weight_and_not_of_the_output_layer() -> None:
    dense, pruned = build(), build()
    for name, weight in pruned.named_parameters():
        if weight.dim() == 2 and name.startswith("blocks."):
            limit = weight.detach().abs().flatten().kthvalue(round(0.6 * weight.numel())).values  # fmt: skip
            weight.data.mul_(weight.abs() > limit)
    read_only(dense, "sparse:0.6")
    torch.testing.assert_close(logits(dense), logits(pruned), rtol=1e-4, atol=1e-5)


def test_rounded_values_take_two_bytes_and_so_does_the_output_layer() -> None:
    model = build()
    held = sum(
        p.numel()
        for n, p in model.named_parameters()
        if p.dim() == 2 and n.startswith("blocks.")
    )
    expected, size = logits(model), read_only(model, "sparse:0.5:bfloat16")
    head = 128 * 64
    rows = size - head * 17 // 8 - held // 8 - held
    assert rows == 8 * (2 * (129 + 65 + 193 + 65) + 129), "beginnings of rows"
    assert (logits(model) - expected).norm() > 0


@pytest.mark.parametrize(
    "word",
    ["sparse:1", "sparse:-0.1", "sparse:x", "sparse:0.5:int8", "sparse:", "sparse:nan"],
)
def test_a_word_without_a_share_is_refused_in_one_line(word: str) -> None:
    with pytest.raises(UsageError, match="SHARE from 0 to below 1"):
        read_sparse_word(word)


def test_words_of_other_forms_are_others() -> None:
    assert read_sparse_word("int8") is None
    assert read_sparse_word("sparse") == (0, False)
    assert read_sparse_word("sparse:bfloat16") == (0, True)
    assert read_sparse_word("sparse:0.7:bfloat16") == (0.7, True)


@pytest.mark.parametrize("shape", [{"kv_rank": 16, "rope_dim": 8, "value_dim": 16}, {"experts": 4}])  # fmt: skip
def test_other_models_are_refused_in_one_line(shape: dict[str, int]) -> None:
    with pytest.raises(
        UsageError, match=r"weights in sparse:0\.5 are for dense models"
    ):
        read_only(build(**shape), "sparse:0.5")
