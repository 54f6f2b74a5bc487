"""The schedule that a layout asks for, and what of the model its microbatches pass."""

from weft.layout.layout import Layout
from weft.recipe import ModelShape
from weft.schedule.actions import Table
from weft.schedule.build import build
from weft.schedule.simulate import Costs
from weft.schedule.skip import cut, skip_pipe
from weft.schedule.stages import assign_stages, modelled_costs
from weft.schedule.vocab import with_vocabulary


def make_table(layout: Layout, microbatches: int, shape: ModelShape, seq_len: int) -> Table:
    """The schedule that ``layout`` asks for, as built; what the model computes decides where vocabulary passes go."""
    if layout.skip:
        lengths = cut(layout.pp, layout.skip)
        costs = Costs(lambda a: lengths[a.stage])  # F, I and W take about the same
        holders = [[r] for r in range(layout.pp)]
        table = skip_pipe(holders, microbatches, layout.skip, costs, ranks=layout.pp, limit=layout.pp)
    else:
        table = build(layout.schedule, layout.pp, microbatches, layout.virtual)
    if layout.vocab_barriers:
        cost = modelled_costs(shape, layout, table, seq_len).compute
        return with_vocabulary(table, layout.vocab_barriers, cost)
    return table


def routes(shape: ModelShape, layout: Layout, microbatches: int, seq_len: int) -> list[tuple[int, ...]]:
    """The blocks that each microbatch passes, in order: what one device must compute to equal a partial pipeline."""
    table = make_table(layout, microbatches, shape, seq_len)
    stages = assign_stages(shape, layout, table.stages, seq_len)
    return [tuple(i for s in path for i in stages[s].layers) for path in table.paths]
