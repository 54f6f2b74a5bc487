"""Semantic: documents that say nearly the same, by the cosine of their embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from weft.curation.data_operators import Decision, OperatorFailed
from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.curation.duplicate_groups import (
    SurvivorSettings,
    flat_ids,
    id_ranks,
    joined_summaries,
    survivor_decisions,
    survivor_scores,
)
from weft.curation.embedding_settings import EmbeddingSettings
from weft.curation.k_means import k_means
from weft.curation.semantic_groups import semantic_survivors
from weft.curation.text_embeddings import column_vectors, embed_documents
from weft.registry import register

#: Documents of a cluster, on average, where the number of clusters is not set.
CLUSTER_DOCUMENTS = 1000


class SemanticSettings(EmbeddingSettings, SurvivorSettings):
    """Settings of the removal of documents that say nearly the same."""

    keep: Literal["far", "longest", "first", "best"] = Field(  # type: ignore[assignment]  # one choice more
        "far",
        description=(
            "Document of a group of similar ones that is kept: the one farthest from its cluster's "
            "centroid, the longest, the first by id, or the one with the highest value of the column "
            "'score'. Equals are decided by id."
        ),
    )
    model: str = Field(
        "",
        description="Model that computes the embeddings: any that 'weft generate' opens.",
    )
    column: str = Field(
        "", description="Column that holds the embeddings, in place of a model."
    )
    eps: float = Field(
        0.05,
        gt=0,
        le=2,
        description="Documents are alike if the cosine of their embeddings is above 1 - eps.",
    )
    clusters: int = Field(
        0,
        ge=0,
        description=(
            "Number of clusters of k-means; only documents of one cluster are compared with each other. 0: "
            "one cluster for about 1000 documents."
        ),
    )
    seed: int = Field(0, ge=0, description="Seed of k-means.")

    @model_validator(mode="after")
    def _has_vectors(self) -> SemanticSettings:
        if bool(self.model) == bool(self.column):
            raise ValueError(
                "operator 'semantic' needs embeddings: set either model or column"
            )
        return self


@register(
    "operator",
    "semantic",
    settings=SemanticSettings,
    title="Semantic duplicates",
    paper="Abbas et al. 2023 (2303.09540)",
    recipe="docs/how-to/duplicates.md",
    proof="tests/curation/test_semantic_groups.py",
    figure="no two that are kept are alike in a cluster, and every dropped one is like its survivor",
)
class Semantic:
    """Drops documents that say nearly the same as another document of their cluster: the cosine of their embeddings is
    high (Abbas et al. 2023). A document without an embedding has no duplicates.
    """

    late: ClassVar = ("eps", "clusters", "seed")

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(SemanticSettings)

    def fingerprint(self) -> str:
        """Return a hash of the model's weights; "" if a column holds the embeddings. The results of this step are
        computed again when it changes.
        """
        ours = self.settings
        if not ours.model:
            return ""
        from weft.curation.engine_generator import read_generator

        read = read_generator(ours.model, ours.weights)
        return f"{read.weights} {read.tokenizer.fingerprint}"

    def summarize(self, documents: Documents) -> dict[str, np.ndarray]:
        ours = self.settings
        if ours.model:
            vectors = embed_documents(
                documents.texts,
                ours.model,
                ours.weights,
                ours.device,
                ours.pooling,
                ours.most_tokens,
            )
        elif ours.column in documents.columns:
            vectors = column_vectors(documents.columns[ours.column], ours.column)
        else:
            raise OperatorFailed(
                f"operator 'semantic' needs the column {ours.column!r}; columns: "
                f"{', '.join(documents.columns) or 'none'}"
            )
        scores = np.zeros(len(documents))
        if ours.keep != "far":
            scores = survivor_scores(documents, ours)
        sizes = np.array([0, *map(len, vectors)], np.int64)
        return {
            "vectors": np.concatenate([np.zeros(0, np.float16), *vectors]),
            "vectors_offsets": np.cumsum(sizes),
            "scores": scores,
        }

    def decide(
        self,
        ids: Sequence[Sequence[str]],
        summaries: Sequence[Mapping[str, np.ndarray]],
    ) -> list[Decision]:
        names = flat_ids(ids)
        places = id_ranks(names)
        sizes = np.concatenate([np.diff(s["vectors_offsets"]) for s in summaries])
        scores = joined_summaries(summaries, "scores")
        vectors = np.zeros((len(names), _width(sizes)), np.float16)
        vectors[sizes > 0] = joined_summaries(summaries, "vectors").reshape(
            -1, vectors.shape[1]
        )
        # in the order of ids, so that nothing depends on shards
        order = np.argsort(places)
        order = order[vectors[order].any(axis=1)]
        survivors = np.arange(len(names))
        if len(order):
            count = self.settings.clusters or -(-len(order) // CLUSTER_DOCUMENTS)
            count = min(count, len(order))
            clustering = k_means(vectors[order], count, self.settings.seed, cosine=True)
            if self.settings.keep == "far":
                scores[order] = clustering.distances
            ranks = np.lexsort((places[order], -scores[order])).argsort()
            of = semantic_survivors(
                vectors[order], clustering.labels, ranks, self.settings.eps
            )
            survivors[order] = order[of]
        return survivor_decisions(
            ids, survivors, "semantic duplicate", "semantic_copies"
        )


def _width(sizes: np.ndarray) -> int:
    """Return the width of all vectors from the number of elements of each, which is 0 for those that are missing."""
    widths = np.unique(sizes[sizes > 0]).tolist()
    if len(widths) > 1:
        raise OperatorFailed(
            f"embeddings have different widths: {', '.join(map(str, widths))}"
        )
    return widths[0] if widths else 1
