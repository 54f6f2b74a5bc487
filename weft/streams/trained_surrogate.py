"""Opens a trained surrogate, to predict with it what the simulation would have computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from warnings import warn

import numpy as np
import torch

from weft.checkpoint.model import open_model
from weft.errors import UsageError
from weft.models.array_model import ArrayModel


@dataclass(frozen=True)
class Surrogate:
    """A trained surrogate of a simulation. Call it with a mapping of inputs to predict the outputs. ``model``: the
    trained model.
    """

    model: ArrayModel = field(repr=False)

    def __call__(self, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the predicted outputs by name, each ``[rows, *shape]``.

        ``arrays``: the inputs by name, in the same form, as the training's simulators have sent them. Raises
        :class:`UsageError` for other names or shapes.
        """
        shapes = self.model.shape.inputs
        given = {name: np.asarray(array, np.float32) for name, array in arrays.items()}
        if given.keys() != shapes.keys():
            raise UsageError(
                f"the surrogate reads {', '.join(shapes)}, and {', '.join(given) or 'nothing'} was given"
            )
        rows = {len(array) if array.ndim else 0 for array in given.values()}
        for name, shape in shapes.items():
            if given[name].shape[1:] != shape or len(rows) > 1 or 0 in rows:
                raise UsageError(
                    f"input {name!r} has the shape {list(given[name].shape)}, and needs [rows, "
                    f"{', '.join(map(str, shape))}] with as many rows in every input"
                )
        device = next(self.model.parameters()).device
        with torch.inference_mode():
            predicted = self.model.predict(
                {name: torch.from_numpy(x).to(device) for name, x in given.items()}
            )
        return {name: x.float().cpu().numpy() for name, x in predicted.items()}


def open_surrogate(
    where: str | Path, device: str = "cpu", say: Callable[[str], None] = warn
) -> Surrogate:
    """Open the surrogate that a run with ``[stream]`` has trained.

    ``where``: the run's folder or a checkpoint. ``device``: where it computes. ``say``: called with a line for each
    damaged checkpoint that was skipped for an older one. Raises :class:`UsageError` for a model of tokens.
    """
    model = open_model(str(where), device, say).model
    if not isinstance(model, ArrayModel):
        raise UsageError(
            f"{where} is a model of tokens, which weft generate and weft serve read; open_surrogate is for runs with "
            "[stream]"
        )
    return Surrogate(model)
