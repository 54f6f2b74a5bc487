"""The kernel that reads keys from cache blocks, against attention in float64; without a GPU in Triton's interpreter.

pip install 'weft[kernels]'; the interpreter multiplies bfloat16 wrongly, so that this type is for GPUs.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.models.attention_backend import FIXED, GATHERED, PAGED, DecodeRows
from weft.models.backend_choice import choose_backend
from weft.models.paged import KeyValuePages, Reading, slots
from weft.models.query_tiles import tile_spans
from weft.models.spans import Span

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
triton = pytest.importorskip("triton")

BLOCKS = 64

#: Largest relative error by type.
NEAR = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@triton.jit
def count_to(limit):  # type: ignore[no-untyped-def]
    for _ in range(limit):
        pass


@pytest.fixture(scope="module")
def interpreter() -> None:
    """Skip where Triton only interprets, and cannot loop: the interpreter of 3.6 does not know NumPy 2.4."""
    try:
        if DEVICE.type == "cpu":
            count_to[(1,)](2)
    except Exception as error:
        pytest.skip(f"Triton {triton.__version__} does not interpret a loop: {error}")


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


@st.composite
def cases(draw: st.DrawFn) -> dict[str, object]:
    """New tokens of several texts, whose tables share blocks and lie anywhere; what a layer may be."""
    texts = draw(
        st.lists(
            st.tuples(
                st.sampled_from([1, 1, 1, 2, 5, 17, 30]),
                st.sampled_from([0, 1, 15, 16, 40, 100]),
            ),
            min_size=1,
            max_size=4,
        )
    )
    types = [torch.float32, torch.float16]
    return {
        "texts": texts,
        "size": draw(st.sampled_from([1, 3, 8, 16, 32])),
        "kv_heads": draw(st.integers(1, 3)),
        "group": draw(st.sampled_from([1, 2, 3, 4, 7])),
        "width": draw(st.sampled_from([8, 64, 80, 96, 128])),
        "window": draw(st.sampled_from([0, 0, 1, 5, 40])),
        "splits": draw(st.sampled_from([0, 1, 2, 5])),
        "dtype": draw(st.sampled_from(types)),
        "seed": draw(st.integers(0, 2**16)),
        "backend": draw(st.sampled_from([PAGED, FIXED])),
        # with a fixed maximum of 0 the largest overflows, and all others may vanish
        "scale": draw(st.sampled_from([1, 1, 6])),
    }


@pytest.mark.slow(15)
@pytest.mark.usefixtures("interpreter")
@settings(max_examples=12, deadline=None)
@given(case=cases())
def test_the_kernel_attends_like_the_gathered_copy_in_float64(case: dict) -> None:
    drawn = torch.Generator().manual_seed(case["seed"])
    size, kv_heads, width = case["size"], case["kv_heads"], case["width"]
    spans, row = list[Span](), 0
    for count, past in case["texts"]:
        need = -(-(past + count) // size)
        table = torch.randint(0, 2 * BLOCKS, (need,), generator=drawn).tolist()
        spans.append(Span(row, row + count, past, table))
        row += count
    store, q = (
        torch.randn(*shape, generator=drawn).to(case["dtype"]).to(DEVICE)
        for shape in (
            (2, 2 * BLOCKS, size, kv_heads, width),
            (row, kv_heads * case["group"], width),
        )
    )
    q *= case["scale"]
    out, backend = torch.full_like(q, torch.nan), case["backend"]
    assert backend.takes(q, store, width)
    for tiles in tile_spans(spans, case["window"], case["group"], DEVICE):
        tiles = tiles._replace(splits=case["splits"])
        backend.attend(q, store, tiles, case["window"], out)
    exact = q.cpu().double(), store.cpu().double()
    expected = torch.empty_like(exact[0])
    for piece in GATHERED.group(spans, exact[1], case["window"], exact[0]):
        GATHERED.attend(*exact, piece, case["window"], expected)
    assert relative_error(out.cpu(), expected) < NEAR[case["dtype"]]


@pytest.mark.usefixtures("interpreter")
def test_rows_of_a_decode_step_are_attended_to_like_spans() -> None:
    """With tables filled up behind the texts' blocks, and more programs than keys."""
    drawn = torch.Generator().manual_seed(1)
    store = torch.randn(2, BLOCKS, 4, 2, 16, generator=drawn).to(DEVICE)
    q = torch.randn(3, 6, 16, generator=drawn).to(DEVICE)
    tables = torch.randint(0, BLOCKS, (3, 8), generator=drawn, dtype=torch.int32)
    places = torch.tensor([0, 3, 30], dtype=torch.int32)
    rows = DecodeRows(tables.to(DEVICE), places.to(DEVICE))
    spans = [Span(i, i + 1, int(places[i]), tables[i].tolist()) for i in range(3)]
    for window in (0, 6):
        outs = []
        for backend in (PAGED, GATHERED):
            out = torch.full_like(q, torch.nan)
            backend.attend(
                q, store, backend.group_rows(rows, store, window, q), window, out
            )
            outs.append(out)
        expected = torch.empty_like(q)
        for piece in GATHERED.group(spans, store, window, q):
            GATHERED.attend(q, store, piece, window, expected)
        for out in outs:
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_pages_that_do_not_fit_the_kernel_are_gathered() -> None:
    """Float64, and latent vectors, which have one part; the choice is declared, not tried."""
    assert choose_backend("paged", DEVICE) is PAGED
    q = torch.randn(1, 4, 2, 8, dtype=torch.float64)
    pages = KeyValuePages(4)
    pages.backend = PAGED
    span = Span(0, 4, 0, [0])
    pages.reading = Reading([span], torch.tensor(slots([span], 4)))
    out = pages(q, q, q, torch.tensor([0, 4]))
    assert out.isfinite().all()
    assert not PAGED.takes(q, torch.empty(2, 1, 4, 2, 8, dtype=torch.float64), 8)
    assert not PAGED.takes(q.float(), torch.empty(1, 1, 4, 2, 8), 8)
    assert not PAGED.takes(q.float(), torch.empty(2, 1, 4, 2, 8), 6)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("splits", [1, 3])
def test_tiles_far_from_the_fixed_maximum_are_computed_again(splits: int) -> None:
    """One text's scores overflow, another's all vanish, the third is as it should be."""
    drawn = torch.Generator().manual_seed(2)
    store = torch.rand(2, 12, 4, 2, 16, generator=drawn).to(DEVICE)
    store[0, :4] += 300
    store[0, 4:8] -= 300
    q = torch.ones(3, 4, 16, device=DEVICE)
    spans = [Span(i, i + 1, 13, [*range(4 * i, 4 * i + 4)]) for i in range(3)]
    out, expected = torch.full_like(q, torch.nan), torch.empty_like(q.cpu().double())
    for tiles in tile_spans(spans, 0, 2, DEVICE):
        FIXED.attend(q, store, tiles._replace(splits=splits), 0, out)
    exact = q.cpu().double(), store.cpu().double()
    for piece in GATHERED.group(spans, exact[1], 0, exact[0]):
        GATHERED.attend(*exact, piece, 0, expected)
    assert relative_error(out.cpu(), expected) < 1e-4
    assert torch.isfinite(out).all()
