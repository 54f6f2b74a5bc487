"""The time of layers in a pass, forward and backward, for whoever chooses by measured times."""

from __future__ import annotations

import time

import torch

T = torch.Tensor


class PassClock:
    """Measures the seconds of forward and backward of a pass through layers, from this object's creation on. The
    attribute ``seconds`` is the time of both together; None until backward has gone through the layers.
    """

    def __init__(self) -> None:
        self._forward, self._begun = 0.0, now()
        self.seconds: float | None = None

    def watch(self, x: T, y: T) -> None:
        """Note the end of forward, and let the gradients of ``x`` and ``y`` note end and beginning of backward. ``x``,
        ``y``: input and output of the layers. If they have no gradients, only forward is measured.
        """
        self._forward = now() - self._begun
        if not (x.requires_grad and y.requires_grad):
            self.seconds = self._forward
            return
        y.register_hook(self._back)
        x.register_hook(self._end)

    def _back(self, grad: T) -> None:
        self._begun = now()

    def _end(self, grad: T) -> None:
        self.seconds = self._forward + now() - self._begun


def now() -> float:
    """Return a monotonic time in seconds, after waiting for all work that was queued on the GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
