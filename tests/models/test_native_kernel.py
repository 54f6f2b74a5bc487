"""The kernel in C that reads keys from cache blocks, against attention in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import UsageError
from weft.generate.engine import Engine
from weft.generate.sampling import GREEDY
from weft.layout.mesh import Mesh
from weft.models import native_kernel
from weft.models.attention_backend import GATHERED, NATIVE, DecodeRows
from weft.models.backend_choice import choose_backend
from weft.models.native_kernel import compiled_kernel, has_kernel
from weft.models.spans import Span
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

SHAPE = ModelShape(vocab=64, layers=1, embed=32, heads=2, kv_heads=1, ffn=32)
BLOCKS = 64
CPU = torch.device("cpu")

needs_compiler = pytest.mark.skipif(
    not has_kernel(16, 2, 16), reason="no C compiler that knows __builtin_prefetch"
)


def build() -> Transformer:
    return parallelize(SHAPE, Mesh.single(), Train())[0]


def close_to_exact(
    q: torch.Tensor, store: torch.Tensor, spans: list[Span], window: int, near: float
) -> None:
    out, expected = torch.full_like(q, torch.nan), torch.empty_like(q.double())
    for piece in NATIVE.group(spans, store, window, q):
        NATIVE.attend(q, store, piece, window, out)
    exact = q.double(), store.double()
    for piece in GATHERED.group(spans, exact[1], window, exact[0]):
        GATHERED.attend(*exact, piece, window, expected)
    assert float((out - expected).norm() / expected.norm()) < near


@needs_compiler
@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(
        st.tuples(st.sampled_from([1, 1, 2, 5, 30]), st.sampled_from([0, 1, 15, 16, 100])),
        min_size=1, max_size=5,
    ),
    head=st.sampled_from([(64, 3, 16), (16, 1, 3), (32, 4, 16)]), kv_heads=st.integers(1, 3),
    window=st.sampled_from([0, 0, 1, 5, 40]), threads=st.sampled_from([1, 3]), size=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_the_kernel_attends_like_the_gathered_copy_in_float64(
    texts: list[tuple[int, int]], head: tuple[int, int, int], kv_heads: int, window: int, threads: int, size: float,
    seed: int,
) -> None:  # fmt: skip
    """New tokens of several texts whose tables share blocks and lie anywhere; scores near zero and far apart."""
    drawn = torch.Generator().manual_seed(seed)
    width, group, block = head
    spans, row = list[Span](), 0
    for count, past in texts:
        need = -(-(past + count) // block)
        table = torch.randint(0, BLOCKS, (need,), generator=drawn).tolist()
        spans.append(Span(row, row + count, past, table))
        row += count
    store = torch.randn(2, BLOCKS, block, kv_heads, width, generator=drawn)
    q = size * torch.randn(row, kv_heads * group, width, generator=drawn)
    before, usual = torch.get_num_threads(), native_kernel.SHARED_KEYS
    try:
        torch.set_num_threads(threads)
        native_kernel.SHARED_KEYS = 1
        # scores have errors in proportion to their size
        close_to_exact(q, store, spans, window, 1e-6 * max(1.0, size / 5))
    finally:
        torch.set_num_threads(before)
        native_kernel.SHARED_KEYS = usual


@needs_compiler
def test_a_token_gets_the_same_bits_whatever_else_is_in_the_batch() -> None:
    drawn = torch.Generator().manual_seed(3)
    store = torch.randn(2, BLOCKS, 16, 2, 16, generator=drawn)
    q = torch.randn(6, 4, 16, generator=drawn)
    tables = torch.randint(0, BLOCKS, (6, 8), generator=drawn).tolist()
    spans = [Span(i, i + 1, 20 * i, tables[i]) for i in range(6)]
    together = torch.empty_like(q)
    (batch,) = NATIVE.group(spans, store, 0, q)
    NATIVE.attend(q, store, batch, 0, together)
    for span in spans:
        alone = torch.empty_like(q[:1])
        own = q[span.first : span.last]
        (batch,) = NATIVE.group([span._replace(first=0, last=1)], store, 0, own)
        NATIVE.attend(own, store, batch, 0, alone)
        assert torch.equal(alone[0], together[span.first])
    rows = DecodeRows(
        torch.tensor(tables, dtype=torch.int32),
        torch.tensor([s.past for s in spans], dtype=torch.int32),
    )
    out = torch.empty_like(q)
    NATIVE.attend(q, store, NATIVE.group_rows(rows, store, 0, q), 0, out)
    assert torch.equal(out, together)


@needs_compiler
def test_numbers_that_are_not_finite_stay_so() -> None:
    store, q = torch.randn(2, 4, 16, 2, 16), torch.randn(2, 4, 16)
    store[0, 0, 2, 0, 3] = torch.nan
    spans = [Span(0, 1, 5, [0]), Span(1, 2, 5, [1])]
    out = torch.empty_like(q)
    for piece in NATIVE.group(spans, store, 0, q):
        NATIVE.attend(q, store, piece, 0, out)
    assert out[0, :2].isnan().all() and out[0, 2:].isfinite().all()
    assert out[1].isfinite().all()


def test_what_the_kernel_does_not_take_is_gathered() -> None:
    q, store = torch.randn(1, 4, 16), torch.randn(2, 1, 4, 2, 16)
    assert not NATIVE.takes(q.double(), store.double(), 16)
    assert not NATIVE.takes(q.bfloat16(), store.bfloat16(), 16)
    assert not NATIVE.takes(q, store[:1], 16)
    assert not NATIVE.takes(q, store, 8)
    assert not NATIVE.takes(q[..., :8], store[..., :8], 8)
    assert choose_backend("", CPU) is NATIVE and choose_backend("gathered", CPU) is GATHERED  # fmt: skip


def test_without_a_compiler_texts_are_written_and_the_option_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    compiled_kernel.cache_clear()
    try:
        model = build()
        with pytest.raises(
            UsageError, match=r"--attention native needs .* a C compiler"
        ):
            Engine(model, attention="native")
        engine = Engine(model)
        (text,) = engine.submit([1, 2, 3], 4, GREEDY)
        engine.run()
        assert len(text.written) == 4
        assert not [*tmp_path.glob("kernel*")]
    finally:
        native_kernel.compiled_kernel.cache_clear()


def test_an_attention_that_cannot_serve_is_refused() -> None:
    model = build()
    with pytest.raises(
        UsageError, match=r"no attention 'other'.* Choose from: gathered"
    ):
        Engine(model, attention="other")
    with pytest.raises(UsageError, match="without --invariant; leave out --invariant"):
        Engine(model, attention="native", invariant=True)
    with pytest.raises(UsageError, match="leave out --layout"):
        Engine(model, attention="native", ranks=True)
    with pytest.raises(UsageError, match="paged attention needs a GPU"):
        Engine(model, attention="paged")
    with pytest.raises(UsageError, match="--attention native needs Linux"):
        Engine(model.double(), attention="native")
