"""``weft probe``: measure this machine, or the ranks that torchrun has started, and write a cluster file."""

import json
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as Grid

from weft.cli.failure import leave
from weft.cli.launch import in_ranks, init_ranks, threads_per_rank
from weft.errors import WeftError

#: Seconds after which the processes of one setting are given up.
PATIENCE = 300


def probe(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The cluster file to write.")] = Path("probe.toml"),
    ranks: Annotated[int, typer.Option(min=1, help="Measure with 1, 2, 4 ... up to so many ranks at once.")] = 4,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and turns.")] = False,
) -> int:
    """Measure this machine for weft plan: products, memory, operators, collectives. Under torchrun: its ranks."""
    if in_ranks():
        return _be_rank(out, quick)
    begun = time.perf_counter()
    wanted = [n for n in (2**i for i in range(10)) if n < ranks] + [ranks]
    settings = []
    with Console(stderr=True).status("") as status:
        for n in wanted:
            status.update(f"measuring with {n} process{'es' * (n > 1)} at once")
            settings.append(_setting(n, quick))
    _write(settings, max(wanted), out, time.perf_counter() - begun)
    return 0


def _setting(ranks: int, quick: bool) -> dict[str, Any]:
    """What rank 0 of ``ranks`` fresh processes measures while the others do the same."""
    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = threads_per_rank(0, ranks)
    given = {
        "OMP_NUM_THREADS": str(threads), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        with tempfile.TemporaryDirectory() as folder:
            context = mp.start_processes(_worker, (threads, quick, folder), ranks, join=False, start_method="spawn")
            until = time.monotonic() + PATIENCE
            while not context.join(timeout=1):
                if time.monotonic() > until:
                    raise WeftError(f"the probe's {ranks} processes did not end in {PATIENCE} s")
            found: dict[str, Any] = json.loads((Path(folder) / "0").read_text())
            return found
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _worker(rank: int, threads: int, quick: bool, folder: str) -> None:
    import torch

    from weft.planner.probe import measure

    # What a rank of a run has imported by the time it trains.
    from weft.train import loop, rehearse  # noqa: F401

    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(threads)
    found = measure(rehearse.reference, lambda: init_ranks("cpu", PATIENCE), quick)
    (Path(folder) / str(rank)).write_text(json.dumps(found))
    leave(0)


def _be_rank(out: Path, quick: bool) -> int:
    """One of several ranks that were started elsewhere: one setting, and the links between all of them."""
    import torch

    from weft.planner.probe import measure
    from weft.train import loop, rehearse  # noqa: F401

    torch.set_num_threads(threads_per_rank(0, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    begun = time.perf_counter()
    found = measure(rehearse.reference, lambda: init_ranks("cpu", PATIENCE), quick)
    if int(os.environ["RANK"]) == 0:
        _write([found], int(os.environ["WORLD_SIZE"]), out, time.perf_counter() - begun)
    return 0


def _write(settings: list[dict[str, Any]], count: int, out: Path, seconds: float) -> None:
    from weft.planner.probe import as_toml, cluster

    tree = cluster(settings, count)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(f"# Written by weft probe in {seconds:.0f} s; for weft plan --cluster.\n{as_toml(tree)}\n")
    grid = Grid(header_style="bold", box=None, padding=(0, 2, 0, 0))
    grid.add_column("each of")
    for name in ("threads", "GFLOP/s f32", "bf16", "triad GB/s", "op us", "FSDP us", "all-reduce 1 MB us", "in a step",
                 "MB empty"):  # fmt: skip
        grid.add_column(name, justify="right")
    for s in settings:
        reduce = _nearest(s["collectives"].get(f"reduce.{s['ranks']}"), 2**20)
        grid.add_row(
            f"{s['ranks']} process{'es' * (s['ranks'] > 1)}", str(s["threads"]), f"{s['peaks']['float32'] / 1e9:.0f}",
            f"{s['peaks']['bfloat16'] / 1e9:.0f}", f"{s['triad'] / 1e9:.1f}", f"{s['overhead']['op'] * 1e6:.1f}",
            f"{s['overhead']['sharded'] * 1e6:.0f}", "-" if reduce is None else f"{reduce * 1e6:.0f}",
            f"x {s['slow']:.2f}", f"{s['memory']['plain'] / 1e6:.0f}",
        )  # fmt: skip
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, 120)
    console.print(grid)
    console.print(f"{out}: {seconds:.0f} s; use it with: weft plan MODEL --cluster {out}")


def _nearest(points: list[list[float]] | None, size: int) -> float | None:
    """Seconds of the collective at the measured size nearest to ``size``."""
    if not points:
        return None
    _, cpu, besides = min(points, key=lambda p: abs(p[0] - size))
    return cpu + besides
