"""A simulated schedule as lines of text for a terminal, one for each rank."""

from rich.text import Text

from weft.schedule.draw import colours, shaded, shades_of
from weft.schedule.simulate import Simulation


def text_timeline(simulation: Simulation, width: int, colour: bool) -> list[Text]:
    """Return a text picture of ``simulation``: a line for each rank that shows its actions along the time.

    An action is shown by the number of its microbatch; if there is no room, by this number's last digit. ``colour``:
    whether colours tell kinds of action apart. One more line then says which kind has which colour. Without colours
    each action also shows the name of its kind, which needs more columns. The list is empty if a line would be wider
    than ``width`` characters.
    """
    kinds, shades = colours(simulation.table), shades_of(simulation.table)
    gutter = len(f"rank {len(simulation.timeline) - 1}  ")
    timed = [t for lane in simulation.timeline for t in lane if t.end > t.start]
    shortest = min(t.end - t.start for t in timed)
    digits = len(str(simulation.table.microbatches - 1))
    wanted = (digits + 1, digits) if colour else (digits + max(map(len, kinds)),)
    columns = simulation.elapsed / shortest
    fitting = (c for c in (*wanted, 1) if gutter + columns * c <= width)
    cells = next(fitting, 0)
    if not cells or (cells < wanted[-1] and not colour):
        return []
    lanes = []
    for rank, actions in enumerate(simulation.timeline):
        lane, at = Text(f"rank {rank}".ljust(gutter)), 0
        for t in actions:
            begin, end = (round(time / shortest * cells) for time in (t.start, t.end))
            if end <= begin:
                continue
            kind, stage, m = t.action.key
            label = f"{m}" if colour else f"{kind}{m}"
            shade = shades.by_action[rank, stage, m]
            fill, ink = shaded(kinds[kind], shade, shades.number)
            lane.append(" " * (begin - at))
            label = label[-(end - begin) :].ljust(end - begin, " " if colour else "-")
            lane.append(label, style=f"{ink} on {fill}" if colour else "")
            at = end
        lanes.append(lane)
    if not colour:
        return lanes
    legend = Text(" " * gutter)
    for kind, fill in kinds.items():
        ink = shaded(fill, 0, 1)[1]
        legend.append(f" {kind} ", style=f"{ink} on {fill}").append(" ")
    return [*lanes, legend]
