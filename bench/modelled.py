"""What tables would take if every rank had a device of its own: critical paths, and operations that only sleep."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weft.parallel.context.tables import TileTable
from weft.schedule.actions import Action
from weft.schedule.execute import Op
from weft.schedule.kinds import KINDS


def critical_path(table: TileTable) -> float:
    """Steps waiting for each other: the sum of the busiest rank's work, in tiles of ``tokens / ranks`` squared.

    The ideal is ``ranks / 2``: half the score matrix, shared evenly.
    """
    return sum(max(work) for work in work_per_step(table))


def work_per_step(table: TileTable) -> list[list[float]]:
    """Work of every rank in every step, in the same unit."""
    unit = (table.ranks / len(table.owner)) ** 2
    return [
        [sum(unit / 2 if t.mask == "causal" else unit for t in table.at.get((step, rank), ())) for rank in
         range(table.ranks)]
        for step in range(table.steps)
    ]  # fmt: skip


def sleeping(costs: Callable[[Action], float]) -> Mapping[str, Op]:
    """Operations that take the modelled seconds and hand on an empty tensor: a rehearsal of a schedule."""

    def op(a: Action, reads: Sequence[Any]) -> Sequence[Any]:
        time.sleep(costs(a))
        return [
            torch.empty(1) for value in a.writes if not value.name.startswith("done:")
        ]

    return {name: op for name, kind in KINDS.items() if not kind.inserted}
