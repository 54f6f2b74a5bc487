"""The norm in front of everything that a block does."""

import torch

from weft.layout.dims import Dim
from weft.layout.mesh import Mesh
from weft.models.fused import rms_norm
from weft.models.module import Module


class Norm(Module):
    """RMSNorm (Zhang & Sennrich 2019)."""

    def __init__(self, dim: Dim, eps: float, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.eps = eps
        self.weight("scale", dim, std=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.scale, self.eps)
