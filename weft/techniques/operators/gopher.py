"""Gopher's quality rules: documents that are too short, too long, or not prose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.curation.limits import Limit, limit_reasons, transposed
from weft.curation.page_statistics import STOP_WORDS, gopher_statistics
from weft.registry import register
from weft.section import Section


class GopherSettings(Section):
    """Settings of Gopher's quality rules. The defaults are those of the Gopher paper (Rae et al. 2021)."""

    least_words: int = Field(
        50, ge=0, description="Smallest number of words in a document that is kept."
    )
    most_words: int = Field(
        100_000, ge=1, description="Largest number of words in a document that is kept."
    )
    least_word_length: float = Field(
        3,
        ge=0,
        description="Smallest mean length of a word, in characters, in a document that is kept.",
    )
    most_word_length: float = Field(
        10,
        ge=0,
        description="Largest mean length of a word, in characters, in a document that is kept.",
    )
    most_hashes: float = Field(
        0.1,
        ge=0,
        description="Largest number of hash signs (#) per word in a document that is kept.",
    )
    most_ellipses: float = Field(
        0.1,
        ge=0,
        description="Largest number of ellipses (...) per word in a document that is kept.",
    )
    most_bullet_lines: float = Field(
        0.9,
        ge=0,
        description="Largest share of lines that begin with a bullet, in a document that is kept.",
    )
    most_ellipsis_lines: float = Field(
        0.3,
        ge=0,
        description="Largest share of lines that end with an ellipsis (...), in a document that is kept.",
    )
    least_alphabetic: float = Field(
        0.8,
        ge=0,
        le=1,
        description="Smallest share of words with at least one letter, in a document that is kept.",
    )
    least_stop_words: int = Field(
        2,
        ge=0,
        description="Smallest number of different stop words in a document that is kept.",
    )
    stop_words: Sequence[str] = Field(
        STOP_WORDS,
        description="Words that are common in the documents' language. A text of sentences has some of them.",
    )


@register(
    "operator",
    "gopher",
    settings=GopherSettings,
    title="Quality rules of Gopher: counts of words, symbols, bullets and stop words",
    paper="Rae et al. 2021 (2112.11446)",
    recipe="data/stdlib.toml",
    proof="tests/curation/test_heuristics.py",
    figure="decisions of datatrove's filter on 240 pages",
)
class Gopher:
    """Drops documents whose counts of words and symbols are unlike prose (Rae et al. 2021, 2112.11446)."""

    late: ClassVar = tuple(
        name for name in GopherSettings.model_fields if name != "stop_words"
    )

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(GopherSettings)

    def statistics(self, documents: Documents) -> dict[str, list[Any]]:
        words = self.settings.stop_words
        return transposed([gopher_statistics(text, words) for text in documents.texts])

    def reasons(self, columns: Mapping[str, Sequence[Any]]) -> list[str]:
        limits = self.settings
        return limit_reasons(
            [
                Limit("gopher_words", "words", limits.least_words, limits.most_words),
                Limit(
                    "gopher_word_length",
                    "mean length of words",
                    limits.least_word_length,
                    limits.most_word_length,
                ),
                Limit("gopher_hashes", "hash signs per word", None, limits.most_hashes),
                Limit(
                    "gopher_ellipses", "ellipses per word", None, limits.most_ellipses
                ),
                Limit(
                    "gopher_bullet_lines",
                    "share of lines with bullets",
                    None,
                    limits.most_bullet_lines,
                ),
                Limit(
                    "gopher_ellipsis_lines",
                    "share of lines with ellipses",
                    None,
                    limits.most_ellipsis_lines,
                ),
                Limit(
                    "gopher_alphabetic",
                    "share of words with letters",
                    limits.least_alphabetic,
                ),
                Limit("gopher_stop_words", "stop words", limits.least_stop_words),
            ],
            columns,
        )
