"""A simulated schedule as lines of text for a terminal, one for each rank."""

from rich.text import Text

from weft.schedule.draw import colours, shaded, shades_of
from weft.schedule.simulate import Simulation


def text_timeline(simulation: Simulation, width: int, colour: bool) -> list[Text]:
    """A lane per rank with the microbatch (its last digit, where there is no room) in each action; none if too wide.

    Without colour every action also carries its kind, and therefore needs more room.
    """
    kinds, (shade, shades, _) = colours(simulation.table), shades_of(simulation.table)
    gutter = len(f"rank {len(simulation.timeline) - 1}  ")
    timed = [t for lane in simulation.timeline for t in lane if t.end > t.start]
    shortest = min(t.end - t.start for t in timed)
    digits = len(str(simulation.table.microbatches - 1))
    wanted = (digits + 1, digits) if colour else (digits + max(map(len, kinds)),)
    cells = next(
        (
            c
            for c in (*wanted, 1)
            if gutter + simulation.elapsed / shortest * c <= width
        ),
        0,
    )
    if not cells or (cells < wanted[-1] and not colour):
        return []
    lanes = []
    for rank, actions in enumerate(simulation.timeline):
        lane, at = Text(f"rank {rank}".ljust(gutter)), 0
        for t in actions:
            begin, end = (
                round(t.start / shortest * cells),
                round(t.end / shortest * cells),
            )
            if end <= begin:
                continue
            label = (
                f"{t.action.microbatch}"
                if colour
                else f"{t.action.kind}{t.action.microbatch}"
            )
            fill, ink = shaded(
                kinds[t.action.kind],
                shade[rank, t.action.stage, t.action.microbatch],
                shades,
            )
            lane.append(" " * (begin - at))
            label = label[-(end - begin) :].ljust(end - begin, " " if colour else "-")
            lane.append(label, style=f"{ink} on {fill}" if colour else "")
            at = end
        lanes.append(lane)
    if not colour:
        return lanes
    legend = Text(" " * gutter)
    for kind, fill in kinds.items():
        legend.append(f" {kind} ", style=f"{shaded(fill, 0, 1)[1]} on {fill}").append(
            " "
        )
    return [*lanes, legend]
