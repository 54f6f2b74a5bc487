"""Top: the best documents by a column, such as the score of a classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field, model_validator

from weft.curation.best_documents import Keep, choose_best, score_order
from weft.curation.column_values import group_column, number_column
from weft.curation.data_operators import Decision
from weft.curation.data_pipeline import DataStep
from weft.curation.document_selection import SelectionSettings, drop_reasons, kept_line
from weft.curation.documents import Documents
from weft.curation.duplicate_groups import flat_ids, joined_summaries, split_decisions
from weft.registry import register


class TopSettings(SelectionSettings):
    """Settings of the operator that selects documents by a column of numbers."""

    column: str = Field(
        "",
        description=(
            "Column of numbers by which documents are ranked. With keep = 'random' it must not be "
            "set."
        ),
    )
    keep: Keep = Field(
        "high",
        description="Which documents are kept: those of high or of low values, or random ones.",
    )
    group: str = Field(
        "",
        description="Column of classes or other groups. At least 'floor' documents of each group are kept.",
    )
    floor: int = Field(
        0, ge=0, description="Smallest number of documents of each group that are kept."
    )
    seed: int = Field(
        0, ge=0, description="Seed of the random choice with keep = 'random'."
    )

    @model_validator(mode="after")
    def _columns(self) -> TopSettings:
        if bool(self.column) == (self.keep == "random"):
            raise ValueError(
                "keep = 'high' and 'low' need column, the numbers to select by; keep = 'random' has none"
            )
        if self.floor and not self.group:
            raise ValueError("floor needs group, the column of classes that it is for")
        return self


@register(
    "operator",
    "top",
    settings=TopSettings,
    title="The best share of documents by a column, with a floor for each class",
    paper="Li et al. 2024 (DCLM, 2406.11794); Sorscher et al. 2022 (2206.14486)",
    recipe="data/scores.toml",
    proof="tests/curation/test_selectors.py",
    figure="all kept is identity; independent of shards and order",
)
class Top:
    """Keeps a share or a number of the documents: those with the highest or lowest values in a column, or random ones
    (DCLM, Li et al. 2024; Sorscher et al. 2022). Documents without a value come last; equal values are ordered by the
    documents' ids.
    """

    late: ClassVar = ("share", "number", "keep", "floor", "seed")

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(TopSettings)
        self._said: list[str] = []

    def notes(self) -> list[str]:
        """Return how many documents of each group the last decision has kept."""
        return self._said

    def summarize(self, documents: Documents) -> dict[str, np.ndarray]:
        column, group = self.settings.column, self.settings.group
        none = np.zeros(len(documents))
        return {
            "scores": number_column(documents, column, "column") if column else none,
            "groups": group_column(documents, group, "group")
            if group
            else none.astype(np.str_),
        }

    def decide(
        self,
        ids: Sequence[Sequence[str]],
        summaries: Sequence[Mapping[str, np.ndarray]],
    ) -> list[Decision]:
        ours, names = self.settings, flat_ids(ids)
        scores = joined_summaries(summaries, "scores")
        groups = joined_summaries(summaries, "groups")
        order = score_order(scores, names, ours.keep, ours.seed)
        kept = choose_best(
            order, ours.count(len(names)), groups if ours.group else None, ours.floor
        )
        self._said = [kept_line(ours.group, groups, kept)] if ours.group else []
        reason = (
            "not drawn"
            if ours.keep == "random"
            else f"not among the best by {ours.column}"
        )
        return split_decisions(ids, {}, drop_reasons(kept, reason))
