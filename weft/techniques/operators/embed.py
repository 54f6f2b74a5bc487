"""Embed: a column with a vector of each document, by a model."""

from __future__ import annotations

from pydantic import Field

from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.curation.embedding_settings import EmbeddingSettings
from weft.registry import register


class EmbedSettings(EmbeddingSettings):
    """Settings of the operator that computes an embedding (a vector) of each document: the model, and the column to
    write.
    """

    model: str = Field(
        description=(
            "Model that computes the embeddings: a run, a checkpoint, a folder of Hugging Face, a "
            "GGUF file or an id of the hub."
        )
    )
    column: str = Field(
        "embedding", description="Name of the column to which the vectors are written."
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
    """Adds a column of vectors of norm 1, which operators ``clusters``, ``prune`` and ``semantic`` read (Reimers &
    Gurevych 2019).

    The vector of a document is its embedding by a language model; a document without tokens has None.
    """

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(EmbedSettings)

    def fingerprint(self) -> str:
        """Return a hash of the model's weights and tokenizer. The results of this step are computed again when it
        changes.
        """
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
