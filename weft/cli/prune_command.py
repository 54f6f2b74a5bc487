"""``weft prune``: a model with zeros among its weights."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.arguments import DTYPES, Ema, ModelName, PluginModules, import_plugins
from weft.cli.console import warn
from weft.errors import UsageError, nearest

_share = "Part of each weight's elements that become zero, from 0 to below 1."
_by = (
    "magnitude: the smallest elements; wanda: the smallest products of an element and the norm of its input for the "
    "text in --data, row by row."
)
_data = "File with a text like those that the model is for; with --by wanda."
_tokens = "Tokens of the text that are read."
_dtype = "Type of the values: float32, bfloat16 or float16; by default that of the model from which the run started."


def prune_model_command(
    checkpoint: Annotated[str, ModelName],
    out: Annotated[Path, typer.Option(help="The new folder.")],
    share: Annotated[float, typer.Option(metavar="SHARE", help=_share)],
    by: Annotated[str, typer.Option(metavar="magnitude|wanda", help=_by)] = "magnitude",
    data: Annotated[Path | None, typer.Option(metavar="FILE", help=_data)] = None,
    tokens: Annotated[int, typer.Option(min=1, help=_tokens)] = 32_768,
    ema: Ema = False,
    dtype: Annotated[str | None, typer.Option(help=_dtype)] = None,
    plugin: PluginModules = None,
) -> int:
    """Set most elements of a dense model's weights to zero, and write it with a bitmap in place of the zeros.

    weft generate and weft serve run it in that form with --weights sparse. Other programs read what weft export makes
    of it.
    """
    from weft.checkpoint.pruned_model import prune_model

    import_plugins(plugin)
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype!r} is not possible; {nearest(dtype, DTYPES)}")
    typer.echo(prune_model(checkpoint, out, share, by, data, tokens, warn, ema, dtype))
    typer.echo(out)
    return 0
