"""Semantic duplicates: no two that are kept are alike, every dropped one is like its survivor, in any shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.curation.operators import cut, decisions, joint, kept
from tests.serve.running import build
from weft.curation import semantic_groups
from weft.curation.data_operators import OperatorFailed
from weft.curation.documents import Documents
from weft.curation.k_means import unit_rows
from weft.curation.semantic_groups import semantic_survivors
from weft.curation.text_embeddings import column_vectors
from weft.data.tokenizer import load_tokenizer
from weft.errors import UsageError, WeftError
from weft.models.hugging_face import export
from weft.parallel.build import resident_state


def around(groups: int, each: int, spread: float, seed: int) -> np.ndarray:
    """Vectors around so many directions; the first of each group is the direction itself."""
    random = np.random.default_rng(seed)
    centers = random.normal(size=(groups, 1, 16))
    noise = random.normal(size=(groups, each, 16)) * spread
    noise[:, 0] = 0
    return (centers + noise).reshape(-1, 16).astype(np.float32)


def documents_of(vectors: np.ndarray) -> Documents:
    ids = [f"d{i:03}" for i in range(len(vectors))]
    return Documents(ids, ids, {"vector": vectors.tolist()})


@given(st.integers(0, 99), st.sampled_from([1, 4]), st.sampled_from(["far", "first", "best"]), st.data())  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_survivors_in_any_shards(
    seed: int, clusters: int, keep: str, data: st.DataObject
) -> None:
    vectors = around(6, 5, 0.15, seed)
    documents = documents_of(vectors)
    rng = np.random.default_rng(seed)
    documents = documents.with_columns({"quality": rng.random(30).tolist()})
    score = {"score": "quality"} if keep == "best" else {}
    operator = joint("semantic", column="vector", keep=keep, clusters=clusters, **score)
    rows = decisions(operator, [documents])
    order = data.draw(st.permutations(range(30)))
    edges = data.draw(st.lists(st.integers(0, 30), max_size=3))
    assert decisions(operator, cut(documents, order, edges)) == rows
    units = dict(zip(documents.ids, unit_rows(vectors), strict=True))
    survivors = kept(rows)
    for name, row in rows.items():
        if row["duplicate_of"]:
            assert row["duplicate_of"] in survivors
            assert units[name] @ units[row["duplicate_of"]] > 0.95 - 1e-3
            assert row["reason"] == f"semantic duplicate of another document: {row['duplicate_of']}"  # fmt: skip
    if clusters == 1:
        for a in survivors:
            assert all(units[a] @ units[b] < 0.95 + 1e-3 for b in survivors if a != b)
    if keep == "best" and clusters == 1:
        best = dict(zip(documents.ids, documents.columns["quality"], strict=True))
        pairs = [(row["duplicate_of"], name) for name, row in rows.items()]
        assert all(best[a] > best[b] for a, b in pairs if a)


def plain_survivors(vectors: np.ndarray, eps: float) -> list[bool]:
    is_kept: list[bool] = []
    for i, vector in enumerate(vectors):
        is_kept.append(not any(is_kept[j] and vector @ vectors[j] > 1 - eps for j in range(i)))  # fmt: skip
    return is_kept


def test_equals_the_plain_way_in_any_block(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = unit_rows(around(20, 20, 0.2, seed=1))
    zeros = np.zeros(400, np.int64)
    whole = semantic_survivors(vectors, zeros, np.arange(400), 0.05)
    is_kept = whole == np.arange(400)
    assert is_kept.tolist() == plain_survivors(vectors, 0.05)
    assert 20 < is_kept.sum() < 400
    monkeypatch.setattr(semantic_groups, "BLOCK_VECTORS", 7)
    blocks = semantic_survivors(vectors, zeros, np.arange(400), 0.05)
    assert ((blocks == np.arange(400)) == is_kept).all()


def test_the_farthest_of_its_cluster_is_kept() -> None:
    vectors = around(1, 30, 0.05, seed=2)
    rows = decisions(joint("semantic", column="vector", eps=0.5), [documents_of(vectors)])  # fmt: skip
    units = unit_rows(vectors)
    center = unit_rows(units.mean(axis=0)[None])[0]
    (survivor,) = kept(rows)
    assert survivor == f"d{int((units @ center).argmin()):03}"
    assert rows[survivor]["semantic_copies"] == 30


def test_missing_vectors_have_no_duplicates() -> None:
    vectors: list[Any] = [[1.0, 0.0], None, [0.0, 0.0], None, [2.0, 0.0]]
    documents = Documents(list("abcde"), list("abcde"), {"v": vectors})
    operator = joint("semantic", column="v", keep="first")
    rows = decisions(operator, [documents])
    assert kept(rows) == list("abcd") and rows["e"]["duplicate_of"] == "a"
    shards = [documents.select([1, 3]), documents.select([0, 2, 4])]
    assert decisions(operator, shards) == rows
    assert kept(decisions(operator, shards[:1])) == ["b", "d"]


def test_wrong_vectors_are_named() -> None:
    for value in (["a"], [[1.0]], [float("nan")], 3.0):
        with pytest.raises(WeftError, match="no vector of finite numbers"):
            column_vectors([[1.0], value], "v")
    two = Documents(["a", "b"], ["", ""], {"v": [[1.0], [1.0, 2.0]]})
    with pytest.raises(OperatorFailed, match="different widths: 1, 2"):
        decisions(joint("semantic", column="v"), [two])
    with pytest.raises(OperatorFailed, match=r"needs the column 'w'; columns: v"):
        decisions(joint("semantic", column="w"), [two])
    for settings_ in ({}, {"model": "x", "column": "y"}):
        with pytest.raises(UsageError, match="set either model or column"):
            joint("semantic", **settings_)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model with random weights."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny = build()
    held = resident_state(tiny, tiny.mesh).held
    export({p.name: p.local for p in held}, tiny.shape, folder)
    load_tokenizer("bytes", ()).save(folder)
    return str(folder)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_model_embeds_texts(model: str, pooling: str) -> None:
    texts = ["one text", "", "one text", "another, which is longer", "one text"]
    documents = Documents(list("abcde"), texts)
    operator = joint("semantic", model=model, pooling=pooling, keep="first", eps=1e-3)
    rows = decisions(operator, [documents])
    assert kept(rows) == ["a", "b", "d"] and rows["e"]["duplicate_of"] == "a"
    assert decisions(operator, [documents.select([4, 3]), documents.select([2, 1, 0])]) == rows  # fmt: skip
    assert len(operator.fingerprint()) > 20
    assert joint("semantic", column="v").fingerprint() == ""
    short = joint("semantic", model=model, pooling=pooling, most_tokens=3)
    cut_texts = Documents(["a", "b"], ["one", "one text"])
    assert len(kept(decisions(short, [cut_texts]))) == 1


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WeftError):
        joint("semantic", model=str(tmp_path / "nothing")).fingerprint()
