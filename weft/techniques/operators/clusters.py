"""Clusters: density-based pruning of concept clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field, PositiveFloat

from weft.curation.column_values import vector_column
from weft.curation.concept_clusters import prune_clusters
from weft.curation.data_operators import Decision
from weft.curation.data_pipeline import DataStep
from weft.curation.document_selection import SelectionSettings, drop_reasons, say
from weft.curation.documents import Documents
from weft.curation.duplicate_groups import (
    flat_ids,
    id_ranks,
    joined_summaries,
    split_decisions,
)
from weft.registry import register


class ClustersSettings(SelectionSettings):
    """Settings of the pruning by density."""

    embedding: str = Field("embedding", description="Column of vectors.")
    clusters: int = Field(
        100,
        ge=1,
        description="Number of clusters; fewer where there are fewer documents.",
    )
    temperature: PositiveFloat = Field(
        0.5,
        description="Temperature of the softmax over complexities; a high one keeps as many of each cluster.",
    )
    neighbours: int = Field(
        20, ge=1, description="Nearest clusters to which the distance counts."
    )
    seed: int = Field(0, ge=0, description="Seed of the clusters.")


@register(
    "operator",
    "clusters",
    settings=ClustersSettings,
    title="Concept clusters pruned by their density, by projection instead of a solver",
    paper="Abbas et al. 2024 (2401.04578)",
    proof="tests/curation/test_concept_clusters.py",
    figure="counts equal the best of all whole numbers on small cases; their sum is exact",
)
class Clusters:
    """Keeps few documents of dense clusters and many of wide ones, far from others (Abbas et al. 2024, 2401.04578).

    Of each cluster the documents farthest from the centroid are kept. Columns: ``cluster``, ``cluster_distance``.
    """

    late: ClassVar = (
        "share",
        "number",
        "clusters",
        "temperature",
        "neighbours",
        "seed",
    )

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(ClustersSettings)

    def summarize(self, documents: Documents) -> dict[str, np.ndarray]:
        if not len(documents):  # of which nobody knows the width
            return {"vectors": np.zeros((0, 0), np.float32)}
        name = self.settings.embedding
        return {"vectors": vector_column(documents, name, "embedding")}

    def decide(
        self,
        ids: Sequence[Sequence[str]],
        summaries: Sequence[Mapping[str, np.ndarray]],
    ) -> list[Decision]:
        ours, names = self.settings, flat_ids(ids)
        if not names:
            return split_decisions(ids, {}, [])
        filled = [summary for summary in summaries if len(summary["vectors"])]
        vectors = joined_summaries(filled, "vectors")
        ranks = id_ranks(names)
        pruned = prune_clusters(
            vectors[np.argsort(ranks)],
            ours.count(len(names)),
            ours.clusters,
            ours.temperature,
            ours.neighbours,
            ours.seed,
        )
        sizes = np.bincount(pruned.labels, minlength=len(pruned.counts))
        shares = pruned.counts / np.maximum(sizes, 1)
        say(
            "clusters",
            f"{pruned.counts.sum()} of {len(names)} documents kept, of the {len(sizes)} clusters between "
            f"{shares.min():.0%} and {shares.max():.0%}",
        )
        columns = {
            "cluster": pruned.labels[ranks].tolist(),
            "cluster_distance": pruned.distances[ranks].tolist(),
        }
        reason = "close to the centroid of its cluster"
        return split_decisions(ids, columns, drop_reasons(pruned.kept[ranks], reason))
