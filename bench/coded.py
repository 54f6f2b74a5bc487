"""Sequential gradient codes beside plain gradient coding, over ranks that sleep as long as they would compute.

Ranks become slow, and recover, by a chain of two states (Gilbert and Elliott), the same for all sides in the same turn:
each rank by itself, or those of a host together.
A job takes a rank that computes all of it ``JOB_S`` seconds, and every round ``ROUND_S`` more; a slow rank takes
``SLOW`` times as long, and looks up every few milliseconds whether its round is over. All else is what a step of
``weft train`` does: tasks, links, the ends of rounds, decoding. The parameters of every code are the best of a grid on
other traces, simulated; the simulation also has the figures for more ranks.

    python bench/coded.py [--rounds 6] [--json bench/results/coded.json]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from step import machine, on_ranks, race, write

from weft.recipe import Resilience
from weft.sync.arrivals import Gathering, Sum, connect_ranks
from weft.sync.coded import Arrived, Code, CodedTask, code_of

RESULTS = Path(__file__).parent / "results" / "coded.json"
JOB_S, ROUND_S, SLOW = 1.0, 0.01, 8.0
PATIENCE = 0.3
# chances that a rank becomes slow in a round, and that it stays so
ENTER, STAY = 0.04, 0.2


def trace(ranks: int, rounds: int, seed: int, host: int) -> np.ndarray:
    """By round and rank how many times as long work takes, ``[rounds, ranks]``; ``host``: ranks that share one."""
    chance = (
        np.random.default_rng(seed).random((rounds, ranks // host)).repeat(host, axis=1)
    )
    slow = np.zeros((rounds, ranks), bool)
    # as many rounds as are asked for: the first ones are always the same
    for number in range(rounds):
        slow[number] = chance[number] < np.where(
            slow[number - 1] if number else False, STAY, ENTER
        )
    return np.where(slow, SLOW, 1.0)


def seconds(code: Code, tasks: list[CodedTask]) -> float:
    return ROUND_S + JOB_S * sum(len(task.parts) for task in tasks) / code.parts


def simulated(code: Code, factors: np.ndarray, patience: float) -> float:
    """Seconds of a step, by the rule that ends rounds; in the next round a slow rank is as that finds it."""
    arrived: list[set[int]] = []
    left, total, rule = set(range(code.jobs)), 0.0, Gathering(code, patience, inf)
    while left:
        tasks = [code.tasks(rank, len(arrived), arrived) for rank in range(code.ranks)]
        times = [
            seconds(code, some) * f
            for some, f in zip(tasks, factors[len(arrived)], strict=True)
        ]
        arrived.append(set())
        now, first = 0.0, 0.0
        for rank in sorted(range(code.ranks), key=times.__getitem__):
            most = rule.duration(arrived, left, first)
            if most is None or most <= times[rank]:
                now = now if most is None else max(now, most)
                break
            now = times[rank]
            arrived[-1].add(rank)
            first = first or now * bool(tasks[rank])
        total += now
        left = {job for job in left if code.decoding(job, arrived) is None}
    return total


def grid(ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for late in range(1, ranks // 2 + 2):
        yield "gradient", {"stragglers": late}
        for burst, window in (
            (1, 2),
            (1, 3),
            (1, 4),
            (2, 3),
            (2, 5),
            (2, 7),
            (3, 4),
            (3, 6),
            (3, 8),
        ):
            words = {
                "stragglers": late,
                "burst": burst,
                "window": window,
                "patience": PATIENCE,
            }
            if (window - 1) % burst == 0:
                yield "sr-sgc", words
            yield "m-sgc", words


def made(kind: str, words: dict[str, Any], ranks: int, jobs: int) -> Code:
    code = code_of(Resilience(code=kind, jobs=jobs, **words), ranks)  # type: ignore[arg-type]
    assert code is not None
    return code


def best(ranks: int, jobs: int, host: int) -> dict[str, dict[str, Any]]:
    """Of each kind the words that take the least time on traces of their own: the few best of some traces, on more."""
    some, more = (
        [trace(ranks, jobs + 9, 1000 + seed, host) for seed in seeds]
        for seeds in (range(4), range(24))
    )
    kinds: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for kind, words in grid(ranks):
        kinds.setdefault(kind, []).append(
            (_taken(kind, words, ranks, jobs, some), words)
        )
    found = {}
    for kind, all_words in kinds.items():
        few = sorted(all_words, key=lambda pair: pair[0])[:4]
        found[kind] = min(
            (words for _, words in few),
            key=lambda words: _taken(kind, words, ranks, jobs, more),
        )
    return found


def _taken(
    kind: str,
    words: dict[str, Any],
    ranks: int,
    jobs: int,
    traces: Sequence[np.ndarray],
) -> float:
    code = made(kind, words, ranks, jobs)
    return sum(simulated(code, one, PATIENCE) for one in traces)


def described(
    kind: str,
    words: dict[str, Any],
    ranks: int,
    jobs: int,
    host: int,
    seeds: Sequence[int],
) -> dict[str, Any]:
    """A side's words, what they come to, and the mean seconds of simulated steps."""
    code = made(kind, words, ranks, jobs)
    times = [
        simulated(code, trace(ranks, jobs + 9, seed, host), PATIENCE) for seed in seeds
    ]
    return {
        **words, "load": round(len(code.parts_of(0)) / code.parts, 4), "delay": code.delay, "parts": code.parts,
        "simulated_s": round(float(np.mean(times)), 3),
    }  # fmt: skip


