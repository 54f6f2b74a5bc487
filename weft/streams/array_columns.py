"""The arrays of a sample: their names and shapes, and their place in a row of float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from weft.errors import UsageError

#: How a row travels and is kept: float32, the lowest byte first.
ROW_TYPE = np.dtype("<f4")


@dataclass(frozen=True)
class ArrayColumns:
    """Names and shapes of a sample's arrays. A row is a flat vector with the values of all arrays of one sample, in the
    order of ``shapes``. ``shapes``: shape of each array by its name.
    """

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def width(self) -> int:
        """Number of values of a row, that is, of all arrays of a sample together."""
        return sum(map(prod, self.shapes.values()))

    @property
    def table(self) -> list[list[Any]]:
        """The columns as JSON values: pairs of name and shape."""
        return [[name, list(shape)] for name, shape in self.shapes.items()]

    def pack(self, arrays: Mapping[str, Any]) -> np.ndarray:
        """Join the arrays of a sample to a row, float32 ``[width]``. ``arrays``: numbers or arrays by name. Raises
        :class:`UsageError` for other names or shapes, and for values that are not numbers.
        """
        if arrays.keys() != self.shapes.keys():
            raise UsageError(
                f"a sample has the arrays {', '.join(map(str, arrays)) or 'none'}, and the training reads "
                f"{', '.join(self.shapes)}"
            )
        parts = []
        for name, shape in self.shapes.items():
            try:
                array = np.asarray(arrays[name], ROW_TYPE)
            except (TypeError, ValueError) as error:
                raise UsageError(f"array {name!r} of a sample has no numbers: {error}") from None  # fmt: skip
            if array.shape != shape:
                raise UsageError(
                    f"array {name!r} of a sample has the shape {list(array.shape)}, and the training reads "
                    f"{list(shape)}"
                )
            parts.append(array.reshape(-1))
        return np.concatenate(parts)

    def unpack(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Cut ``rows`` ``[rows, width]`` into the arrays of the samples, each ``[rows, *shape]``, by name."""
        arrays, at = {}, 0
        for name, shape in self.shapes.items():
            size = prod(shape)
            arrays[name] = rows[:, at : at + size].reshape(len(rows), *shape)
            at += size
        return arrays


def columns_of_table(table: Any) -> ArrayColumns:
    """Return the columns that :attr:`ArrayColumns.table` describes. Raises :class:`ValueError` for anything else."""
    try:
        shapes = {str(name): tuple(int(size) for size in shape) for name, shape in table}  # fmt: skip
    except (TypeError, ValueError):
        raise ValueError("no table of columns") from None
    if len(shapes) != len(table) or any(min(s, default=1) < 1 for s in shapes.values()):
        raise ValueError("no table of columns")
    return ArrayColumns(shapes)
