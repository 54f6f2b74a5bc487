"""Disturb a run on purpose, and show what became of every fault.

    python bench/chaos.py recipes/quickstart.toml --kill 20 --freeze 5 --minutes 20 --seed 1

docs/explanations/resilience.md says what each fault does, and what is compared.
"""

import sys
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from campaign import TOLERANCE, Campaign, CampaignResult, carry_out, check_comparable
from hosts import unavailable
from injector import schedule
from rich.console import Console

from weft.api import with_planned_layout
from weft.cli import run_command_line
from weft.cli.app import app
from weft.cli.arguments import AsJson, LayoutText, Overrides, RecipeFile
from weft.cli.console import grid, plain_console
from weft.errors import UsageError
from weft.recipe import RUNS, load_recipe
from weft.train.runs import unused_folder

_reference = "An undisturbed run of the same recipe; by default one is made afterwards, on one rank."
_hosts = "Put the ranks on this many hosts: network namespaces of this machine (needs root on Linux)."
_seed = "Chooses times and targets; the same seed gives the same faults."
_minutes = "Stop the run after this time; faults happen in its first nine tenths."


def chaos(
    recipe: RecipeFile,
    layout: LayoutText = None,
    overrides: Overrides = None,
    kill: Annotated[int, typer.Option(min=0, help="How often to kill a rank.")] = 0,
    leader: Annotated[
        int,
        typer.Option(
            min=0, help="How often to kill the rank that leads the agreement."
        ),
    ] = 0,
    two: Annotated[
        int, typer.Option(min=0, help="How often to kill two ranks at once.")
    ] = 0,
    host: Annotated[
        int, typer.Option(min=0, help="How often to kill all ranks of a host.")
    ] = 0,
    freeze: Annotated[
        int,
        typer.Option(min=0, help="How often to freeze a rank; every second one thaws."),
    ] = 0,
    link: Annotated[
        int,
        typer.Option(
            min=0, help="How often to unplug the cable of a host for a while."
        ),
    ] = 0,
    slow: Annotated[
        int, typer.Option(min=0, help="How often to slow a rank to half its speed.")
    ] = 0,
    minutes: Annotated[float, typer.Option(min=0.05, help=_minutes)] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help=_seed)] = 0,
    hosts: Annotated[int, typer.Option(min=0, max=200, help=_hosts)] = 0,
    ranks: Annotated[
        int | None, typer.Option(min=2, help="Ranks for a recipe without a layout.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(metavar="RUN", help=_reference)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for all results; runs/chaos by default.")
    ] = None,
    json: AsJson = False,
) -> int:
    """Train with faults: ranks killed, frozen, cut off, slowed. Then compare with an undisturbed run."""
    if hosts and (why := unavailable()):
        raise UsageError(f"{why}; leave out --hosts")
    if (link or host) and not hosts:
        raise UsageError(
            "--link and --host are for hosts, which have cables; add --hosts 3"
        )
    values = ["resilience.survive=true", *(overrides or [])]
    given = load_recipe(recipe, values, layout)
    if "layout" not in given.model_fields_set:
        given, layout = with_planned_layout(given, ranks)[0], ""
    if given.layout.world < 2:
        raise UsageError(
            "a run of one rank has nobody to go on without it; add --ranks 4, or --layout"
        )
    if reference is None:
        check_comparable(recipe, values, given)
    counts = {
        "kill": kill,
        "leader": leader,
        "two": two,
        "host": host,
        "freeze": freeze,
        "link": link,
        "slow": slow,
    }
    faults = schedule(counts, 54 * minutes, seed)
    tolerance = TOLERANCE.get(given.train.dtype, TOLERANCE["float32"])
    campaign = Campaign(
        recipe, str(given.layout) if layout == "" else layout, values, given.layout.world, faults, 60 * minutes,
        out or unused_folder(RUNS / "chaos"), hosts, reference, tolerance,
    )  # fmt: skip
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    found = carry_out(campaign, console.print)
    if json:
        print(
            dumps({"rows": found.rows, "medians": found.medians, "wrong": found.wrong})
        )
    else:
        _show(found, campaign.out)
    return int(bool(found.wrong))


def _show(found: CampaignResult, out: Path) -> None:
    columns = {
        "fault": "fault", "at_s": "at s", "hit": "ranks hit", "lasts_s": "lasts s", "survivors": "survivors",
        "detect_s": "detect", "part_s": "part", "agree_s": "agree", "rebuild_s": "rebuild", "recover_s": "recover",
        "recompute_s": "recompute", "stall_s": "stall s", "again": "steps again", "layout": "layout then",
    }  # fmt: skip
    table = grid(columns.values(), ("fault", "layout then"), wrap=True)
    for row in [*found.rows, {"fault": "median", **found.medians}]:
        table.add_row(*(_cell(row.get(name)) for name in columns))
    console = plain_console(150)
    console.print(table)
    for problem in found.wrong:
        console.print(f"wrong: {problem}", markup=False)
    if not found.wrong:
        console.print(
            "every step was recorded once, with the losses and tokens of a run that nobody disturbed"
        )
    console.print(f"{out}: the run, the one beside it, their output and this table")


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def register() -> None:
    """Add the command to those of ``weft``, whose errors are one line as well."""
    app.command()(chaos)


if __name__ == "__main__":
    register()
    sys.argv.insert(1, "chaos")
    run_command_line()
