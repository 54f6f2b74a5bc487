"""Workflows: jobs of several requests, one after the other, that are to be done by a common deadline.

An agent that writes SQL, for instance, links the schema, writes candidates, corrects them, and selects one. Each of
these stages is a request, or several at once (HexGen-Text2SQL, 2505.05286).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Workflow:
    """A request's place in a workflow, a job of several stages, each of which is one or more requests.

    Attributes:
        ``id``: name of the workflow; all its requests have the same.
        ``stage``: label of this request's stage. Stages with equal labels are taken to be about equally long.
        ``remaining``: labels of the stages that come after this one, in order.
        ``deadline``: when the last stage is to be done, in seconds of the clock ``time.monotonic`` of this process;
            infinity if there is no deadline.
    """

    id: str
    stage: str = ""
    remaining: tuple[str, ...] = ()
    deadline: float = math.inf

    def frame(self, now: float) -> dict[str, Any]:
        """Return the workflow as JSON for another process, whose clock differs: its deadline becomes the milliseconds
        that are left. ``now``: the time of this process's clock.
        """
        left = None if math.isinf(self.deadline) else 1000 * (self.deadline - now)
        return {
            "id": self.id,
            "stage": self.stage,
            "remaining": list(self.remaining),
            "deadline_ms": left,
        }

    @classmethod
    def of_frame(cls, frame: Mapping[str, Any], now: float) -> "Workflow":
        """Build a workflow from the JSON that :meth:`frame` returns. ``now``: the time of this process's clock."""
        left = frame["deadline_ms"]
        deadline = math.inf if left is None else now + left / 1000
        return cls(frame["id"], frame["stage"], tuple(frame["remaining"]), deadline)

    def stage_deadline(self, now: float, seconds: Callable[[str], float]) -> float:
        """Return when this stage is to be done, in seconds of ``time.monotonic``. The time until the workflow's
        deadline is shared among this and the remaining stages in proportion to their estimated seconds.

        ``now``: the present time. ``seconds``: returns the estimated seconds of a stage, by its label.
        """
        own = seconds(self.stage)
        whole = own + sum(map(seconds, self.remaining))
        share = own / whole if whole else 1 / (1 + len(self.remaining))
        return now + (self.deadline - now) * share
