"""Attention by shares of the keys with one fixed maximum, and the choice by measured times."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generate.test_many import NEW, PROMPTS, build, each_alone
from weft.errors import UsageError
from weft.generate.engine import Engine
from weft.generate.sampling import GREEDY
from weft.models import split_keys
from weft.models.attention_backend import (
    BACKENDS,
    FIXED,
    GATHERED,
    AttentionBackend,
    MeasuredPiece,
    check_attention,
)
from weft.models.backend_choice import choose_backend
from weft.models.fixed_maximum import FixedSums
from weft.models.measured_attention import TimeTable, call_shape, measured_backend
from weft.models.spans import Span

T = torch.Tensor
CPU = torch.device("cpu")
BLOCKS = 40


def attended(backend: AttentionBackend, q: T, store: T, spans: list[Span], window: int) -> T:  # fmt: skip
    out = torch.full_like(q, torch.nan)
    for piece in backend.group(spans, store, window, q):
        backend.attend(q, store, piece, window, out)
    return out


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(
        st.tuples(st.sampled_from([1, 1, 1, 2, 5, 30]), st.sampled_from([0, 1, 15, 40, 100])),
        min_size=1, max_size=4,
    ),
    size=st.sampled_from([1, 4, 16]), kv_heads=st.integers(1, 3), group=st.sampled_from([1, 3]),
    window=st.sampled_from([0, 0, 1, 5, 40]), share=st.sampled_from([8, 32, 1024]),
    scale=st.sampled_from([0.1, 1.0, 60.0]), side=st.booleans(), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_shares_add_up_to_attention_over_all_keys(
    texts: list[tuple[int, int]], size: int, kv_heads: int, group: int, window: int, share: int,
    scale: float, side: bool, seed: int,
) -> None:  # fmt: skip
    """Whatever the scores are: a scale of 60 overflows, and lies far below a maximum of others."""
    drawn = torch.Generator().manual_seed(seed)
    spans, row = list[Span](), 0
    for new, past in texts:
        need = -(-(past + new) // size)
        table = torch.randint(0, BLOCKS, (need,), generator=drawn).tolist()
        table = [*range(need)] if side else table
        spans.append(Span(row, row + new, past, table))
        row += new
    store = torch.randn(2, 140, size, kv_heads, 8, generator=drawn, dtype=torch.float64)
    q = scale * torch.randn(row, kv_heads * group, 8, generator=drawn, dtype=torch.float64)  # fmt: skip
    q *= scale
    before, split_keys.SHARE_KEYS = split_keys.SHARE_KEYS, share
    try:
        assert FIXED.takes(q, store, 8)
        ours = attended(FIXED, q, store, spans, window)
    finally:
        split_keys.SHARE_KEYS = before
    expected = attended(GATHERED, q, store, spans, window)
    assert torch.allclose(ours, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("far", [3e3, -3e3])
def test_an_overflow_is_found_and_computed_again(far: float, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Planted: the layer's maximum follows, so that the next tokens are computed once; another layer's stays."""
    calls = []
    real = split_keys.attend_shares

    def counted(*arguments: object) -> tuple[T, bool]:
        calls.append(arguments[-1])
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(split_keys, "attend_shares", counted)
    monkeypatch.setattr(split_keys, "_highest", {})
    store = torch.rand(2, 8, 4, 2, 8, dtype=torch.float64)
    q = torch.ones(1, 4, 8, dtype=torch.float64)
    spans = [Span(0, 1, 27, [*range(7)])]
    attended(FIXED, q, store, spans, 0)
    assert calls == [0.0]
    store[0] += far
    wrong = FixedSums(q.view(2, 2, 8), 0.0)
    wrong.add(store[0].flatten(0, 1).transpose(0, 1), store[1].flatten(0, 1).transpose(0, 1))  # fmt: skip
    assert not wrong.exact
    for _ in range(2):
        ours = attended(FIXED, q, store, spans, 0)
        assert torch.allclose(ours, attended(GATHERED, q, store, spans, 0), rtol=0, atol=1e-10)  # fmt: skip
    assert len(calls) == 4 and calls[2] == calls[3] != 0.0
    other = store.clone() * 0 + 1
    attended(FIXED, q, other, spans, 0)
    assert calls[-1] == 0.0


