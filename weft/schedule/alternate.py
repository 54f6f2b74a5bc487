"""Updates of units that alternate between host, where they rest, and device: their table and their split.

While the host updates some units, another unit's state is copied to the device, updated there and copied back (Deep
Optimizer States, Maurya et al. 2024, 2410.21316). The table has three ranks: the host, which updates; the device, which
updates beside the copies to it; and the copies back.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weft.schedule.actions import Action, Table
from weft.schedule.kinds import Clock, Kind, declare_kind
from weft.schedule.simulate import Costs, Simulation, simulate

HOST, DEVICE, BACK = range(3)

ON_HOST = declare_kind(Kind("ON_HOST", "a unit is updated on the host", "#2563eb"))
ON_DEVICE = declare_kind(
    Kind("ON_DEVICE", "a unit is updated on the device", "#15803d")
)
BRING = declare_kind(
    Kind(
        "BRING",
        "a unit's state comes to the device",
        "#f0a021",
        clock=Clock.COMMUNICATION,
    )
)
RETURN = declare_kind(
    Kind(
        "RETURN",
        "a unit's state returns to the host",
        "#9333ea",
        clock=Clock.COMMUNICATION,
    )
)

#: Units whose states fit the device at once: one that arrives, one that is updated, one that returns.
ROOMS = 3


class DeviceSplit(NamedTuple):
    """A split of the optimizer's update between host and device, and its simulated duration.

    ``device``: number of units (parameters that are updated together) that the device updates; ``seconds``: time until
    all units are updated.
    """

    device: int
    seconds: float


def on_device(units: int, count: int) -> list[int]:
    """Choose the ``count`` of ``units`` units that the device updates; return their indices, spread evenly."""
    return [(2 * i + 1) * units // (2 * count) for i in range(count)]


def update_table(units: int, count: int) -> Table:
    """Build the table of the updates of ``units`` units, of which the device updates ``count`` and the host all others.

    A unit is a group of parameters that are updated together. In place of pipeline ranks the table has three workers:
    :data:`HOST` updates units, :data:`DEVICE` fetches units and updates them, and :data:`BACK` copies updated units
    from the device to the host.
    """
    away = on_device(units, count)
    there: list[Action] = []
    back: list[Action] = []
    for i, unit in enumerate(away):
        room = ((RETURN, away[i - ROOMS], 0),) if i >= ROOMS else ()
        there.append(Action(DEVICE, BRING, unit, 0, room))
        there.append(Action(DEVICE, ON_DEVICE, unit, 0, ((BRING, unit, 0),)))
        back.append(Action(BACK, RETURN, unit, 0, ((ON_DEVICE, unit, 0),)))
    here = [Action(HOST, ON_HOST, unit, 0) for unit in range(units) if unit not in away]
    ranks = tuple(here), tuple(there), tuple(back)
    return Table(f"{count} on the device", ranks, units, (tuple(range(units)),))


def simulated(
    count: int, sizes: Sequence[int], rates: Mapping[str, float]
) -> Simulation:
    """Simulate the updates of all units, of which ``count`` are updated on the device.

    ``sizes``: bytes of each unit; ``rates``: seconds per byte by kind of action, such as :data:`ON_HOST` or
    :data:`BRING`.
    """
    return simulate(
        update_table(len(sizes), count), Costs(lambda a: rates[a.kind] * sizes[a.stage])
    )


def splits(sizes: Sequence[int], rates: Mapping[str, float]) -> list[DeviceSplit]:
    """Simulate the optimizer's update for every possible split of its units between host and device.

    A unit is a group of parameters that are updated together. The device updates 0, 1, ... or all units, and the host
    the others. Returns all splits, the fastest first. Of equally fast ones the one with fewest units on the device
    comes first. ``sizes``: bytes of each unit; ``rates``: seconds per byte for each kind of action, such as
    :data:`ON_HOST` or :data:`BRING`.
    """
    splits = [
        DeviceSplit(count, simulated(count, sizes, rates).elapsed)
        for count in range(len(sizes) + 1)
    ]
    return sorted(splits, key=lambda split: (split.seconds, split.device))
