"""The section ``[optimizer]``: how parameters are updated."""

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, field_validator

from weft.recipe.host_section import HostSection
from weft.registry import find
from weft.section import Section


class ParameterGroup(Section):
    """Settings for the parameters whose names match ``match`` (with ``*`` and ``?``).

    ``lr`` multiplies the learning rate; ``weight_decay`` replaces the optimizer's.
    """

    match: str
    lr: float = Field(1.0, ge=0)
    weight_decay: float | None = Field(None, ge=0)


class Optimizer(HostSection):
    """How parameters are updated.

    The learning rate rises to ``lr`` in ``warmup`` steps, or in that share of the run if it is below 1. Left out, the
    warm-up takes a tenth of the run, and at most 100 steps. After it, ``schedule``: ``cosine``, ``linear``, ``wsd``
    (stable, and a linear decay at the end; Hu et al. 2024) or ``constant``. Both end where the run does: at
    ``train.steps``, or where ``data.epochs`` are over.

    ``estimate``: how gradients are computed; ``zeroth-order`` estimates them from the losses at two points, ``epsilon``
    times a random direction away, without backward and unclipped (MeZO, Malladi et al. 2023). ``pairs``: each of two
    ranks along ``dp`` evaluates one of the points, on the same sequences (DistZO2, Wang et al. 2025). ``kind``:
    the update rule, by its name; ``weft techniques`` lists them, and each brings settings of its own. Rules for the
    matrices of blocks leave the rest to AdamW. ``state``: how AdamW's moments rest between updates. ``ema``: decay of a
    moving average of the parameters that is kept beside them; 0 keeps none. ``use_ema``: validate, sample and export
    this average instead of the parameters. ``in_backward``: every block is updated as soon as backward has its
    gradients, which are then freed (LOMO, Lv et al. 2023); needs ``clip = 0``.
    """

    hosts: ClassVar = {"kind": "optimizer", "state": "moments"}

    estimate: Literal["backward", "zeroth-order"] = "backward"
    epsilon: PositiveFloat = 1e-3
    pairs: bool = False
    kind: str = "adamw"
    state: str = "float32"
    ema: float = Field(0.0, ge=0, lt=1)
    use_ema: bool = False
    in_backward: bool = False
    groups: tuple[ParameterGroup, ...] = ()
    lr: PositiveFloat = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: float = Field(0.1, ge=0)
    clip: float = Field(
        1.0, ge=0, description="global gradient norm; 0 turns clipping off"
    )
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup: int | float | None = Field(None, ge=0)
    decay: int = Field(
        0,
        ge=0,
        description="steps of the final decay of 'wsd', at most all after warm-up; 0: a fifth of all",
    )
    min_lr: float = Field(0.1, ge=0, le=1, description="floor as a fraction of lr")
    post_validation: bool = Field(
        False,
        description="pipelines: update at once, check the global norm a step later",
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
