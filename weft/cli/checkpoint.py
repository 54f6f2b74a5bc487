"""``weft checkpoint``: list, look into, verify, compare, merge, convert and thin out checkpoints."""

import fnmatch
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TransferSpeedColumn,
)

from weft.cli.arguments import AsJson
from weft.cli.console import warn
from weft.cli.convert import convert_command
from weft.errors import UsageError, WeftError
from weft.paths import real_path

if TYPE_CHECKING:  # `weft --help` does not wait for PyTorch
    from weft.checkpoint.load import StoredCheckpoint
    from weft.checkpoint.storage import Storage
    from weft.layout.dims import Tensor

app = typer.Typer(
    help="List, look into, verify, compare, merge, convert and prune checkpoints.",
    no_args_is_help=True,
)
app.command("convert")(convert_command)

_newest = "A checkpoint, or a run: its newest one. A folder or s3://bucket/prefix."
OneCheckpoint = Annotated[str, typer.Argument(metavar="PATH", help=_newest)]
_all = "A run or a checkpoint: a folder or s3://bucket/prefix."
AllCheckpoints = Annotated[str, typer.Argument(metavar="PATH", help=_all)]
_pattern = typer.Argument(
    metavar="PATTERN",
    help="Show only tensors with this part of a name, or pattern such as '*.norm'.",
)


@app.command("ls")
def ls_command(path: AllCheckpoints, as_json: AsJson = False) -> int:
    """List the checkpoints of a run, oldest first: step, layout, size, and whether they seem whole.

    A checkpoint that seems whole may still hold damaged values; weft checkpoint verify reads them.
    """
    from weft.checkpoint.boxes import ROOT
    from weft.checkpoint.load import StoredCheckpoint
    from weft.checkpoint.store import check_files

    records = []
    checkpoints = _checkpoints(path)
    spread = len({str(place).removesuffix(place.name) for place in checkpoints}) > 1
    for place in checkpoints:
        checkpoint, problem, meta = StoredCheckpoint(place), None, {}
        try:
            meta = checkpoint.meta
            check_files(checkpoint)
        except WeftError as error:
            problem = str(error).removeprefix(f"checkpoint {place} is ")
        record: dict[str, Any] = {
            key: meta.get(key) for key in ("step", "layout", "world")
        } | {"problem": problem}
        record |= {"checkpoint": str(place) if spread or not place.name else place.name}
        record |= {"tokens": meta.get("progress", {}).get("tokens")}
        record |= {"saved": place.modified(ROOT), "bytes": sum(place.list().values())}
        records.append(record)
    if as_json:
        print(json.dumps(records))
        return 0
    columns = ("checkpoint", "step", "layout", "world", "tokens")
    rows: list[tuple[str, ...]] = [(*columns, "saved", "size", "")]
    for r in records:
        state = (
            str(datetime.fromtimestamp(int(r["saved"]))),
            _bytes(r["bytes"]),
            r["problem"] or "seems whole",
        )
        rows.append(
            (*("-" if r[key] is None else str(r[key]) for key in columns), *state)
        )
    _print_table(rows)
    return 0


