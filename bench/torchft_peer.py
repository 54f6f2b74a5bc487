"""A rank is killed, frozen or cut off: what becomes of the others, and of the batch, in torchft and in Weft.

    python -m venv peers/stable && peers/stable/bin/pip install torch==2.13.0 torchft==0.2.0    # and torchft-nightly
    sudo python bench/torchft_peer.py --torchft 0.2.0=peers/stable/bin/python --torchft nightly=peers/nightly/bin/python

Three data parallel ranks of a tiny model, each on a host of its own (a network namespace); torchft's lighthouse is on a
fourth, which nothing befalls. After ten steps the second rank is hit, between two steps, or while the others are in the
all-reduce of the gradients that it has not come to. The others then have :data:`PATIENCE` seconds for ten more steps.
torchft is used as its examples do, once with its DistributedDataParallel and once with an all-reduce per gradient that
is waited for; its limits are lowered in its favour (:data:`TIMEOUT`; its lighthouse waits a second for who joins, and
two for heartbeats).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "torchft_peer.json"
FAULTS, PLACES = ("kill", "freeze", "link"), ("in the all-reduce", "between steps")
#: Ranks; who is hit; after how many steps; how many steps follow; seconds for that; seconds of torchft's collectives.
RANKS, VICTIM, BEFORE, AFTER, PATIENCE, TIMEOUT = 3, 1, 10, 10, 40, 10
#: The model and the samples per rank and step.
VOCAB, EMBED, LAYERS, LENGTH, SAMPLES = 256, 64, 2, 64, 4


# --- the rank that is hit -------------------------------------------------------------------------------------------


class Fate:
    """Befalls the victim when it has taken :data:`BEFORE` steps, at ``place``."""

    def __init__(self, kind: str, place: str, folder: Path, rank: int) -> None:
        self.kind, self.place, self.folder = kind, place, folder
        self.due = rank == VICTIM and kind != "none"

    def at(self, place: str, steps: int) -> None:
        if not self.due or place != self.place or steps < BEFORE:
            return
        self.due = False
        if place == PLACES[0]:
            time.sleep(0.5)  # so that the others are in it
        (self.folder / "hit").write_text(str(time.time()))
        if self.kind == "link":
            while not (self.folder / "pulled").exists():
                time.sleep(0.005)
        else:
            os.kill(
                os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP
            )


# --- torchft --------------------------------------------------------------------------------------------------------


def be_lighthouse() -> None:
    from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]

    server = LighthouseServer(
        bind="[::]:29510",
        min_replicas=2,
        join_timeout_ms=1000,
        quorum_tick_ms=100,
        heartbeat_timeout_ms=2000,
    )
    print(server.address(), flush=True)
    time.sleep(3600)


def tiny() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(
        EMBED, 4, 4 * EMBED, 0.0, batch_first=True, norm_first=True
    )
    return nn.Sequential(
        nn.Embedding(VOCAB, EMBED), nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False),
        nn.Linear(EMBED, VOCAB),
    )  # fmt: skip


def be_replica(
    folder: Path,
    mode: str,
    fault: str,
    place: str,
    rank: int,
    address: str,
    lighthouse: str,
) -> None:
    import socket

    socket.gethostname = lambda: address  # what it tells the others to reach it by
    import torch
    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, ProcessGroupGloo  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    store = dist.TCPStore(address, 29500, is_master=True, wait_for_workers=False)
    model, fate = tiny(), Fate(fault, place, folder, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    limit = timedelta(seconds=TIMEOUT)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit), min_replica_size=2, replica_id=f"replica{rank}", rank=0, world_size=1,
        store_addr=address, store_port=store.port, lighthouse_addr=lighthouse, hostname=address, timeout=limit,
        quorum_timeout=timedelta(seconds=30), connect_timeout=limit,
        load_state_dict=lambda s: (model.load_state_dict(s["model"]), optimizer.load_state_dict(s["optimizer"])),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    )  # fmt: skip
    reduce, step = manager.allreduce, manager.current_step

    def allreduce(*words: Any, **more: Any) -> Any:
        fate.at(PLACES[0], step())
        return reduce(*words, **more)

    manager.allreduce = allreduce
    wrapped = DistributedDataParallel(manager, model) if mode == "DDP" else model
    (folder / f"ready{rank}").touch()
    # else two of them start without the third
    while len(list(folder.glob("ready*"))) < RANKS:
        time.sleep(0.01)
    with (folder / f"{rank}.jsonl").open("w", buffering=1) as log:
        drawn = 0
        while step() < BEFORE + AFTER:
            fate.at(PLACES[1], step())
            draw = torch.Generator().manual_seed(drawn * RANKS + rank)
            drawn += 1
            tokens = (
                torch.randint(VOCAB // 8, (SAMPLES, LENGTH + 1), generator=draw).cumsum(
                    1
                )
            ) % VOCAB
            manager.start_quorum()
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(
                wrapped(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:]
            )
            loss.backward()
            if mode != "DDP":
                works = [manager.allreduce(p.grad) for p in model.parameters()]
                for work in works:
                    work.wait()
            committed = manager.should_commit()
            if committed:
                optimizer.step()
            found = {
                "time": time.time(),
                "step": step(),
                "committed": committed,
                "loss": loss.item(),
            }
            log.write(json.dumps(found | {"ranks": manager.num_participants()}) + "\n")
    os._exit(0)


def run_torchft(python: str, mode: str, fault: str, place: str) -> dict[str, Any]:
    from hosts import hosts

    with (
        tempfile.TemporaryDirectory() as name,
        hosts(RANKS + 1, f"weft-torchft-{os.getpid()}") as made,
    ):
        folder, processes = Path(name), []
        lighthouse = f"http://{made[RANKS].address}:29510"
        told = [python, __file__, "--be", "lighthouse"]
        quiet: dict[str, Any] = {
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
        }
        server = subprocess.Popen(made[RANKS].command(told), **quiet)
        time.sleep(1)
        for rank in range(RANKS):
            words = [folder, mode, fault, place, rank, made[rank].address, lighthouse]
            told = [
                "env",
                "OMP_NUM_THREADS=1",
                python,
                __file__,
                "--be",
                "replica",
                json.dumps([str(w) for w in words]),
            ]
            with (folder / f"{rank}.err").open("w") as error:
                processes.append(
                    subprocess.Popen(
                        made[rank].command(told), stdout=error, stderr=error
                    )
                )
        try:
            hit = watch(processes, fault, folder, made[VICTIM])
            codes = [process.poll() for process in processes]
        finally:
            for process in (*processes, server):
                process.kill()
                process.wait()
        logs = [read(folder / f"{rank}.jsonl") for rank in range(RANKS)]
        errors = [(folder / f"{rank}.err").read_text() for rank in range(RANKS)]
    return judge_torchft(logs, codes, errors, hit)


def watch(
    processes: list[subprocess.Popen[bytes]], fault: str, folder: Path, victim: Any
) -> float:
    """Wait until the others are done, or out of patience; pull the cable when it is time. When the fault happened."""
    others = [
        process
        for rank, process in enumerate(processes)
        if rank != VICTIM or fault == "none"
    ]
    until, hit = time.monotonic() + 300, 0.0
    while time.monotonic() < until and any(
        process.poll() is None for process in others
    ):
        if (
            not hit
            and (folder / "hit").exists()
            and (text := (folder / "hit").read_text())
        ):
            hit, until = float(text), time.monotonic() + PATIENCE
            if fault == "link":
                victim.link(up=False)
                hit = time.time()
                (folder / "pulled").touch()
        time.sleep(0.01)
    return hit


def read(path: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )


def judge_torchft(
    logs: list[Any], codes: list[int | None], errors: list[str], hit: float
) -> dict[str, Any]:
    others = [rank for rank in range(RANKS) if rank != VICTIM]
    lived = [rank for rank in others if codes[rank] in (0, None)]
    after = [
        row["time"]
        for rank in lived
        for row in logs[rank]
        if row["committed"] and row["step"] > BEFORE
    ]
    # A discarded step's samples do not come again, nor do those of a rank that is not there.
    discarded = max(
        (sum(not row["committed"] for row in logs[rank]) for rank in others), default=0
    )
    short = sum(row["ranks"] < RANKS for row in logs[others[0]] if row["committed"])
    steps = sorted({row["step"] for log in logs for row in log if row["committed"]})
    trace = {}
    for step in steps:
        losses = [
            row["loss"]
            for log in logs
            for row in log
            if row["committed"] and row["step"] == step
        ]
        trace[step] = sum(losses) / len(losses)
    ended = [rank for rank in others if codes[rank] not in (0, None)]
    said = errors[ended[0]].strip().splitlines()[-1] if ended else ""
    return {
        "survivors": len(lived), "steps": max(steps, default=0), "stall_s": stall(after, hit),
        "batches_discarded": discarded, "steps_with_fewer_samples": short, "loss": trace, "error": said[:300],
    }  # fmt: skip


def stall(after: list[float], hit: float) -> float | None:
    """Seconds from the fault to the first step that was finished after it."""
    return round(min(after) - hit, 2) if after and hit else None


# --- Weft -----------------------------------------------------------------------------------------------------------

SETTINGS = [
    f"model.embed={EMBED}", f"model.layers={LAYERS}", f"data.seq_len={LENGTH}", f"train.batch={RANKS * SAMPLES}",
    f"train.steps={BEFORE + AFTER}", "train.dtype=float64", "validation.every=0", "observe.every=1",
    "observe.split_every=0", "checkpoint.every=1000",
]  # fmt: skip


def be_rank(folder: Path, fault: str, place: str, rank: int) -> None:
    """``weft train``, with the same fate before the step's sums, or after it."""
    import weft.train.step as module
    from weft.cli import run_command_line

    fate, taken, plain = Fate(fault, place, folder, rank), [0], module.step_sum

    def step_sum(*words: Any) -> Any:
        fate.at(PLACES[0], taken[0])
        sums = plain(*words)
        taken[0] += 1
        return sums

    take = module.Step.take

    def step(*words: Any) -> Any:
        fate.at(PLACES[1], taken[0])
        return take(*words)

    module.step_sum, module.Step.take = step_sum, step  # type: ignore[method-assign]
    recipe = str(Path(__file__).parents[1] / "recipes/quickstart.toml")
    sys.argv = [
        "weft",
        "train",
        recipe,
        "--layout",
        f"dp={RANKS}",
        "--out",
        str(folder / "run"),
    ]
    sys.argv += [word for setting in SETTINGS for word in ("--set", setting)]
    run_command_line()


