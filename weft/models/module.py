"""The base of all modules: parameters are made with their logical description beside them; and the norm."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.layout.dims import Dim, Logical
from weft.layout.mesh import Mesh
from weft.models.fused import rms_norm


class Module(nn.Module):
    """A module whose parameters are created on the meta device with their logical description beside them."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.logical: dict[str, Logical] = {}

    if TYPE_CHECKING:  # registered parameters are tensors

        def __getattr__(self, name: str) -> Any: ...

    def weight(
        self, name: str, *dims: Dim, std: float | None, whole: bool = False, everywhere: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Logical:  # fmt: skip
        """Register parameter ``name`` with this rank's part of the tensor that ``dims`` describe.

        ``everywhere``: every rank holds all of that as its state, and no gradient changes it. ``dtype``,
        where it is not one to compute in: such a parameter cannot learn.
        """
        self.logical[name] = logical = self.mesh.place.logical(
            dims, std, whole, everywhere
        )
        values = torch.empty(logical.local_shape, device="meta", dtype=dtype)
        learns = values.is_floating_point() and not everywhere
        self.register_parameter(name, nn.Parameter(values, requires_grad=learns))
        return logical


class Norm(Module):
    """RMSNorm (Zhang & Sennrich 2019)."""

    def __init__(self, dim: Dim, eps: float, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.eps = eps
        self.weight("scale", dim, std=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.scale, self.eps)
