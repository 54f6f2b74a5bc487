"""What a server looks at before it believes an update: form, finite numbers, size, and whether it waits for it."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from weft.errors import WeftError
from weft.federated.privacy_budget import clipped_difference, difference_norm

T = torch.Tensor
#: Accepted updates with which a new one is compared, and how many there must be.
REMEMBERED, ENOUGH = 20, 5


@dataclass
class UpdateJudge:
    """Refuses updates that would damage the model.

    Attributes:
        ``clip``: norm to which differences are scaled down; 0: none.
        ``largest``: an update is refused if its norm per step is more than this multiple of the median of the last
            accepted ones; 0: no limit.
        ``norms``: norms per step of the last accepted updates.
    """

    clip: float = 0.0
    largest: float = 0.0
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def accepted(self, difference: Mapping[str, T], steps: int) -> dict[str, T]:
        """Return ``difference``, a client's update of ``steps`` local steps, clipped to the norm ``clip``. Raises
        :class:`WeftError` if a value is not finite, or the norm per step is over the limit.
        """
        check_finite(difference)
        norm = difference_norm(difference)
        if not norm < float("inf"):
            raise WeftError("its norm is no finite number")
        self.judge(norm / max(1, steps))
        self.norms.append(norm / max(1, steps))
        return clipped_difference(difference, self.clip)

    def judge(self, norm: float) -> None:
        """Raise :class:`WeftError` if ``norm``, the norm per step of an update, is over the limit."""
        if not self.largest or len(self.norms) < ENOUGH:
            return
        usual = statistics.median(self.norms)
        if norm > self.largest * usual > 0:
            raise WeftError(
                f"its norm per step is {norm:.3g}, and {usual:.3g} is usual: more than federated.largest = "
                f"{self.largest:g} times as much"
            )


def check_finite(difference: Mapping[str, T]) -> None:
    """Raise :class:`WeftError` if an element of ``difference`` is not a finite number."""
    for name, x in difference.items():
        if not bool(torch.isfinite(x).all()):
            raise WeftError(f"{name} has elements that are not finite numbers")
