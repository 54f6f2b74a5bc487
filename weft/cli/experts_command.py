"""``weft experts``: train experts of different sizes on domains or clusters of their own, and join them."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from weft.cli.arguments import AsJson, Overrides, RecipeFile
from weft.cli.console import print_table
from weft.cli.expert_wishes import (
    ExpertWish,
    check_expert_names,
    check_texts,
    read_wish,
)
from weft.errors import UsageError, WeftError

_expert = (
    "An expert: its name, and what its recipe differs in, as "
    "'code data.path=code/*.py model.layers=4'. May be repeated. With --clusters it changes the expert of that name, "
    "cluster-0 and following."
)
_clusters = "Divide the recipe's images into so many clusters by k-means, and train an expert for each of them."
_features = (
    "With --clusters: a .npy file with a vector for each image, in the order of the data, by which they are divided; "
    "by default the pixels."
)
_only = "Train only this expert, as on a machine of its own; may be repeated. All must be here before they are joined."
_lost = "With --clusters: join without this expert, whose cluster is masked; may be repeated."
_top = "How many experts, the likeliest, have a say in each token, or in each image at each step; 0: all."
_prior = "Weight of each expert before anything of a text is seen, in the order of --expert; by default all are alike."
_router = "With --clusters: steps of the training of the router."


def experts_command(
    recipe: RecipeFile,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of the set; each expert has a run folder in it.")],
    expert: Annotated[list[str] | None, typer.Option(metavar="TEXT", help=_expert)] = None,
    clusters: Annotated[int | None, typer.Option(metavar="K", help=_clusters)] = None,
    features: Annotated[Path | None, typer.Option(metavar="FILE", help=_features)] = None,
    overrides: Overrides = None,
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help=_only)] = None,
    lost: Annotated[list[str] | None, typer.Option(metavar="NAME", help=_lost)] = None,
    top: Annotated[int, typer.Option(min=0, help=_top)] = 0,
    prior: Annotated[list[float] | None, typer.Option(metavar="WEIGHT", help=_prior)] = None,
    router_steps: Annotated[int, typer.Option(min=1, help=_router)] = 1000,
    as_json: AsJson = False,
) -> int:  # fmt: skip
    """Train experts apart, each on a domain or a cluster of its own and in a size of its own, and join them.

    They exchange nothing. weft generate, weft serve and weft eval take the folder as a model: in every text an expert
    counts by how likely it has made the text so far. With --clusters, weft sample takes it: a router says how much each
    counts in a noised image. Run again, the command goes on with what has not ended.
    """
    import json

    from weft.train.expert_set import write_expert_set
    from weft.writable import check_writable

    check_writable(out, "--out", folder=True)
    divided = None
    if clusters is None:
        _refuse_without_clusters(expert, features, lost)
        wishes = [read_wish(recipe, text, overrides or []) for text in expert or []]
    else:
        from weft.cli.cluster_experts import (
            cluster_names,
            divide_images,
            join_images,
            write_division,
        )

        if prior is not None:
            raise UsageError(
                "--prior is of texts; the router of images learns how frequent clusters are. Leave it out"
            )
        check_expert_names(cluster_names(clusters), only or [], lost or [], top)
        divided = divide_images(
            recipe, overrides or [], expert or [], clusters, features, out
        )
        wishes = divided.wishes
    names = [wish.name for wish in wishes]
    check_expert_names(names, only or [], lost or [], top)
    if divided is None:
        check_texts(wishes, only or names, prior)
    out.mkdir(parents=True, exist_ok=True)
    if divided is not None:
        write_division(divided, out)
    here = [w for w in wishes if w.name in (only or names) and w.name not in (lost or [])]  # fmt: skip
    _train_each(recipe, here, overrides or [], out, as_json)
    wanted = [wish for wish in wishes if wish.name not in (lost or [])]
    missing = [w.name for w in wanted if not (out / w.name / "checkpoints").is_dir()]
    if missing:
        without = ", or --lost NAME joins the others" if divided else ""
        typer.echo(
            f"not joined yet: {', '.join(missing)} of {out} must be trained, or its run folder copied there; then run "
            f"this again{without}"
        )
        return 0
    if divided is None:
        write_expert_set(out, names, prior or [1.0] * len(names), top)
    else:
        join_images(divided, out, top, lost or [], router_steps)
    rows = [_row(wish, out / wish.name) for wish in wanted]
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


def _refuse_without_clusters(
    expert: list[str] | None, features: Path | None, lost: list[str] | None
) -> None:
    """Raise :class:`UsageError` for options that only ``--clusters`` reads, and for no expert at all."""
    for option, given in (("--features", features), ("--lost", lost)):
        if given:
            raise UsageError(f"{option} is for --clusters; leave it out")
    if not expert:
        raise UsageError(
            "no experts are named; give --expert 'NAME section.key=value ...' for each, or --clusters K for images"
        )


#: Exit codes of a run that a user has stopped: no other begins then.
STOPPED = (130, -2)


class ExpertRow(NamedTuple):
    """A row of the table of experts: ``name``, numbers of ``parameters`` and of trained ``tokens``, and ``flops`` of
    training.
    """

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


def _train_each(
    recipe: Path, wishes: list[ExpertWish], overrides: list[str], out: Path, quiet: bool
) -> None:
    """Train experts one after another; one that fails does not keep the others from being trained.

    Raises :class:`WeftError` for those that have failed.
    """
    failed: dict[str, int] = {}
    for wish in wishes:
        code = _train(recipe, wish, overrides, out / wish.name, quiet)
        if code:
            failed[wish.name] = code
        if code in STOPPED:
            break
    if failed:
        codes = ", ".join(
            f"expert {name} has ended with exit code {code}"
            for name, code in failed.items()
        )
        raise WeftError(
            f"{codes} (its own lines are above); run the same command again to go on, or train it elsewhere with --only"
        )


def _train(
    recipe: Path, wish: ExpertWish, overrides: list[str], out: Path, quiet: bool
) -> int:
    """Train one expert as ``weft train`` does, or go on with it. Returns the exit code."""
    words = [sys.executable, "-m", "weft", *training_words(recipe, wish, overrides, out)]  # fmt: skip
    typer.echo(f"expert {wish.name}", err=quiet)
    ended = subprocess.run(words, stdout=sys.stderr if quiet else None, check=False)
    return ended.returncode


def training_words(
    recipe: Path, wish: ExpertWish, overrides: list[str], out: Path
) -> list[str]:
    """Return the arguments of ``weft`` that train an expert in the run folder ``out``, or continue its run."""
    words = ["train", str(recipe), "--out", str(out)]
    for each in (*overrides, *wish.overrides):
        words += ["--set", each]
    if (out / "checkpoints").is_dir():
        words += ["--resume", "auto"]
    return words
