"""Bad words: documents with a word of a list."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from weft.cache import digest
from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.errors import WeftError
from weft.paths import home_path
from weft.registry import register
from weft.section import Section


class BadWordsSettings(Section):
    """Settings of the filter that drops documents with words of a list."""

    path: str = Field(description="File with a word or a phrase per line.")
    apart: bool = Field(
        True,
        description="Whether words must stand apart from letters and digits; false for scripts without spaces.",
    )
    most_bad_words: int = Field(
        0, ge=0, description="Largest number of these words in a document that is kept."
    )


@register(
    "operator",
    "bad-words",
    settings=BadWordsSettings,
    title="Documents with words of a list",
    paper="Raffel et al. 2020 (JMLR 21)",
    recipe="docs/how-to/document-scores.md",
    proof="tests/curation/test_heuristics.py",
    figure="words apart from others, and in scripts without spaces anywhere",
)
class BadWords:
    """Drops documents with words of a list, in any case (Raffel et al. 2020, JMLR 21)."""

    late: ClassVar = ("most_bad_words",)

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(BadWordsSettings)
        self.words = _read_words(home_path(self.settings.path))
        either = "|".join(map(re.escape, self.words))
        apart = rf"(?<!\w)(?:{either})(?!\w)"
        self.pattern = re.compile(apart if self.settings.apart else either)

    def fingerprint(self) -> str:
        """Return a digest of the list's words. The results of this step are computed again when it changes."""
        return digest(self.words)

    def statistics(self, documents: Documents) -> dict[str, list[Any]]:
        counts = [len(self.pattern.findall(text.lower())) for text in documents.texts]
        return {"bad_words": counts}

    def reasons(self, columns: Mapping[str, Sequence[Any]]) -> list[str]:
        most = self.settings.most_bad_words
        reason = "a bad word" if most == 0 else f"more than {most} bad words"
        return [reason if count > most else "" for count in columns["bad_words"]]


def _read_words(path: Path) -> list[str]:
    """Return the words of the file in lower case, the longest first, so that a phrase counts before its first word."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WeftError(
            f"steps.path: the list of words {path} cannot be read ({error}); give a text file with a word per line"
        ) from None
    words = {line.strip().lower() for line in lines} - {""}
    if not words:
        raise WeftError(
            f"steps.path: the list of words {path} is empty; write a word per line"
        )
    return sorted(words, key=lambda word: (-len(word), word))
