"""Targets of clusters are the projection that a brute-force solver has; sums are exact; density decides."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from weft.curation.concept_clusters import (
    cluster_complexity,
    project_counts,
    prune_clusters,
    target_counts,
)
from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.errors import UsageError


@st.composite
def problems(draw: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Wished counts, bounds and a sum that the bounds allow."""
    bounds = draw(
        st.lists(
            st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5
        )
    )
    low = np.array([a for a, _ in bounds])
    high = low + np.array([b for _, b in bounds])
    total = draw(st.integers(int(low.sum()), int(high.sum())))
    wish = st.floats(-3, 12, allow_nan=False, width=32)
    wanted = draw(st.lists(wish, min_size=len(low), max_size=len(low)))
    return np.array(wanted, float), low, high, total


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_counts_are_the_best_of_all_whole_numbers(
    problem: tuple[np.ndarray, np.ndarray, np.ndarray, int],
) -> None:
    wanted, low, high, total = problem
    counts = project_counts(wanted, low, high, total)
    assert counts.sum() == total and (low <= counts).all() and (counts <= high).all()
    every = product(*(range(a, b + 1) for a, b in zip(low, high, strict=True)))
    best = min(
        float(((np.array(c) - wanted) ** 2).sum()) for c in every if sum(c) == total
    )
    assert ((counts - wanted) ** 2).sum() <= best + 1e-6


