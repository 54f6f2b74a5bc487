"""``weft schedule``: the clock of a pipeline schedule before anything runs, as text, picture, page or trace."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.arguments import AsJson

_exchange = (
    "Time to send a microbatch's tokens to experts of other ranks and back, "
    "in all layers of a rank; backward takes as long."
)
_ms = "{} of a microbatch on a rank, all its stages."


def schedule_command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="A schedule, e.g. 1f1b; if not given: list all."
        ),
    ] = None,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline ranks, P.")] = 4,
    microbatches: Annotated[
        int, typer.Option(min=1, help="Microbatches per step, M.")
    ] = 8,
    virtual: Annotated[
        int | None, typer.Option(min=1, help="Stages per rank (looped schedules: 2).")
    ] = None,
    forward: Annotated[
        float, typer.Option(min=0, metavar="MS", help=_ms.format("Forward"))
    ] = 1.0,
    backward_input: Annotated[
        float, typer.Option(min=0, metavar="MS", help=_ms.format("Input gradient"))
    ] = 1.0,
    backward_weight: Annotated[
        float, typer.Option(min=0, metavar="MS", help=_ms.format("Weight gradient"))
    ] = 1.0,
    comm: Annotated[
        float,
        typer.Option(min=0, metavar="MS", help="Time of a transfer between two ranks."),
    ] = 0.0,
    exchange: Annotated[float, typer.Option(min=0, metavar="MS", help=_exchange)] = 0.0,
    layers: Annotated[
        int, typer.Option(min=1, help="With --exchange: layers with experts per stage.")
    ] = 2,
    svg: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the schedule as a picture."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the schedule as an interactive page."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Simulate and draw a pipeline schedule: makespan, bubble, peak activations. Needs no devices.

    Makespan: the longest time from a rank's first action to its last, which is the time of a step in a run of many
    steps. Activations are counted in microbatches: 1 is what all stages of a rank save of one microbatch.
    """
    from weft.cli.schedule_view import list_schedules, show_schedule

    files = {"svg": svg, "html": html, "trace": trace}
    if name is None:
        return list_schedules(files, as_json)
    milliseconds = {
        "forward": forward,
        "backward-input": backward_input,
        "backward-weight": backward_weight,
        "comm": comm,
        "exchange": exchange,
    }
    return show_schedule(
        name, stages, microbatches, virtual, milliseconds, layers, files, as_json
    )
