"""``weft export``: a checkpoint for other programs."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.arguments import Ema, ModelName
from weft.cli.console import warn


def export(
    checkpoint: Annotated[str, ModelName],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    merge: Annotated[bool, typer.Option("--merge", help="Merge an adapter into its model, and write that.")] = False,
    ema: Ema = False,
) -> int:
    """Write a checkpoint as a Hugging Face model: safetensors, config and tokenizer. An adapter alone, as PEFT does."""
    from weft.checkpoint.model import export_model

    export_model(checkpoint, out, warn, merge, ema)
    typer.echo(out)
    return 0
