"""The section ``[memory]``: where tensors rest while they are not in use."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from weft.recipe.conflicts import Asked, refuse
from weft.recipe.section import Section

#: Where tensors can rest while they are not in use, the nearest first.
PLACES = ("device", "host", "file")


Place = Literal["device", "host", "file"]


class Memory(Section):
    """Where tensors rest while they are not in use: on the ``device``, in the ``host``'s memory, or in a ``file``.

    ``weights``: the rank's own rows of the parameters, in full precision. They are updated where they rest, or on the
    host if that is a file (ZeRO-Offload, Ren et al. 2021). ``gradients``, once reduced, and the optimizer's ``moments``
    rest with the weights by default; moments may be further away. ``activations``: what backward needs of the first
    ``blocks`` blocks of every pass; 0 takes as many as transfers can hide, by a profile of passes. ``folder`` is where
    the files are. They have no names, and disappear with the run however it ends. ``speculate``: which units are
    updated during backward, before the global norm decides about clipping, and undone if it clips (SuperOffload, Lian
    et al. 2025): "all", or with "even" as many as balance a step's transfers. ``alternate``: with weights and moments
    on the host, this share of the units is updated on the device meanwhile (Deep Optimizer States, Maurya et al. 2024);
    "auto": the fastest share, by rates measured in the first steps. ``buffer``: MiB of weights from a file that stay in
    memory from forward to backward, beyond what a step needs in any case.
    """

    weights: Place = "device"
    gradients: Literal["", "device", "host", "file"] = ""
    moments: Literal["", "device", "host", "file"] = ""
    activations: Place = "device"
    blocks: int = Field(
        0,
        ge=0,
        description="how many blocks' activations leave; 0: as many as travel hidden",
    )
    folder: str = "."
    buffer: int = Field(
        0,
        ge=0,
        description="MiB of weights from files that stay from forward to backward",
    )
    speculate: Literal["none", "even", "all"] = "none"
    alternate: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = 0.0

    def place_of(self, kind: str) -> str:
        """Where weights, gradients, moments or activations rest."""
        return getattr(self, kind) or self.weights

    def distance(self, kind: str) -> int:
        return PLACES.index(self.place_of(kind))

    @property
    def away(self) -> dict[str, str]:
        """Where weights, gradients, moments and activations rest, for those that do not rest on the device."""
        kinds = ("weights", "gradients", "moments", "activations")
        return {kind: self.place_of(kind) for kind in kinds if self.distance(kind)}

    @property
    def offloads_state(self) -> bool:
        return self.weights != "device"

    @property
    def offloads_activations(self) -> bool:
        return self.activations != "device"

    @field_validator("folder")
    @classmethod
    def _local(cls, folder: str) -> str:
        if "://" in folder:  # which would be a folder of that name, here
            raise ValueError("it should be a folder of this computer, on a local disk")
        return folder

    @model_validator(mode="after")
    def _together(self) -> Self:
        refuse(Asked(memory=self), "memory")
        return self
