"""The module that simulated clients train: a model of arrays, from one input to the logits of classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from weft.errors import UsageError
from weft.plugins import model_technique

if TYPE_CHECKING:
    from weft.recipe import Recipe


class ArrayClassifier(nn.Module):
    """Maps samples ``[rows, values]`` to logits ``[rows, classes]`` by the model for arrays that ``recipe`` describes.

    This model must have one input array and one output array.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        model = recipe.model
        ((self._input, self._shape),) = model.inputs.items()
        ((self._output, (self.classes,)),) = model.outputs.items()
        self.values = int(torch.Size(self._shape).numel())
        with torch.random.fork_rng([]):
            torch.manual_seed(recipe.train.seed)
            self.net = model_technique(model).implementation(model.inputs, model.outputs, **model.settings)  # fmt: skip
        self.to(torch.float64 if recipe.train.dtype == "float64" else torch.float32)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        arrays = {self._input: rows.reshape(len(rows), *self._shape)}
        logits: torch.Tensor = self.net(arrays)[self._output]
        return logits

    def check(self, values: int, classes: int) -> None:
        """Raise :class:`UsageError` if the model does not fit the samples.

        ``values``: number of values of a sample. ``classes``: number of classes.
        """
        if values != self.values:
            raise UsageError(
                f"model.inputs has {self.values} values, and a sample of federated.samples has {values}; set "
                f"model.inputs = {{ {self._input} = [{values}] }}"
            )
        if classes > self.classes:
            raise UsageError(
                f"model.outputs has {self.classes} classes, and federated.samples has {classes}; set model.outputs = "
                f"{{ {self._output} = [{classes}] }}"
            )
