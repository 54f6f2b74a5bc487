"""Classifier: documents by a logistic regression on their hashed n-grams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.curation.limits import Limit, limit_reasons
from weft.curation.ngram_classifier import file_digest, load_classifier
from weft.paths import home_path
from weft.registry import register
from weft.section import Section


class ClassifierSettings(Section):
    """Settings of the filter of documents by a trained classifier."""

    model: str = Field(description="File of a classifier, from weft data classify.")
    least: float = Field(
        0.5,
        ge=0,
        le=1,
        description=(
            "Smallest probability of a document that is kept; 0 keeps all, for operator 'top' to choose the best share."
        ),
    )
    column: str = Field(
        "quality", description="Name of the column to which the probability is written."
    )


@register(
    "operator",
    "classifier",
    settings=ClassifierSettings,
    title="Documents like good examples, by hashed n-grams",
    paper="Joulin et al. 2017 (1607.01759); Li et al. 2024 (DCLM, 2406.11794)",
    recipe="docs/how-to/document-scores.md",
    proof="tests/curation/test_classifier.py",
    figure="AUC at least 0.95 on packages of the standard library that it was not trained on, against spoilt copies",
)
class Classifier:
    """Drops documents that a trained classifier finds too unlike its positive examples (Joulin et al. 2017; DCLM, Li et
    al. 2024). A column has the classifier's probability.
    """

    late = ("least",)

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(ClassifierSettings)
        self.file = home_path(self.settings.model)
        self.classifier = load_classifier(self.file)

    def fingerprint(self) -> str:
        """Return a digest of the classifier's file. The results of this step are computed again when it changes."""
        return file_digest([self.file])

    def statistics(self, documents: Documents) -> dict[str, list[Any]]:
        scores = [self.classifier.probability(text) for text in documents.texts]
        return {self.settings.column: scores}

    def reasons(self, columns: Mapping[str, Sequence[Any]]) -> list[str]:
        limit = Limit(self.settings.column, self.settings.column, self.settings.least)
        return limit_reasons([limit], columns)
