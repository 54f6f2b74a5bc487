"""Schedules by name: each builder gives the order of actions of every rank for any number of microbatches.

The builders are techniques (``weft/techniques/schedules/``); what several of them share stands in this folder.
"""

from functools import cache

from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.recipe.conflicts import AskedRecipe, refuse_conflicts
from weft.registry import find, names
from weft.schedule.actions import Table, assemble
from weft.schedule.builder import ScheduleBuilder
from weft.schedule.times import EQUAL, Times

__all__ = ["Times", "build", "builder_of", "builders"]

#: Forward passes that a table may have at most: above, building it takes minutes and many GB.
LARGEST = 2_000_000


@cache
def builder_of(name: str) -> ScheduleBuilder:
    """Return the builder of a schedule. Raises :class:`UsageError` if no schedule has this name."""
    builder: ScheduleBuilder = find("schedule", name).implementation()
    return builder


def builders() -> dict[str, ScheduleBuilder]:
    """Return the builder of every schedule by the schedule's name, in the planner's order."""
    every = {name: builder_of(name) for name in names("schedule")}
    return dict(sorted(every.items(), key=lambda item: (item[1].place, item[0])))


def build(
    name: str,
    ranks: int,
    microbatches: int,
    virtual: int | None = None,
    times: Times = EQUAL,
) -> Table:
    """Build the table of actions of the pipeline schedule ``name`` for one step.

    ``ranks``: number of ranks in the pipeline; ``microbatches``: their number in the step. ``virtual``: stages (chunks)
    per rank, for schedules that let the caller choose; None: the schedule's own number. ``times``: times of one
    microbatch on a rank. Some schedules need them to decide which action fills an idle time. Raises :class:`UsageError`
    if the schedule does not exist with these numbers.
    """
    if ranks < 1:
        raise UsageError(
            f"schedule {name} needs at least 1 rank, got {ranks}; give the size of the pipeline"
        )
    if microbatches < 1:
        raise UsageError(
            f"schedule {name} needs at least 1 microbatch, got {microbatches}; cut the batch into more"
        )
    if virtual is not None and virtual < 1:
        raise UsageError(
            f"schedule {name} needs at least 1 chunk per rank, got {virtual}; the usual number is 2"
        )
    layout = Layout(pp=ranks, schedule=name, virtual=virtual)
    asked = AskedRecipe(layout=layout, staged=True)
    refuse_conflicts(asked)
    builder, chunks = builder_of(name), asked.chunks
    stages = ranks * chunks
    if stages * microbatches > LARGEST:
        raise UsageError(
            f"schedule {name} of {stages:,} stages and {microbatches:,} microbatches is too large for a table (at most "
            f"{LARGEST:,} passes in each direction); ask for fewer of either"
        )
    orders = builder.orders(ranks, microbatches, chunks, times)
    return assemble(name, orders, stages, [range(stages)] * microbatches)
