"""``weft ranks``: who takes part in a run, and who is to join or to leave."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weft.cli.arguments import AsJson
from weft.cli.console import grid
from weft.run.rank_processes import in_ranks

app = typer.Typer(
    name="ranks",
    help="Show, add or remove the ranks of a run while it goes on.",
    no_args_is_help=True,
)
RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder of a run of several ranks.")
]
_members = typer.Argument(
    metavar="MEMBER...", help="Numbers of members, as weft ranks list shows them."
)


@app.command("list")
def list_command(run: RunFolder, json: AsJson = False) -> None:
    """Show the members of a run: number, rank, process and address."""
    from weft.resilience.roster import read_roster

    roster = read_roster(run)
    if json:
        from dataclasses import asdict
        from json import dumps

        print(
            dumps(
                {
                    "epoch": roster.epoch,
                    "members": [asdict(member) for member in roster.members],
                }
            )
        )
        return
    heads = ("member", "rank", "process", "address")
    table = grid(heads, heads, wrap=True)
    for rank, member in enumerate(roster.members):
        table.add_row(
            str(member.number),
            str(rank),
            str(member.pid),
            f"{member.host}:{member.port}",
        )
    Console(highlight=False).print(table)


@app.command("add")
def add_command(
    run: RunFolder,
    ranks: Annotated[
        int, typer.Option(min=1, help="Number of ranks to start on this machine.")
    ] = 1,
) -> int:
    """Add ranks to a run, and stay until they have ended. On another machine RUN must be the same folder.

    If RUN is the folder of an island that was lost, all ranks of this island are started again.
    """
    from weft.recipe import build_recipe
    from weft.resilience.roster import read_roster

    about = read_roster(run).about
    if not in_ranks():
        count = (
            build_recipe(about["recipe"]).layout.inside.world
            if "island" in about
            else ranks
        )
        from weft.run.launch import launch

        return launch(sys.argv[1:], count, survive=True)
    from weft.cli.train import conclude
    from weft.resilience.run import join_run

    recipe, outcome, concludes = join_run(run)
    if outcome is not None and concludes:
        conclude(recipe, outcome)
    return 0


@app.command("remove")
def remove_command(run: RunFolder, members: Annotated[list[int], _members]) -> None:
    """Let members of a run leave after its present step. MEMBER is a number that weft ranks list shows."""
    from weft.errors import UsageError
    from weft.resilience.roster import ask_to_leave, read_roster

    roster = read_roster(run)
    if "island" in roster.about:
        raise UsageError(
            f"{run} is of an island, which leaves as a whole: end its ranks, and the others go on without it"
        )
    known = [member.number for member in roster.members]
    if unknown := [number for number in members if number not in known]:
        raise UsageError(
            f"{run} has no member {unknown[0]}; it has {', '.join(map(str, known))}"
        )
    if len(set(members)) == len(known):
        raise UsageError(
            "a run cannot go on without any member; stop it with Ctrl-C, or leave one of them"
        )
    ask_to_leave(run, members)
