"""``weft probe``: measure this machine, or the ranks that torchrun has started, and write a cluster file."""

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from weft.cli.console import grid, plain_console
from weft.errors import UsageError
from weft.paths import real_path
from weft.run.rank_processes import in_ranks, threads_per_rank
from weft.writable import check_writable


def probe_command(
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The cluster file to write.")
    ] = Path("probe.toml"),
    ranks: Annotated[
        int, typer.Option(min=1, help="Measure with 1, 2, 4 ... up to this many ranks.")
    ] = 4,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure fewer sizes and repetitions.")
    ] = False,
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="A folder on the disk to measure.")
    ] = Path(),
    windows: Annotated[
        int,
        typer.Option(
            "--watch",
            min=0,
            help="Measure a step so often, to predict how much other programs slow it.",
        ),
    ] = 0,
) -> int:
    """Measure this machine for weft plan: products, memory, a step, collectives, a disk. Under torchrun: its ranks."""
    from weft.rehearse.interference import LEAST

    if 0 < windows < LEAST:
        raise UsageError(
            f"--watch {windows} is too few to learn from; give {LEAST} or more"
        )
    if in_ranks():
        return _be_rank(out, quick, folder)
    from weft.rehearse.machine_probe import probe_storage, setting

    check_writable(out, "--out")
    begun = time.perf_counter()
    wanted = [n for n in (2**i for i in range(10)) if n < ranks] + [ranks]
    settings = []
    with Console(stderr=True).status("") as status:
        status.update(f"measuring the disk of {real_path(folder)}")
        # first: a folder that cannot be used is said at once
        moves = probe_storage(folder, quick)
        for n in wanted:
            status.update(f"measuring with {n} process{'es' * (n > 1)} at once")
            settings.append(setting(n, quick))
        watched: list[list[float]] = []
        if windows:
            from weft.rehearse.interference import small_step, watch_windows

            status.update(f"watching {windows} steps")
            watched = watch_windows(small_step(), windows).tolist()
    _write(settings, max(wanted), moves, out, time.perf_counter() - begun, watched)
    return 0


def _be_rank(out: Path, quick: bool, folder: Path) -> int:
    """Measure as one of several ranks that were started elsewhere: one setting, and the links between all ranks."""
    import torch

    from weft.rehearse.machine_probe import probe_machine, probe_storage

    torch.set_num_threads(
        threads_per_rank(0, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    )
    begun = time.perf_counter()
    measured = probe_machine(quick)
    if int(os.environ["RANK"]) == 0:
        moves = probe_storage(folder, quick)
        _write(
            [measured],
            int(os.environ["WORLD_SIZE"]),
            moves,
            out,
            time.perf_counter() - begun,
        )
    return 0


def _write(
    settings: list[dict[str, Any]],
    count: int,
    moves: dict[str, Any],
    out: Path,
    seconds: float,
    watched: list[list[float]] | None = None,
) -> None:
    from weft.recipe.toml import write_toml
    from weft.rehearse.machine_probe import cluster

    tree = cluster(settings, count, moves)
    if watched:
        tree["calibration"]["windows"] = watched
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        f"# Written by weft probe in {seconds:.0f} s; for weft plan --cluster.\n{write_toml(tree, 5)}"
    )
    heads = (
        "each of",
        "threads",
        "GFLOP/s f32",
        "bf16",
        "triad GB/s",
        "step ms",
        "all-reduce 1 MB us",
        "MB empty",
    )
    table = grid(heads, ("each of",), wrap=True)
    for s in settings:
        reduce = _nearest(s["collectives"].get(f"reduce.{s['ranks']}"), 2**20)
        table.add_row(
            f"{s['ranks']} process{'es' * (s['ranks'] > 1)}", str(s["threads"]), f"{s['peaks']['float32'] / 1e9:.0f}",
            f"{s['peaks']['bfloat16'] / 1e9:.0f}", f"{s['triad'] / 1e9:.1f}", f"{s['step'] * 1e3:.0f}",
            "-" if reduce is None else f"{reduce * 1e6:.0f}", f"{s['memory']['plain'] / 1e6:.0f}",
        )  # fmt: skip
    console = plain_console(120)
    console.print(table)
    disk, link = moves["disk"], moves["link"]
    console.print(
        f"disk of {disk['folder']}: {_rates(disk, 'read', 'write')}, {disk['free'] / 1e9:.0f} GB free"
    )
    if disk["note"]:
        console.print(f"note: {disk['note']}", markup=False)
    if link:
        console.print(
            f"copies of pinned memory: {_rates(link, 'to_device', 'to_host')}"
        )
    console.print(
        f"{out}: {seconds:.0f} s; use it with: weft plan MODEL --cluster {out}"
    )


def _rates(curves: dict[str, Any], *names: str) -> str:
    """Return the GB/s of each curve's transfers by their MiB."""

    def rates(points: list[list[float]]) -> str:
        return ", ".join(
            f"{size / seconds / 1e9:.2f} ({size / 2**20:.0f} MiB)"
            for size, seconds in points
        )

    return "; ".join(
        f"{name.replace('_', ' ')} {rates(curves[name])} GB/s" for name in names
    )


def _nearest(points: list[list[float]] | None, size: int) -> float | None:
    """Return the seconds of the collective at the measured size nearest to ``size``."""
    if not points:
        return None
    _, cpu, besides = min(points, key=lambda p: abs(p[0] - size))
    return cpu + besides
