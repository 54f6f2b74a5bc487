"""The section ``[optimizer]``: how parameters are updated."""

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, field_validator

from weft.recipe.host_section import HostSection
from weft.registry import find
from weft.section import Section


class ParameterGroup(Section):
    """Settings for the parameters whose names match a pattern."""

    match: str = Field(description="Pattern of names, with * and ?.")
    lr: float = Field(1.0, ge=0, description="Factor of the learning rate.")
    weight_decay: float | None = Field(
        None, ge=0, description="Replaces the optimizer's weight decay."
    )


class Optimizer(HostSection):
    """How parameters are updated. ``weft techniques`` lists update rules; each brings settings of its own.

    Zeroth order: MeZO (Malladi et al. 2023), in pairs DistZO2 (Wang et al. 2025). ``wsd``: Hu et al. 2024.
    ``in_backward``: LOMO (Lv et al. 2023).
    """

    hosts: ClassVar = {"kind": "optimizer", "state": "moments"}

    estimate: Literal["backward", "zeroth-order"] = Field(
        "backward",
        description="How gradients are computed; zeroth-order estimates them from the "
        "losses at two points, without backward and unclipped.",
    )
    epsilon: PositiveFloat = Field(
        1e-3,
        description="zeroth-order: distance of the points, as a multiple of a random "
        "direction.",
    )
    pairs: bool = Field(
        False,
        description="zeroth-order: each of two ranks along dp evaluates one of the points, "
        "on the same sequences.",
    )
    kind: str = Field(
        "adamw",
        description="The update rule; rules for the matrices of blocks leave the rest to "
        "AdamW.",
    )
    state: str = Field(
        "float32", description="How AdamW's moments rest between updates."
    )
    ema: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Decay of a moving average of the parameters that is kept beside them; "
        "0 keeps none.",
    )
    use_ema: bool = Field(
        False,
        description="Validate, sample and export the average instead of the parameters.",
    )
    in_backward: bool = Field(
        False,
        description="Every block is updated as soon as backward has its gradients, which "
        "are then freed; needs clip = 0.",
    )
    groups: tuple[ParameterGroup, ...] = Field(
        (), description="Other settings for parameters by name."
    )
    lr: PositiveFloat = Field(3e-4, description="Learning rate after warm-up.")
    betas: tuple[float, float] = Field(
        (0.9, 0.95), description="Decays of AdamW's two moments."
    )
    eps: PositiveFloat = Field(
        1e-8, description="Added to the root of AdamW's second moment."
    )
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay.")
    clip: float = Field(
        1.0, ge=0, description="Largest global gradient norm; 0 turns clipping off."
    )
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine",
        description="How the learning rate falls until the run ends; wsd: it stays, and "
        "falls linearly at the end.",
    )
    warmup: int | float | None = Field(
        None,
        ge=0,
        description="Steps in which the learning rate rises, or a share of the run if below "
        "1; left out: a tenth of the run, at most 100 steps.",
    )
    decay: int = Field(
        0,
        ge=0,
        description="Steps of the final decay of wsd, at most all after warm-up; 0: a fifth "
        "of all.",
    )
    min_lr: float = Field(
        0.1, ge=0, le=1, description="Learning rate at the end, as a fraction of lr."
    )
    post_validation: bool = Field(
        False,
        description="Pipelines: update at once, and check the global norm a step later.",
    )

    @property
    def update_rule(self) -> Any:
        """What makes the update rule: the way in which moments rest, if not as the state does, or else the rule."""
        if self.state == "float32":
            return find("optimizer", self.kind).made
        return find("moments", self.state).made

    @property
    def elementwise(self) -> bool:
        """Whether a rank can update what it holds by itself."""
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
