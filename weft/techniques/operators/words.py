"""Words: documents with too few or too many words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.registry import register
from weft.section import Section


class WordsSettings(Section):
    """Settings of the limits on the number of words of a document."""

    least: int = Field(
        50, ge=0, description="Smallest number of words in a document that is kept."
    )
    most: int = Field(
        100_000, ge=1, description="Largest number of words in a document that is kept."
    )


@register("operator", "words", settings=WordsSettings, title="Limits on words")
class Words:
    """Drops documents with fewer or more words than its settings allow. A word is a string between white spaces."""

    late: ClassVar = ("least", "most")

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(WordsSettings)

    def statistics(self, documents: Documents) -> dict[str, list[Any]]:
        return {"words": [len(text.split()) for text in documents.texts]}

    def reasons(self, columns: Mapping[str, Sequence[Any]]) -> list[str]:
        least, most = self.settings.least, self.settings.most

        def reason(words: int) -> str:
            if words < least:
                return f"fewer than {least} words"
            return f"more than {most} words" if words > most else ""

        return [reason(words) for words in columns["words"]]
