"""Pair: real documents with rephrased ones, at an exact ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.registry import register
from weft.section import Section

if TYPE_CHECKING:
    import numpy as np

    from weft.curation.data_operators import Decision


class PairSettings(Section):
    """Settings of the operator that keeps real and rephrased documents at a given ratio."""

    ratio: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="Number of rephrased documents for each real one.",
    )
    seed: int = Field(
        0,
        description="Seed of the random choice of rephrased documents, where there are more than needed.",
    )


@register(
    "operator",
    "pair",
    settings=PairSettings,
    title="Pairs of real and rephrased documents",
    paper="Maini et al. 2024 (WRAP)",
    proof="tests/curation/test_pairing.py",
)
class Pair:
    """Keeps real documents together with the documents that were made from them, at an exact ratio (WRAP, Maini et al.
    2024). The column ``part`` says which kind a document is: "real" or "synthetic".
    """

    late: ClassVar = ("ratio", "seed")

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(PairSettings)

    def summarize(self, documents: Documents) -> dict[str, np.ndarray]:
        from weft.curation.pairing import pair_summary

        return pair_summary(documents)

    def decide(
        self,
        ids: Sequence[Sequence[str]],
        summaries: Sequence[Mapping[str, np.ndarray]],
    ) -> list[Decision]:
        from weft.curation.pairing import pair_documents

        return pair_documents(ids, summaries, self.settings.ratio, self.settings.seed)
