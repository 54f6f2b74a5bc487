"""Prune: the hard or the easy ones of labelled examples, by how a small network learns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from weft.curation.best_documents import choose_best, score_order
from weft.curation.column_values import (
    document_vectors,
    group_column,
    joined_vectors,
    with_vector,
)
from weft.curation.data_operators import Decision
from weft.curation.data_pipeline import DataStep
from weft.curation.document_selection import SelectionSettings, drop_reasons, kept_line
from weft.curation.documents import Documents
from weft.curation.duplicate_groups import (
    flat_ids,
    id_ranks,
    joined_summaries,
    split_decisions,
)
from weft.registry import register


class PruneSettings(SelectionSettings):
    """Settings of the operator that selects labelled examples by difficulty."""

    metric: Literal["el2n", "forgetting", "prototypes"] = Field(
        "el2n",
        description=(
            "Measure of how hard an example is: its error early in training ('el2n'), how often it is "
            "forgotten ('forgetting'), or its distance to the nearest centroid ('prototypes'), which needs no "
            "labels."
        ),
    )
    keep: Literal["hard", "easy", "auto"] = Field(
        "auto",
        description=(
            "Which examples are kept: 'hard' ones, which are worth more if data are plentiful, or 'easy' "
            "ones, which are worth more if data are scarce. 'auto' measures both on held-out examples."
        ),
    )
    label: str = Field(
        "",
        description=(
            "Column with the class of each example, which 'el2n', 'forgetting', keep = 'auto' and "
            "'floor' need."
        ),
    )
    embedding: str = Field(
        "",
        description="Column with the embedding of each document. If not set: hashed n-grams of the text.",
    )
    floor: int = Field(
        0, ge=0, description="Smallest number of examples of each class that are kept."
    )
    runs: int = Field(
        10,
        ge=1,
        description="Number of networks that are trained; an example's score is the mean over them.",
    )
    steps: int = Field(
        60,
        ge=1,
        description="Number of training steps before the error of 'el2n' is measured.",
    )
    clusters: int = Field(20, ge=1, description="Number of centroids for 'prototypes'.")
    compare: bool = Field(
        True,
        description=(
            "Whether training on the chosen examples is compared with training on as many random ones, by the "
            "error on held-out examples."
        ),
    )
    seed: int = Field(0, ge=0, description="Seed of networks and clusters.")

    @model_validator(mode="after")
    def _labelled(self) -> PruneSettings:
        if not self.label and self.metric != "prototypes":
            raise ValueError(
                f"metric = {self.metric!r} needs label, the column with the class; 'prototypes' does without"
            )
        if not self.label and (self.keep == "auto" or self.floor):
            raise ValueError(
                "keep = 'auto' and floor need label, the class's column; without one set keep = 'hard' or 'easy'"
            )
        return self


@register(
    "operator",
    "prune",
    settings=PruneSettings,
    title="Hard or easy examples by EL2N, forgetting or prototypes, with a floor for each class",
    paper="Sorscher et al. 2022 (2206.14486); Paul et al. 2021 (2107.07075); Toneva et al. 2019 (1812.05159)",
    recipe="data/scores.toml",
    proof="tests/curation/test_pruning.py",
    figure="digits with a floor for each class, by EL2N, forgetting and prototypes: at 50 %, hard 96.5, 96.7 and 97.6, "
    "random 96.5; at 5 %, easy 76.8, 80.8 and 75.4, hard 46.2, 57.9 and 63.1, random 80.9 (`bench/pruning.py`)",
)
class Prune:
    """Keeps the hardest or the easiest labelled examples, and warns if a random choice would train better (Sorscher et
    al. 2022; Paul et al. 2021; Toneva et al. 2019). It writes the column ``difficulty``. The report says how much of
    each class is kept, and which accuracies on held-out examples are reached after training on hard, easy and random
    examples.
    """

    late: ClassVar = tuple(
        name
        for name in PruneSettings.model_fields
        if name not in ("label", "embedding")
    )

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(PruneSettings)
        self._said: list[str] = []

    def notes(self) -> list[str]:
        """Return lines about the last decision: how much of each class it kept, the accuracies that were compared, and
        warnings.
        """
        return self._said

    def summarize(self, documents: Documents) -> dict[str, np.ndarray]:
        label, none = self.settings.label, np.zeros(len(documents), np.str_)
        return {
            "vectors": document_vectors(documents, self.settings.embedding),
            "labels": group_column(documents, label, "label") if label else none,
        }

    def decide(
        self,
        ids: Sequence[Sequence[str]],
        summaries: Sequence[Mapping[str, np.ndarray]],
    ) -> list[Decision]:
        self._said = []
        ours, names = self.settings, flat_ids(ids)
        if not names:
            return split_decisions(ids, {}, [])
        # by ids, so that nothing depends on shards
        ranks = id_ranks(names)
        order, names = np.argsort(ranks), sorted(names)
        parts = [summary["vectors"] for summary in summaries]
        vectors = joined_vectors(parts, "embedding")[order]
        known = with_vector(vectors)
        groups = joined_summaries(summaries, "labels")[order]
        scores = np.full(len(names), np.nan)
        count, keep = ours.count(len(names)), "hard"
        if known.any():
            labels = np.unique(groups[known], return_inverse=True)[1].astype(np.int64)
            scores[known] = self._scores(vectors[known], labels)
            names_known = [name for name, has in zip(names, known, strict=True) if has]
            share = count / len(names)
            keep = self._keep(scores[known], vectors[known], labels, names_known, share)
        # those without a vector come last
        best = score_order(scores, names, "high" if keep == "hard" else "low")
        kept = choose_best(best, count, groups, ours.floor)
        if ours.label:
            self._said.append(kept_line(ours.label, groups, kept))
        other = "easy" if keep == "hard" else "hard"
        reasons = drop_reasons(kept[ranks], f"{other} by {ours.metric}", known[ranks])
        difficulty = [None if x != x else float(x) for x in scores[ranks]]
        return split_decisions(ids, {"difficulty": difficulty}, reasons)

    def _scores(self, vectors: np.ndarray, labels: np.ndarray) -> np.ndarray:
        from weft.curation.example_difficulty import (
            el2n_scores,
            forgetting_counts,
            prototype_distances,
        )

        ours = self.settings
        if ours.metric == "el2n":
            return el2n_scores(vectors, labels, ours.runs, ours.steps, ours.seed)
        if ours.metric == "forgetting":
            return forgetting_counts(vectors, labels, ours.runs, seed=ours.seed)
        return prototype_distances(vectors, ours.clusters, ours.seed)

    def _keep(
        self,
        scores: np.ndarray,
        vectors: np.ndarray,
        labels: np.ndarray,
        names: list[str],
        share: float,
    ) -> str:
        """Return whether hard or easy examples are kept, after the comparison if there is to be one."""
        from weft.curation.pruning_comparison import compare_pruning

        ours = self.settings
        if share == 1 or not (ours.label and (ours.compare or ours.keep == "auto")):
            return "hard" if ours.keep == "auto" else ours.keep
        measured = compare_pruning(
            scores, vectors, labels, names, share, ours.floor, seed=ours.seed
        )
        if measured is None:
            keep: str = "easy" if ours.keep == "auto" else ours.keep
            self._said.append(
                f"warning: {len(names)} examples are too few to compare choices of them; {keep} ones are kept"
            )
            return keep
        keep = measured.better if ours.keep == "auto" else ours.keep
        self._said += measured.lines(keep)
        return keep
