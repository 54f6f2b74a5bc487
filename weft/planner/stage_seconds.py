"""Seconds of a pipeline's stages, and of a step whose number of microbatches is larger than that of a simulation."""

from collections.abc import Sequence
from typing import NamedTuple

from weft.planner.cost import MicrobatchSeconds
from weft.schedule.simulate import Simulation
from weft.schedule.stages import Stage
from weft.schedule.times import Times
from weft.shapes.shape import Shape


class StageWaits(NamedTuple):
    """Seconds of a microbatch in which a rank sends or receives and so cannot compute, in each pass of a stage."""

    forward: float = 0.0
    backward: float = 0.0


def stage_times(
    shape: Shape,
    stage: Stage,
    times: MicrobatchSeconds,
    waits: StageWaits = StageWaits(),  # noqa: B008
) -> Times:
    """Return the seconds of one microbatch's passes at a stage.

    ``times``: those of one layer on the stage's devices. ``waits``: seconds of each pass in which the rank sends or
    receives and so cannot compute.
    """
    exposed = times.tp + times.cp + times.ep
    count = len(stage.layers)
    look_up = (times.forward + times.backward) * 4 * shape.embed / shape.active_weights
    forward = (
        count * (times.forward + exposed)
        + stage.head * times.head
        + stage.embedding * look_up / 3
    )
    back = (
        count * (times.backward + times.again + (times.count - 1) * exposed)
        + stage.embedding * look_up / 1.5
    )
    weight = count * times.weight
    return Times(
        float(forward) + waits.forward,
        float(back - weight) + waits.backward,
        float(weight),
    )


def makespan_of(runs: Sequence[Simulation], microbatches: int) -> float:
    """Return the makespan of a step of ``microbatches`` microbatches, extrapolated from simulations of fewer.

    ``runs``: one or two simulations, the one with more microbatches first. Each microbatch beyond these is assumed to
    take as long as each additional one of the simulations, and at least as long as the busiest rank computes for it.
    """
    first = runs[0]
    size = first.table.microbatches
    each = max(first.busy) / size
    if len(runs) > 1:
        step = size - runs[1].table.microbatches
        each = max(each, (first.makespan - runs[1].makespan) / step)
    return float(first.makespan + (microbatches - size) * each)
