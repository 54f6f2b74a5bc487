"""What counts as a reward. It needs nothing else, so that processes of environments begin fast."""

from __future__ import annotations

import math
from typing import Any

#: The largest reward, as the square of a much larger one is no float32.
LARGEST = 1e15


class NotAReward(ValueError):
    """Raised for a value that is no reward; the text says what it is."""


def reward_value(given: Any) -> float:
    """Return the number ``given`` as a reward. Raises :class:`NotAReward` unless it is finite and not too large."""
    try:
        value = float(given)
    except (TypeError, ValueError):
        raise NotAReward(
            f"returned {type(given).__name__}, which is no number"
        ) from None
    except OverflowError:
        raise NotAReward("returned an int that is too large") from None
    if not math.isfinite(value):
        raise NotAReward(f"returned {value}")
    if abs(value) > LARGEST:
        raise NotAReward(f"returned {value:g}, more than {LARGEST:g}")
    return value
