"""Embed: a column with a vector of each document, by a model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.registry import register
from weft.section import Section


class EmbedSettings(Section):
    """Settings of the operator that computes document embeddings."""

    model: str = Field(
        description="A run, a checkpoint, a folder of Hugging Face, a GGUF file or an id of the hub."
    )
    column: str = Field("embedding", description="Column of the vectors.")
    pooling: Literal["mean", "last"] = Field(
        "mean",
        description="Vector: mean of the final hidden states, or the last token's.",
    )
    most_tokens: int = Field(
        512, ge=1, description="Tokens of a text that the model reads, from its start."
    )
    weights: Literal["float", "bfloat16", "int8", "int4"] = Field(
        "float",
        description=(
            "Number format of the model's weights: 'float': as the model is loaded; 'bfloat16'; 'int8' and 'int4': "
            "quantised to so many bits when the model is loaded (docs/how-to/generate.md)."
        ),
    )
    device: Literal["cpu", "cuda"] = Field(
        "cpu", description="Device on which the model computes."
    )


@register(
    "operator",
    "embed",
    settings=EmbedSettings,
    title="Vectors of documents by a model, for clusters and pruning",
    paper="Reimers & Gurevych 2019 (1908.10084)",
    recipe="docs/how-to/document-scores.md",
    proof="tests/curation/test_text_loss.py",
    figure="the vectors of operator `semantic`",
)
class Embed:
    """Adds a column of vectors of norm 1, which operators ``clusters``, ``prune`` and ``semantic`` read.

    A document without tokens has None.
    """

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(EmbedSettings)

    def fingerprint(self) -> str:
        """Return a hash of the model's weights and tokenizer."""
        from weft.curation.text_loss import model_and_tokenizer_hash

        return model_and_tokenizer_hash(self.settings.model)

    def map(self, documents: Documents) -> Documents:
        from weft.curation.text_embeddings import embed_documents

        ours = self.settings
        vectors = embed_documents(
            documents.texts,
            ours.model,
            ours.weights,
            ours.device,
            ours.pooling,
            ours.most_tokens,
        )
        values = [vector.astype(float).tolist() or None for vector in vectors]
        return documents.with_columns({ours.column: values})
