"""The commands in the order of ``weft --help``. Each stands in the file named after it."""

import os
import shutil
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

import weft
from weft.cli.bench import app as bench
from weft.cli.chat import chat_command
from weft.cli.checkpoint import app as checkpoint
from weft.cli.client import client_command
from weft.cli.cluster_engine import engine_command
from weft.cli.data import app as data
from weft.cli.doctor import doctor_command
from weft.cli.eval import eval_command
from weft.cli.experts_command import experts_command
from weft.cli.export import export_command
from weft.cli.generate import generate_command
from weft.cli.new import new_command
from weft.cli.peer import app as peer
from weft.cli.plan import plan_command
from weft.cli.predictor import predictor_command
from weft.cli.probe import probe_command
from weft.cli.profile import profile_command
from weft.cli.prune_command import prune_model_command
from weft.cli.ranks import app as ranks
from weft.cli.recipes import recipes_command
from weft.cli.report import report_command
from weft.cli.sample_command import sample_command
from weft.cli.schedule import schedule_command
from weft.cli.search import search_command
from weft.cli.serve import serve_command
from weft.cli.techniques import techniques_command
from weft.cli.top import top_command
from weft.cli.train import train_command
from weft.cli.verify import verify_command
from weft.errors import Interrupted


class Commands(TyperGroup):
    """The group of all commands of ``weft``.

    It distinguishes Ctrl-C in a command from a command that returns exit code 130.
    """

    def __init__(self, **settings: Any) -> None:
        # a table of commands is whole at any width, a plain list is not
        super().__init__(**settings | {"rich_markup_mode": "rich"})

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]  # typer's own context, which is private
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None
        except BrokenPipeError as error:
            from weft.run.failure import nobody_reads

            if nobody_reads():
                raise
            # typer says nothing of any broken pipe
            raise RuntimeError(str(error)) from error


class CommandLine(typer.Typer):
    """The command line ``weft``, whose parser is made once per process.

    Typer would read the signatures of all commands again at every call, which takes longer than what most commands
    refuse.
    """

    @property
    def parser(self) -> Any:
        """The group of all commands as Typer's click has it, a :class:`Commands`."""
        return self._parser(*self.registered_commands, *self.registered_groups)

    @lru_cache(1)  # noqa: B019  # there is one command line
    def _parser(self, *registered: object) -> Any:
        return typer.main.get_command(self)

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """Parse a command line, by default that of this process, and run its command; return what that returns."""
        return self.parser(*args, **settings)


app = CommandLine(
    name="weft",
    cls=Commands,
    help="Train large models on whatever devices there are, under any layout, proved equal to one device.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # below this, tables cut the names of options
    rich_markup_mode="rich" if shutil.get_terminal_size().columns >= 80 else None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_verbose = (
    "Show tracebacks, as WEFT_DEBUG=1 does; without a command: print the version."
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.")
    ] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help=_verbose)] = False,
) -> None:
    if version or (verbose and context.invoked_subcommand is None):
        typer.echo(f"weft {weft.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)
    if verbose:
        os.environ["WEFT_DEBUG"] = "1"


command: Callable[..., int]
for command in (
    train_command,
    client_command,
    verify_command,
    generate_command,
    sample_command,
    chat_command,
    serve_command,
    engine_command,
    top_command,
    eval_command,
    experts_command,
    report_command,
    doctor_command,
    export_command,
    schedule_command,
    predictor_command,
    probe_command,
    profile_command,
    recipes_command,
    new_command,
    search_command,
    techniques_command,
):
    app.command(command.__name__.removesuffix("_command"))(command)
for name, commands in {
    "ranks": ranks,
    "peer": peer,
    "data": data,
    "checkpoint": checkpoint,
    "bench": bench,
}.items():
    app.add_typer(commands, name=name, cls=Commands)
app.command(
    "rl",
    help="Train by rewards: the same as weft train, for a recipe with a section rl.",
)(train_command)
app.command("prune")(prune_model_command)
app.command("plan", no_args_is_help=True)(plan_command)
