"""``weft export``: a checkpoint for other programs."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.arguments import ModelName
from weft.cli.console import warn


def export(
    checkpoint: Annotated[str, ModelName], out: Annotated[Path, typer.Option(help="The folder to make.")]
) -> int:
    """Write a checkpoint as a Hugging Face model: safetensors, config and tokenizer."""
    from weft.generate.model import export_model

    export_model(checkpoint, out, warn)
    typer.echo(out)
    return 0
