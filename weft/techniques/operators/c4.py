"""C4's pages: documents with too few sentences, with filler text or with curly brackets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from weft.curation.c4_page import is_filler, is_program
from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.curation.limits import Limit, limit_reasons
from weft.curation.split_words import count_sentences
from weft.registry import register
from weft.section import Section


class C4Settings(Section):
    """Settings of C4's rules on whole pages. The defaults are those of the C4 paper (Raffel et al. 2020)."""

    least_sentences: int = Field(
        5, ge=0, description="Smallest number of sentences in a document that is kept."
    )
    drop_filler: bool = Field(
        True, description="Whether documents with 'lorem ipsum' are dropped."
    )
    drop_brackets: bool = Field(
        True, description="Whether documents with a curly bracket are dropped."
    )


@register(
    "operator",
    "c4",
    settings=C4Settings,
    title="Pages of C4: enough sentences, no filler text, no curly brackets",
    paper="Raffel et al. 2020 (JMLR 21)",
    recipe="docs/how-to/document-scores.md",
    proof="tests/curation/test_heuristics.py",
    figure="decisions of datatrove's filter on 240 pages",
)
class C4:
    """Drops documents with few sentences, filler text or curly brackets (Raffel et al. 2020, JMLR 21). It runs after
    the operator ``c4-lines``.
    """

    late: ClassVar = ("least_sentences", "drop_filler", "drop_brackets")

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(C4Settings)

    def statistics(self, documents: Documents) -> dict[str, list[Any]]:
        lines = [text.splitlines() for text in documents.texts]
        return {
            "c4_sentences": [sum(map(count_sentences, page)) for page in lines],
            "c4_filler": [any(map(is_filler, page)) for page in lines],
            "c4_brackets": [any(map(is_program, page)) for page in lines],
        }

    def reasons(self, columns: Mapping[str, Sequence[Any]]) -> list[str]:
        settings = self.settings
        sentences = Limit("c4_sentences", "sentences", settings.least_sentences)
        few = limit_reasons([sentences], columns)
        filler, brackets = columns["c4_filler"], columns["c4_brackets"]

        def reason(i: int) -> str:
            if settings.drop_filler and filler[i]:
                return "filler text (lorem ipsum)"
            return "curly bracket" if settings.drop_brackets and brackets[i] else few[i]

        return [reason(i) for i in range(len(few))]
