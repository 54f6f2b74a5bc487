"""The loader: the same data in every layout, at every position."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.batch import IGNORE, Batch
from weft.data.loader import Loader, open_data, shares_of
from weft.data.order import Order, Stream
from weft.layout.layout import Layout
from weft.layout.sequence import owned_ranges, padded_length
from weft.recipe import Data, Recipe, Source, Train

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def stream(sizes: list[int], seq_len: int, seed: int = 0) -> Stream:
    """Documents whose tokens are all different, so that a token tells where it comes from."""
    offsets = np.append(0, np.cumsum(sizes))
    return Stream(
        np.arange(offsets[-1], dtype=np.uint32),
        offsets[:-1],
        np.diff(offsets),
        seq_len,
        seed,
    )


def loaders(order: Order, recipe: Recipe, cp_rank: int = 0) -> list[Loader]:
    """One loader per batch rank; those of a batch of 7 are not alike."""
    rows, passes = recipe.rows_per_pass(recipe.layout)
    layout, batch, seq_len = recipe.layout, recipe.train.batch, recipe.data.seq_len
    ranks = layout.size("dp", "shard")
    speeds = (
        tuple(1 / (1 + rank % 3) for rank in range(ranks))
        if batch == 7 and ranks > 1
        else ()
    )
    passes = (
        max(passes, -(-max(shares_of(batch, speeds)) // rows)) if speeds else passes
    )
    return [
        Loader(order, layout, r, cp_rank, batch, rows, passes, seq_len, speeds=speeds)
        for r in range(ranks)
    ]


def whole_rows(
    order: Order, recipe: Recipe, position: int
) -> list[list[tuple[int, int, int]]] | None:
    """(token, label, position) of every labelled token of a step, row by row, put together from all ranks."""
    layout, length = recipe.layout, padded_length(recipe.data.seq_len, recipe.layout)
    parts = [
        [one.step(position) for one in loaders(order, recipe, cp)]
        for cp in range(layout.cp)
    ]
    if parts[0][0] is None:
        assert all(step is None for of_cp in parts for step in of_cp)
        return None
    seen = [
        sample
        for of_cp in parts
        for step in of_cp
        for batch in step or ()
        for sample in batch.samples
    ]
    assert sorted(seen) == list(
        range(position, min(position + recipe.train.batch, order.total or 10**9))
    )
    result = []
    for per_cp in zip(*parts, strict=True):  # the cp ranks of one batch rank
        for batches in zip(*per_cp, strict=True):  # of one pass
            rows = batches[0].tokens.shape[0]
            whole = torch.full((3, rows, length), -7)
            for cp, batch in enumerate(batches):
                check(batch, rows, length, layout.cp)
                at = torch.cat(
                    [
                        torch.arange(lo, hi)
                        for lo, hi in owned_ranges(length, layout, cp)
                    ]
                )
                whole[:, :, at] = torch.stack(
                    [batch.tokens, batch.labels, batch.positions]
                )
                assert torch.equal(batch.cu_seqlens, batches[0].cu_seqlens)
            assert (whole != -7).all()
            edges = batches[0].cu_seqlens.long()
            restart = torch.zeros(rows * length, dtype=torch.long)
            restart[edges[:-1]] = edges[:-1]
            assert torch.equal(
                whole[2].flatten(),
                torch.arange(rows * length) - restart.cummax(0).values,
            )
            result += [
                [tuple(x) for x in row.T.tolist() if x[1] != IGNORE]
                for row in whole.unbind(1)
            ]
    return [row for row in result if row]


def check(batch: Batch, rows: int, length: int, cp: int) -> None:
    for one in (batch.tokens, batch.labels, batch.positions):
        assert (
            one.shape == (rows, length // cp)
            and one.dtype == torch.int64
            and one.is_contiguous()
        )
    cu = batch.cu_seqlens
    assert (
        cu.dtype == torch.int32
        and cu[0] == 0
        and cu[-1] == rows * length
        and (cu.diff() > 0).all()
    )
    assert set(range(0, rows * length + 1, length)) <= set(cu.tolist())


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    size = st.integers(1, 3)
    layout = Layout(
        dp=draw(size),
        shard=draw(size),
        cp=draw(size),
        tp=draw(size),
        context=draw(st.sampled_from(["ring", "ulysses"])),
    )
    train = Train(
        batch=draw(st.integers(1, 11)), micro_batch=draw(st.none() | st.integers(1, 4))
    )
    return Recipe(
        layout=layout, train=train, data=Data(seq_len=draw(st.integers(1, 23)))
    )


@settings(deadline=None, max_examples=100)
@given(
    recipes(),
    st.lists(lengths, min_size=1, max_size=3),
    st.integers(0, 2),
    st.integers(0, 40),
)
def test_every_layout_reads_the_same(
    recipe: Recipe, documents: list[list[int]], epochs: int, position: int
) -> None:
    streams = tuple(
        stream(sizes, recipe.data.seq_len, seed) for seed, sizes in enumerate(documents)
    )
    order = Order(streams, tuple(1.0 + i for i in range(len(streams))), 0, epochs)
    single = Recipe(train=Train(batch=recipe.train.batch), data=recipe.data)
    assert whole_rows(order, recipe, position) == whole_rows(order, single, position)


def test_padding_is_a_segment_without_labels() -> None:
    order = Order((stream([3, 4], 5),), (1.0,), 0, epochs=1)  # rows of 5 and 2 tokens
    recipe = Recipe(layout=Layout(cp=2), train=Train(batch=3), data=Data(seq_len=5))
    (batch,) = loaders(order, recipe)[0].step(0) or []
    assert padded_length(5, recipe.layout) == 8 and batch.tokens.shape == (3, 4)
    cu = batch.cu_seqlens.tolist()
    assert {0, 8, 16, 24} <= set(cu) and not set(range(17, 24)) & set(cu)
    # a row of two documents, one of one, each with a tail, and a row of padding
    assert len(cu) == 1 + 3 + 2 + 1
    assert (batch.labels[2] == IGNORE).all() and (batch.tokens[2] == 0).all()
    assert batch.positions[2].tolist() == [0, 1, 6, 7]


def test_documents_cut_by_a_row_go_on_with_position_zero() -> None:
    order = Order((stream([10], 4),), (1.0,), 0, epochs=1)
    loader = loaders(order, Recipe(train=Train(batch=3), data=Data(seq_len=4)))[0]
    (batch,) = loader.step(0) or []
    whole = torch.stack([batch.tokens, batch.labels, batch.positions], 1).tolist()
    rows = {row[0][0]: tuple(row) for row in whole}
    assert rows[0] == ([0, 1, 2, 3], [1, 2, 3, 4], [0, 1, 2, 3])
    assert rows[8] == ([8, 9, 0, 0], [9, IGNORE, IGNORE, IGNORE], [0, 1, 0, 1])
    assert batch.real_tokens == 9


def test_resume_by_position_is_uninterrupted() -> None:
    order = Order((stream([9, 30, 2, 41], 6), stream([77], 6)), (2.0, 1.0), 4)
    wide, narrow = (
        Recipe(layout=Layout(dp=n), train=Train(batch=4), data=Data(seq_len=6))
        for n in (2, 1)
    )
    straight = [whole_rows(order, wide, 4 * i) for i in range(12)]
    again = Order(order.streams, order.weights, 4)
    assert straight[7:] == [whole_rows(again, narrow, 4 * i) for i in range(7, 12)]


def test_finite_data_ends_on_all_ranks_after_a_ragged_batch() -> None:
    order = Order((stream([33], 8),), (1.0,), 0, epochs=1)  # 4 rows
    recipe = Recipe(layout=Layout(dp=2), train=Train(batch=3), data=Data(seq_len=8))
    ranks = loaders(order, recipe)
    real = [
        [sum(b.real_tokens for b in one.step(at) or []) for one in ranks]
        for at in (0, 3)
    ]
    assert real == [[16, 8], [8, 0]]
    for position in (4, 6, 99):
        assert [one.step(position) for one in ranks] == [None, None]


@pytest.fixture
def corpus(tmp_path: Path) -> Data:
    for name, count in (("a", 40), ("b", 10)):
        (tmp_path / name).mkdir()
        for i in range(count):
            (tmp_path / name / f"{i:02d}.txt").write_text(
                f"document {name}{i:02d} " * (1 + i % 7)
            )
    sources = (
        Source(kind="text", path=str(tmp_path / "a"), weight=3),
        Source(kind="text", path=str(tmp_path / "b")),
    )
    return Data(
        sources=sources, seq_len=16, validation=0.2, cache=tmp_path / "cache", epochs=1
    )


def test_open_data_splits_by_documents(corpus: Data) -> None:
    opened = open_data(corpus)
    assert opened.validation is not None and "40 documents" in opened.description
    for train, validation in zip(
        opened.train.streams, opened.validation.streams, strict=True
    ):
        assert not set(train.starts) & set(validation.starts)
        assert train.tokens + validation.tokens == len(train.ids)
    assert opened.validation.total and opened.train.total
    text = opened.tokenizer.decode(opened.train.row(0)[0])
    assert "ocument" in text.replace(" ", "") or len(text) < 16
    assert open_data(corpus).fingerprint == opened.fingerprint
    for change in ({"seed": 1}, {"seq_len": 17}, {"sources": corpus.sources[::-1]}):
        assert (
            open_data(corpus.model_copy(update=change)).fingerprint
            != opened.fingerprint
        )
    assert open_data(corpus.model_copy(update={"validation": 0.0})).validation is None


def test_pretokenized_data_reads_like_the_text_it_came_from(corpus: Data) -> None:
    data = corpus.model_copy(update={"sources": corpus.sources[:1]})
    opened = open_data(data)
    (folder,) = (corpus.cache or Path()).glob("tokens-*")
    again = open_data(
        data.model_copy(
            update={"sources": (Source(kind="tokens", path=str(folder), weight=3),)}
        )
    )
    assert again.fingerprint == opened.fingerprint and opened.train.total
    for i in range(opened.train.total):
        for mine, theirs in zip(opened.train.row(i), again.train.row(i), strict=True):
            assert np.array_equal(mine, theirs)


def test_a_step_takes_less_than_two_milliseconds() -> None:
    """Documents of 20 tokens, the slow case; 10 ms of the processor allow for a slow machine."""
    order = Order((stream([20] * 50_000, 1024),), (1.0,), 0)
    loader = loaders(order, Recipe(train=Train(batch=8), data=Data(seq_len=1024)))[0]
    loader.step(0)
    times = []
    for i in range(1, 20):
        start = time.thread_time()
        loader.step(8 * i)
        times.append(time.thread_time() - start)
    assert min(times) < 0.010
