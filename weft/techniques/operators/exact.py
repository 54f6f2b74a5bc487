"""Exact: documents whose texts are equal."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from weft.curation.data_operators import Decision
from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.curation.duplicate_groups import (
    SurvivorSettings,
    choose_survivors,
    connected_groups,
    equal_neighbours,
    flat_ids,
    joined_summaries,
    survivor_decisions,
    survivor_scores,
)
from weft.curation.shingles import simplified
from weft.registry import register


def _as_it_is(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _without_spaces(text: str) -> bytes:
    return _as_it_is(" ".join(unicodedata.normalize("NFC", text).split()))


def _words(text: str) -> bytes:
    return b" ".join(simplified(text).replace(b"\0", b" ").split())


#: What of a text is compared, by the value of the setting.
COMPARED: dict[str, Callable[[str], bytes]] = {
    "text": _as_it_is,
    "spaces": _without_spaces,
    "words": _words,
}


class ExactSettings(SurvivorSettings):
    """Settings of the removal of exact duplicates: what is compared, and which document of equal ones is kept."""

    normalize: Literal["text", "spaces", "words"] = Field(
        "spaces",
        description="What is compared: the text as it is; the text with every run of white space as one space, in "
        "Unicode's form NFC; or its words in small letters without accents and punctuation, every digit as 0.",
    )


@register(
    "operator",
    "exact",
    settings=ExactSettings,
    title="Exact duplicates",
    paper="Lee et al. 2022 (2107.06499)",
    recipe="data/duplicates.toml",
    proof="tests/curation/test_duplicates.py",
    figure="equal texts are always duplicates; the same result in any shards and order",
)
class Exact:
    """Drops documents whose normalised text equals that of another document (Lee et al. 2022). Texts are compared by a
    hash of 128 bits.
    """

    late: ClassVar = ()

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(ExactSettings)

    def summarize(self, documents: Documents) -> dict[str, np.ndarray]:
        compared = COMPARED[self.settings.normalize]
        digests = [
            blake2b(compared(text), digest_size=16).digest() for text in documents.texts
        ]
        keys = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
        return {"keys": keys, "scores": survivor_scores(documents, self.settings)}

    def decide(
        self,
        ids: Sequence[Sequence[str]],
        summaries: Sequence[Mapping[str, np.ndarray]],
    ) -> list[Decision]:
        names = flat_ids(ids)
        pairs = equal_neighbours(joined_summaries(summaries, "keys"))
        groups = connected_groups(len(names), *pairs)
        scores = joined_summaries(summaries, "scores")
        survivors = choose_survivors(groups, scores, names)
        return survivor_decisions(ids, survivors, "duplicate", "exact_copies")
