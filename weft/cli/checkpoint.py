"""``weft checkpoint``: list, look into, verify, compare, merge and thin out checkpoints."""

import fnmatch
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from weft.checkpoint.format import ROOT, Tensor
from weft.checkpoint.load import Checkpoint
from weft.checkpoint.s3 import open_storage
from weft.checkpoint.save import TORCH_DTYPES, Local
from weft.checkpoint.storage import Storage
from weft.checkpoint.store import candidates, committed, is_new, look, places, prune, rewrite
from weft.checkpoint.store import verify as verify_whole
from weft.errors import UsageError, WeftError
from weft.layout.dims import Box, part
from weft.observe.metrics import FILE, read_metrics

CHUNK = 1 << 22  # elements that are compared together
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def ls(path: str, as_json: bool) -> int:
    """A line per checkpoint, oldest first. One that seems whole may still hold damaged values."""
    records = []
    found = _checkpoints(path)
    spread = len({str(place).removesuffix(place.name) for place in found}) > 1
    for place in found:
        checkpoint, problem, meta = Checkpoint(place), None, {}
        try:
            meta = checkpoint.meta
            look(checkpoint)
        except WeftError as error:
            problem = str(error).removeprefix(f"checkpoint {place} is ")
        record: dict[str, Any] = {key: meta.get(key) for key in ("step", "layout", "world")} | {"problem": problem}
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
        state = str(datetime.fromtimestamp(int(r["saved"]))), _bytes(r["bytes"]), r["problem"] or "seems whole"
        rows.append((*("-" if r[key] is None else str(r[key]) for key in columns), *state))
    _print_table(rows)
    return 0


def inspect(path: str, pattern: str | None, as_json: bool) -> int:
    """What a checkpoint says of itself, and the tensors whose name contains or, with wildcards, matches ``pattern``."""
    checkpoint = Checkpoint(_checkpoints(path)[-1])
    meta, tensors = checkpoint.meta, checkpoint.tensors
    wanted = pattern if pattern and any(c in pattern for c in "*?[") else f"*{pattern or ''}*"
    names = [name for name in tensors if fnmatch.fnmatchcase(name, wanted)]
    if not names and pattern:
        raise WeftError(f"{checkpoint} has no tensor like {pattern!r}; `weft checkpoint inspect` without it lists all")
    blocks = Counter(b.tensor for b in checkpoint.all_blocks())
    if as_json:
        about = {key: value for key, value in meta.items() if key not in ("tensors", "places", "rng")}
        found = {n: asdict(t := tensors[n]) | {"blocks": blocks[n], "bytes": _size(t)} for n in names}
        print(json.dumps({"checkpoint": str(checkpoint), **about, "tensors": found}))
        return 0
    facts = {"checkpoint": checkpoint, **{key: meta.get(key) for key in ("step", "layout", "world", "data")}} | {
        "recipe": meta.get("recipe", {}).get("name"),
        "progress": ", ".join(f"{key} {value:,}" for key, value in meta.get("progress", {}).items()),
        "files": ", ".join(Path(name).name for name in meta["files"]),
        "tensors": f"{len(tensors)}, {_bytes(sum(map(_size, tensors.values())))}",
    }
    _print_table([(key, str(value)) for key, value in facts.items() if value not in ("", None)])
    rows = [("tensor", "shape", "dtype", "dims", "blocks", "size")]
    for name in names:
        t = tensors[name]
        shape = " x ".join(map(str, t.shape)) or "scalar"
        rows.append((name, shape, t.dtype, " ".join(t.dims) or "-", str(blocks[name]), _bytes(_size(t))))
    print()
    _print_table(rows)
    return 0


def verify(path: str) -> int:
    """Read everything that ``path`` means: one checkpoint, or all of a run with a line for each."""
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


def diff(a: str, b: str, as_json: bool) -> int:
    """Compare tensors bit by bit; exit code 0 if they are equal, whatever step and layout they were saved at."""
    with _reading(_checkpoints(a)[-1], _checkpoints(b)[-1]) as (one, two):
        fields = ("step", "layout", "world", "data", "progress")
        meta = {k: [one.meta.get(k), two.meta.get(k)] for k in fields if one.meta.get(k) != two.meta.get(k)}
        missing = [name for name in one.tensors if name not in two.tensors]
        extra = [name for name in two.tensors if name not in one.tensors]
        common = [(name, t, two.tensors[name]) for name, t in one.tensors.items() if name in two.tensors]
        alike = {name: t for name, t, other in common if (t.shape, t.dtype) == (other.shape, other.dtype)}
        changed = {n: [[s.dtype, s.shape], [t.dtype, t.shape]] for n, s, t in common if n not in alike}
        compared = {name: _compare(name, t, one, two) for name, t in alike.items()}
    values = {name: found for name, found in compared.items() if found["different"]}
    equal = not (missing or extra or changed or values)
    if as_json:
        found = {n: {k: x if math.isfinite(x) else None for k, x in v.items()} for n, v in values.items()}
        record = {"equal": equal, "meta": meta, "missing": missing, "extra": extra, "changed": changed}
        print(json.dumps(record | {"values": found}))
        return 0 if equal else 1
    rows = [(key, *map(str, pair)) for key, pair in meta.items()]
    rows += [(name, *(f"{dtype} {list(shape)}" for dtype, shape in pair)) for name, pair in changed.items()]
    rows += [(name, "there", "missing") for name in missing] + [(name, "missing", "there") for name in extra]
    _print_table([("", "A", "B"), *rows] if rows else [])
    table = [("tensor", "different elements", "largest difference", "relative 2-norm")]
    for name, v in values.items():
        count = f"{v['different']:,} of {alike[name].numel:,}"
        table.append((name, count, f"{v['max']:.3g}", f"{v['relative']:.3g}"))
    _print_table(table if values else [])
    print(f"all {len(one.tensors)} tensors are equal" if equal else "the tensors differ")
    return 0 if equal else 1


