"""Paragraphs: those that stand in several documents, and documents that consist of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from weft.curation.data_operators import Decision
from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.curation.duplicate_groups import (
    SurvivorSettings,
    flat_ids,
    id_ranks,
    joined_summaries,
    split_decisions,
    survivor_scores,
)
from weft.curation.repeated_paragraphs import is_repeated, paragraph_table
from weft.registry import register


class ParagraphsSettings(SurvivorSettings):
    """Settings of the search for paragraphs that several documents have."""

    unit: Literal["paragraph", "line"] = Field(
        "paragraph",
        description="What is compared between documents: paragraphs, which empty lines separate, or single lines.",
    )
    least_words: int = Field(
        10, ge=1, description="Paragraphs with fewer words never count as repeated."
    )
    least_documents: int = Field(
        2,
        ge=1,
        description=(
            "Number of documents that must share a paragraph so that it counts as repeated; 1: a paragraph "
            "that occurs twice in one document counts as well."
        ),
    )
    most_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description=(
            "Largest share of a document's characters that may be in repeated paragraphs; a document "
            "above it is dropped. 1: none is dropped."
        ),
    )


@register(
    "operator",
    "paragraphs",
    settings=ParagraphsSettings,
    title="Repeated paragraphs",
    paper="Soldaini et al. 2024 (2402.00159)",
    recipe="data/duplicates.toml",
    proof="tests/curation/test_repeated_paragraphs.py",
    figure="one document keeps each paragraph, as a search without hashes says",
)
class Paragraphs:
    """Marks paragraphs that other documents have, too, and drops documents that consist mostly of them (Soldaini et al.
    2024). One document keeps such a paragraph: the longest document, the first by id, or the best. For all others the
    column ``repeated_spans`` lists start and end of each repeated paragraph, and ``repeated_share`` says their share of
    the characters. The operator ``cut-repeated`` cuts them out. Paragraphs are compared by hashes of 64 bits of their
    words.
    """

    late: ClassVar = ("least_documents", "most_share")

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(ParagraphsSettings)

    def summarize(self, documents: Documents) -> dict[str, np.ndarray]:
        ours = self.settings
        table = paragraph_table(documents.texts, ours.unit, ours.least_words)
        return {
            "paragraphs": table.rows,
            "paragraphs_offsets": table.offsets,
            "lengths": np.array([*map(len, documents.texts)], np.int64),
            "scores": survivor_scores(documents, ours),
        }

    def decide(
        self,
        ids: Sequence[Sequence[str]],
        summaries: Sequence[Mapping[str, np.ndarray]],
    ) -> list[Decision]:
        names = flat_ids(ids)
        counts = np.concatenate([np.diff(s["paragraphs_offsets"]) for s in summaries])
        rows = joined_summaries(summaries, "paragraphs")
        keys, starts, ends = rows[:, 0], *rows[:, 1:].astype(np.int64).T
        order = np.lexsort((id_ranks(names), -joined_summaries(summaries, "scores")))
        ranks = np.empty(len(names), np.int64)
        ranks[order] = np.arange(len(names))
        repeated = is_repeated(
            keys, np.repeat(ranks, counts), starts, self.settings.least_documents
        )
        document = np.repeat(np.arange(len(names)), counts)[repeated]
        spans = np.stack([starts[repeated], ends[repeated]], axis=1)
        lengths = np.maximum(joined_summaries(summaries, "lengths"), 1)
        sizes = spans[:, 1] - spans[:, 0]
        shares = np.bincount(document, weights=sizes, minlength=len(names)) / lengths
        edges = np.searchsorted(document, np.arange(len(names) + 1))
        most = self.settings.most_share
        reason = f"more than {most:.0%} of its text repeats other documents"
        columns = {
            "repeated_share": shares.tolist(),
            "repeated_spans": [
                spans[start:end].ravel().tolist() for start, end in pairwise(edges)
            ],
        }
        reasons = [reason if share > most else "" for share in shares]
        return split_decisions(ids, columns, reasons)
