"""Updates per second with rollouts that are ahead of training by at most so many updates, against the synchronous loop.

The ledger, the router, the channel of weights and the engines are the real ones, in threads of one process; the model
is tiny. Each answer is written after a sleep drawn from U(20, 200) ms, from a log-normal distribution with the same
mean, or in proportion to a length drawn from those that a run has logged (the first phases of ``rl_length.py`` with
normaliser ``tokens``, in ``traces/answer_lengths.json``), with the same mean. Training sleeps for 60 ms. One run of
every bound after another, with the same sleeps for the same answers; the order changes from turn to turn. The lag of
every trained answer is counted. Rows of other kinds that the file already has are kept.

    OMP_NUM_THREADS=1 python bench/rl_staleness.py [--json bench/results/rl_staleness.json]
    python bench/rl_staleness.py --log      # write the lengths anew
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch

from weft.generate.request import Generation
from weft.generate.sampling import Sampling
from weft.layout.mesh import Mesh
from weft.net.endpoint import Endpoint
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train
from weft.rl.remote_rollouts import RemoteRollouts, RemoteSettings
from weft.rl.rollout import GroupRequest, RewardQuestion
from weft.rl.rollout_engine import RolloutEngine
from weft.rl.weight_channel import WeightSender

SHAPE = ModelShape(vocab=31, layers=1, embed=16, heads=2, kv_heads=1, ffn=16)
TRAIN_S, MEAN_S = 0.06, 0.11
KINDS = ("uniform", "lognormal", "logged")
LENGTHS = Path(__file__).parent / "traces" / "answer_lengths.json"


@cache
def logged_lengths() -> list[int]:
    """Tokens of each answer of a run, in the order of their questions."""
    return list(json.loads(LENGTHS.read_text())["lengths"])


def sleep_of(kind: str, seed: int) -> float:
    """Seconds that the answer of this seed takes."""
    chance = Random(seed)
    if kind == "uniform":
        return chance.uniform(0.02, 0.2)
    if kind == "logged":
        lengths = logged_lengths()
        return MEAN_S * chance.choice(lengths) / statistics.mean(lengths)
    return chance.lognormvariate(0, 0.8) * MEAN_S / 1.377  # e^(0.8^2 / 2)


class SleepingEngine:
    """An engine in threads, which writes one answer at a time and sleeps before each."""

    def __init__(self, run: Endpoint, name: str, kind: str) -> None:
        self.endpoint = Endpoint("127.0.0.1")
        self.engine = RolloutEngine(self.endpoint, run.address, "s", name, lambda said: None)  # fmt: skip
        step, awake = self.engine.engine.step, set[int]()

        def slow_step() -> Any:
            scheduler = self.engine.engine.scheduler
            for request in [*scheduler.running, *scheduler.waiting][:1]:
                assert isinstance(request, Generation)
                if request.how.seed not in awake:
                    awake.add(request.how.seed)
                    time.sleep(sleep_of(kind, request.how.seed))
            return step()

        self.engine.engine.step = slow_step  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self.engine.work, args=(0.0,))
        self.thread.start()

    def close(self) -> None:
        self.thread.join()
        self.endpoint.close()


def run(bound: int, kind: str, updates: int, batch: int, engines: int) -> dict[str, Any]:  # fmt: skip
    """Train ``updates`` times, and return seconds, lags, and times of every phase as a run with [rl] records them."""
    _, state = parallelize(SHAPE, Mesh.single(), Train(seed=1))
    endpoint = Endpoint("127.0.0.1")
    sender = WeightSender(Mesh.single(), state, endpoint, "s")
    settings = RemoteSettings(
        bound=bound, batch=batch, group=1, most=2, requests=1, cache=1024, how=Sampling()
    )  # fmt: skip
    rollouts = RemoteRollouts(endpoint, "s", SHAPE, sender, settings, lambda said: None)
    writers = []
    for number in range(engines):
        writers.append(SleepingEngine(endpoint, f"e{number}", kind))
    rollouts.take_weights(0)
    while len(rollouts.router.links) < engines:
        time.sleep(0.01)
    begun = time.perf_counter()
    rollouts.request(
        [
            GroupRequest(n, RewardQuestion(""), (n % 31, 3, 4), 1, n)
            for n in range(updates * batch)
        ]
    )
    phases = []
    for update in range(updates):
        moved = time.perf_counter()
        groups = rollouts.finished(batch)
        written = time.perf_counter()
        assert [each.request.number for each in groups] == [
            *range(update * batch, (update + 1) * batch)
        ]
        time.sleep(TRAIN_S)
        trained = time.perf_counter()
        with torch.no_grad():
            for held in state.held:
                held.local += 1e-3
        rollouts.take_weights(update + 1)
        phases.append({
            "rollout_s": written - moved, "train_s": trained - written, "prepare_s": 0.0,
            "weights_s": time.perf_counter() - trained, "lags": {"0": batch},
        })  # fmt: skip
    seconds = time.perf_counter() - begun
    lags = {str(lag): count for lag, count in sorted(rollouts.lags.items())}
    rollouts.close()
    for writer in writers:
        writer.close()
    endpoint.close()
    assert max(map(int, lags)) <= bound
    return {"seconds": seconds, "lags": lags, "phases": phases}


def log_lengths() -> None:
    """Write the tokens of each answer of the first rollout phases of the run that learns the task ``length``."""
    import rl_length

    from weft.api import start

    asked = {
        "tokens": 48, "longest": 16, "group": 8, "batch": 64, "start": 60, "steps": 8, "start_lr": 3e-3, "lr": 1e-3,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        recipe = rl_length.recipe("tokens", 0, argparse.Namespace(**asked))
        run = start(recipe, Path(folder) / "run").run
        # a letter is a token, and the last token ends the answer
        lengths = [
            min(answer.length + 1, asked["tokens"])
            for phase in rl_length.phases(run)
            for answer in phase
        ]
    LENGTHS.write_text(json.dumps({"settings": asked, "lengths": lengths}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", action="store_true", help="run and write lengths")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.log:
        log_lengths()
        return
    rows: dict[str, Any] = {}
    for kind in given.kinds:
        runs: dict[int, list[dict[str, Any]]] = {bound: [] for bound in given.bounds}
        for turn in range(given.turns):
            for bound in given.bounds[:: 1 if turn % 2 == 0 else -1]:
                runs[bound].append(
                    run(bound, kind, given.updates, given.batch, given.engines)
                )
        times = {
            bound: statistics.median(each["seconds"] for each in of_bound)
            for bound, of_bound in runs.items()
        }
        rows[kind] = {
            str(bound): {
                "seconds": round(times[bound], 3),
                "times_as_fast": round(times[given.bounds[0]] / times[bound], 3),
                "all_s": [round(each["seconds"], 3) for each in of_bound],
                "lags": of_bound[-1]["lags"],
            }
            for bound, of_bound in runs.items()
        }
    row = {
        "updates": given.updates,
        "groups_of_an_update": given.batch,
        "engines": given.engines,
        "train_s": TRAIN_S,
        "load": os.getloadavg()[0],
        **rows,
    }
    print(json.dumps(row, indent=1))
    if given.json:
        known = json.loads(given.json.read_text()) if given.json.exists() else {}
        kept = {kind: known[kind] for kind in KINDS if kind in known}
        row = kept | row
        given.json.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
