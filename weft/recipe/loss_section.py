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

    ``cross-entropy`` of the labels; or, on pairs of answers of which one is preferred, ``dpo`` (Rafailov et al. 2023),
    ``dpo-norm`` (of averages over tokens, Rafailov et al. 2024), ``ipo`` (Azar et al. 2023), ``robust`` (Chowdhury et
    al. 2024), ``hinge`` (Zhao et al. 2023), ``simpo`` (Meng et al. 2024), ``orpo`` (Hong et al. 2024)
    and ``reward``, which trains a model with a scalar head to score answers (Bradley & Terry 1952).

    ``beta`` multiplies the difference of the two answers, and for ``orpo`` the odds ratio's part of the loss;
    ``label_smoothing`` is the assumed share of pairs with swapped labels; ``margin`` is by how much ``simpo`` and
    ``reward`` want the chosen answer ahead. ``reference``: the model that the other losses keep close to; by default
    the one from which the run starts. ``kto`` (Ethayarajh et al. 2024) learns from answers that are each good or bad
    (data of kind ``feedback``), which it counts ``desirable`` and ``undesirable`` times.

    Any other kind is a plugin's (docs/plugins.md), which is called with ``settings``.
    """

    kind: str = "cross-entropy"
    settings: dict[str, Any] = Field({})
    beta: PositiveFloat = 0.1
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    margin: float = 0.0
    reference: str | None = None
    desirable: PositiveFloat = 1.0
    undesirable: PositiveFloat = 1.0

    @property
    def of_pairs(self) -> bool:
        return self.kind in PAIR_LOSSES

    @property
    def is_own(self) -> bool:
        """Whether a plugin computes it."""
        return self.kind not in ("cross-entropy", *PAIR_LOSSES)