class Sleeper:
    """A code whose tasks a rank sleeps for, and the step that it takes."""

    def __init__(
        self, kind: str, words: dict[str, Any], ranks: int, jobs: int, host: int
    ) -> None:
        self.code, self.number = made(kind, words, ranks, jobs), 0
        self.link = connect_ranks(self.code, dist.group.WORLD, 120.0, PATIENCE)
        self.jobs, self.host = jobs, host

    def tasks(self, rank: int, number: int, arrived: Arrived) -> list[CodedTask]:
        found = self.code.tasks(rank, number, arrived)
        factor = trace(self.code.ranks, number + 1, self.link.step, self.host)[
            number, rank
        ]
        self.seconds = factor * seconds(self.code, found) / max(1, len(found))
        return found

    def compute(self, task: CodedTask, over: Callable[[], bool]) -> Sum | None:
        end = time.monotonic() + self.seconds
        while (left := end - time.monotonic()) > 0:
            if over():
                return None
            time.sleep(min(left, 0.005))
        return Sum(
            np.asarray(task.coefficients) @ [[1.0 + part] for part in task.parts],
            np.zeros(1),
        )

    def step(self) -> float:
        total = self.link.take_step(self, self.compute, False).total  # type: ignore[arg-type]
        expected = self.jobs * self.code.parts * (self.code.parts + 1) / 2
        if total is None or abs(total.vector[0] / expected - 1) > 1e-9:
            raise SystemExit(f"decoded {total} where the sum is {expected}")
        return 0.0


def on_rank(
    rank: int,
    ranks: int,
    jobs: int,
    host: int,
    rounds: int,
    chosen: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    sleepers = {
        kind: Sleeper(kind, words, ranks, jobs, host) for kind, words in chosen.items()
    }
    for sleeper in sleepers.values():
        sleeper.step()
    taken = race({kind: sleeper.step for kind, sleeper in sleepers.items()}, rounds, 1)
    found = {}
    for kind, times in taken.items():
        ratios = [
            plain / mine for plain, mine in zip(taken["gradient"], times, strict=True)
        ]
        found[kind] = described(kind, chosen[kind], ranks, jobs, host, range(1, rounds + 1)) | {
            "mean_s": round(statistics.mean(times), 3), "times": [round(t, 3) for t in times],
            "ratio": round(sum(taken["gradient"]) / sum(times), 3), "ratios": [round(r, 3) for r in ratios],
        }  # fmt: skip
    return found


def on_paper(
    ranks: int, jobs: int, host: int, traces: int, chosen: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    found = {
        kind: described(kind, words, ranks, jobs, host, range(traces))
        for kind, words in chosen.items()
    }
    plain = found["gradient"]["simulated_s"]
    return {
        kind: row | {"ratio": round(plain / row["simulated_s"], 3)}
        for kind, row in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--rounds", type=int, default=4, help="turns of all sides")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=16, help="jobs of a step")
    parser.add_argument(
        "--traces",
        type=int,
        default=6,
        help="steps that are simulated, also for twice the ranks",
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    ranks, jobs = options.ranks, options.jobs
    results: dict[str, Any] = {
        "machine": machine(), "rounds": options.rounds, "ranks": ranks, "jobs": jobs, "job_s": JOB_S,
        "round_s": ROUND_S, "slow": SLOW, "enter": ENTER, "stay": STAY,
    }  # fmt: skip
    for host, name in ((1, "each by itself"), (2, "hosts of two")):
        chosen = best(ranks, jobs, host)
        slept = on_ranks(ranks, on_rank, ranks, jobs, host, options.rounds, chosen)
        results[name] = {"slept": slept}
        for more in (ranks, 2 * ranks) if options.traces else ():
            known = chosen if more == ranks else best(more, jobs, host)
            results[name][f"simulated, {more} ranks"] = on_paper(
                more, jobs, host, options.traces, known
            )
        for kind, row in slept.items():
            times = f"{row['mean_s']:.2f} s, simulated {row['simulated_s']:.2f}"
            print(
                f"{name}: {kind:10} load {row['load']:.3f}: {times}, {row['ratio']:.2f}x",
                flush=True,
            )
    write(results, options.json)


if __name__ == "__main__":
    main()
