"""``weft checkpoint convert``: checkpoints of other programs in, Hugging Face and DCP out."""

from pathlib import Path

import torch
import typer

from weft.checkpoint.convert import convert
from weft.errors import UsageError, nearest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def run(
    source: str, out: str, kind: str | None, to: str, config: Path | None, dtype: str | None, optimizer: bool
) -> int:
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype!r} is not possible; {nearest(dtype, DTYPES)}")
    found = convert(source, out, kind, to, config, DTYPES[dtype] if dtype else None, optimizer)
    count = sum(logical.numel for logical in found.logical.values())
    moments = ", with optimizer state" if found.moments and optimizer and to != "hf" else ""
    typer.echo(f"{out}: {len(found.names())} tensors, {count:,} parameters from {found.kind}{moments}")
    return 0
