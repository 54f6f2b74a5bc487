"""The best by a column: floors, ties, missing values, all is identity, and neither shards nor order matter."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.curation.best_documents import kept_count
from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.errors import UsageError, WeftError

Row = tuple[str, float | None, str]


def kept(rows: list[Row], cuts: tuple[int, ...] = (), **values: Any) -> list[str]:
    """Ids of the documents that are kept, sorted."""
    step: Any = DataStep(operator="top", **values).build()
    edges = [0, *cuts, len(rows)]
    parts = [rows[a:b] for a, b in pairwise(edges)]
    shards = [
        Documents(
            [name for name, _, _ in part],
            [""] * len(part),
            {"score": [s for _, s, _ in part], "class": [c for _, _, c in part]},
        )
        for part in parts
    ]
    decisions = step.decide(
        [s.ids for s in shards], [step.summarize(s) for s in shards]
    )
    return sorted(
        name
        for shard, decision in zip(shards, decisions, strict=True)
        for name, reason in zip(shard.ids, decision.reasons, strict=True)
        if not reason
    )


ROWS: list[Row] = [
    ("a", 5, "x"), ("b", 4, "x"), ("c", 4, "x"), ("d", None, "y"), ("e", 1, "y"), ("f", 0, "z"),
]  # fmt: skip


def test_high_and_low() -> None:
    assert kept(ROWS, column="score", number=2) == [
        "a",
        "b",
    ]  # of equals the first by id
    assert kept(ROWS, column="score", number=2, keep="low") == ["e", "f"]
    assert kept(ROWS, column="score", number=5) == ["a", "b", "c", "e", "f"]
    assert kept(ROWS, column="score", number=0) == []
    assert kept(ROWS, column="score", number=99) == list("abcdef")


def test_floors() -> None:
    assert kept(ROWS, column="score", number=3, group="class", floor=1) == [
        "a",
        "e",
        "f",
    ]
    # a group has no more than it has
    assert kept(ROWS, column="score", number=5, group="class", floor=2) == [
        "a",
        "b",
        "d",
        "e",
        "f",
    ]
    with pytest.raises(UsageError, match="floors are 5 documents, and 4 are kept"):
        kept(ROWS, column="score", number=4, group="class", floor=2)


def test_wrong_settings_are_named() -> None:
    for values, said in (
        ({"column": "score"}, "either share or number"),
        ({"column": "score", "share": 0.5, "number": 1}, "either share or number"),
        ({"share": 0.5}, "need column"),
        ({"column": "score", "share": 0.5, "keep": "random"}, "need column"),
        ({"column": "score", "share": 0.5, "floor": 1}, "floor needs group"),
        ({"column": "score", "share": 1.5}, "share"),
    ):
        with pytest.raises(UsageError, match=said):
            kept(ROWS, **values)
    with pytest.raises(WeftError, match="which is no number"):
        kept(ROWS, column="class", number=1)
    with pytest.raises(
        UsageError,
        match="no earlier step has written this column; columns: score, class",
    ):
        kept(ROWS, column="scores", number=1)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.one_of(st.none(), st.integers(0, 3), st.floats(-2, 2)), st.sampled_from("xyz")),
        max_size=14,
    ),
    st.floats(0, 1),
    st.sampled_from(["high", "low", "random"]),
    st.data(),
)  # fmt: skip
def test_neither_shards_nor_order_matter(
    values: list[tuple[float | None, str]], share: float, keep: str, data: Any
) -> None:
    rows: list[Row] = [
        (f"{i:02}", score, group) for i, (score, group) in enumerate(values)
    ]
    column = "" if keep == "random" else "score"
    whole = kept(rows, column=column, share=share, keep=keep)
    assert len(whole) == kept_count(len(rows), share, None)
    shuffled = data.draw(st.permutations(rows))
    cut = data.draw(st.integers(0, len(rows)))
    assert kept(shuffled, (cut,), column=column, share=share, keep=keep) == whole
    assert kept(rows, column=column, share=1.0, keep=keep) == [
        name for name, *_ in rows
    ]
    # more is kept, and nothing of before is lost
    assert {*whole} <= {*kept(rows, column=column, share=(1 + share) / 2, keep=keep)}


def test_random_draws_by_seed() -> None:
    rows: list[Row] = [(f"{i:03}", None, "") for i in range(200)]
    first, second = (kept(rows, share=0.5, keep="random", seed=seed) for seed in (1, 2))
    assert len(first) == len(second) == 100 and 20 < len({*first} & {*second}) < 80
