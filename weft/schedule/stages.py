"""The schedule that a layout asks for: the part of the model on each stage, and its costs."""

from collections.abc import Sequence
from dataclasses import dataclass

from weft.layout.layout import Layout
from weft.recipe import ModelShape
from weft.schedule.actions import LOCAL, Table, Value, assemble
from weft.schedule.build import build
from weft.schedule.build.greedy import list_schedule
from weft.schedule.build.vertical import vertical
from weft.schedule.partition import partition
from weft.schedule.simulate import Costs, by_kind
from weft.schedule.skip import plan_paths, stage_lengths
from weft.schedule.times import ModelTimes, Times
from weft.schedule.vocab import output_times, with_vocabulary
from weft.shapes.shape import shape_of


@dataclass(frozen=True)
class Stage:
    """The part of a model that a pipeline stage computes.

    ``layers``: indices of its layers; ``embedding``, ``head``: whether it also computes the embedding or the output
    layer.
    """

    layers: range
    embedding: bool = False
    head: bool = False


def cut_stages(
    layers: int,
    stages: int,
    layer: float,
    first: float,
    last: float,
    ends: bool = True,
    speeds: Sequence[float] | None = None,
) -> tuple[Stage, ...]:
    """Assign ``layers`` layers to ``stages`` stages such that the slowest stage is as fast as possible.

    ``layer``, ``first``, ``last``: work of one layer, of the embedding, and of the output layer with its loss, in one
    unit. ``ends``: whether the embedding belongs to the first stage and the output layer to the last. If not, they
    belong to no stage, and their work does not count: every rank of the pipeline has an equal share of both.
    ``speeds``: work that each stage's device does per unit of time; None: all devices are equally fast.
    """
    costs = [first, *[layer] * layers, last] if ends else [layer] * layers
    return tuple(
        Stage(
            range(max(share.start - ends, 0), min(share.stop - ends, layers)),
            embedding=ends and share.start == 0,
            head=ends and share.stop == len(costs),
        )
        for share in partition(costs, stages, speeds)
    )


def assign_stages(
    shape: ModelShape, layout: Layout, table: Table, seq_len: int
) -> tuple[Stage, ...]:
    """Assign layers to the stages of ``table`` such that the slowest stage is as fast as possible.

    Work is counted in floating-point operations. With ``layout.stage_speeds`` ranks differ in how fast they compute.
    ``shape``: the model; ``seq_len``: tokens of a sequence. If ``layout.skip`` is set, microbatches skip some
    stages, but never the first and the last. These two then get less work.
    """
    first, layer, last = shape_of(shape).forward_flops(seq_len)
    stages = table.stages
    speeds = stage_lengths(stages, layout.skip) if layout.skip else [1.0] * stages
    if layout.stage_speeds:
        for s in range(stages):
            speeds[s] *= min(layout.stage_speeds[rank] for rank in table.holders(s))
    ends = not (layout.vocab_barriers or layout.takes_turns)
    return cut_stages(shape.layers, stages, layer, first, last, ends, speeds)


def stage_costs(
    times: ModelTimes, stages: Sequence[Stage], kept: float = 1.0, move: float = 0.0
) -> Costs:
    """Return the costs for simulating a table with these ``stages``.

    ``times``: times of one microbatch's passes at each stage. ``kept``: memory that a rank needs for the saved
    activations of one layer and one microbatch. Its unit is the unit of memory in the simulation. ``move``: time of a
    transfer from one rank to another, in the unit of ``times``.
    """

    def size(value: Value) -> float:
        here = value.name in LOCAL and value.stage < len(stages)
        return len(stages[value.stage].layers) * kept if here else 0.0

    return Costs(by_kind(times), lambda value, source, target: move, size)


def modelled_costs(
    shape: ModelShape, layout: Layout, table: Table, seq_len: int
) -> Costs:
    """Return costs for simulating ``table`` under this layout, in floating-point operations per token.

    The memory of a stage is its number of layers; ``shape``: the model; ``seq_len``: tokens of a sequence.
    """
    stages = assign_stages(shape, layout, table, seq_len)
    look_up, layer, output = shape_of(shape).forward_flops(seq_len)

    def stage_times(stage: Stage) -> Times:
        whole = len(stage.layers) * layer + stage.embedding * look_up
        # Output layer and loss make all their gradients with the loss, in forward.
        return Times(whole + 3 * output * stage.head, whole, whole)

    whole = Times(look_up, 0.0, look_up), output_times(output, layout.vocab_barriers)
    return stage_costs(
        ModelTimes([stage_times(s) for s in stages], *whole, len(table.ranks)), stages
    )


def make_table(
    layout: Layout, microbatches: int, shape: ModelShape, seq_len: int
) -> Table:
    """Build the table of the schedule of ``layout`` for ``microbatches`` microbatches, without transfers between ranks.

    ``shape``: the model, whose modelled floating-point operations decide where passes over the vocabulary go;
    ``seq_len``: tokens of a sequence.
    """
    if layout.skip:
        lengths = stage_lengths(layout.pp, layout.skip)
        costs = Costs(lambda a: lengths[a.stage])  # F, I and W take about the same
        holders = [[r] for r in range(layout.pp)]
        paths = plan_paths(holders, microbatches, layout.skip, costs)
        table = list_schedule(
            "skip", holders, paths, costs, ranks=layout.pp, limit=layout.pp
        )
    elif layout.pp == 1:
        # streamed from a tier: a stage per block, and all microbatches of one before the next
        stages = shape.layers + 2
        order, path = vertical(stages, microbatches), range(stages)
        table = assemble("vertical", [order], stages, [path] * microbatches)
    else:
        table = build(layout.schedule, layout.pp, microbatches, layout.virtual)
    if layout.vocab_barriers:
        cost = modelled_costs(shape, layout, table, seq_len).compute
        return with_vocabulary(table, layout.vocab_barriers, cost)
    return table


def routes(
    shape: ModelShape, layout: Layout, microbatches: int, seq_len: int
) -> list[tuple[int, ...]]:
    """List for each microbatch the indices of the model's blocks that it passes, in order.

    With ``layout.skip`` microbatches leave out blocks. One device that runs the same blocks computes what the pipeline
    computes. ``seq_len``: tokens of a sequence.
    """
    table = make_table(layout, microbatches, shape, seq_len)
    stages = assign_stages(shape, layout, table, seq_len)
    return [tuple(i for s in path for i in stages[s].layers) for path in table.paths]
