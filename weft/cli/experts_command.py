"""``weft experts``: train experts of different sizes on domains of their own, and join them."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from weft.cli.arguments import AsJson, Overrides, RecipeFile
from weft.cli.console import print_table
from weft.errors import UsageError, WeftError

if TYPE_CHECKING:
    from weft.recipe import Recipe

_expert = (
    "An expert: its name, and what its recipe differs in, as "
    "'code data.path=code/*.py model.layers=4'. May be repeated."
)
_only = "Train only this expert, as on a machine of its own; may be repeated. All must be here before they are joined."
_top = "How many experts, the likeliest, have a say in each token; 0: all."
_prior = "Weight of each expert before anything of a text is seen, in the order of --expert; by default all are alike."


class ExpertWish(NamedTuple):
    """An expert that a user asks for: its ``name``, its ``overrides`` of the recipe, and the ``recipe`` with these."""

    name: str
    overrides: tuple[str, ...]
    recipe: "Recipe"


def experts_command(
    recipe: RecipeFile,
    expert: Annotated[list[str], typer.Option(metavar="TEXT", help=_expert)],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of the set; each expert has a run folder in it.")],
    overrides: Overrides = None,
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help=_only)] = None,
    top: Annotated[int, typer.Option(min=0, help=_top)] = 0,
    prior: Annotated[list[float] | None, typer.Option(metavar="WEIGHT", help=_prior)] = None,
    as_json: AsJson = False,
) -> int:  # fmt: skip
    """Train experts apart, each on a domain of its own and as large as that is hard, and join them to one model.

    They exchange nothing. weft generate, weft serve and weft eval take the folder as a model: in every text an expert
    counts by how likely it has made the text so far. Run again, the command goes on with what has not ended.
    """
    import json

    from weft.train.expert_set import write_expert_set

    wishes = [_wish(recipe, text, overrides or []) for text in expert]
    names = [wish.name for wish in wishes]
    _check(wishes, only or names, top, prior)
    out.mkdir(parents=True, exist_ok=True)
    for wish in wishes:
        if wish.name in (only or names):
            _train(recipe, wish, overrides or [], out / wish.name, as_json)
    missing = [name for name in names if not (out / name / "checkpoints").is_dir()]
    if missing:
        typer.echo(
            f"not joined yet: {', '.join(missing)} of {out} must be trained, or its run folder copied there; then run "
            "this again"
        )
        return 0
    write_expert_set(out, names, prior or [1.0] * len(names), top)
    rows = [_row(wish, out / wish.name) for wish in wishes]
    if as_json:
        print(json.dumps([row._asdict() for row in rows], indent=1))
        return 0
    print_table(
        ("expert", "parameters", "tokens", "flops"),
        [
            (r.name, f"{r.parameters:,}", f"{r.tokens:,}", f"{r.flops:.3g}")
            for r in rows
        ],
    )
    typer.echo(out)
    return 0


class ExpertRow(NamedTuple):
    """What an expert is: its ``name``, number of ``parameters`` and of ``tokens`` seen, and ``flops`` of training."""

    name: str
    parameters: int
    tokens: int
    flops: float


def _row(wish: ExpertWish, run: Path) -> ExpertRow:
    """Count what the trained expert in the folder ``run`` is, and took."""
    from weft.observe.run_metrics import read_metrics
    from weft.shapes.parameters import parameters
    from weft.train.setup import prepare

    shape = prepare(wish.recipe).shape
    count = sum(parameter.numel for parameter in parameters(shape))
    tokens = int(read_metrics(run)["train"][-1]["tokens"])
    return ExpertRow(wish.name, count, tokens, 6.0 * count * tokens)


def _wish(recipe: Path, text: str, overrides: list[str]) -> ExpertWish:
    """Read one value of ``--expert``, and its recipe, which is refused as by ``weft train``."""
    from weft.recipe import load_recipe

    try:
        name, *own = shlex.split(text)
    except ValueError:
        name, own = "", []
    if not name or "=" in name or "/" in name or name.startswith("."):
        raise UsageError(
            f"--expert {text!r} does not begin with a name; write it as 'code data.path=code/*.py model.layers=4'"
        )
    if wrong := next((each for each in own if "=" not in each), None):
        raise UsageError(f"--expert {name}: {wrong!r} is no section.key=value")
    loaded = load_recipe(recipe, [*overrides, *own])
    loaded.need_model()
    return ExpertWish(name, tuple(own), loaded)


def _check(
    wishes: list[ExpertWish], only: list[str], top: int, prior: list[float] | None
) -> None:
    """Raise :class:`UsageError` for experts that cannot be joined, before any of them is trained."""
    from weft.data.source_check import check_sources

    names = [wish.name for wish in wishes]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(
            f"two experts are named {twice!r}; give each a name of its own"
        )
    if other := next((name for name in only if name not in names), None):
        raise UsageError(f"--only {other} is none of the experts {', '.join(names)}")
    if top > len(names):
        raise UsageError(f"--top {top} of {len(names)} experts; 0 stands for all")
    if prior is not None and (
        len(prior) != len(names) or min(prior) < 0 or not any(prior)
    ):
        raise UsageError(
            f"--prior has {len(prior)} weights for {len(names)} experts; give one for each, none below 0 and one above"
        )
    tokenizers = {wish.recipe.data.tokenizer for wish in wishes}
    if len(tokenizers) > 1:
        raise UsageError(
            f"the experts have different tokenizers ({', '.join(map(str, tokenizers))}), so that their probabilities "
            "cannot be joined; give all the same data.tokenizer"
        )
    for wish in wishes:
        if wish.name in only:
            check_sources(wish.recipe.data)


def _train(
    recipe: Path, wish: ExpertWish, overrides: list[str], out: Path, quiet: bool
) -> None:
    """Train one expert as ``weft train`` does, or go on with it. Raises :class:`WeftError` if the run fails."""
    words = [sys.executable, "-m", "weft", "train", str(recipe), "--out", str(out)]
    for each in (*overrides, *wish.overrides):
        words += ["--set", each]
    if (out / "checkpoints").is_dir():
        words += ["--resume", "auto"]
    typer.echo(f"expert {wish.name}", err=quiet)
    ended = subprocess.run(words, stdout=sys.stderr if quiet else None, check=False)
    if ended.returncode:
        raise WeftError(
            f"expert {wish.name} has ended with exit code {ended.returncode} (its own lines are above); run the same "
            "command again to go on, or train it elsewhere with --only"
        )
