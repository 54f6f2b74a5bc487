"""The section ``[optimizer]``: how parameters are updated."""

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, field_validator

from weft.recipe.host_section import HostSection
from weft.registry import find
from weft.section import Section


class ParameterGroup(Section):
    """Settings of the optimizer for the parameters whose names match a pattern."""

    match: str = Field(
        description=(
            "Names of the parameters in this group, as a pattern in which * stands for any text and ? for any "
            "character, such as 'blocks.*.attention.*'."
        )
    )
    lr: float = Field(
        1.0,
        ge=0,
        description="Number by which the learning rate is multiplied for these parameters. 0: they are not updated.",
    )
    weight_decay: float | None = Field(
        None,
        ge=0,
        description=(
            "Weight decay of these parameters. If not set: optimizer.weight_decay for matrices, none for vectors."
        ),
    )


class Optimizer(HostSection):
    """Section on how the optimizer updates parameters: update rule, learning rate, weight decay and clipping.

    ``weft techniques`` lists the update rules and the settings of each. Papers of the other methods: MeZO
    (``estimate``, Malladi et al. 2023), DistZO2 (``pairs``, Wang et al. 2025), LOMO (``in_backward``, Lv et al. 2023),
    and the schedule ``wsd`` (Hu et al. 2024).
    """

    hosts: ClassVar = {"kind": "optimizer", "state": "moments"}
    asks: ClassVar = {
        "estimate": "zeroth-order",
        "post_validation": "post-validation",
        "in_backward": "in-backward",
    }

    estimate: Literal["backward", "zeroth-order"] = Field(
        "backward",
        description=(
            "How gradients are computed. 'backward': by a backward pass; 'zeroth-order': estimated from the losses "
            "of two forward passes with slightly changed weights (MeZO), which needs little memory."
        ),
    )
    epsilon: PositiveFloat = Field(
        1e-3,
        description=(
            "For estimate = 'zeroth-order': how far the weights are moved along a random direction. One forward "
            "pass is computed at this distance forwards, the other at the same distance backwards."
        ),
    )
    pairs: bool = Field(
        False,
        description=(
            "For estimate = 'zeroth-order': whether two ranks of dp compute the same sequences, each with one of "
            "the two forward passes. If false, each rank runs both passes on sequences of its own."
        ),
    )
    kind: str = Field(
        "adamw",
        description=(
            "Update rule. For all parameters: 'adamw', 'adafactor' (no first moment, compressed second moment), "
            "'lion' (sign of an average of gradients) or 'sgd' (no momentum). For the matrices within blocks alone, "
            "with AdamW for all other parameters: 'muon' (momentum made orthogonal), 'galore' or 'natural-galore' "
            "(Adam on projected gradients)."
        ),
    )
    state: str = Field(
        "float32",
        description=(
            "Number format in which AdamW's two moments are kept. Fewer bits take less memory and are less exact."
        ),
    )
    ema: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Decay of a moving average of the weights, such as 0.999: the share of the old average that each step "
            "keeps. The average is kept beside the weights (see use_ema). 0: no average."
        ),
    )
    use_ema: bool = Field(
        False,
        description=(
            "Whether validation, generation and exports use the averaged weights of 'ema' instead of the latest "
            "ones."
        ),
    )
    in_backward: bool = Field(
        False,
        description=(
            "Update each block during backward and free its gradients at once, to save memory (LOMO). It needs clip "
            "= 0, since the norm of all gradients is not known yet."
        ),
    )
    groups: tuple[ParameterGroup, ...] = Field(
        (),
        description=(
            "Learning rates and weight decays for some of the parameters, chosen by name. If several groups match a "
            "parameter, the last one counts."
        ),
    )
    lr: PositiveFloat = Field(
        3e-4,
        description="Largest learning rate, which is reached at the end of the warm-up.",
    )
    betas: tuple[float, float] = Field(
        (0.9, 0.95),
        description=(
            "Two decay rates, each the share of an old average that a step keeps. For AdamW and GaLore: those of "
            "the first and of the second moment. For Lion: those of the average whose sign is the update, and of "
            "the average that is kept."
        ),
    )
    eps: PositiveFloat = Field(
        1e-8,
        description=(
            "Small number added to the denominator of AdamW's and GaLore's updates, against division by zero."
        ),
    )
    weight_decay: float = Field(
        0.1,
        ge=0,
        description=(
            "Decoupled weight decay of matrices: each step subtracts this number times the learning rate times the "
            "weight. Vectors, such as norms and biases, do not decay, unless optimizer.groups says so. 0: no decay."
        ),
    )
    clip: float = Field(
        1.0,
        ge=0,
        description=(
            "Largest norm of all gradients together, taken as one vector. Larger gradients are scaled down to this "
            "norm. 0: no clipping."
        ),
    )
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine",
        description=(
            "How the learning rate falls after the warm-up. 'cosine': along half a cosine until the end of the run; "
            "'linear': in a straight line until the end; 'wsd': only in the last steps, whose number is 'decay'; "
            "'constant': not at all."
        ),
    )
    warmup: int | float | None = Field(
        None,
        ge=0,
        description=(
            "Number of steps in which the learning rate rises from 0 to 'lr' in a straight line. A number between 0 "
            "and 1 is a share of the run. 0: no warm-up. If not set: a tenth of the run, at most 100 steps."
        ),
    )
    decay: int = Field(
        0,
        ge=0,
        description=(
            "For schedule = 'wsd': number of steps at the end of the run in which the learning rate falls. 0: a "
            "fifth of the run."
        ),
    )
    min_lr: float = Field(
        0.1,
        ge=0,
        le=1,
        description=(
            "Learning rate at the end of the run, as a share of 'lr': 0.1 is a tenth. Schedule 'constant' does not "
            "use it."
        ),
    )
    post_validation: bool = Field(
        False,
        description=(
            "For pipelines: update parameters without waiting for the norm of all gradients. The norm is checked a "
            "step later, and an update that should have been clipped is undone and repeated."
        ),
    )

    @property
    def update_rule(self) -> Any:
        """Class of the update rule that ``kind`` names. If ``state`` names another form of the moments than float32, it
        is the rule that keeps them in that form.
        """
        if self.state == "float32":
            return find("optimizer", self.kind).implementation
        return find("moments", self.state).implementation

    @property
    def elementwise(self) -> bool:
        """Whether a rank can update its shard of a parameter without data of other ranks."""
        return bool(getattr(self.update_rule, "elementwise", False))

    @field_validator("warmup")
    @classmethod
    def _steps_or_share(cls, warmup: int | float | None) -> int | float | None:
        if not isinstance(warmup, float) or 0 < warmup < 1:
            return warmup
        if not warmup.is_integer():
            raise ValueError(
                "it should be a whole number of steps, or a share of the run below 1"
            )
        return int(warmup)
