"""Settings of operators that compute embeddings of documents with a model."""

from typing import Literal

from pydantic import Field

from weft.section import Section


class EmbeddingSettings(Section):
    """Settings that say by which model, and how, a document is embedded as a vector."""

    pooling: Literal["mean", "last"] = Field(
        "mean",
        description=(
            "How a text's embedding is made of the final hidden states: their 'mean', or that of the 'last' "
            "token."
        ),
    )
    most_tokens: int = Field(
        512,
        ge=1,
        description="Largest number of tokens that the model reads of a text, from its start.",
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
