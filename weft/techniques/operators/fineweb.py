"""FineWeb's rules: pages of short, repeated or unfinished lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.curation.limits import Limit, limit_reasons, transposed
from weft.curation.page_statistics import SENTENCE_MARKS, fineweb_statistics
from weft.registry import register
from weft.section import Section


class FineWebSettings(Section):
    """Settings of FineWeb's own quality rules. The defaults are those of the FineWeb paper (Penedo et al. 2024)."""

    least_ended_lines: float = Field(
        0.12,
        ge=0,
        le=1,
        description="Smallest share of lines that end with a punctuation mark, in a document that is kept.",
    )
    most_short_lines: float = Field(
        0.67,
        ge=0,
        description="Largest share of short lines in a document that is kept. 'short' says which lines count.",
    )
    most_repeated_characters: float = Field(
        0.01,
        ge=0,
        description="Largest share of characters in repeated lines, in a document that is kept.",
    )
    most_line_breaks: float = Field(
        0.3,
        ge=0,
        description="Largest number of line breaks per word in a document that is kept; lists have many.",
    )
    short: int = Field(
        30,
        ge=0,
        description="Largest number of characters in a line that counts as short.",
    )
    marks: str = Field(
        "",
        description=(
            "Characters that end a sentence. If not set: the characters that Unicode marks as sentence ends in any "
            "script, such as . ! ?, without quotes."
        ),
    )


@register(
    "operator",
    "fineweb",
    settings=FineWebSettings,
    title="FineWeb's rules: lines that are short, repeated or not ended by a mark",
    paper="Penedo et al. 2024 (2406.17557)",
    recipe="data/stdlib.toml",
    proof="tests/curation/test_heuristics.py",
    figure="decisions of datatrove's filter on 240 pages",
)
class FineWeb:
    """Drops pages of short, repeated or unfinished lines (Penedo et al. 2024, 2406.17557)."""

    late: ClassVar = (
        "least_ended_lines",
        "most_short_lines",
        "most_repeated_characters",
        "most_line_breaks",
    )

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(FineWebSettings)

    def statistics(self, documents: Documents) -> dict[str, list[Any]]:
        short = self.settings.short
        marks = tuple(self.settings.marks) or SENTENCE_MARKS
        return transposed(
            [fineweb_statistics(text, short, marks) for text in documents.texts]
        )

    def reasons(self, columns: Mapping[str, Sequence[Any]]) -> list[str]:
        limits = self.settings
        return limit_reasons(
            [
                Limit("fineweb_lines", "lines with text", 1),
                Limit(
                    "fineweb_ended_lines",
                    "share of lines that end with a mark",
                    limits.least_ended_lines,
                ),
                Limit(
                    "fineweb_short_lines",
                    "share of short lines",
                    None,
                    limits.most_short_lines,
                ),
                Limit(
                    "fineweb_repeated_characters",
                    "share of characters in repeated lines",
                    None,
                    limits.most_repeated_characters,
                ),
                Limit(
                    "fineweb_line_breaks",
                    "line breaks per word",
                    None,
                    limits.most_line_breaks,
                ),
            ],
            columns,
        )
