"""What ``weft schedule`` prints and writes. A file of its own, as ``weft --help`` need not wait for what it imports."""

import json
import math
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path

from rich.console import Console

from weft.cli.console import print_table
from weft.errors import UsageError
from weft.pages import write
from weft.schedule import draw
from weft.schedule.build import Times, build, builder_of, builders
from weft.schedule.exchange import best_turns, with_exchanges
from weft.schedule.lanes import text_timeline
from weft.schedule.simulate import Simulation, simulate, uniform_costs
from weft.writable import check_writable

#: Options of the command that are times of a stage's work.
TIMES = ("forward", "backward-input", "backward-weight", "comm")


def show_schedule(
    name: str,
    stages: int,
    microbatches: int,
    virtual: int | None,
    milliseconds: Mapping[str, float],
    layers: int,
    files: Mapping[str, Path | None],
    as_json: bool,
) -> int:
    """Simulate the pipeline schedule ``name``, print its figures and draw it into ``files``. Returns the exit code.

    Args:
        ``stages``: number of pipeline ranks.
        ``microbatches``: number of microbatches in a step.
        ``virtual``: pipeline stages per rank; None: the schedule's own number.
        ``milliseconds``: times of one microbatch by names of options: "forward", "backward-input", "backward-weight",
            "comm" (a transfer) and "exchange" (experts).
        ``layers``: layers with experts per stage.
        ``files``: path to write for each kind of drawing, "svg", "html" or "trace"; None: do not draw it.
        ``as_json``: print JSON instead of a table and a drawing.
    """
    for kind, path in files.items():
        if path is not None:
            check_writable(path, f"--{kind}")
    for option, value in milliseconds.items():
        if not math.isfinite(value):
            raise UsageError(f"--{option} {value} is not possible; give a time in ms")
    exchange = milliseconds["exchange"]
    forward, backward_input, backward_weight, comm = (
        milliseconds[option] for option in TIMES
    )
    times = Times(
        forward, backward_input, backward_weight, comm, exchange / 2, exchange / 2
    )
    work = times.forward + times.backward
    if work <= 0:
        raise UsageError(
            "nothing takes any time; give --forward, --backward-input or --backward-weight above 0"
        )
    table = build(name, stages, microbatches, virtual, times)
    simulation, turns = simulate(table, uniform_costs(table, times)), {}
    if exchange:
        inside = [layers] * table.stages
        turns = best_turns(
            table, inside, uniform_costs(with_exchanges(table, inside), times)
        )
        simulation = min(turns.values(), key=attrgetter("makespan"))
    bubble = (simulation.makespan - microbatches * work) / simulation.makespan
    note = f"{builder_of(name).about} · {_paper(name)}"
    for kind, path in files.items():
        if path is not None:
            write(path, _content(kind, simulation, note), f"--{kind}")
    if as_json:
        record = {
            "schedule": name,
            "stages": stages,
            "microbatches": microbatches,
            "makespan": simulation.makespan,
            "elapsed": simulation.elapsed,
            "bubble_rate": bubble,
            "peak_activations": list(simulation.peaks),
        }
        record |= (
            {
                "exchanges_beside": {
                    way.value: simulation.makespan for way, simulation in turns.items()
                }
            }
            if turns
            else {}
        )
        print(json.dumps(record))
    else:
        beside = ", ".join(
            f"{way.value} {draw.short_number(simulation.makespan)} ms"
            for way, simulation in turns.items()
        )
        facts = {"exchanges beside": beside} if turns else {}
        facts |= {k: str(path) for k, path in files.items() if path}
        _show(simulation, bubble, f"[bold]{name}[/]  {note}", facts)
    return 0


def _show(
    simulation: Simulation, bubble: float, title: str, more: dict[str, str]
) -> None:
    """Print the figures in words, ``more`` facts, and the lanes if the terminal has room for them."""
    table, console = simulation.table, Console(highlight=False)
    console.print(title, soft_wrap=True)
    elapsed = f", first to last action {draw.short_number(simulation.elapsed)} ms"
    facts = {
        "table": f"{len(table.ranks)} ranks, {table.microbatches} microbatches, {table.stages} stages",
        "makespan": f"{draw.short_number(simulation.makespan)} ms"
        + (elapsed if simulation.elapsed > simulation.makespan * (1 + 1e-9) else ""),
        "bubble rate": f"{bubble:z.2%}",
        "peak activations": f"{_peaks(simulation.peaks)}  (in microbatches of a rank)",
    } | more
    for key, fact in facts.items():
        console.print(f"{key:<17} {fact}", soft_wrap=True, markup=False)
    if lanes := text_timeline(
        simulation, console.width, console.color_system in ("256", "truecolor")
    ):
        console.print()
        for lane in lanes:
            console.print(lane, no_wrap=True, overflow="crop")


def _paper(name: str) -> str:
    paper = builder_of(name).paper
    return f"arXiv {paper}" if paper[:4].isdigit() else paper


def _peaks(peaks: tuple[float, ...]) -> str:
    """Return the peak of every rank, or a single value if all are equal."""
    shown = [draw.short_number(peak) for peak in peaks]
    return (
        f"{shown[0]} on every rank"
        if len(shown) > 1 and len(set(shown)) == 1
        else " ".join(shown)
    )


def _content(kind: str, simulation: Simulation, note: str) -> str:
    if kind == "trace":
        return json.dumps(draw.perfetto(simulation))
    return (draw.svg if kind == "svg" else draw.html)(simulation, note=note, unit="ms")


def list_schedules(files: dict[str, Path | None], as_json: bool) -> int:
    given = [f"--{kind}" for kind, path in files.items() if path is not None]
    if given:
        raise UsageError(
            f"{given[0]} needs the name of a schedule; choose from: {', '.join(builders())}"
        )
    if as_json:
        print(
            json.dumps(
                [
                    {"schedule": n, "about": b.about, "paper": b.paper}
                    for n, b in builders().items()
                ]
            )
        )
        return 0
    print_table(
        ("schedule", "what it does", "paper"),
        ((n, b.about, b.paper) for n, b in builders().items()),
    )
    return 0
