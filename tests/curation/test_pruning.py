"""Hard or easy examples: scores find what was made hard, all is identity, and random is said where it is better."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.curation.example_difficulty import (
    el2n_scores,
    forgetting_counts,
    prototype_distances,
)
from weft.curation.pruning_comparison import PruningComparison, compare_pruning
from weft.curation.small_network import network_accuracy
from weft.errors import UsageError


def classes(each: int = 40, wide: float = 0.7) -> tuple[np.ndarray, np.ndarray]:
    """Examples of three Gaussian classes, which overlap a little."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), each)
    features = 2 * np.eye(3, 6)[labels] + wide * rng.normal(size=(3 * each, 6))
    return features.astype(np.float32), labels


@pytest.mark.parametrize("metric", ["el2n", "forgetting", "prototypes"])
def test_scores_find_what_is_hard(metric: str) -> None:
    """A tenth of the labels is wrong or, as prototypes see no labels, a tenth of the examples lies elsewhere."""
    features, labels = classes(wide=0.3)
    spoilt = np.random.default_rng(1).choice(120, 12, replace=False)
    if metric == "prototypes":
        features[spoilt] = np.random.default_rng(2).normal(size=(12, 6))
        scores = prototype_distances(features, 3)
    else:
        labels = labels.copy()
        labels[spoilt] = (labels[spoilt] + 1) % 3
        score = el2n_scores if metric == "el2n" else forgetting_counts
        scores = score(features, labels, runs=3)  # type: ignore[operator]
        assert np.array_equal(scores, score(features, labels, runs=3))  # type: ignore[operator]
    hardest = np.argsort(-scores)[:12]
    assert len({*hardest.tolist()} & {*spoilt.tolist()}) >= 9


def test_el2n_by_hand() -> None:
    """Before it is trained a network of equal logits has an error of sqrt(1 - 1/k) for k classes."""
    features, labels = np.zeros((6, 4), np.float32), np.array([0, 1, 2, 0, 1, 2])
    assert el2n_scores(features, labels, runs=2, steps=0) == pytest.approx(
        (2 / 3) ** 0.5
    )


def test_easy_overtakes_hard_where_data_is_scarce() -> None:
    features, labels = classes(100, 0.9)
    names = [f"{i:03}" for i in range(300)]
    scores = el2n_scores(features, labels, runs=3)
    scarce = compare_pruning(scores, features, labels, names, 0.08)
    assert scarce is not None and scarce.better == "easy"
    assert scarce.easy >= scarce.hard + 0.05 and scarce.trained == 19
    assert (
        compare_pruning(scores[:50], features[:50], labels[:50], names[:50], 0.5)
        is None
    )


def test_a_warning_says_where_random_is_better() -> None:
    measured = PruningComparison(0.873, 0.673, 0.947, 597, 300, 0.009)
    first, warning = measured.lines("hard")
    assert first == (
        "accuracy on 597 held-out examples with 300 others: hard 87.3%, easy 67.3%, random 94.7% (standard error 0.9%)"
    )
    assert warning.startswith(
        "warning: random examples are better than hard ones here, 94.7% beside 87.3%"
    )
    assert len(measured._replace(hard=0.95).lines("hard")) == 1


def decided(
    step: Any,
    features: np.ndarray,
    labels: np.ndarray,
    order: list[int],
    cuts: list[int],
) -> dict[str, Any]:
    parts = [part.tolist() for part in np.split(np.array(order), cuts)]
    shards = [
        Documents(
            [f"{i:03}" for i in part],
            [""] * len(part),
            {
                "vector": [features[i].tolist() for i in part],
                "class": [f"c{labels[i]}" for i in part],
            },
        )
        for part in parts
    ]
    decisions = step.decide(
        [s.ids for s in shards], [step.summarize(s) for s in shards]
    )
    return {
        name: (reason, d.columns["difficulty"][i])
        for s, d in zip(shards, decisions, strict=True)
        for i, (name, reason) in enumerate(zip(s.ids, d.reasons, strict=True))
    }


def test_the_operator_does_not_depend_on_shards() -> None:
    features, labels = classes()
    settings: dict[str, Any] = {"label": "class", "embedding": "vector", "runs": 2}
    step = DataStep(
        operator="prune", share=0.25, keep="hard", floor=8, **settings
    ).build()
    whole = decided(step, features, labels, list(range(120)), [])
    kept = [name for name, (reason, _) in whole.items() if not reason]
    assert len(kept) == 30 and min(np.bincount(labels[[int(n) for n in kept]])) >= 8
    measured, *_, by_class = step.notes()
    assert measured.startswith("accuracy on 24 held-out examples with 24 others: hard")
    assert by_class.startswith("kept by class: c")
    shuffled = np.random.default_rng(0).permutation(120).tolist()
    quiet = DataStep(
        operator="prune", share=0.25, keep="hard", floor=8, compare=False, **settings
    ).build()
    assert decided(quiet, features, labels, shuffled, [0, 50]) == whole
    assert quiet.notes() == [by_class]
    # 100 % is identity
    every = DataStep(operator="prune", share=1.0, **settings).build()
    assert not any(
        reason for reason, _ in decided(every, features, labels, shuffled, [9]).values()
    )


def test_auto_keeps_what_is_better() -> None:
    features, labels = classes(60, 0.9)
    step = DataStep(
        operator="prune", share=0.08, label="class", embedding="vector", runs=3
    ).build()
    reasons = {
        reason
        for reason, _ in decided(step, features, labels, list(range(180)), []).values()
    }
    assert reasons == {"", "hard by el2n"} and "easy" in step.notes()[0]
    few = decided(step, features[:40], labels[:40], list(range(40)), [])
    assert step.notes()[0].startswith("warning: 40 examples are too few to compare")
    assert sum(not reason for reason, _ in few.values()) == 3


def test_texts_without_vectors_and_labels() -> None:
    """Hashed n-grams stand for vectors, and prototypes need no class."""
    texts = ["the river runs to the sea " * 3] * 8 + ["0x1f 0x2a 0x3b 0x4c"]
    documents = Documents([f"{i}" for i in range(9)], texts)
    step: Any = DataStep(
        operator="prune", metric="prototypes", keep="easy", number=8, clusters=1
    ).build()
    (decision,) = step.decide([documents.ids], [step.summarize(documents)])
    assert decision.reasons == [""] * 8 + ["hard by prototypes"]
    (nothing,) = step.decide([[]], [step.summarize(documents.select([]))])
    assert nothing.reasons == []


def test_wrong_settings_are_named() -> None:
    for values, said in (
        ({"share": 0.5}, "metric = 'el2n' needs label"),
        ({"share": 0.5, "metric": "prototypes"}, "set keep = 'hard' or 'easy'"),
        ({"label": "class"}, "either share or number"),
    ):
        with pytest.raises(UsageError, match=said):
            DataStep(operator="prune", **values)  # type: ignore[arg-type]
    step: Any = DataStep(operator="prune", number=1, label="class").build()
    with pytest.raises(UsageError, match=r"steps\.label = 'class': no earlier step"):
        step.summarize(Documents(["a"], ["b"]))


def test_networks_learn_classes() -> None:
    features, labels = classes(30, 0.3)
    assert (
        network_accuracy(features, labels, features, labels, runs=2, steps=100) > 0.97
    )
