"""An environment that dies, hangs or raises when its tests ask for it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from weft.rl.control.environment_kinds import LineWalk


class FaultyWalk(LineWalk):
    """Walk that does ``fault`` in the step after ``at`` steps, as long as the file ``once`` is not there.

    ``fault``: "die", "hang", "raise" or "nan". It makes the file before, so that the environment is whole afterwards.
    """

    def __init__(self, fault: str, once: str, at: int = 3, limit: int = 6) -> None:
        super().__init__(limit=limit)
        self._fault, self._once, self._at, self._taken = fault, Path(once), at, 0

    def step(self, action: Any) -> Any:
        self._taken += 1
        if self._taken > self._at and not self._once.exists():
            if self._fault != "always":
                self._once.touch()
            if self._fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self._fault == "hang":
                time.sleep(600)
            if self._fault in ("raise", "always"):
                raise ZeroDivisionError("the ground is gone")
            return np.array([np.nan, 0.0]), 0.0, False, False, {}
        return super().step(action)
