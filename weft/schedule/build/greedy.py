"""A list scheduler: the order of every rank from measured times, under a memory limit (Qi et al. 2023, 2401.10241)."""

from collections.abc import Sequence
from math import inf

from weft.schedule.actions import Order, Table, assemble
from weft.schedule.build.listing import Listing, Policy
from weft.schedule.build.trips import Trips
from weft.schedule.simulate import Costs, simulate
from weft.schedule.times import Times

#: Share of a stage's saved activations that the weight gradient needs, 32 / (34 + 5as/h) in section 2 of the paper:
#: 0.37 for its 1.5B model, 0.43 for 6.2B. (Nearer to 1 if attention saves no scores.)
TAPE = 0.4

#: No policy is the best for all times and limits. On random costs and limits the best of these is at most 1 % slower
#: than that of all combinations of these numbers.
POLICIES = (
    Policy(True, 0.5, inf),
    Policy(True, 1.0, 1.0),
    Policy(True, 0.0, 2.0),
    Policy(False, 0.0, inf),
    Policy(False, 0.5, 1.5),
    Policy(False, 0.5, 2.0),
)


def list_schedule(
    name: str,
    holders: Sequence[Sequence[int]],
    paths: Sequence[Sequence[int]],
    costs: Costs,
    *,
    ranks: int,
    limit: float | Sequence[float] | None = None,
    split: bool = True,
    priority: Policy | Sequence[Policy] = POLICIES,
) -> Table:
    """Build a table by list scheduling for each policy of ``priority``, and return the fastest.

    List scheduling simulates the step and lets every idle rank start the best action that is ready; a policy says what
    "best" means. The result is never slower than running one microbatch after the other.

    Args:
        ``name``: the schedule's name.
        ``holders[s]``: ranks that may run stage ``s``.
        ``paths[m]``: stages of microbatch ``m`` in the order of its forward, each at most once.
        ``costs``: times of actions and transfers, and sizes of values.
        ``ranks``: number of ranks.
        ``limit``: memory of every rank, or a list with the memory of each, in units of ``costs.size``; None: unlimited.
            It must hold saved activations (``saved``) and the inputs of postponed weight gradients (``tape``).
        ``split``: whether backward is split into input gradient (I) and weight gradient (W).
        ``priority``: one policy or several.

    Raises :class:`ScheduleError` if a single microbatch needs more memory than the limit.
    """
    if limit is None:
        limit = inf
    limits = list(limit) if isinstance(limit, Sequence) else [limit] * ranks
    policies = [priority] if isinstance(priority, Policy) else priority
    trips = Trips(paths, costs, limits, split)
    orders = [Listing(name, holders, trips, policy).orders() for policy in policies]
    orders.append(Listing(name, holders, trips, Policy()).one_by_one())
    tables = (assemble(name, order, len(holders), paths) for order in orders)
    clocks = (simulate(table, costs) for table in tables)
    return min(clocks, key=lambda clock: (clock.makespan, clock.elapsed)).table


def zero_bubble(
    name: str, ranks: int, microbatches: int, times: Times, limit: int, tape: float
) -> list[Order]:
    """Return each rank's order of actions in the automatic zero-bubble schedule (Qi et al. 2023, 2401.10241).

    ``name``: the schedule's name in errors; ``ranks``, ``microbatches``: numbers of ranks, and of microbatches in a
    step; ``times``: times of one microbatch on a rank; ``limit``: memory of a rank, as a number of microbatches' saved
    activations; ``tape``: share of a microbatch's saved activations that a postponed weight gradient needs.
    """
    took = {"F": times.forward, "I": times.backward_input, "W": times.backward_weight}
    costs = Costs(
        lambda action: took[action.kind],
        lambda value, source, target: times.move,
        lambda value: {"saved": 1.0, "tape": tape}.get(value.name, 0.0),
    )
    holders, paths = [[r] for r in range(ranks)], [range(ranks)] * microbatches
    table = list_schedule(name, holders, paths, costs, ranks=ranks, limit=limit)
    return [[action.key for action in actions] for actions in table.ranks]