def merge(path: str, out: str) -> int:
    """Rewrite a checkpoint as one of a single rank; nothing half-made stays."""
    target = open_storage(out)
    if not is_new(target):
        raise UsageError(f"--out {out} exists already; name a new folder")
    with _reading(_checkpoints(path)[-1]) as (source,):
        try:
            rewrite(source, target)
        except BaseException:  # Ctrl-C as well
            target.clear()
            raise
    print(out)
    return 0


def thin(run: str, last: int, every: int, best: str | None, dry_run: bool) -> int:
    """Delete what the policy does not keep, in each place of the run.

    Reads the newest checkpoint there first, and those before until one is whole.
    """
    found = _checkpoints(run)
    if found == [open_storage(run)]:
        raise UsageError(f"{run} is one checkpoint; give the folder of its run")
    scores = _scores(Path(run), best) if best else None
    damaged: list[str] = []
    kept = 0

    def check(place: Storage) -> None:
        damaged.append(place.name)
        _verify(place)
        damaged.pop()

    for root in places(run):
        if not (here := committed(root)):
            continue
        before = len(damaged)
        gone = prune(root, last, every, scores, check, dry_run)
        if len(damaged) - before == len(here):
            raise WeftError(f"no checkpoint in {root} verifies, so none is deleted")
        for place in gone:
            print(f"{'would delete' if dry_run else 'deleted'} {place}")
        kept += len(here) - len(gone)
    print(f"{kept} of {len(found)} kept" + (f"; damaged: {', '.join(damaged)}" if damaged else ""))
    return 0


def _scores(run: Path, metric: str) -> dict[int, float]:
    """A metric of the run by step: ``validation.loss``, or ``validation`` for short."""
    kind, _, field = metric.partition(".")
    folder = next((p for p in (run, run.parent) if (p / FILE).is_file()), None)
    if folder is None:
        raise UsageError(f"--best needs the metrics of the run, and there is no {FILE} in {run}; give the run's folder")
    records = read_metrics(folder).get(kind, [])
    scores = {r["step"]: float(value) for r in records if isinstance(value := r.get(field or "loss"), int | float)}
    if not scores:
        raise UsageError(f"--best {metric}: the run has no such metric; validation.loss and train.loss are usual")
    return scores


def _checkpoints(path: str) -> list[Storage]:
    """The checkpoints that ``path`` means, oldest first."""
    return candidates(path, warn=lambda text: print(f"weft: {text}", file=sys.stderr))[::-1]


class _Watched:
    """A place that tells how many bytes of data files are read."""

    def __init__(self, place: Storage, heard: Callable[[int], None]) -> None:
        self._place, self._heard = place, heard

    def __str__(self) -> str:
        return str(self._place)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place, name)

    def read_into(self, name: str, offset: int, *buffers: memoryview) -> None:
        self._place.read_into(name, offset, *buffers)
        self._heard(sum(b.nbytes for b in buffers))


@contextmanager
def _reading(*places: Storage) -> Iterator[list[Checkpoint]]:
    """Open checkpoints, with a bar for how much of them has been read."""
    console, found = Console(stderr=True), []
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        for place in places:
            task = bar.add_task(place.name, total=None)
            found.append(Checkpoint(cast(Storage, _Watched(place, partial(bar.advance, task)))))
            bar.update(task, total=sum(map(_size, found[-1].tensors.values())))
        yield found


def _verify(place: Storage) -> int:
    with _reading(place) as (checkpoint,):
        return verify_whole(checkpoint)


def _compare(name: str, tensor: Tensor, one: Checkpoint, two: Checkpoint) -> dict[str, float]:
    """How many elements are different, bit by bit, and by how much."""
    count, largest, apart, norm = 0, 0.0, 0.0, 0.0
    rows = (*tensor.shape, 1)[0]
    for i in range(pieces := min(rows, -(-tensor.numel // CHUNK))):
        box: Box = (part(rows, pieces, i), *((0, n) for n in tensor.shape[1:]))[: len(tensor.shape)]
        x, y = (torch.empty([hi - lo for lo, hi in box], dtype=TORCH_DTYPES[tensor.dtype]) for _ in "xy")
        one.load({name: Local(x, box, tensor)})
        two.load({name: Local(y, box, tensor)})
        unequal = x.view(BITS[tensor.itemsize]) != y.view(BITS[tensor.itemsize])
        norm += float(x.double().square().sum())
        if found := int(unequal.sum()):
            gap = (x[unequal].double() - y[unequal].double()).abs()
            count, apart = count + found, apart + float(gap.square().sum())
            largest = max(largest, float(gap.max()), key=lambda v: (math.isnan(v), v))
    return {"different": count, "max": largest, "relative": math.sqrt(apart / norm) if norm else math.inf}


def _size(t: Tensor) -> int:
    return t.numel * t.itemsize


def _bytes(count: int) -> str:
    power = min(4, (len(str(count)) - 1) // 3)
    return f"{count / 1000**power:.4g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Columns side by side; not cut to the terminal's width, so that lines can be searched."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
