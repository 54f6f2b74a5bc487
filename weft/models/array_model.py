"""Models that read arrays instead of tokens: surrogates of simulations.

A surrogate ``model(inputs, outputs, **settings)`` of kind "surrogate" returns a ``torch.nn.Module`` whose
``forward(arrays)`` gets the inputs by name, each ``[rows, *shape]``, and returns the outputs by name in the same form.
Rows are samples, and no row may depend on another. Like a plugin's model of tokens the module is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from weft.data.batch import IGNORE, Batch
from weft.errors import UsageError, WeftError
from weft.layout.mesh import Mesh
from weft.models.hooks import NO_HOOKS, Hooks
from weft.models.plugin_loss import TokenLoss
from weft.models.plugin_model import PluginModel
from weft.plugins import blaming, model_technique
from weft.recipe import ModelShape

T = torch.Tensor
ArrayShapes = Mapping[str, Sequence[int]]


def flattened(arrays: Mapping[str, T], shapes: ArrayShapes) -> T:
    """Return the arrays that ``shapes`` names, each ``[rows, *shape]``, side by side as ``[rows, values]``."""
    return torch.cat([arrays[n].reshape(len(arrays[n]), prod(s)) for n, s in shapes.items()], 1)  # fmt: skip


class FlatArrays(nn.Module):
    """Wraps the module ``net``, a map of vectors, as a map of arrays with names. The inputs of a row are joined to one
    vector, and the vector that ``net`` returns is cut into the outputs. ``inputs``, ``outputs``: shapes of the
    arrays by name.
    """

    def __init__(
        self, net: nn.Module, inputs: ArrayShapes, outputs: ArrayShapes
    ) -> None:
        super().__init__()
        self.net, self.inputs, self.outputs = net, dict(inputs), dict(outputs)

    def forward(self, arrays: Mapping[str, T]) -> dict[str, T]:
        """Return the outputs by name, each ``[rows, *shape]``, for the inputs ``arrays`` in the same form."""
        predicted = self.net(flattened(arrays, self.inputs))
        parts = predicted.split([prod(shape) for shape in self.outputs.values()], 1)
        return {
            name: part.reshape(len(part), *shape)
            for part, (name, shape) in zip(parts, self.outputs.items(), strict=True)
        }


def mean_squared_error(predicted: T, target: T) -> T:
    """Return the mean squared difference of ``predicted`` and ``target``, ``[rows, values]`` each, for each row:
    ``[rows]``.
    """
    return (predicted - target).square().mean(1)


class ArrayModel(PluginModel):
    """A surrogate of a simulation in place of a transformer, trained like a :class:`PluginModel`. The loss of a sample
    is the mean squared error over all values of its outputs. If ``loss.kind`` names a plugin's loss, that function
    computes the loss of each sample, from predicted and simulated values, both ``[rows, values]``. The arguments are
    those of :class:`PluginModel`.
    """

    def __init__(
        self,
        shape: ModelShape,
        mesh: Mesh,
        loss_chunk: int = 1024,
        hooks: Hooks = NO_HOOKS,
    ) -> None:
        super().__init__(shape, mesh, loss_chunk, hooks)
        own = hooks.criterion
        self.row_losses: Callable[[T, T], T] = (
            own.of if isinstance(own, TokenLoss) else mean_squared_error
        )

    def predict(self, arrays: Mapping[str, T]) -> dict[str, T]:
        """Return the outputs by name, each ``[rows, *shape]``, for the inputs ``arrays``, in the type of the weights.

        Raises :class:`WeftError` if the module returns other arrays.
        """
        who = model_technique(self.shape)
        dtype = next(self.net.parameters()).dtype
        given = {name: arrays[name].to(dtype) for name in self.shape.inputs}
        predicted: dict[str, T] = blaming(who, self.net)(given)
        rows = len(next(iter(given.values())))
        wanted = {name: [rows, *s] for name, s in self.shape.outputs.items()}
        if not isinstance(predicted, dict):
            raise WeftError(f"{who} returned {type(predicted).__name__}, and returns a dict of {wanted}")  # fmt: skip
        shapes = {name: list(x.shape) for name, x in predicted.items()}
        if shapes != wanted:
            raise WeftError(f"{who} returned {shapes} where {wanted} are needed")
        return predicted

    def forward(
        self, tokens: T, positions: T, cu_seqlens: T, learned: Batch | None = None, only: slice | T | None = None,
        seen: Any = None, hooks: Hooks | None = None, route: Sequence[int] | None = None,
    ) -> T:  # fmt: skip
        """Return the summed loss of the samples in ``learned``, whose ``arrays`` hold inputs and outputs. The arguments
        are those of :meth:`weft.models.transformer.Transformer.forward`. Raises :class:`UsageError` if ``learned`` is
        None, because this model reads no tokens.
        """
        if learned is None or learned.arrays is None:
            raise UsageError(
                f"model.kind = {self.shape.kind!r} reads arrays, and neither reads nor writes text; weft.streams."
                "open_surrogate predicts with it"
            )
        rows = (learned.labels[:, 0] != IGNORE).nonzero()[:, 0]
        arrays = {name: x[rows] for name, x in learned.arrays.items()}
        predicted = self.predict(arrays)
        flat = flattened(predicted, self.shape.outputs)
        target = flattened(arrays, self.shape.outputs)
        flat = flat if flat.dtype == torch.float64 else flat.float()
        losses = self.row_losses(flat, target.to(flat.dtype))
        if not isinstance(losses, T) or losses.shape != rows.shape:
            returned = list(losses.shape) if isinstance(losses, T) else type(losses).__name__  # fmt: skip
            raise WeftError(
                f"a plugin's loss returned {returned} for {len(rows)} samples; it returns one loss for each"
            )
        return losses.double().sum()
