"""One direction of an exchange: how it compresses, and what compression has lost so far."""

from __future__ import annotations

from dataclasses import dataclass

from weft.saddle.saddle_problem import Values
from weft.sync.compressor import Compressor


@dataclass
class Direction:
    """How values are compressed in one direction, to the server or back.

    Attributes:
        ``compressor``: the compressor of the values.
        ``residuals``: what compression has lost so far, by sender and name of the tensor, to be added to the next
            message; None: it is not added.
    """

    compressor: Compressor
    residuals: dict[int, Values] | None = None

    def nbytes(self, values: Values) -> int:
        """Return the bytes of a message that has a tensor for each of ``values``."""
        return sum(self.compressor.nbytes(t.shape, t.dtype) for t in values.values())
