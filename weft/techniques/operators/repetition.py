"""Repetition: documents that repeat their own lines, paragraphs or n-grams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.curation.limits import Limit, limit_reasons, transposed
from weft.curation.repeated_parts import ALL_SIZES, TOP_SIZES, repetition_statistics
from weft.registry import register
from weft.section import Section


class RepetitionSettings(Section):
    """Settings of Gopher's rules on documents that repeat themselves. The defaults are those of table A1 of the Gopher
    paper (Rae et al. 2021).
    """

    most_repeated_lines: float = Field(
        0.3,
        ge=0,
        description="Largest share of lines that repeat an earlier line, in a document that is kept.",
    )
    most_repeated_paragraphs: float = Field(
        0.3,
        ge=0,
        description=(
            "Largest share of paragraphs that repeat an earlier paragraph, in a document that is "
            "kept."
        ),
    )
    most_line_characters: float = Field(
        0.2,
        ge=0,
        description="Largest share of characters in repeated lines, in a document that is kept.",
    )
    most_paragraph_characters: float = Field(
        0.2,
        ge=0,
        description="Largest share of characters in repeated paragraphs, in a document that is kept.",
    )
    most_top_grams: tuple[float, float, float] = Field(
        (0.2, 0.18, 0.16),
        description=(
            "Largest shares of a document's characters that may belong to its most frequent sequence "
            "of words: three numbers, for sequences of 2, 3 and 4 words."
        ),
    )
    most_repeated_grams: tuple[float, float, float, float, float, float] = Field(
        (0.15, 0.14, 0.13, 0.12, 0.11, 0.1),
        description=(
            "Largest shares of a document's characters that may belong to repeated sequences of "
            "words: six numbers, for sequences of 5, 6, ... and 10 words."
        ),
    )


@register(
    "operator",
    "repetition",
    settings=RepetitionSettings,
    title="Repetition of lines, paragraphs and n-grams, rules of Gopher",
    paper="Rae et al. 2021 (2112.11446)",
    recipe="data/stdlib.toml",
    proof="tests/curation/test_heuristics.py",
    figure="decisions of datatrove's filter on 240 pages",
)
class Repetition:
    """Drops documents in which lines, paragraphs or sequences of words are repeated too often (Rae et al. 2021,
    2112.11446, table A1).
    """

    late: ClassVar = tuple(RepetitionSettings.model_fields)

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(RepetitionSettings)

    def statistics(self, documents: Documents) -> dict[str, list[Any]]:
        return transposed([repetition_statistics(text) for text in documents.texts])

    def reasons(self, columns: Mapping[str, Sequence[Any]]) -> list[str]:
        settings = self.settings
        most = {
            "repeated_paragraphs": settings.most_repeated_paragraphs,
            "repeated_paragraph_characters": settings.most_paragraph_characters,
            "repeated_lines": settings.most_repeated_lines,
            "repeated_line_characters": settings.most_line_characters,
        }
        for n, limit in zip(TOP_SIZES, settings.most_top_grams, strict=True):
            most[f"top_{n}_gram_characters"] = limit
        for n, limit in zip(ALL_SIZES, settings.most_repeated_grams, strict=True):
            most[f"repeated_{n}_gram_characters"] = limit
        limits = [
            Limit(column, f"share of {column.replace('_', ' ')}", None, limit)
            for column, limit in most.items()
        ]
        return limit_reasons(limits, columns)
