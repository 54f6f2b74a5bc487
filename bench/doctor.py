"""Who is it? A slow rank, sender, receiver or link in a run of four ranks: is it named within 20 steps?

    sudo python bench/doctor.py [--trials 40] [--quiet 20] [--seed 0] [--json bench/results/doctor.json]

Every rank is on a host of its own, a network namespace. A slow computer sleeps, or computes something else; senders
and receivers have a slow cable one way, a link is slow towards one host (tbf). Layout and victim change from trial to
trial; in quiet ones nothing is slowed, and nobody may be named. Right is to name the victim and its kind, and nobody
else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hosts import Host, hosts, unavailable

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "doctor.json"
WORLD, STEPS, PORT = 4, 20, 29541
LAYOUTS = ("dp=4,zero=1", "shard=4", "pp=2,dp=2,zero=1", "shard=2,tp=2")
FAULTS = ("sleep", "busy", "sender", "receiver", "link")
SETTINGS = ("model.vocab=1024", "model.embed=64", "model.layers=4", "data.seq_len=64", "train.batch=8",
            "train.micro_batch=1")  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """``fault`` is one of :data:`FAULTS`, or empty.

    ``slower``: how many times its own computing a step has more of it; ``rate``: Mbit/s.
    """

    number: int
    layout: str
    fault: str = ""
    victim: int = 0
    other: int = 0
    slower: float = 0.0
    rate: int = 0

    @property
    def expected(self) -> list[tuple[str, list[int]]]:
        kind = {"sleep": "computer", "busy": "computer"}.get(self.fault, self.fault)
        return (
            [(kind, [self.victim, self.other] if kind == "link" else [self.victim])]
            if kind
            else []
        )


def drawn(faults: int, quiet: int, seed: int) -> list[Trial]:
    """Trials in a random order, of all faults alike."""
    draw, found = random.Random(seed), list[Trial]()
    for i in range(faults + quiet):
        fault = ("computer", "sender", "receiver", "link")[i % 4] if i < faults else ""
        fault = draw.choice(FAULTS[:2]) if fault == "computer" else fault
        victim = draw.randrange(WORLD)
        other = draw.choice([r for r in range(WORLD) if r != victim])
        found.append(
            Trial(
                0,
                draw.choice(LAYOUTS),
                fault,
                victim,
                other,
                draw.uniform(0.8, 2.0),
                draw.choice((20, 40, 80)),
            )
        )
    draw.shuffle(found)
    return [Trial(**asdict(trial) | {"number": i}) for i, trial in enumerate(found)]


# --- a rank ---


def be_rank(trials: list[Trial], folder: Path) -> None:
    """Take the steps of all trials; the first rank writes what is said after each."""
    import torch.distributed as dist

    from weft.layout.mesh import Mesh
    from weft.recipe import load_recipe
    from weft.rehearse.rehearsed_step import plain_batches
    from weft.train.setup import build_for_training, model_shape

    jobs = {}
    for layout in sorted({trial.layout for trial in trials}):
        recipe = load_recipe(ROOT / "recipes/quickstart.toml", list(SETTINGS), layout)
        shape, mesh = model_shape(recipe), Mesh.create(recipe.layout, "cpu")
        jobs[layout] = (
            *build_for_training(shape, mesh, recipe),
            plain_batches(recipe, shape)(mesh),
            mesh,
        )
    for trial in trials:
        ready = folder / f"{trial.number}.ready"
        while not ready.exists():  # the network is as the trial wants it
            time.sleep(0.02)
        found = one_trial(trial, *jobs[trial.layout], folder)
        if dist.get_rank() == 0:
            (folder / "new").write_text(json.dumps(found))
            (folder / "new").replace(folder / f"{trial.number}.json")


def one_trial(
    trial: Trial, model: Any, state: Any, batches: Any, mesh: Any, folder: Path
) -> dict[str, Any]:
    import torch.distributed as dist

    from weft.observe import trace
    from weft.observe.rank_delays import DelayWatch, digest_trace
    from weft.train.step import train_step

    assert dist.group.WORLD is not None
    rank, times, found, computing, more = (
        dist.get_rank(),
        list[float](),
        list[Any](),
        0.0,
        0.0,
    )
    ring = trace.start_tracing(folder, rank, trial.number)
    watch = DelayWatch(ring, dist.group.WORLD, mesh.device)
    for number in range(1, STEPS + 1):
        begun = time.perf_counter()
        with trace.step(number):
            train_step(model, state, batches, mesh, lr=1e-3, clip=1.0)
            slow_down(trial.fault if rank == trial.victim else "", more)
        # its own, with what other work takes of its processor
        computing = digest_trace(ring.read(), 1).compute - more
        more = trial.slower * max(0.0, computing)
        times.append(time.perf_counter() - begun)
        if watch.look() or number == STEPS:
            found.append(
                (number, [(v.kind, list(v.ranks), v.text) for v in watch.verdicts])
            )
    trace.stop()
    return {"said": found, "step_s": sorted(times)[STEPS // 2], **watch.record()}


def slow_down(fault: str, seconds: float) -> None:
    if fault == "sleep":
        time.sleep(seconds)
    begun = time.perf_counter()
    while fault == "busy" and time.perf_counter() - begun < seconds:
        pass


# --- the network ---


def tc(space: str, *words: str) -> None:
    subprocess.run(
        ["ip", "netns", "exec", space, "tc", *words], check=True, capture_output=True
    )


def slow_network(trial: Trial, made: tuple[Host, ...]) -> list[tuple[str, str]]:
    """Slow down what the trial says; returns where, as what undoes it."""
    victim = made[trial.victim]
    bucket = ("tbf", "rate", f"{trial.rate}mbit", "burst", "32kb", "latency", "100ms")
    if trial.fault == "sender":
        where = (victim.name, "eth0")
        tc(where[0], "qdisc", "add", "dev", where[1], "root", *bucket)
    elif trial.fault == "receiver":
        where = (victim.switch, victim.port)
        tc(where[0], "qdisc", "add", "dev", where[1], "root", *bucket)
    elif trial.fault == "link":
        where = (victim.name, "eth0")
        device = ("dev", where[1])
        tc(
            where[0],
            "qdisc",
            "add",
            *device,
            "root",
            "handle",
            "1:",
            "htb",
            "default",
            "20",
        )
        tc(
            where[0],
            "class",
            "add",
            *device,
            "parent",
            "1:",
            "classid",
            "1:20",
            "htb",
            "rate",
            "10gbit",
        )
        tc(
            where[0],
            "class",
            "add",
            *device,
            "parent",
            "1:",
            "classid",
            "1:10",
            "htb",
            "rate",
            "10gbit",
        )
        tc(
            where[0],
            "qdisc",
            "add",
            *device,
            "parent",
            "1:10",
            "handle",
            "10:",
            *bucket,
        )
        tc(where[0], "filter", "add", *device, "parent", "1:", "protocol", "ip", "prio", "1", "u32",
           "match", "ip", "dst", f"{made[trial.other].address}/32", "flowid", "1:10")  # fmt: skip
    else:
        return []
    return [where]


def campaign(trials: list[Trial]) -> list[dict[str, Any]]:
    """What was said in each trial."""
    results = []
    with (
        tempfile.TemporaryDirectory() as name,
        hosts(WORLD, f"weft-doctor-{os.getpid()}") as made,
    ):
        folder = Path(name)
        (folder / "trials").write_text(json.dumps([asdict(trial) for trial in trials]))
        ranks = []
        for rank, host in enumerate(made):
            env = os.environ | {
                "MASTER_ADDR": made[0].address, "MASTER_PORT": str(PORT), "RANK": str(rank), "WORLD_SIZE": str(WORLD),
                "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
            }  # fmt: skip
            ranks.append(
                subprocess.Popen(
                    host.command([sys.executable, __file__, "--rank", name]), env=env
                )
            )
        try:
            for trial in trials:
                slowed, answer = (
                    slow_network(trial, made),
                    folder / f"{trial.number}.json",
                )
                (folder / f"{trial.number}.ready").touch()
                while not answer.exists():
                    if any(rank.poll() for rank in ranks):
                        raise SystemExit("a rank has failed")
                    time.sleep(0.05)
                for space, device in slowed:
                    tc(space, "qdisc", "del", "dev", device, "root")
                found = json.loads(answer.read_text())
                said = [
                    (kind, sorted(ranks) if kind != "link" else ranks)
                    for kind, ranks, _ in found["said"][-1][1]
                ]
                right = said == trial.expected
                kept = {
                    name: found[name]
                    for name in ("said", "step_s", "probes", "probe_s")
                }
                results.append({**asdict(trial), **kept, "right": right})
                what = f"{trial.number} {trial.layout} {trial.fault or 'quiet'} {trial.victim} {trial.other}"
                how = f"{trial.rate} Mbit, steps of {found['step_s'] * 1e3:.0f} ms"
                print(
                    what,
                    how,
                    "right" if right else f"WRONG: {found['said']}",
                    flush=True,
                )
        finally:
            for rank in ranks:
                rank.kill()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--quiet", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        import torch

        from weft.run.rank_processes import init_ranks

        torch.set_num_threads(1)
        init_ranks("cpu", 120)
        be_rank(
            [
                Trial(**values)
                for values in json.loads((given.rank / "trials").read_text())
            ],
            given.rank,
        )
        os._exit(0)
    if reason := unavailable():
        raise SystemExit(reason)
    results = campaign(drawn(given.trials, given.quiet, given.seed))
    right = Counter(one["fault"] or "quiet" for one in results if one["right"])
    counts = Counter(one["fault"] or "quiet" for one in results)
    found = {
        name: f"{right[name]} of {count}" for name, count in sorted(counts.items())
    }
    print(found)
    summary = {
        "date": datetime.now().isoformat(timespec="minutes"),
        "seed": given.seed,
        "right": found,
        "trials": results,
    }
    given.json.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