def run_weft(fault: str, place: str) -> dict[str, Any]:
    from campaign import start_on
    from hosts import hosts
    from injector import DisturbedRun

    with (
        tempfile.TemporaryDirectory() as name,
        hosts(RANKS, f"weft-torchft-{os.getpid()}") as made,
    ):
        folder = Path(name)
        words = [
            "sh",
            "-c",
            f'exec "$@" "[\\"{folder}\\", \\"{fault}\\", \\"{place}\\", \\"$RANK\\"]"',
            "sh",
        ]
        words += [sys.executable, __file__, "--be", "rank"]
        processes = start_on(made, words, RANKS, folder / "log")
        run = DisturbedRun(folder / "run", processes)
        try:
            hit = watch(processes, fault, folder, made[VICTIM])
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        run.look()
        said = (folder / "log").read_text().strip().splitlines()[-1:]
    trained = [r for r in run.records if r["kind"] == "train"]
    lived = [
        rank for rank in range(RANKS) if rank != VICTIM and codes[rank] in (0, None)
    ]
    after = [r["time"] for r in trained if r["step"] > BEFORE]
    return {
        "survivors": len(lived), "steps": run.step, "stall_s": stall(after, hit),
        "batches_discarded": 0 if [r["step"] for r in trained] == list(range(1, run.step + 1)) else None,
        "tokens": {r["step"]: r["tokens"] for r in trained}, "loss": {r["step"]: r["loss"] for r in trained},
        "error": "" if len(lived) == RANKS - 1 else "".join(said)[:300],
    }  # fmt: skip


