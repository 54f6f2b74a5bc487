"""``weft checkpoint convert``: checkpoints of other programs in, Hugging Face and DCP out."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.arguments import DTYPES, PluginModules, import_plugins
from weft.errors import UsageError, nearest

_from = typer.Option(
    "--kind",
    "--from",
    metavar="KIND",
    help=(
        "Format of SOURCE: weft, hf, dcp, deepspeed, megatron or gguf; guessed if"
        " left out."
    ),
)
_source = (
    "A checkpoint of Weft's or of another program, or an id of the Hugging Face hub."
)
_config = typer.Option(help="The model's config.json, if SOURCE has none.")
_upcycle = typer.Option(
    metavar="SETTINGS",
    help='Give a dense model experts: "experts=8, experts_per_token=2", fields of the section model.',
)
_out = typer.Option(help="The new folder; with --to weft also s3://...")


def convert_command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=_source)],
    out: Annotated[str, _out],
    kind: Annotated[str | None, _from] = None,
    to: Annotated[
        str, typer.Option(help="Format of OUT: weft, hf, dcp or gguf.")
    ] = "weft",
    config: Annotated[Path | None, _config] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Type of the weights: float32, bfloat16 or float16; by default as stored."
        ),
    ] = None,
    optimizer: Annotated[
        bool, typer.Option(help="Convert the optimizer state too.")
    ] = True,
    upcycle: Annotated[str | None, _upcycle] = None,
    plugin: PluginModules = None,
) -> int:
    """Convert checkpoints of other programs, with one tensor in memory at a time."""
    import torch

    from weft.checkpoint.convert import convert

    import_plugins(plugin)
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype!r} is not possible; {nearest(dtype, DTYPES)}")
    written = convert(
        source,
        out,
        kind,
        to,
        config,
        getattr(torch, dtype) if dtype else None,
        optimizer,
        upcycle,
    )
    count = sum(row.numel for row in written.table.values())
    moments = (
        ", with optimizer state" if written.moments and optimizer and to != "hf" else ""
    )
    typer.echo(
        f"{out}: {len(written.table)} tensors, {count:,} parameters from {written.kind}{moments}"
    )
    return 0
