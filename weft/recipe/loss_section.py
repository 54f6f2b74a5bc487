"""The section ``[loss]``: what training minimises."""

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, ValidationInfo, field_validator

from weft.recipe.host_section import HostSection
from weft.registry import find, names


class Loss(HostSection):
    """The training loss (docs/how-to/preferences.md).

    ``weft techniques`` lists the losses that compare pairs of answers.
    """

    hosts: ClassVar = {"kind": "pair-loss"}
    asks: ClassVar = {"teachers": "distillation"}

    kind: str = Field(
        "cross-entropy",
        description=(
            "The loss. 'cross-entropy': on the next token; 'reward': for a reward model; 'kto': on answers that are "
            "good or bad; the other losses compare a better with a worse answer to the same prompt "
            "(docs/how-to/preferences.md describes each). A plugin's name is also possible."
        ),
    )
    settings: dict[str, Any] = Field(
        {},
        description="Keyword arguments for a plugin's loss, such as { gamma = 2.0 }.",
    )
    beta: PositiveFloat = Field(
        0.1,
        description=(
            "Strength of a loss on answers. In losses with a reference model, such as 'dpo' and 'kto', a larger "
            "value keeps the model closer to it; in 'orpo' it is the weight of the comparison beside the "
            "cross-entropy; in 'simpo' the difference between the two answers is multiplied by it. 'cross-entropy' "
            "and 'reward' do not use it."
        ),
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description=(
            "Share of the pairs of answers in which the worse answer is assumed to be marked as the better one by "
            "mistake. 'dpo', 'dpo-norm', 'robust', 'simpo' and 'reward' use it. 0: no pair."
        ),
    )
    margin: float = Field(
        0.0,
        description=(
            "For kind = 'simpo' and 'reward': by how much the better answer should score above the worse one. A "
            "margin that the data give for a pair is added."
        ),
    )
    reference: str | None = Field(
        None,
        description=(
            "Reference model, which is not trained, for losses that compare the trained model's probabilities with "
            "those of another model, such as 'dpo'. If not set: the model in model.from."
        ),
    )

    teachers: tuple[str, ...] = Field(
        (),
        description=(
            "Trained models that the model learns to imitate (distillation): runs, checkpoints or other names as in "
            "model.from, with the same tokenizer. With several, their outputs are averaged. Empty: none."
        ),
    )
    teacher_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description=(
            "For 'teachers': weight of the loss that compares the model's probabilities with those of the teachers. "
            "The cross-entropy on the next token has the weight 1 - teacher_share."
        ),
    )
    teacher_average: Literal["probabilities", "logits"] = Field(
        "probabilities",
        description=(
            "For several 'teachers': which of their outputs are averaged, their probabilities or their logits."
        ),
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
        """Whether the loss trains a reward model, which computes one score for a text instead of logits."""
        return self.of_pairs and bool(self.pair_loss.scores)

    @property
    def is_own(self) -> bool:
        """Whether ``kind`` names a loss that a plugin has registered."""
        return self.kind != "cross-entropy" and not self.of_pairs
