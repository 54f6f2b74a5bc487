"""Clusters: density-based pruning of concept clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveFloat

from weft.curation.best_documents import score_order
from weft.curation.column_values import document_vectors, joined_vectors, with_vector
from weft.curation.concept_clusters import PrunedClusters, prune_clusters
from weft.curation.data_operators import Decision
from weft.curation.data_pipeline import DataStep
from weft.curation.document_selection import SelectionSettings, drop_reasons
from weft.curation.documents import Documents
from weft.curation.duplicate_groups import flat_ids, id_ranks, split_decisions
from weft.registry import register

#: Documents of a cluster on average, at least.
_FEWEST = 10


class ClustersSettings(SelectionSettings):
    """Settings of the operator that prunes dense clusters of documents."""

    embedding: str = Field(
        "",
        description="Column with the embedding of each document. If not set: hashed n-grams of the text.",
    )
    clusters: int = Field(
        100,
        ge=1,
        description="Number of clusters; fewer where they would have fewer than 10 documents.",
    )
    temperature: PositiveFloat = Field(
        0.5,
        description=(
            "Temperature of the softmax over the clusters' complexities, by which documents are divided among "
            "clusters; a high one keeps equally many of each."
        ),
    )
    neighbours: int = Field(
        20,
        ge=1,
        description="Number of nearest clusters whose distance counts in a cluster's complexity.",
    )
    inside: Literal["far", "random"] = Field(
        "far",
        description=(
            "Documents of a cluster that are kept: the farthest from its centroid, as in the paper, or random ones, "
            "which are better where clusters overlap and the farthest are outliers."
        ),
    )
    seed: int = Field(
        0, ge=0, description="Seed of the clusters and of random documents."
    )


@register(
    "operator",
    "clusters",
    settings=ClustersSettings,
    title="Concept clusters pruned by their density, by projection instead of a solver",
    paper="Abbas et al. 2024 (2401.04578)",
    recipe="data/scores.toml",
    proof="tests/curation/test_concept_clusters.py",
    figure="counts equal the best of all whole numbers; 20 % of dense and wide classes: accuracy 94.8, with as many "
    "of each cluster 92.8 (`bench/pruning.py`)",
)
class Clusters:
    """Keeps few documents of dense clusters and many of wide clusters (density-based pruning, Abbas et al. 2024). Of
    each cluster the documents farthest from the centroid are kept. It writes the columns ``cluster`` and
    ``cluster_distance``.
    """

    late: ClassVar = (
        "share",
        "number",
        "clusters",
        "temperature",
        "neighbours",
        "inside",
        "seed",
    )

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(ClustersSettings)
        self._said: list[str] = []

    def notes(self) -> list[str]:
        """Return lines that say how much of each cluster the last decision kept."""
        return self._said

    def summarize(self, documents: Documents) -> dict[str, np.ndarray]:
        return {"vectors": document_vectors(documents, self.settings.embedding)}

    def decide(
        self,
        ids: Sequence[Sequence[str]],
        summaries: Sequence[Mapping[str, np.ndarray]],
    ) -> list[Decision]:
        self._said = []
        ours, names = self.settings, flat_ids(ids)
        if not names:
            return split_decisions(ids, {}, [])
        ranks = id_ranks(names)
        parts = [summary["vectors"] for summary in summaries]
        vectors = joined_vectors(parts, "embedding")[np.argsort(ranks)]
        known = with_vector(vectors)
        total = ours.count(len(names))
        kept = np.zeros(len(names), bool)
        # those without a vector come last
        kept[np.flatnonzero(~known)[: max(0, total - int(known.sum()))]] = True
        labels = np.full(len(names), -1)
        distances = np.full(len(names), np.nan)
        if known.any():
            pruned = self._pruned(vectors[known], total, sorted(names), known)
            kept[known] = pruned.kept
            labels[known], distances[known] = pruned.labels, pruned.distances
        columns: dict[str, list[Any]] = {
            "cluster": [None if label < 0 else int(label) for label in labels[ranks]],
            "cluster_distance": [
                None if x != x else float(x) for x in distances[ranks]
            ],
        }
        close = "close to the centroid of its cluster"
        reason = close if ours.inside == "far" else "not drawn of its cluster"
        reasons = drop_reasons(kept[ranks], reason, known[ranks])
        return split_decisions(ids, columns, reasons)

    def _pruned(
        self, vectors: np.ndarray, total: int, names: list[str], known: np.ndarray
    ) -> PrunedClusters:
        """Return the clusters of the documents with a vector, and note how much of them is kept."""
        ours, first = self.settings, self._first(names)
        pruned = prune_clusters(
            vectors,
            min(total, len(vectors)),
            min(ours.clusters, max(1, len(vectors) // _FEWEST)),
            ours.temperature,
            ours.neighbours,
            ours.seed,
            None if first is None else first[known],
        )
        sizes = np.bincount(pruned.labels, minlength=len(pruned.counts))
        shares = pruned.counts / np.maximum(sizes, 1)
        self._said.append(
            f"{pruned.counts.sum()} of {len(vectors)} documents kept, of the {len(sizes)} clusters between "
            f"{shares.min():.0%} and {shares.max():.0%}"
        )
        return pruned

    def _first(self, names: list[str]) -> np.ndarray | None:
        """Return what is kept first inside a cluster where that is random."""
        if self.settings.inside == "far":
            return None
        nothing = np.zeros(len(names))
        first = np.zeros(len(names))
        order = score_order(nothing, names, "random", self.settings.seed)
        first[order] = -np.arange(len(names))
        return first
