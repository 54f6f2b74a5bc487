"""Dynamic filtering: groups of answers without signal, whose rewards are all equal, are replaced by others.

In such a group every advantage is 0, so that the group would only make the batch smaller (DAPO, Yu et al. 2025,
2503.14476).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


def has_signal(rewards: Sequence[float | None]) -> bool:
    """Whether the answers of a group differ in their rewards. None and NaN: the answer has no reward."""
    scored = [r for r in rewards if r is not None and not math.isnan(r)]
    return bool(scored) and min(scored) != max(scored)


@dataclass
class GroupFilter:
    """Chooses groups with signal for a batch, and counts those without.

    Attributes:
        ``wanted``: number of groups in the batch.
        ``most``: number of groups after which groups without signal are taken, too, so that a batch always ends.
        ``kept``: numbers of the groups with signal, in the order of arrival.
        ``spare``: numbers of the groups without signal.
        ``unscored``: how many of these have fewer than two answers with a reward.
    """

    wanted: int
    most: int
    kept: list[int] = field(default_factory=list)
    spare: list[int] = field(default_factory=list)
    unscored: int = 0

    def add(self, number: int, rewards: Sequence[float | None]) -> bool:
        """Take in a group, and return whether it has signal. ``number``: number of the group."""
        if has_signal(rewards):
            self.kept.append(number)
            return True
        self.spare.append(number)
        scored = [r for r in rewards if r is not None and not math.isnan(r)]
        self.unscored += len(scored) < 2
        return False

    @property
    def missing(self) -> int:
        """How many more groups to ask for; 0 if the batch is complete, or no more groups may be asked for."""
        arrived = len(self.kept) + len(self.spare)
        return max(0, min(self.wanted - len(self.kept), self.most - arrived))

    @property
    def batch(self) -> list[int]:
        """Numbers of the groups in the batch, sorted: those with signal first, then as many others as are missing."""
        kept = sorted(self.kept)[: self.wanted]
        return sorted([*kept, *sorted(self.spare)[: self.wanted - len(kept)]])

    @property
    def share(self) -> float:
        """Share of the groups so far that have no signal."""
        arrived = len(self.kept) + len(self.spare)
        return len(self.spare) / arrived if arrived else 0.0
