"""Perplexity: documents by the loss that a model has on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.curation.limits import Limit, limit_reasons
from weft.registry import register
from weft.section import Section


class PerplexitySettings(Section):
    """Settings of the filter of documents by the loss of a language model."""

    model: str = Field(
        description=(
            "Model under which the loss is computed: a run, a checkpoint, a folder of Hugging Face, a "
            "GGUF file or an id of the hub."
        )
    )
    least: float | None = Field(
        None,
        description="Smallest loss of a document that is kept, in nats per token. If not set: no limit.",
    )
    most: float | None = Field(
        None,
        description="Largest loss of a document that is kept, in nats per token. If not set: no limit.",
    )
    column: str = Field(
        "loss", description="Name of the column to which the loss is written."
    )
    window: int = Field(
        0,
        ge=0,
        description=(
            "Number of tokens of a text that the model reads at once; 0: the length with which it was "
            "trained."
        ),
    )
    device: Literal["cpu", "cuda"] = Field(
        "cpu", description="Device on which the model computes."
    )

    @model_validator(mode="after")
    def _in_order(self) -> PerplexitySettings:
        if self.least is not None and self.most is not None and self.least > self.most:
            raise ValueError(
                f"least = {self.least:g} is above most = {self.most:g}; nothing would be kept"
            )
        return self


@register(
    "operator",
    "perplexity",
    settings=PerplexitySettings,
    title="Documents by the loss per token of any model that Weft opens",
    paper="Wenzek et al. 2020 (CCNet, 1911.00359); Marion et al. 2023 (2309.04564)",
    recipe="docs/how-to/document-scores.md",
    proof="tests/curation/test_text_loss.py",
    figure="the model's own loss to 1e-6, the same for a document alone",
)
class Perplexity:
    """Drops documents that surprise a language model too little or too much (Wenzek et al. 2020; Marion et al. 2023).
    The setting ``column`` names a column with the loss in nats per token; a second column, with "_tokens" behind the
    name, has the number of tokens. Documents of fewer than two tokens have no loss; they are dropped if there is a
    limit.
    """

    late = ("least", "most")

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(PerplexitySettings)

    def fingerprint(self) -> str:
        """Return a hash of the model's weights and tokenizer. The results of this step are computed again when it
        changes.
        """
        from weft.curation.text_loss import model_and_tokenizer_hash

        return model_and_tokenizer_hash(self.settings.model)

    def statistics(self, documents: Documents) -> dict[str, list[Any]]:
        from weft.curation.text_loss import text_losses

        ours = self.settings
        losses = text_losses(documents.texts, ours.model, ours.device, ours.window)
        return {
            # NaN stands in no JSON
            ours.column: [x.loss if x.loss == x.loss else None for x in losses],
            f"{ours.column}_tokens": [x.tokens for x in losses],
        }

    def reasons(self, columns: Mapping[str, Sequence[Any]]) -> list[str]:
        ours = self.settings
        limit = Limit(ours.column, ours.column, ours.least, ours.most)
        return limit_reasons([limit], columns)
