"""C4's lines: of each document only the lines that look like sentences."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from weft.curation.c4_page import kept_lines
from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.registry import register
from weft.section import Section


class C4LinesSettings(Section):
    """Settings of C4's rules on single lines: which lines of a document are kept. The defaults are those of the C4
    paper (Raffel et al. 2020).
    """

    line_words: int = Field(
        3, ge=0, description="Smallest number of words in a line that is kept."
    )
    longest_word: int = Field(
        1000,
        ge=1,
        description="Largest number of characters of a word in a line that is kept.",
    )
    ended: bool = Field(
        True,
        description="Whether lines must end with a punctuation mark (. ? ! or a quotation mark).",
    )


@register(
    "operator",
    "c4-lines",
    settings=C4LinesSettings,
    title="Lines of C4: ended by a mark, with enough words, not about JavaScript or cookies",
    paper="Raffel et al. 2020 (JMLR 21)",
    recipe="docs/how-to/document-scores.md",
    proof="tests/curation/test_heuristics.py",
    figure="decisions and texts of datatrove's filter on 240 pages",
)
class C4Lines:
    """Removes lines that are no sentences (Raffel et al. 2020, JMLR 21); filter ``c4`` then drops short documents."""

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(C4LinesSettings)

    def map(self, documents: Documents) -> Documents:
        rules = self.settings
        texts = [
            "\n".join(
                kept_lines(text, rules.line_words, rules.longest_word, rules.ended)
            )
            for text in documents.texts
        ]
        return replace(documents, texts=texts)
