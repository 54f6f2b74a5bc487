"""Decontaminate: documents that have texts of evaluation sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from pydantic import Field

from weft.curation.data_operators import OperatorFailed
from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.curation.evaluation_index import (
    EvaluationIndex,
    build_evaluation_index,
    count_overlaps,
    files_digest,
)
from weft.errors import WeftError
from weft.registry import register
from weft.section import Section


class DecontaminateSettings(Section):
    """Settings of the operator that removes texts of evaluation sets from training data."""

    sets: Sequence[str] = Field(
        min_length=1,
        description=(
            "Evaluation sets: a file, a folder or a glob each. Every text field of their records is looked "
            "for in the documents."
        ),
    )
    ngram: int = Field(
        13,
        ge=1,
        description=(
            "Number of consecutive words of an evaluation text that count as a hit if a document contains "
            "them."
        ),
    )
    least_words: int = Field(
        8,
        ge=1,
        description=(
            "Evaluation texts with fewer words are not looked for. Texts with more, but fewer than 'ngram', "
            "are looked for as a whole."
        ),
    )
    most_hits: int = Field(
        0, ge=0, description="Largest number of hits in a document that is kept."
    )


@register(
    "operator",
    "decontaminate",
    settings=DecontaminateSettings,
    title="Decontamination",
    paper="Brown et al. 2020 (2005.14165)",
    recipe="docs/how-to/duplicates.md",
    proof="tests/curation/test_evaluation_index.py",
    figure="counts are those of a search without hashes",
)
class Decontaminate:
    """Drops documents that have sequences of words of evaluation sets (Brown et al. 2020).

    The column ``contamination_hits`` counts the places of a document where such a sequence begins, and
    ``contaminated_by`` lists the sets. Words are those of the simplified text, without case, accents and punctuation.
    """

    late: ClassVar = ("most_hits",)

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(DecontaminateSettings)

    @cached_property
    def index(self) -> EvaluationIndex:
        """The index of the evaluation sets, read once in each process."""
        ours = self.settings
        try:
            return build_evaluation_index(ours.sets, ours.ngram, ours.least_words)
        except WeftError as error:  # none of a single document
            raise OperatorFailed(str(error)) from None

    def fingerprint(self) -> str:
        """Return a digest of the contents of the evaluation sets. The results of this step are computed again when it
        changes.
        """
        return files_digest(self.settings.sets)

    def notes(self) -> list[str]:
        """Return a line for each evaluation set that has texts too short to be searched for."""
        ours = self.settings
        least = min(ours.least_words, ours.ngram)
        return [
            f"{skipped:,} texts of {name} are not looked for, as they have fewer than {least} words"
            for name, skipped in zip(self.index.names, self.index.skipped, strict=True)
            if skipped
        ]

    def statistics(self, documents: Documents) -> dict[str, list[Any]]:
        counts = count_overlaps(documents.texts, self.index)
        names = self.index.names
        return {
            "contamination_hits": counts.hits.tolist(),
            "contaminated_by": [
                [name for name, hit in zip(names, row, strict=True) if hit]
                for row in counts.sets
            ],
        }

    def reasons(self, columns: Mapping[str, Sequence[Any]]) -> list[str]:
        most = self.settings.most_hits
        pairs = zip(
            columns["contamination_hits"], columns["contaminated_by"], strict=True
        )
        return [
            f"contaminated by {', '.join(sets)}: {hits} hit{'s' * (hits != 1)}"
            if hits > most
            else ""
            for hits, sets in pairs
        ]
