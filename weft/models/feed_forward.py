"""The dense feed-forward layer of a block."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from weft.layout.boundary import gather_tokens, scatter_tokens
from weft.layout.mesh import Mesh
from weft.models.projections import Projections
from weft.models.triton_use import fuses
from weft.recipe import ModelShape
from weft.shapes.parameters import Table

T = torch.Tensor

#: Activations of the gate: SwiGLU (Shazeer 2020), GeGLU with the approximate GELU, or ReGLU.
ACTIVATE: dict[str, Callable[[T], T]] = {
    "silu": F.silu, "gelu": partial(F.gelu, approximate="tanh"), "relu": F.relu,
}  # fmt: skip

#: Gradient of each activation by its input, from the gradient by its output.
SLOPE: dict[str, Callable[[T, T], T]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "relu": partial(torch.ops.aten.threshold_backward, threshold=0),
}


class FeedForward(Projections):
    """A dense feed-forward with a gate: ``down(activate(gate(x)) * up(x))``.

    ``shape``: shape of the model; ``mesh``: ranks that share the model; ``table``: descriptions of the model's
    parameters; ``path``: name of this module in the model.
    """

    TOGETHER = (("gate", "up"), ("down",))

    def __init__(self, shape: ModelShape, mesh: Mesh, table: Table, path: str) -> None:
        super().__init__(shape, mesh, table, path)
        self.activate = ACTIVATE[shape.activation]
        for name in ("gate", "up", "down"):
            self.projection(name)

    def early(self, x: T, whole: T, seen: object) -> None:
        """Do nothing and return None, whatever the arguments are.

        Only a mixture of experts, which has the same method, begins work before attention.
        """

    def share(self, whole: T) -> T:
        """Map ``whole`` ``[batch, seq, embed]`` to this rank's part of the output, of the same shape.

        The output is the sum of the parts over the ranks of ``tp``.
        """
        return self.project(self.activated(whole), "down")[0]

    def activated(self, whole: T) -> T:
        """Return the input of ``down``, ``[batch, seq, ffn/tp]``, from ``whole`` ``[batch, seq, embed]``."""
        gate, up = self.project(whole, "gate", "up")  # [batch, seq, ffn/tp]
        if fuses(gate) and self.activate is F.silu and gate.shape[0] == 1:
            from weft.models.pointwise_kernels import silu_times

            return silu_times(gate, up)
        activated = self.activate(gate)
        # a result that nothing else reads, unless a gradient does
        fresh = torch.is_inference_mode_enabled()
        return activated.mul_(up) if fresh else activated * up

    def forward(self, x: T, seen: object = None, early: object = None) -> T:
        """Map ``x`` ``[batch, seq/tp, embed]`` to the output of the same shape; ``seen`` and ``early`` are not used."""
        return scatter_tokens(self.share(gather_tokens(x, self.mesh)), self.mesh)
