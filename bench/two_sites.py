"""Two sites with a slow link between them: the step time of the axes as the planner places them, beside rank order.

    sudo python bench/two_sites.py [--rate 1gbit] [--rounds 2] [--json bench/results/two_sites.json]

Two network namespaces are the sites, with two ranks each; what they share is a link of ``rate``. The planner sees
nothing but the table of links that the ranks have measured and the traffic of a rehearsed step. Two cases: ranks that
were dealt to the sites in turn, as cyclic distributions do, so that neighbouring ranks are far apart; and ranks in
order, for a job with few tokens per step and many weights, where data parallelism is the axis to keep inside.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from hosts import Host, hosts, unavailable

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "two_sites.json"

#: Layout, recipe settings, and the site of every rank.
CASES: dict[str, tuple[str, list[str], tuple[int, ...]]] = {
    "ranks dealt in turn": ("shard=2,tp=2", ["model.embed=64", "model.layers=8", "train.batch=16"], (0, 1, 0, 1)),
    "many weights, few tokens": (
        "dp=2,tp=2", ["model.vocab=32768", "model.embed=512", "data.seq_len=32", "train.batch=2"], (0, 0, 1, 1)
    ),
}  # fmt: skip
STEPS, WARM = 14, 4


# --- a rank ---


def be_rank(layout: str, settings: list[str], out: Path, what: str) -> None:
    import torch
    import torch.distributed as dist

    from weft.layout.mesh import Mesh
    from weft.recipe import load_recipe
    from weft.rehearse.machine_probe import probe_links
    from weft.rehearse.rehearsed_step import plain_batches
    from weft.run.rank_processes import init_ranks
    from weft.train.setup import build_for_training, model_shape
    from weft.train.step import train_step

    torch.set_num_threads(1)
    init_ranks("cpu", 120)
    if what == "links":
        table = probe_links()
        if dist.get_rank() == 0:
            out.write_text(json.dumps(table))
    else:
        recipe = load_recipe(
            ROOT / "recipes/quickstart.toml", ["model.vocab=1024", *settings], layout
        )
        shape = model_shape(recipe)
        mesh = Mesh.create(recipe.layout, "cpu")
        model, state = build_for_training(shape, mesh, recipe)
        batches = plain_batches(recipe, shape)(mesh)
        times, loss = [], []
        for _ in range(STEPS):
            begun = time.perf_counter()
            loss.append(train_step(model, state, batches, mesh, lr=1e-3, clip=1.0).loss)
            times.append(time.perf_counter() - begun)
        if dist.get_rank() == 0:
            out.write_text(json.dumps({"seconds": times[WARM:], "loss": loss}))
    dist.barrier()
    dist.destroy_process_group()


def on_sites(
    made: tuple[Host, ...],
    sites: tuple[int, ...],
    layout: str,
    settings: list[str],
    what: str,
    port: int,
) -> Any:
    """Start every rank on its site and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found"
        ranks = []
        try:
            for rank, site in enumerate(sites):
                env = {
                    "RANK": rank, "WORLD_SIZE": len(sites), "LOCAL_RANK": sites[:rank].count(site),
                    "OMP_NUM_THREADS": 1, "TORCH_CPP_LOG_LEVEL": "ERROR",
                    "LOCAL_WORLD_SIZE": sites.count(site), "MASTER_ADDR": made[sites[0]].address, "MASTER_PORT": port,
                    "PYTHONPATH": ROOT,
                }  # fmt: skip
                told = [
                    "env",
                    *(f"{k}={v}" for k, v in env.items()),
                    sys.executable,
                    __file__,
                    "--rank",
                    what,
                ]
                told += [
                    "--layout",
                    layout,
                    "--json",
                    str(out),
                    *(w for s in settings for w in ("--set", s)),
                ]
                ranks.append(subprocess.Popen(made[site].command(told)))
            codes = [rank.wait(timeout=150) for rank in ranks]
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
        if any(codes):
            raise SystemExit(f"{layout} {what}: ranks ended with {codes}")
        return json.loads(out.read_text())


