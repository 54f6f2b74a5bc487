"""What tables would take if every rank had a device of its own: critical paths, and operations that only sleep."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weft.parallel.context.tables import TileTable
from weft.schedule.actions import Action, ScheduleError, Table, Value
from weft.schedule.execute import Executed, Op
from weft.schedule.kinds import KINDS
from weft.schedule.simulate import Timed


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


def replay(table: Table, ops: Mapping[str, Op]) -> list[Executed]:
    """Run all ranks of a table in this process, one action at a time: the same values without a transfer.

    ``table`` as built, not lowered. The reference for the values that ranks compute together.
    """
    there: dict[Value, Any] = {}
    queues = [deque(actions) for actions in table.ranks]
    runs = [Executed() for _ in queues]
    done: set[Any] = set()
    moved = True
    while moved:
        moved = False
        for queue, run in zip(queues, runs, strict=True):
            while (
                queue
                and all(v in there for v in queue[0].reads)
                and done.issuperset(queue[0].deps)
            ):
                a, moved = queue.popleft(), True
                start = time.perf_counter()
                results = ops[a.kind](a, [there[v] for v in a.reads])
                there.update(zip(a.writes, results or (), strict=True))
                run.times.append(Timed(a, start, time.perf_counter()))
                done.add(a.key)
    stuck = [queue[0] for queue in queues if queue]
    if stuck:
        raise ScheduleError(
            f"schedule {table.name} cannot go on at {', '.join(map(str, stuck))}"
        )
    return runs
