"""A unit of one parameter that no rank ever has whole: passes bring parts of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from weft.parallel.state import Held
from weft.parallel.units import OWN, Full, TableUnit

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.memory.on_device import OnDevice

T = torch.Tensor


class PartUnit(TableUnit):
    """Unit of one parameter that is never gathered whole: each pass reads the parts it needs, and reduces their
    gradients.

    The arguments are those of :class:`weft.parallel.units.TableUnit`, with one parameter. A subclass sets the attribute
    ``held``, a list with the parameter as this rank holds it.
    """

    def __init__(
        self, full: Full, mesh: Mesh, compute: torch.dtype, tiers: OnDevice
    ) -> None:  # fmt: skip
        self.mesh, self.compute, self.tiers = mesh, compute, tiers
        self.replicas, self.sharing = mesh.sharing(full.logical)
        self.size = mesh.size(self.sharing)
        self.learns = full.parameter.requires_grad
        self.wide = torch.promote_types(compute, torch.float32) if self.learns else compute  # fmt: skip
        self.live, self.near, self.full = True, None, []

    def gather(self, values: Callable[[Held], T] = OWN) -> None:
        """Do nothing, because passes read the parts of the parameter themselves."""

    def fold(self) -> None:
        """Do nothing, because the gradient of each part is reduced as soon as it is computed."""

    def reduce(self) -> None:
        """Do nothing, because the gradient of each part is reduced as soon as it is computed."""