def planned(
    layout: str, settings: list[str], table: dict[str, Any]
) -> tuple[Any, float, float, dict[str, Any]]:
    """The layout with the best order of axes, seconds of communication in that order and in rank order, and traffic."""
    import torch

    from weft.recipe import load_recipe
    from weft.rehearse.local_choice import traffic_of
    from weft.rehearse.mapping import place_axes, traffic_seconds
    from weft.rehearse.rehearsed_step import plain_batches, rehearse
    from weft.rehearse.worker_links import WorkerLinks
    from weft.train.setup import model_shape

    torch.set_num_threads(1)
    recipe = load_recipe(
        ROOT / "recipes/quickstart.toml", ["model.vocab=1024", *settings], layout
    )
    shape = model_shape(recipe)
    seen = rehearse(recipe, shape, plain_batches(recipe, shape), 0)
    traffic = traffic_of(seen.events, 0, recipe.layout)
    links = WorkerLinks.of(table)
    placed = place_axes(links, recipe.layout, traffic)
    best, naive = (
        traffic_seconds(links, order, traffic) for order in (placed, recipe.layout)
    )
    return placed, best, naive, {a: vars(t) for a, t in traffic.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument(
        "--rate", default="1gbit", help="of the link between the sites, as tc takes it"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--layout", help=argparse.SUPPRESS)
    parser.add_argument("--set", action="append", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        be_rank(options.layout, options.set, options.json, options.rank)
        return
    if why := unavailable():
        raise SystemExit(why)
    found: dict[str, Any] = {
        "date": datetime.now().isoformat(timespec="seconds"), "rate": options.rate, "load_before": os.getloadavg()[0],
        "cores": os.cpu_count(), "cases": {},
    }  # fmt: skip
    port = 29600
    with hosts(2, rate=options.rate) as made:
        for name, (layout, settings, sites) in CASES.items():
            if options.case and name not in options.case:
                continue
            port += 1
            table = on_sites(made, sites, layout, settings, "links", port)
            placed, best, naive, traffic = planned(layout, settings, table)
            sides = {"rank order": layout, "planned": f"{layout},order={placed.order}"}
            times: dict[str, list[float]] = {side: [] for side in sides}
            losses = {}
            for _ in range(options.rounds):
                for side, text in sides.items():
                    port += 1
                    result = on_sites(made, sites, text, settings, "steps", port)
                    times[side] += result["seconds"]
                    losses[side] = result["loss"]
            middle = {side: statistics.median(values) for side, values in times.items()}
            ratio = middle["rank order"] / middle["planned"]
            apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
            found["cases"][name] = {
                "layout": layout, "settings": settings, "sites": sites, "order": placed.order, "traffic": traffic,
                "predicted_communication_s": {"rank order": naive, "planned": best}, "step_s": middle,
                "quartiles_s": {side: statistics.quantiles(v, n=4)[::2] for side, v in times.items()}, "ratio": ratio,
                "largest_difference_of_losses": apart, "links": table,
            }  # fmt: skip
            sent = ", ".join(
                f"{axis} {t['bytes'] / 1e6:.1f} MB in {t['messages']:.0f}"
                for axis, t in traffic.items()
            )
            print(
                f'\n{name}: {layout}, {sent} per step and rank; the plan: order = "{placed.order}"'
            )
            for side, seconds in middle.items():
                expected = naive if side == "rank order" else best
                print(
                    f"  {side:12}{1e3 * seconds:9.1f} ms per step   (communication, predicted {1e3 * expected:.1f} ms)"
                )
            print(
                f"  {ratio:.2f}x faster; losses differ by at most {apart:.1e}",
                flush=True,
            )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=2) + "\n")
    print(f"\nwritten to {options.json}")


if __name__ == "__main__":
    main()
