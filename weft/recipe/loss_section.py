"""The section ``[loss]``: what training minimises."""

from typing import Any, ClassVar

from pydantic import Field, PositiveFloat, ValidationInfo, field_validator

from weft.recipe.host_section import HostSection
from weft.registry import find, names


class Loss(HostSection):
    """The training loss (docs/how-to/preferences.md).

    ``weft techniques`` lists the losses that compare pairs of answers.
    """

    hosts: ClassVar = {"kind": "pair-loss"}

    kind: str = Field(
        "cross-entropy",
        description=(
            "The loss: 'cross-entropy' on the next token, a loss on pairs of answers such as "
            "'dpo' (docs/how-to/preferences.md), or a plugin's."
        ),
    )
    settings: dict[str, Any] = Field(
        {}, description="Keyword arguments for a plugin's loss."
    )
    beta: PositiveFloat = Field(
        0.1,
        description=(
            "Strength of a preference loss. In dpo, a larger value keeps the model closer to "
            "the reference; in orpo, it weighs the odds ratio."
        ),
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="Share of pairs that are assumed to have the better answer mislabelled.",
    )
    margin: float = Field(
        0.0,
        description=(
            "By how much simpo and reward want the chosen answer to score above the rejected "
            "one."
        ),
    )
    reference: str | None = Field(
        None,
        description="Model that a preference loss compares with. Left out: the model in model.from.",
    )

    @field_validator("*")
    @classmethod
    def _is_known(cls, value: Any, info: ValidationInfo) -> Any:
        """Take every name: a plugin's loss of tokens may have it, which the recipe looks for."""
        return value

    @property
    def pair_loss(self) -> Any:
        """Class of the loss on pairs of answers (:class:`weft.models.pair_loss.PairLoss`); None for other losses."""
        return find("pair-loss", self.kind).implementation if self.of_pairs else None

    @property
    def of_pairs(self) -> bool:
        return self.kind in names("pair-loss")

    @property
    def scores(self) -> bool:
        """Whether the loss trains a reward model, which has one output instead of logits."""
        return self.of_pairs and bool(self.pair_loss.scores)

    @property
    def is_own(self) -> bool:
        """Whether the loss is registered by a plugin."""
        return self.kind != "cross-entropy" and not self.of_pairs
