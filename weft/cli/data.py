"""``weft data``: what a run would read."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weft.cli.arguments import AsJson, DataPath, Overrides, RecipeFile

app = typer.Typer(help="Look at the data before a run.", no_args_is_help=True)


@app.command("preview")
def preview_command(
    recipe: RecipeFile,
    overrides: Overrides = None,
    data: DataPath = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Number of conversations to show.")
    ] = 3,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the conversations as a page, too."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show the first conversations as their chat template writes them, with the learned text in colour."""
    from weft.data.chat.preview import format_sample, preview_page, preview_samples
    from weft.pages import write
    from weft.recipe import load_recipe
    from weft.train.setup import recipe_tokenizer

    settings = load_recipe(recipe, overrides or (), data=data)
    shown, notes = preview_samples(settings.data, recipe_tokenizer(settings), samples)
    if as_json:
        typer.echo(
            json.dumps(
                [sample.as_json() for sample in shown], indent=2, ensure_ascii=False
            )
        )
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    if html is not None:
        typer.echo(
            write(html, preview_page(settings.name, settings.data, shown), "--html"),
            err=as_json,
        )
    if as_json:
        return 0
    console = Console(highlight=False)
    for sample in shown:
        console.print(f"[bold]{sample.place}[/]: {sample.facts}", soft_wrap=True)
        console.print(
            format_sample(sample, console.color_system is not None),
            soft_wrap=not console.is_terminal,
        )
        console.print()
    return 0