# --- side by side ---------------------------------------------------------------------------------------------------


def apart(found: dict[str, Any], quiet: dict[str, Any]) -> float | None:
    """The largest difference of a loss from that of the same step of an undisturbed run, over the largest loss."""
    both = [
        (found["loss"][step], quiet["loss"][step])
        for step in found["loss"]
        if step in quiet["loss"]
    ]
    return max(abs(a - b) for a, b in both) / max(b for _, b in both) if both else None


def run_command_line() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument(
        "--torchft",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="an environment with it",
    )
    parser.add_argument("--no-weft", action="store_true", help="torchft alone")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--be", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be == "lighthouse":
        return be_lighthouse()
    if options.be == "replica":
        folder, mode, fault, place, rank, address, lighthouse = json.loads(
            options.words
        )
        return be_replica(
            Path(folder), mode, fault, place, int(rank), address, lighthouse
        )
    if options.be == "rank":
        folder, fault, place, rank = json.loads(options.words)
        return be_rank(Path(folder), fault, place, int(rank))
    from hosts import unavailable

    if why := unavailable():
        raise SystemExit(why)
    # hosts are taken down on the way out
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sides: dict[str, Any] = {}
    for text in options.torchft:
        name, _, python = text.partition("=")
        for mode in ("DDP", "all-reduces"):
            sides[f"torchft {name}, {mode}"] = lambda f, p, python=python, mode=mode: (
                run_torchft(python, mode, f, p)
            )
    if not options.no_weft:
        sides["Weft"] = run_weft
    rows = []
    for side, run in sides.items():
        quiet = run("none", "")
        print(
            f"{side}, undisturbed: {quiet['steps']} steps, {quiet['survivors'] + 1} ranks {quiet['error']}",
            flush=True,
        )
        for fault in FAULTS:
            for place in PLACES:
                found = run(fault, place)
                if tokens := found.pop("tokens", None):  # the torchft side counts ranks
                    found["steps_with_fewer_samples"] = sum(
                        quiet["tokens"].get(k) != n for k, n in tokens.items()
                    )
                row = {
                    "side": side,
                    "fault": fault,
                    "place": place,
                    **found,
                    "loss_apart": apart(found, quiet),
                }
                rows.append(row)
                print(
                    "; ".join(f"{k} {v}" for k, v in row.items() if k != "loss"),
                    flush=True,
                )
    told = {
        "date": datetime.now().isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "timeout_s": TIMEOUT,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({**told, "rows": rows}, indent=1) + "\n")
    print(f"written to {options.json}")


if __name__ == "__main__":
    run_command_line()
