"""Duplicates: the same result in any shards and order, exact ones always found, survivors by the declared rule."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.curation.operators import cut, decisions, joint, kept
from weft.curation.documents import Documents
from weft.curation.duplicate_groups import (
    choose_survivors,
    connected_groups,
    equal_neighbours,
)
from weft.errors import UsageError, WeftError

#: Texts that are equal, equal but for spaces, nearly equal, short, and empty.
LINE = " ".join(
    f"the word {chr(97 + i)}{chr(98 + i % 20)} stands here" for i in range(25)
)
POOL = [
    LINE, LINE + " ", LINE.upper(), LINE + " and more", LINE.replace("here", "there", 1),
    "alpha beta", "Alpha, beta!", "gamma", "", "   ", "?!", LINE[: len(LINE) // 2],
]  # fmt: skip


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Documents, list[Documents]]:
    texts = draw(st.lists(st.sampled_from(POOL), min_size=1, max_size=14))
    ids = [f"{draw(st.integers(0, 9))}-{i}" for i in range(len(texts))]
    scores = draw(st.lists(st.sampled_from([0.5, 1.0, 2, None]), min_size=len(texts), max_size=len(texts)))  # fmt: skip
    documents = Documents(ids, texts, {"quality": scores})
    order = draw(st.permutations(range(len(texts))))
    edges = draw(st.lists(st.integers(0, len(texts)), max_size=4))
    return documents, cut(documents, order, edges)


RULES = [{"keep": "longest"}, {"keep": "first"}, {"keep": "best", "score": "quality"}]


def rank(documents: Documents, rule: str, name: str) -> tuple[float, str]:
    """What sorts the documents of a group: the survivor comes first."""
    i = documents.ids.index(name)
    score = documents.columns["quality"][i]
    preference = {
        "longest": len(documents.texts[i]),
        "first": 0,
        "best": -np.inf if score is None else score,
    }
    return -preference[rule], name


@pytest.mark.parametrize("operator", ["exact", "minhash"])
@given(sharded(), st.sampled_from(RULES))
@settings(max_examples=40, deadline=None)
def test_result_depends_on_documents_alone(
    operator: str, drawn: tuple[Documents, list[Documents]], rule: dict[str, str]
) -> None:
    documents, shards = drawn
    rows = decisions(joint(operator, **rule), [documents])
    assert decisions(joint(operator, **rule), shards) == rows
    survivors = set(kept(rows))
    for name, row in rows.items():
        group = [n for n, r in rows.items() if (r["duplicate_of"] or n) == (row["duplicate_of"] or name)]  # fmt: skip
        survivor = min(group, key=lambda n: rank(documents, rule["keep"], n))
        assert survivor in survivors
        assert row["duplicate_of"] == ("" if name == survivor else survivor)
        assert row[f"{operator}_copies"] == len(group)
        assert (survivor in row["reason"]) == (name != survivor)
    assert sum(rows[name][f"{operator}_copies"] for name in survivors) == len(documents)


def texts_of(names: Sequence[str], documents: Documents) -> list[str]:
    return [documents.texts[documents.ids.index(name)] for name in names]


@given(sharded())
@settings(max_examples=40, deadline=None)
def test_equal_texts_are_always_duplicates(
    drawn: tuple[Documents, list[Documents]],
) -> None:
    documents, shards = drawn
    text_rows = decisions(joint("exact", normalize="text"), shards)
    assert sorted(texts_of(kept(text_rows), documents)) == sorted(set(documents.texts))
    near = decisions(joint("minhash"), shards)
    left = texts_of(kept(near), documents)
    assert all(len(list(run)) == 1 for text, run in groupby(sorted(left)) if any(map(str.isalpha, text)))  # fmt: skip


def test_what_is_compared() -> None:
    documents = Documents(list("abcdef"), ["x  y", "x y", "X, y", "e\u0301", "\u00e9", "y x"])  # fmt: skip
    names = {
        normalize: kept(decisions(joint("exact", normalize=normalize), [documents]))
        for normalize in ("text", "spaces", "words")
    }
    assert names == {
        "text": list("abcdef"),
        "spaces": ["a", "c", "d", "f"],  # a: the longest of x  y and x y
        "words": ["a", "d", "f"],
    }


def test_texts_without_words_have_no_near_duplicates() -> None:
    documents = Documents(list("abcd"), ["?", "!", "", "one"])
    rows = decisions(joint("minhash"), [documents])
    assert kept(rows) == list("abcd")


def test_chains_are_one_group_with_one_survivor() -> None:
    """Each text differs a little from the next, and the first one from the last one in most of its words."""
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefgh"), 6)) for _ in range(600)]
    texts = []
    for step in range(12):
        texts.append(" ".join(words[step * 15 : step * 15 + 300]))
    documents = Documents([f"{i:02}" for i in range(12)], texts)
    rows = decisions(joint("minhash", keep="first"), [documents])
    assert kept(rows) == ["00"]
    ends = decisions(joint("minhash"), [documents.select([0, 11])])
    assert len(kept(ends)) == 2


def test_a_score_must_exist_and_be_a_number() -> None:
    documents = Documents(["a"], ["text"], {"grade": ["good"]})
    with pytest.raises(
        UsageError, match=r"score = 'quality': no earlier step.*columns: grade"
    ):
        joint("exact", keep="best", score="quality").summarize(documents)
    with pytest.raises(WeftError, match="holds 'good', which is no number"):
        joint("minhash", keep="best", score="grade").summarize(documents)
    with pytest.raises(UsageError, match="go together"):
        joint("exact", keep="best")
    with pytest.raises(UsageError, match="go together"):
        joint("exact", score="quality")


@st.composite
def linked(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    count = draw(st.integers(1, 30))
    index = st.integers(0, count - 1)
    return count, draw(st.lists(st.tuples(index, index), max_size=40))


@given(linked())
@settings(max_examples=100, deadline=None)
def test_groups_are_connected_components(
    drawn: tuple[int, list[tuple[int, int]]],
) -> None:
    count, pairs = drawn
    expected = list(range(count))
    for _ in range(count):
        for a, b in pairs:
            expected[a] = expected[b] = min(expected[a], expected[b])
    left, right = np.array(pairs, np.int64).reshape(-1, 2).T
    assert connected_groups(count, left, right).tolist() == expected


def test_a_long_chain_is_one_group_in_any_order() -> None:
    order = np.random.default_rng(1).permutation(20_000)
    groups = connected_groups(20_000, order[1:], order[:-1])
    assert not groups.any()


def test_equal_keys_are_neighbours() -> None:
    keys = np.array([[1, 2], [2, 1], [1, 2], [1, 2], [2, 2]], np.uint64)
    left, right = equal_neighbours(keys)
    groups = connected_groups(5, left, right)
    assert groups.tolist() == [0, 1, 0, 0, 4]
    survivors = choose_survivors(groups, np.array([1.0, 0, 5, 5, 0]), list("edcba"))
    assert survivors.tolist() == [3, 1, 3, 3, 4]
