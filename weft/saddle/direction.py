"""One direction of an exchange: how it compresses, and what compression has lost so far."""

from __future__ import annotations

from dataclasses import dataclass

from weft.saddle.saddle_problem import Values
from weft.sync.compressor import Compressor


@dataclass
class Direction:
    """One direction of the exchange.

    Attributes:
        ``compressor``: the compressor of what is sent.
        ``residuals``: what compression has lost so far, by sender and name of the tensor; None without feedback.
    """

    compressor: Compressor
    residuals: dict[int, Values] | None = None

    def nbytes(self, values: Values) -> int:
        """Return the bytes of one message with a tensor for each of ``values``."""
        return sum(self.compressor.nbytes(t.shape, t.dtype) for t in values.values())
