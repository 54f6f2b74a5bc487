"""``weft export``: a checkpoint for other programs."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.arguments import DTYPES, Ema, ModelName
from weft.cli.console import warn
from weft.errors import UsageError, nearest
from weft.new_folder import check_new

_texts = (
    "For a mixture of experts: texts of a task. The experts that these texts "
    "choose decide --keep and --place."
)
_keep = "Keep only this many experts of each layer, those chosen most."
_place = "Order the experts for this many ranks, so that most tokens stay on one rank."
_level = "With --place: weight of equal loads against tokens that stay on a rank."
_most_load = (
    "With --place: the largest load of a rank, as a multiple of the least possible one (1.05). "
    "Integer programs then place the experts (MoETuner; needs scipy). 0: a search without such a limit."
)

_dtype = (
    "Type of the weights: float32, bfloat16 or float16, with --format gguf "
    "also q8_0; by default that of the model from which the run started."
)
_format = "hf: a Hugging Face folder; gguf: a file for llama.cpp and Ollama (OUT.gguf, or a folder with it)."

_push = (
    "Upload the export to this repository of the Hugging Face hub, with the "
    "token of 'hf auth login' or HF_TOKEN."
)
_public = "With --push: make a new repository public; by default it is private."


def export_command(
    checkpoint: Annotated[str, ModelName],
    out: Annotated[Path, typer.Option(help="The new folder (or .gguf file).")],
    merge: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="Merge an adapter into its model, and write the merged model.",
        ),
    ] = False,
    ema: Ema = False,
    texts: Annotated[Path | None, typer.Option(metavar="FILE", help=_texts)] = None,
    keep: Annotated[int, typer.Option(min=0, metavar="N", help=_keep)] = 0,
    place: Annotated[int, typer.Option(min=0, metavar="RANKS", help=_place)] = 0,
    level: Annotated[float, typer.Option(min=0, help=_level)] = 0.0,
    most_load: Annotated[float, typer.Option(min=0, help=_most_load)] = 0.0,
    dtype: Annotated[str | None, typer.Option(help=_dtype)] = None,
    form: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help=_format)
    ] = "hf",
    push: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help=_push)] = None,
    public: Annotated[bool, typer.Option("--public", help=_public)] = False,
) -> int:
    """Write a checkpoint as a Hugging Face model: safetensors, config and tokenizer.

    An adapter is written without its model, in the form of PEFT, unless --merge is given. With --format gguf the model
    is one file for llama.cpp and Ollama.
    """
    check_new(out)
    if public and push is None:
        raise UsageError("--public is for the repository of --push")
    if push is not None:
        from weft.checkpoint.hub import check_push

        check_push(push)
    if form not in ("hf", "gguf"):
        raise UsageError(
            f"--format {form!r} is not possible; {nearest(form, ('hf', 'gguf'))}"
        )
    dtypes = (*DTYPES, "q8_0") if form == "gguf" else DTYPES
    if dtype not in (None, *dtypes):
        raise UsageError(
            f"--dtype {dtype!r} is not possible with --format {form}; {nearest(dtype or '', dtypes)}"
        )
    if texts is not None and form != "hf":
        raise UsageError(
            "--texts is for mixtures of experts, and --format gguf writes none; leave one of them out"
        )
    if texts is None and (keep or place):
        raise UsageError(
            "--keep and --place go by what the tokens of --texts choose; give a file of them"
        )
    if texts is not None:
        from weft.checkpoint.convert.routing import export_for_texts

        typer.echo(
            export_for_texts(
                checkpoint, out, texts, warn, ema, keep, place, level, dtype, most_load
            )
        )
    else:
        from weft.checkpoint.model import export_model

        out = export_model(checkpoint, out, warn, merge, ema, dtype, form)
    typer.echo(out)
    if push is not None:
        from weft.checkpoint.hub import push as pushed

        typer.echo(pushed(out, push, public))
    return 0
