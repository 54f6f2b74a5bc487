"""The base of all modules: parameters are made with their logical description beside them."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.layout.dims import Dim, Logical
from weft.layout.mesh import Mesh


class Module(nn.Module):
    """A module whose parameters are created on the meta device with their logical description beside them."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.logical: dict[str, Logical] = {}

    if TYPE_CHECKING:  # registered parameters are tensors

        def __getattr__(self, name: str) -> Any: ...

    def weight(self, name: str, *dims: Dim, std: float | None, whole: bool = False) -> Logical:
        """Register parameter ``name`` with this rank's part of the tensor that ``dims`` describe."""
        self.logical[name] = logical = self.mesh.place.logical(dims, std, whole)
        self.register_parameter(name, nn.Parameter(torch.empty(logical.local_shape, device="meta")))
        return logical
