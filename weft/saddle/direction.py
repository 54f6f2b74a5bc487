"""One direction of an exchange: how it compresses, and what compression has lost so far."""

from __future__ import annotations

from dataclasses import dataclass

from weft.saddle.saddle_problem import Values
from weft.sync.compressor import Compressor


@dataclass
class Direction:
    """How vectors are compressed in one direction: from the devices to the server, or from the server to the devices.

    Attributes:
        ``compressor``: the compressor of the values.
        ``residuals``: the errors of compression that are added to the next message (error feedback), by sender and name
            of the tensor; None: no error feedback.
    """

    compressor: Compressor
    residuals: dict[int, Values] | None = None

    def nbytes(self, values: Values) -> int:
        """Return the bytes of a message with all tensors of ``values``, each compressed. They depend on shapes and
        types alone.
        """
        return sum(self.compressor.nbytes(t.shape, t.dtype) for t in values.values())