def test_counts_round_the_solution_of_a_quadratic_program() -> None:
    """SLSQP solves the program as the paper states it."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        sizes = rng.integers(5, 60, 6)
        total = int(sizes.sum() // 3)
        complexities = rng.random(6)
        logits = np.exp(complexities / 0.1)
        wanted = total * logits / logits.sum()
        low = np.floor(np.minimum(0.5 * total / 6, sizes - 1))
        solved = minimize(
            lambda x, wanted=wanted: ((x - wanted) ** 2).sum(),
            np.clip(np.full(6, total / 6), low, sizes),
            jac=lambda x, wanted=wanted: 2 * (x - wanted),
            bounds=list(zip(low, sizes, strict=True)),
            constraints={"type": "eq", "fun": lambda x, total=total: x.sum() - total},
            method="SLSQP",
        )
        assert solved.success
        counts = target_counts(complexities, sizes, total, 0.1)
        assert counts.sum() == total
        assert np.abs(counts - solved.x).max() < 1 + 1e-6


def test_equal_clusters_keep_equally() -> None:
    sizes = np.full(7, 30)
    assert target_counts(np.full(7, 0.3), sizes, 70).tolist() == [10] * 7
    assert (
        sorted(target_counts(np.full(7, 0.3), sizes, 72).tolist())
        == [10] * 5 + [11] * 2
    )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_sums_are_exact(sizes: list[int], data: Any) -> None:
    total = data.draw(st.integers(0, sum(sizes)))
    complexities = data.draw(
        st.lists(st.floats(0, 2), min_size=len(sizes), max_size=len(sizes))
    )
    counts = target_counts(np.array(complexities), np.array(sizes), total, 0.1)
    assert counts.sum() == total
    assert (counts >= 0).all() and (counts <= sizes).all()
    # of everything all is kept
    if total == sum(sizes):
        assert counts.tolist() == sizes


def test_impossible_sums_are_refused() -> None:
    with pytest.raises(ValueError, match="no counts between 2 and 4 sum to 5"):
        project_counts(np.zeros(2), np.ones(2), np.full(2, 2), 5)


def spread(widths: list[float], each: int = 40) -> np.ndarray:
    """Vectors about axes of a space, those of each axis as wide as said."""
    rng = np.random.default_rng(1)
    axes = 5 * np.eye(len(widths), 16)
    parts = [
        a + w * rng.normal(size=(each, 16)) for a, w in zip(axes, widths, strict=True)
    ]
    return np.concatenate(parts).astype(np.float32)


def test_wide_clusters_keep_more() -> None:
    vectors = spread([0.1, 0.1, 0.8, 0.8])
    pruned = prune_clusters(vectors, 60, 4, temperature=0.1)
    kept = pruned.kept.reshape(4, 40).sum(1)
    assert kept.sum() == 60 == pruned.counts.sum()
    assert max(kept[:2]) < min(kept[2:])
    # the farthest of each
    for cluster in range(4):
        here = pruned.labels == cluster
        dropped = pruned.distances[here & ~pruned.kept]
        assert pruned.distances[here & pruned.kept].min() >= dropped.max()


def test_complexity_by_hand() -> None:
    centroids = np.array([[1, 0], [0, 1], [-1, 0]], np.float32)
    labels, distances = np.array([0, 0, 1, 2]), np.array([0.1, 0.3, 0.5, 0.2])
    assert cluster_complexity(
        centroids, labels, distances, 1
    ).tolist() == pytest.approx([0.2, 0.5, 0.2])
    assert cluster_complexity(centroids, labels, distances).tolist() == pytest.approx(
        [0.3, 0.5, 0.3]
    )
    assert cluster_complexity(centroids[:1], labels[:2], distances[:2]).tolist() == [0]


def test_the_operator_does_not_depend_on_shards() -> None:
    vectors = spread([0.1, 0.4, 0.8], 12)
    names = [f"{i * 7 % 36:02}" for i in range(36)]
    step: Any = DataStep(
        operator="clusters",
        embedding="embedding",
        clusters=3,
        share=0.5,
        temperature=0.1,
    ).build()

    def decided(order: list[int], cuts: list[int]) -> dict[str, tuple[Any, ...]]:
        parts = [part.tolist() for part in np.split(np.array(order), cuts)]
        shards = [
            Documents(
                [names[i] for i in part],
                [""] * len(part),
                {"embedding": [vectors[i].tolist() for i in part]},
            )
            for part in parts
        ]
        decisions = step.decide(
            [s.ids for s in shards], [step.summarize(s) for s in shards]
        )
        return {
            name: (reason, *(column[i] for column in d.columns.values()))
            for s, d in zip(shards, decisions, strict=True)
            for i, (name, reason) in enumerate(zip(s.ids, d.reasons, strict=True))
        }

    whole = decided(list(range(36)), [])
    assert sum(not reason for reason, *_ in whole.values()) == 18
    shuffled = np.random.default_rng(2).permutation(36).tolist()
    assert decided(shuffled, [0, 5, 20]) == whole
    (note,) = step.notes()  # of the last decision alone
    assert note.startswith("18 of 36 documents kept, of the 3 clusters between")


def test_random_ones_inside_a_cluster() -> None:
    vectors = spread([0.1, 0.8], 20)
    shard = Documents(
        [f"{i:02}" for i in range(40)], [""] * 40, {"vector": vectors.tolist()}
    )
    kept = {}
    for inside in ("far", "random"):
        step: Any = DataStep(
            operator="clusters",
            embedding="vector",
            clusters=2,
            number=20,
            temperature=0.1,
            inside=inside,
        ).build()
        (decision,) = step.decide([shard.ids], [step.summarize(shard)])
        kept[inside] = np.array([not reason for reason in decision.reasons])
    # as many of each cluster, and others
    assert (
        kept["far"][:20].sum() == kept["random"][:20].sum() and kept["far"].sum() == 20
    )
    assert (kept["far"] != kept["random"]).any()


def test_documents_without_a_vector_come_last() -> None:
    vectors: list[Any] = [*spread([0.1, 0.8], 20).tolist(), None, []]
    names = [f"{i:02}" for i in range(42)]
    for operator in ("clusters", "prune"):
        more = {"metric": "prototypes", "keep": "hard"} if operator == "prune" else {}
        for number, missing in ((20, 2), (41, 1), (42, 0)):
            step: Any = DataStep(
                operator=operator, embedding="v", number=number, **more
            ).build()  # type: ignore[arg-type]
            shards = [
                Documents(names[a:b], [""] * (b - a), {"v": vectors[a:b]})
                for a, b in ((0, 30), (30, 30), (30, 40), (40, 42))
            ]
            decisions = step.decide(
                [s.ids for s in shards], [step.summarize(s) for s in shards]
            )
            reasons = [reason for decision in decisions for reason in decision.reasons]
            assert (
                reasons.count("") == number
                and reasons[40:].count("no vector") == missing
            )
            assert next(iter(decisions[3].columns.values())) == [None, None]


def test_vectors_that_are_none_are_named() -> None:
    step: Any = DataStep(operator="clusters", embedding="v", number=1).build()
    for values, said in (
        ([[1.0], [1.0, 2.0]], r"b has '\[1.0, 2.0\]' in this column; .* \(1 here\)"),
        (["ab", "cd"], "a has 'ab'"),
        ([5, 5], "a has '5'"),
        ([[1.0], [float("inf")]], "b has .* a list of finite numbers"),
        ([[[1.0]], [[1.0]]], "a has"),
    ):
        with pytest.raises(UsageError, match=said):
            step.summarize(Documents(["a", "b"], ["", ""], {"v": values}))
    with pytest.raises(
        UsageError, match="no earlier step has written this column; columns: none"
    ):
        step.summarize(Documents(["a"], [""]))
    shards = [Documents([f"{n}"], [""], {"v": [[1.0] * n]}) for n in (2, 3)]
    with pytest.raises(UsageError, match="vectors of 2 and of 3 numbers"):
        step.decide([s.ids for s in shards], [step.summarize(s) for s in shards])
