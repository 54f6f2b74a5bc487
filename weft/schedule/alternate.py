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
    """The number of units that are updated on the ``device``, and the ``seconds`` that updating all units takes."""

    device: int
    seconds: float


def on_device(units: int, count: int) -> list[int]:
    """Return the indices of ``count`` of ``units`` units to update on the device, spread evenly."""
    return [(2 * i + 1) * units // (2 * count) for i in range(count)]


def update_table(units: int, count: int) -> Table:
    """Build the table of the updates of ``units`` units, of which ``count`` units are updated on the device."""
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
    """Simulate the updates of units, of which ``count`` are updated on the device.

    ``sizes``: bytes of each unit; ``rates``: seconds per byte of each kind of action.
    """
    return simulate(
        update_table(len(sizes), count), Costs(lambda a: rates[a.kind] * sizes[a.stage])
    )


def splits(sizes: Sequence[int], rates: Mapping[str, float]) -> list[DeviceSplit]:
    """Simulate the updates with every number of units on the device; return the splits with the fastest one first.

    Of equally fast splits the one with fewest units on the device comes first. ``sizes``: bytes of each unit;
    ``rates``: seconds per byte of each kind of action.
    """
    splits = [
        DeviceSplit(count, simulated(count, sizes, rates).elapsed)
        for count in range(len(sizes) + 1)
    ]
    return sorted(splits, key=lambda split: (split.seconds, split.device))