@app.command("inspect")
def inspect_command(
    path: OneCheckpoint,
    pattern: Annotated[str | None, _pattern] = None,
    as_json: AsJson = False,
) -> int:
    """Show what a checkpoint holds: run, progress and tensors."""
    from weft.checkpoint.load import StoredCheckpoint

    checkpoint = StoredCheckpoint(_checkpoints(path)[-1])
    meta, tensors = checkpoint.meta, checkpoint.tensors
    wanted = (
        pattern
        if pattern and any(c in pattern for c in "*?[")
        else f"*{pattern or ''}*"
    )
    names = [name for name in tensors if fnmatch.fnmatchcase(name, wanted)]
    if not names and pattern:
        raise WeftError(
            f"{checkpoint} has no tensor like {pattern!r}; `weft checkpoint inspect` without it lists all"
        )
    blocks = Counter(b.tensor for b in checkpoint.all_blocks())
    if as_json:
        about = {
            key: value
            for key, value in meta.items()
            if key not in ("tensors", "places")
        }
        described = {
            n: asdict(t := tensors[n]) | {"blocks": blocks[n], "bytes": _size(t)}
            for n in names
        }
        print(
            json.dumps({"checkpoint": str(checkpoint), **about, "tensors": described})
        )
        return 0
    facts = {
        "checkpoint": checkpoint,
        **{key: meta.get(key) for key in ("step", "layout", "world", "data")},
    } | {
        "recipe": meta.get("recipe", {}).get("name"),
        "progress": ", ".join(
            f"{key} {value:,}" for key, value in meta.get("progress", {}).items()
        ),
        "files": ", ".join(Path(name).name for name in meta["files"]),
        "tensors": f"{len(tensors)}, {_bytes(sum(map(_size, tensors.values())))}",
    }
    _print_table(
        [(key, str(value)) for key, value in facts.items() if value not in ("", None)]
    )
    rows = [("tensor", "shape", "dtype", "dims", "blocks", "size")]
    for name in names:
        t = tensors[name]
        shape = " x ".join(map(str, t.shape)) or "scalar"
        rows.append(
            (
                name,
                shape,
                t.dtype,
                " ".join(t.dims) or "-",
                str(blocks[name]),
                _bytes(_size(t)),
            )
        )
    print()
    _print_table(rows)
    return 0


@app.command("verify")
def verify_checkpoint_command(path: AllCheckpoints) -> int:
    """Read checkpoints from end to end and check every digest. Exit code 0: all are whole, 1: some are damaged."""
    from weft.checkpoint.address import open_storage

    whole = True
    for place in _checkpoints(path):
        try:
            print(f"{place}  whole, {_bytes(_verify(place))} read", flush=True)
        except WeftError as error:
            if place == open_storage(path):
                raise
            whole = False
            print(f"{place}  {error}", flush=True)
    return 0 if whole else 1


@app.command("diff")
def diff_command(
    a: Annotated[str, typer.Argument(metavar="A", help=_newest)],
    b: Annotated[str, typer.Argument(metavar="B", help=_newest)],
    as_json: AsJson = False,
) -> int:
    """Compare the tensors of two checkpoints, of whatever layout. Exit code 0: equal bit by bit, 1: not."""
    from weft.checkpoint.compare import compare

    with _reading(_checkpoints(a)[-1], _checkpoints(b)[-1]) as (left, right):
        comparison = compare(left, right)
    if as_json:
        finite = {
            name: {key: x if math.isfinite(x) else None for key, x in asdict(v).items()}
            for name, v in comparison.values.items()
        }
        print(
            json.dumps(
                {"equal": comparison.equal} | asdict(comparison) | {"values": finite}
            )
        )
        return 0 if comparison.equal else 1
    rows = [(key, *map(str, pair)) for key, pair in comparison.meta.items()]
    rows += [
        (name, *(f"{dtype} {list(shape)}" for dtype, shape in pair))
        for name, pair in comparison.changed.items()
    ]
    rows += [(name, "there", "missing") for name in comparison.missing] + [
        (n, "missing", "there") for n in comparison.extra
    ]
    _print_table([("", "A", "B"), *rows] if rows else [])
    table = [("tensor", "different elements", "largest difference", "relative 2-norm")]
    for name, v in comparison.values.items():
        count = f"{v.different:,} of {left.tensors[name].numel:,}"
        table.append((name, count, f"{v.max:.3g}", f"{v.relative:.3g}"))
    _print_table(table if comparison.values else [])
    print(
        f"all {len(left.tensors)} tensors are equal"
        if comparison.equal
        else "the tensors differ"
    )
    return 0 if comparison.equal else 1


@app.command("merge")
def merge_command(
    path: OneCheckpoint,
    out: Annotated[str, typer.Option(help="The new folder, or s3://...")],
) -> int:
    """Rewrite a checkpoint of many ranks as one of a single rank, verified and bit by bit the same."""
    from weft.checkpoint.address import open_storage
    from weft.checkpoint.store import is_new, rewrite

    target = open_storage(out)
    if not is_new(target):
        raise UsageError(f"--out {out} exists already; name a new folder")
    with _reading(_checkpoints(path)[-1]) as (source,):
        rewrite(source, target)
    print(out)
    return 0


