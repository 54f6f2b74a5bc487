"""Cut-repeated: texts without the paragraphs that other documents have, too."""

from __future__ import annotations

from weft.curation.data_operators import OperatorFailed
from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.curation.repeated_paragraphs import without_spans
from weft.registry import register


@register(
    "operator",
    "cut-repeated",
    title="Texts without repeated paragraphs",
    paper="Soldaini et al. 2024 (2402.00159)",
    recipe="data/duplicates.toml",
    proof="tests/curation/test_repeated_paragraphs.py",
    figure="texts without what is marked, and all else of them",
)
class CutRepeated:
    """Removes from the documents' texts those paragraphs that the operator ``paragraphs`` has marked (Soldaini et al.
    2024). A text may be empty afterwards.
    """

    def __init__(self, step: DataStep) -> None:
        del step

    def map(self, documents: Documents) -> Documents:
        spans = documents.columns.get("repeated_spans")
        if spans is None:
            raise OperatorFailed(
                "operator 'cut-repeated' needs the column 'repeated_spans'; put a step 'paragraphs' before it"
            )
        texts = [
            without_spans(text, of or ())
            for text, of in zip(documents.texts, spans, strict=True)
        ]
        # what was cut is not there any more
        done: list[list[int]] = [[] for _ in texts]
        cut = Documents(documents.ids, texts, documents.columns)
        return cut.with_columns({"repeated_spans": done})
