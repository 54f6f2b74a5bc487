"""The section ``[loss]``: what training minimises."""

from typing import Any

from pydantic import Field, PositiveFloat

from weft.section import Section

#: Losses that compare pairs of answers; plugins bring other losses.
PAIR_LOSSES = (
    "dpo",
    "dpo-norm",
    "ipo",
    "robust",
    "hinge",
    "simpo",
    "orpo",
    "kto",
    "reward",
)


class Loss(Section):
    """The training loss (docs/preference.md).

    Of pairs of answers: ``dpo`` (Rafailov et al. 2023), ``dpo-norm`` (of averages over tokens, Rafailov et al. 2024),
    ``ipo`` (Azar et al. 2023), ``robust`` (Chowdhury et al. 2024), ``hinge`` (Zhao et al. 2023), ``simpo`` (Meng et al.
    2024), ``orpo`` (Hong et al. 2024), and ``reward``, which trains a model with a scalar head to score answers
    (Bradley & Terry 1952). ``kto`` (Ethayarajh et al. 2024) learns from answers that are each good or bad.
    """

    kind: str = Field(
        "cross-entropy",
        description="cross-entropy of the labels, a loss that compares pairs of answers, or "
        "a plugin's.",
    )
    settings: dict[str, Any] = Field(
        {}, description="Keywords that a plugin's loss is called with."
    )
    beta: PositiveFloat = Field(
        0.1,
        description="Factor of the difference of two answers; of orpo, of the odds ratio's "
        "part.",
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Assumed share of pairs with swapped labels."
    )
    margin: float = Field(
        0.0, description="By how much simpo and reward want the chosen answer ahead."
    )
    reference: str | None = Field(
        None,
        description="Model that the loss keeps close to; left out: the one from which the "
        "run starts.",
    )
    desirable: PositiveFloat = Field(
        1.0, description="kto: how many times a good answer counts."
    )
    undesirable: PositiveFloat = Field(
        1.0, description="kto: how many times a bad answer counts."
    )

    @property
    def of_pairs(self) -> bool:
        return self.kind in PAIR_LOSSES

    @property
    def is_own(self) -> bool:
        """Whether a plugin computes it."""
        return self.kind not in ("cross-entropy", *PAIR_LOSSES)
