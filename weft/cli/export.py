"""``weft export``: a checkpoint for other programs."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.arguments import DTYPES, Ema, ModelName
from weft.cli.console import warn
from weft.errors import UsageError, nearest

_texts = "For a mixture of experts: texts of a task, whose choices of experts decide --keep and --place."
_keep = "Keep only this many experts of each layer, those chosen most."
_place = "Order the experts for this many ranks, so that most tokens stay on one rank."
_level = "With --place: weight of equal loads against tokens that stay on a rank."

_dtype = "float32, bfloat16 or float16 weights; else as those that the run started from."


def export(
    checkpoint: Annotated[str, ModelName],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    merge: Annotated[bool, typer.Option("--merge", help="Merge an adapter into its model, and write that.")] = False,
    ema: Ema = False,
    texts: Annotated[Path | None, typer.Option(metavar="FILE", help=_texts)] = None,
    keep: Annotated[int, typer.Option(min=0, metavar="N", help=_keep)] = 0,
    place: Annotated[int, typer.Option(min=0, metavar="RANKS", help=_place)] = 0,
    level: Annotated[float, typer.Option(min=0, help=_level)] = 0.0,
    dtype: Annotated[str | None, typer.Option(help=_dtype)] = None,
) -> int:
    """Write a checkpoint as a Hugging Face model: safetensors, config and tokenizer. An adapter alone, as PEFT does."""
    if dtype not in (None, *DTYPES):
        raise UsageError(f"--dtype {dtype!r} is not possible; {nearest(dtype or '', DTYPES)}")
    if texts is None and (keep or place):
        raise UsageError("--keep and --place go by what the tokens of --texts choose; give a file of them")
    if texts is not None:
        from weft.checkpoint.convert.routing import export_for_texts

        typer.echo(export_for_texts(checkpoint, out, texts, warn, ema, keep, place, level, dtype))
    else:
        from weft.checkpoint.model import export_model

        export_model(checkpoint, out, warn, merge, ema, dtype)
    typer.echo(out)
    return 0
