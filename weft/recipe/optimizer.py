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
            "Names of parameters, as a pattern with * (any text) and ? (any character)."
        )
    )
    lr: float = Field(
        1.0,
        ge=0,
        description=(
            "Number by which the learning rate is multiplied for these parameters; 0: they "
            "stay as they are."
        ),
    )
    weight_decay: float | None = Field(
        None,
        ge=0,
        description="Weight decay for these parameters. If not set: that of [optimizer].",
    )


class Optimizer(HostSection):
    """Section on how the optimizer updates parameters: update rule, learning rate, weight decay and clipping.

    ``weft techniques`` lists the update rules, each of which brings settings of its own. The other methods are from
    these papers: ``estimate`` MeZO (Malladi et al. 2023), ``pairs`` DistZO2 (Wang et al. 2025), ``in_backward`` LOMO
    (Lv et al. 2023), and the schedule ``wsd`` Hu et al. 2024.
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
            "How gradients are computed: by a backward pass, or estimated from two forward "
            "passes without one ('zeroth-order', MeZO), which needs little memory."
        ),
    )
    epsilon: PositiveFloat = Field(
        1e-3,
        description=(
            "zeroth-order: size e of the random change of the weights. One forward pass adds "
            "e times a random direction to the weights, the other subtracts it."
        ),
    )
    pairs: bool = Field(
        False,
        description=(
            "zeroth-order: let two ranks of dp share the same sequences, each with one of the"
            " two forward passes."
        ),
    )
    kind: str = Field(
        "adamw",
        description=(
            "Update rule. 'adamw', 'adafactor' (no first moment, compressed second), 'lion' "
            "(sign of an average of gradients) and 'sgd' (no momentum) update all parameters."
            " 'muon' (momentum made orthogonal), 'galore' and 'natural-galore' (Adam on "
            "projected gradients) update the matrices of blocks, and AdamW all other "
            "parameters."
        ),
    )
    state: str = Field(
        "float32",
        description=(
            "Number format of AdamW's two moments. Fewer bits take less memory."
        ),
    )
    ema: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Keep a moving average of the weights, with this decay (such as 0.999); 0: keep "
            "none."
        ),
    )
    use_ema: bool = Field(
        False,
        description=(
            "Validate, sample and export the averaged weights of 'ema' instead of the latest "
            "ones."
        ),
    )
    in_backward: bool = Field(
        False,
        description=(
            "Update each block during backward and free its gradients at once, to save memory "
            "(LOMO). It needs clip = 0."
        ),
    )
    groups: tuple[ParameterGroup, ...] = Field(
        (), description="Settings for some of the parameters, chosen by name."
    )
    lr: PositiveFloat = Field(3e-4, description="Learning rate after warm-up.")
    betas: tuple[float, float] = Field(
        (0.9, 0.95), description=("Decay rates of AdamW's first and second moment.")
    )
    eps: PositiveFloat = Field(
        1e-8,
        description="Small number added to the denominator of AdamW, against division by zero.",
    )
    weight_decay: float = Field(
        0.1,
        ge=0,
        description=(
            "Decoupled weight decay: each step subtracts this number times the learning rate "
            "times the weight from every weight. 0: none."
        ),
    )
    clip: float = Field(
        1.0,
        ge=0,
        description=(
            "Largest norm of all gradients together, as one vector; larger gradients are "
            "scaled down to it. 0: no clipping."
        ),
    )
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine",
        description=(
            "How the learning rate falls after warm-up: along a cosine ('cosine'), in a "
            "straight line ('linear'), only in the last steps, whose number 'decay' gives "
            "('wsd'), or not at all ('constant')."
        ),
    )
    warmup: int | float | None = Field(
        None,
        ge=0,
        description=(
            "Number of steps in which the learning rate rises from 0 to 'lr'; a number between 0 and 1 is a share of "
            "the run, and 0 means none. If not set: a tenth of the run, at most 100 steps."
        ),
    )
    decay: int = Field(
        0,
        ge=0,
        description=(
            "Schedule 'wsd': number of steps at the end of the run in which the learning rate"
            " falls; 0: a fifth of the run."
        ),
    )
    min_lr: float = Field(
        0.1,
        ge=0,
        le=1,
        description=(
            "Learning rate at the end of the run, as a share of 'lr'. Schedule 'constant' "
            "does not use it."
        ),
    )
    post_validation: bool = Field(
        False,
        description=(
            "With a pipeline: update without waiting for the gradient norm, check it a step "
            "later, and undo and repeat the update if it had to be clipped."
        ),
    )

    @property
    def update_rule(self) -> Any:
        """Class of the update rule: that of ``kind`` or, if moments are not in float32, that of ``state``."""
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