@pytest.mark.parametrize("kind", ["softmax", "windows"])
def test_an_engine_writes_what_it_writes_otherwise(kind: str) -> None:
    engine = Engine(build(kind, torch.float64), attention="fixed", size=4, budget=20)
    texts = [engine.submit(p, NEW, GREEDY)[0] for p in PROMPTS]
    assert engine.reader.pages[0].backend is FIXED  # type: ignore[union-attr]
    engine.run()
    expected = each_alone(kind, torch.float64)
    assert [text.written for text in texts] == [text.written for text in expected]


def slowed(backend: AttentionBackend, clock: list[float], seconds: float) -> AttentionBackend:  # fmt: skip
    """The backend, with a clock that it moves."""

    def attend(*arguments: object) -> None:
        clock[0] += seconds
        backend.attend(*arguments)  # type: ignore[arg-type]

    return AttentionBackend(
        backend.name, backend.takes, backend.group, backend.group_rows, attend
    )


def test_the_measured_choice_is_never_a_slower_one(tmp_path: Path) -> None:
    """For every shape the fastest by the table; a table of the file is not measured again, one of others is."""
    now = [0.0]
    store = torch.rand(2, 70, 4, 1, 8)
    folder, chosen, numbers = tmp_path / "cache", {}, count()
    for texts, past, costs in [
        (1, 9, (1.0, 2.0)), (1, 250, (3.0, 1.0)), (5, 9, (2.0, 1.5)), (1, 9, (9.0, 1.0)),
    ]:  # fmt: skip
        table = TimeTable.at(folder, CPU)
        backend = measured_backend(
            [slowed(GATHERED, now, costs[0]), slowed(FIXED, now, costs[1])], table, lambda: now[0]
        )  # fmt: skip
        spans = [Span(i, i + 1, past, [*range(past // 4 + 1)]) for i in range(texts)]
        q = torch.rand(texts, 2, 8)
        before = now[0]
        out = attended(backend, q, store, spans, 0)
        assert torch.allclose(out, attended(GATHERED, q, store, spans, 0), atol=1e-5)
        (piece,) = backend.group(spans, store, 0, q)
        assert isinstance(piece, MeasuredPiece)
        times = table.times[call_shape(spans, store, 0, q).word]
        assert times[piece.backend.name] == min(times.values())
        chosen[next(numbers)] = piece.backend.name
        measured = now[0] - before > 2 * max(costs)
        assert measured == (len(chosen) < 4)
    assert chosen == {0: "gathered", 1: "fixed", 2: "fixed", 3: "gathered"}
    (file,) = (folder / "attention").iterdir()
    assert len(json.loads(file.read_text())) == 3
    assert not TimeTable.at(folder, CPU, again=True).times
    file.write_text("{")
    assert not TimeTable.at(folder, CPU).times
    (tmp_path / "no folder").write_text("")
    TimeTable.at(tmp_path / "no folder", CPU).keep("shape", {"gathered": 1.0})


def test_names_of_attention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="gathered, paged, native, fixed, measured, remeasured"):  # fmt: skip
        check_attention("quick", False, False)
    with pytest.raises(UsageError, match="leave out --invariant"):
        check_attention("measured", True, False)
    assert choose_backend("measured", CPU).name == "measured"
    assert BACKENDS["fixed"] is choose_backend("fixed", CPU)
    engine = Engine(build("softmax", torch.float32), attention="measured")
    engine.submit(PROMPTS[1], 3, GREEDY)
    engine.run()
    assert len([*(tmp_path / "attention").iterdir()]) == 1