@app.command("prune")
def prune_command(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run folder, or s3://bucket/prefix.")
    ],
    last: Annotated[
        int,
        typer.Option(
            "--keep-last", min=1, metavar="N", help="Keep the newest N checkpoints."
        ),
    ],
    every: Annotated[
        int,
        typer.Option(
            "--keep-every", min=0, metavar="K", help="Keep a checkpoint every K steps."
        ),
    ] = 0,
    best: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC",
            help=(
                "Keep the checkpoint with the lowest value of this metric, e.g. "
                "validation.loss."
            ),
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be deleted.")
    ] = False,
) -> int:
    """Delete old checkpoints of a run, but never the last that verifies, and none while the run is training.

    In each folder or prefix with checkpoints of the run, checkpoints are read from the newest on, until one is whole.
    """
    from weft.checkpoint.address import open_storage
    from weft.checkpoint.best import best_checkpoint
    from weft.checkpoint.lease import Lease
    from weft.checkpoint.store import checkpoint_places, committed_checkpoints
    from weft.checkpoint.store import prune as delete
    from weft.observe.run_metrics import metric_by_step

    checkpoints = _checkpoints(run)
    if checkpoints == [open_storage(run)]:
        raise UsageError(f"{run} is one checkpoint; give the folder of its run")
    scores = metric_by_step(Path(run), best) if best else None
    kept = best_checkpoint(Path(run))

    def is_best(place: "Storage") -> bool:
        return bool(kept) and (
            str(place) == kept or real_path(str(place)) == real_path(kept)
        )

    deleted, damaged = 0, list[str]()
    # Not the run's folder itself: by when it was changed, --resume auto tells which run is the last.
    roots = [
        root
        for root in checkpoint_places(run)
        if root != open_storage(run) or committed_checkpoints(root)
    ]
    with Lease() as lease:
        if not dry_run:
            lease.take(roots)
        for root in roots:
            count = len(committed_checkpoints(root))
            pruned = delete(
                root,
                last,
                every,
                scores,
                _verify,
                dry_run,
                is_own=lambda place: not is_best(place),
            )
            if count and len(pruned.damaged) == count:
                raise WeftError(f"no checkpoint in {root} verifies, so none is deleted")
            for place in pruned.deleted:
                print(f"{'would delete' if dry_run else 'deleted'} {place}")
            deleted += len(pruned.deleted)
            damaged += [place.name for place in pruned.damaged]
    print(
        f"{len(checkpoints) - deleted} of {len(checkpoints)} kept"
        + (f"; damaged: {', '.join(damaged)}" if damaged else "")
    )
    return 0


def _checkpoints(path: str) -> "list[Storage]":
    """Return the checkpoints at ``path``, oldest first."""
    from weft.checkpoint.store import candidates

    return candidates(path, warn=warn)[::-1]


@contextmanager
def _reading(*places: "Storage") -> "Iterator[list[StoredCheckpoint]]":
    """Open checkpoints for the context, with a progress bar of the bytes read."""
    from weft.checkpoint.load import StoredCheckpoint

    console, opened = Console(stderr=True), []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        for place in places:
            task = bar.add_task(place.name, total=None)
            opened.append(StoredCheckpoint(place, partial(bar.advance, task)))
            bar.update(task, total=sum(map(_size, opened[-1].tensors.values())))
        yield opened


def _verify(place: "Storage") -> int:
    from weft.checkpoint.store import verify as verify_whole

    with _reading(place) as (checkpoint,):
        return verify_whole(checkpoint)


def _size(t: "Tensor") -> int:
    return t.numel * t.itemsize


def _bytes(count: int) -> str:
    power = min(4, (len(str(count)) - 1) // 3)
    return f"{count / 1000**power:.4g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print columns side by side without cutting lines to the terminal's width, so that they can be searched."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(
            "  ".join(
                cell.ljust(width) for cell, width in zip(row, widths, strict=True)
            ).rstrip()
        )
