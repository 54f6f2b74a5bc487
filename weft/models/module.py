"""The base class of all modules, which registers parameters with a description of the whole tensor, and the norm."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.layout.dims import Logical
from weft.layout.mesh import Mesh
from weft.models.fused import rms_norm
from weft.shapes.parameters import Table


class Module(nn.Module):
    """Base class of modules whose parameters are made on the meta device, each with a description of the whole tensor.

    ``mesh``: ranks that share the model; ``table``: descriptions of the parameters of the model or of the module's
    layer (:mod:`weft.shapes.parameters`); ``path``: the module's name in the model.
    """

    def __init__(self, mesh: Mesh, table: Table | None = None, path: str = "") -> None:
        super().__init__()
        self.mesh = mesh
        self.described = table or {}
        self.path = path
        self.logical: dict[str, Logical] = {}

    if TYPE_CHECKING:  # registered parameters are tensors

        def __getattr__(self, name: str) -> Any: ...

    def inside(self, name: str) -> str:
        """Return the full name in the model of this module's parameter or submodule ``name``."""
        return f"{self.path}.{name}" if self.path else name

    def weight(self, name: str, whole: bool = False) -> Logical:
        """Register the parameter ``name`` of this module, on the meta device.

        Returns the description of the whole tensor. Type and dimensions come from the parameter table. The registered
        parameter is this rank's shard. ``whole``: whether the shard is not cut over mesh axes whose ranks compute the
        same data, such as ``tp``. A statistic (a tensor that no gradient changes) is never cut over them.
        """
        row = self.described[self.inside(name)]
        fixed = row.kind == "statistic"
        place = self.mesh.place
        logical = place.logical(row.dims, row.std, whole or fixed, everywhere=fixed)
        self.logical[name] = logical
        dtype = torch.uint8 if row.is_bytes else None
        values = torch.empty(logical.local_shape, device="meta", dtype=dtype)
        learns = values.is_floating_point() and not fixed
        self.register_parameter(name, nn.Parameter(values, requires_grad=learns))
        return logical

    def norm_of(self, name: str, eps: float) -> Any:
        """Return a new norm, the submodule called ``name`` of this module; None if the parameter table has no such
        norm.

        ``eps``: the constant that is added to the mean square.
        """
        path = self.inside(name)
        if f"{path}.scale" not in self.described:
            return None
        return Norm(self.mesh, self.described, path, eps)


class Norm(Module):
    """RMSNorm over the last dimension (Zhang & Sennrich 2019), with a trained scale.

    ``mesh``: ranks that share the model; ``table``: descriptions of the model's parameters; ``path``: name of this
    module in the model; ``eps``: constant added to the mean square.
    """

    def __init__(self, mesh: Mesh, table: Table, path: str, eps: float) -> None:
        super().__init__(mesh, table, path)
        self.eps = eps
        self.weight("scale")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.scale, self.eps)
