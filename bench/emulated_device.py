"""A plugin under which an engine's passes take as long as on a device that this machine does not have.

    weft serve --checkpoint MODEL --engines 3 --plugin emulated_device

Everything else is the product's: a tiny model computes, then the pass sleeps until the time that the device would have
taken is over. So several engines share this machine's cores without being measured by them. Cache blocks that travel
layer by layer leave when the tiny model has computed them. Two variables change the speed:
``EMULATED_SPEEDS``, a JSON object with the speed of engines by their names, where it is not 1, and ``EMULATED_SLOW``,
by which all seconds are multiplied.
"""

import json
import os
import sys
from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any, NamedTuple

import torch

from weft.generate.reader import PagedReader
from weft.generate.scheduler import ScheduledStep


class DeviceTimes(NamedTuple):
    """Seconds of a pass: ``fixed``, and for each ``token`` that it computes and each ``key`` that a text reads."""

    fixed: float = 0.020
    token: float = 0.00008
    key: float = 0.000001

    def seconds(self, step: ScheduledStep) -> float:
        """Return the seconds of the pass of ``step``."""
        tokens = sum(step.work.values())
        keys = sum(request.computed + n for request, n in step.work.items())
        return self.fixed + self.token * tokens + self.key * keys


TIMES = DeviceTimes()


def speed_of(words: list[str]) -> float:
    """Return the speed of the engine that the command line ``words`` starts."""
    slow = float(os.environ.get("EMULATED_SLOW", "1"))
    speeds = json.loads(os.environ.get("EMULATED_SPEEDS", "{}"))
    names = [word.removeprefix("--name=") for word in words if word.startswith("--name=")]  # fmt: skip
    return (float(speeds.get(names[-1], 1.0)) if names else 1.0) / slow


def emulate(speed: float) -> None:
    """Let every pass of a reader take its time on the device, at this ``speed``."""
    start = PagedReader.start

    def slowly(
        self: PagedReader, step: ScheduledStep, *rest: Any
    ) -> Callable[[], torch.Tensor]:
        ends = perf_counter() + TIMES.seconds(step) / speed
        logits = start(self, step, *rest)
        sleep(max(0.0, ends - perf_counter()))
        return logits

    PagedReader.start = slowly  # type: ignore[method-assign]


emulate(speed_of(sys.argv))
