"""Federated policies, trees and estimates on simulated clients: python bench/federated.py [--quick] [PART ...].

Parts: `policies` (policy x speeds x partition: time to a loss, waits, staleness), `momentum` (FedAvg-M and SCAFFOLD-M
at equal rounds), `tree` (sums through shared memory against pickled pipes), `clients` (1,000 simulated clients),
`compass` (FedCompass against FedAvg with as many steps at most, time to a loss), `fresh` (stale updates made fresh).
Each part writes its figures to bench/results/federated.json, beside those of
the others.
Times of `tree` and `clients` are those of a quiet machine. `--quick` is small, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import Pipe, Process
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch import nn

from weft.federated.classifier_cohort import ClassifierCohort
from weft.federated.client_partition import Partition, draw_partition
from weft.federated.fresh_updates import FreshUpdates
from weft.federated.labelled_samples import read_labelled
from weft.federated.policy import AssignedWork, ClientStep, ClientUpdate, Differences
from weft.federated.shared_updates import SharedUpdates
from weft.federated.simulated_speeds import SimulatedSpeeds
from weft.federated.virtual_clock import VirtualClock
from weft.federated.weighted_sum import weighted_sum
from weft.recipe.federated_section import Federated
from weft.registry import find

RESULTS = Path(__file__).parent / "results" / "federated.json"
BATCH = 32
SPEEDS = {"1, 1, 2, 4, 8": (1, 1, 2, 4, 8), "equal": (1,)}


def simulated(
    settings: dict[str, Any], rate: float, partition: Partition | None = None
) -> VirtualClock:
    """A virtual clock over softmax regression on the digits, from zero."""
    section = Federated(**{"patience": 1e6, "weights": "equal", **settings})
    samples = read_labelled("sklearn:digits")
    partition = partition or draw_partition(
        section.partition, section.clients, samples.labels, alpha=section.alpha
    )
    net = nn.Linear(64, 10)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    cohort = ClassifierCohort(net, samples, partition, BATCH, rate, 0)
    policy = find("federation-policy", section.policy).implementation(section)
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    return VirtualClock(policy, start, cohort, SimulatedSpeeds(section, cohort.names()))


def trajectory(clock: VirtualClock, seconds: float) -> list[tuple[float, float]]:
    """Times and losses after every change within so many virtual seconds."""
    points: list[tuple[float, float]] = []
    cohort = clock.cohort
    assert isinstance(cohort, ClassifierCohort)
    clock.on_change = lambda change: points.append(
        (clock.now, cohort.score(clock.parameters).loss)
    )
    clock.run(10**9, seconds)
    return points


def waits(clock: VirtualClock) -> float:
    """Mean seconds from the arrival of an update to the client's next work."""
    arrived: dict[str, float] = {}
    waited = []
    for event in clock.events:
        if event.kind == "update":
            arrived[event.client] = event.time
        elif event.kind == "start" and event.client in arrived:
            waited.append(event.time - arrived.pop(event.client))
    return fmean(waited) if waited else 0.0


#: Each policy with the settings that suit five clients; of FedAvg the numbers of steps between FedCompass' limits.
POLICIES: dict[str, dict[str, Any]] = {
    "fedavg, 20 steps": {"policy": "fedavg", "steps": 20},
    "fedavg, 60 steps": {"policy": "fedavg", "steps": 60},
    "fedavg, 100 steps": {"policy": "fedavg", "steps": 100},
    "fedcompass": {"policy": "fedcompass", "rate": 0.9},
    "fedcompass, normalised": {
        "policy": "fedcompass",
        "rate": 0.9,
        "normalise": True,
        "steps": 60,
    },
    "fedbuff": {"policy": "fedbuff", "buffer": 3, "unbiased": True},
    "fedasync": {"policy": "fedasync", "rate": 0.5, "unbiased": True},
    "fedfix": {"policy": "fedfix", "tick": 40.0},
    "fedavg-m": {"policy": "fedavg-m", "steps": 20},
    "scaffold-m": {"policy": "scaffold-m", "steps": 20},
}


def policies(quick: bool) -> dict[str, Any]:
    """The table: policy x speeds x partition. Time to a loss is that of the best of two learning rates."""
    rows, seconds = [], 400.0 if quick else 4800.0
    for speeds, partition, target in [
        ("1, 1, 2, 4, 8", "classes", 1.0),
        ("1, 1, 2, 4, 8", "dirichlet", 0.5),
        ("1, 1, 2, 4, 8", "even", 0.3),
        ("equal", "classes", 1.0),
    ][: 1 if quick else 4]:
        for name, settings in POLICIES.items():
            best: dict[str, Any] = {}
            for rate in (0.1,) if quick else (0.03, 0.1):
                clock = simulated(
                    {
                        "clients": 5,
                        "speeds": SPEEDS[speeds],
                        "partition": partition,
                        **settings,
                    },
                    rate,
                )
                points = trajectory(clock, seconds)
                reached = next((t for t, loss in points if loss <= target), None)
                updates = [e for e in clock.events if e.kind == "update"]
                row = {
                    "policy": name,
                    "speeds": speeds,
                    "partition": partition,
                    "target": target,
                    "rate": rate,
                    "time_to_target": reached,
                    "loss": round(points[-1][1], 4),
                    "waited_s": round(waits(clock), 2),
                    "staleness": round(fmean(e.staleness for e in updates), 2),
                    "updates": len(updates),
                }
                if not best or (reached or 1e9, row["loss"]) < (
                    best["time_to_target"] or 1e9,
                    best["loss"],
                ):
                    best = row
            rows.append(best)
            print(best, flush=True)
    return {"rows": rows}


def time_to(
    target: float, rate: float, seconds: float, settings: dict[str, Any]
) -> float | None:
    """Virtual seconds after which the loss is at most ``target``; None if it is not within ``seconds``."""
    five = {"clients": 5, "speeds": SPEEDS["1, 1, 2, 4, 8"], "partition": "classes"}
    clock = simulated({**five, **settings}, rate)
    assert isinstance(clock.cohort, ClassifierCohort)
    for change in range(1, 10**6):
        clock.run(change, seconds)
        if clock.cohort.score(clock.parameters).loss <= target:
            return clock.now
        if clock.policy.version < change:
            break
    return None


def compass(quick: bool) -> dict[str, Any]:
    """Time to loss 1.0 on speeds 1, 1, 2, 4, 8, two classes each, the best of three learning rates.

    As published, FedAvg takes as many steps as FedCompass' fastest clients at most. Messages take no time on the
    virtual clock, so that FedAvg is the faster the fewer steps it takes; its best, a single step, is beside it, and
    limits of FedCompass that suit it.
    """
    times: dict[str, float | None] = {}
    cases: dict[str, dict[str, Any]] = {
        **{f"fedavg, {steps} steps": {"policy": "fedavg", "steps": steps} for steps in (100, 20, 1)},
        **{
            f"fedcompass, {least} to {most} steps": {
                "policy": "fedcompass", "rate": 0.9, "min_steps": least, "max_steps": most, "latest": 1.2
            }
            for least, most in ((20, 100), (10, 100), (2, 20), (1, 4))
        },
    }  # fmt: skip
    for name, settings in cases.items():
        reached = [
            time_to(1.0, rate, 200.0 if quick else 4000.0, settings)
            for rate in ((1.0,) if quick else (0.3, 1.0, 3.0))
        ]
        times[name] = min((each for each in reached if each is not None), default=None)
        print(name, reached, flush=True)
    figures: dict[str, Any] = {"seconds to loss 1.0": times}
    for ours, theirs in (
        ("fedcompass, 20 to 100 steps", "fedavg, 100 steps"),
        ("fedcompass, 10 to 100 steps", "fedavg, 100 steps"),
        ("fedcompass, 2 to 20 steps", "fedavg, 20 steps"),
        ("fedcompass, 1 to 4 steps", "fedavg, 1 steps"),
    ):
        a, b = times[ours], times[theirs]
        figures[f"{ours}, against {theirs}"] = round(a / b, 3) if a and b else None
    print(figures)
    return figures


def momentum(quick: bool) -> dict[str, Any]:
    """Ten clients with two classes each, 20 local steps, 60 rounds, the best of four learning rates."""
    figures: dict[str, Any] = {}
    for per_round in (0, 3):
        for policy in ("fedavg", "fedavg-m", "scaffold", "scaffold-m"):
            best = (float("inf"), 0.0, 0.0)
            for rate in (0.3,) if quick else (0.03, 0.1, 0.3, 1.0):
                clock = simulated(
                    {
                        "policy": policy,
                        "clients": 10,
                        "per_round": per_round,
                        "partition": "classes",
                    },
                    rate,
                )
                clock.run(5 if quick else 60)
                assert isinstance(clock.cohort, ClassifierCohort)
                score = clock.cohort.score(clock.parameters)
                best = min(best, (score.loss, score.accuracy, rate))
            figures[f"{policy}, {per_round or 10} of 10"] = {
                "loss": round(best[0], 4),
                "accuracy": round(best[1], 4),
                "rate": best[2],
            }
            print(policy, per_round, best, flush=True)
    for part in (10, 3):
        ratio = (
            figures[f"fedavg-m, {part} of 10"]["loss"]
            / figures[f"fedavg, {part} of 10"]["loss"]
        )
        figures[f"ratio of FedAvg-M to FedAvg, {part} of 10"] = round(ratio, 3)
    return figures


def collect(pipe: Any, count: int) -> None:
    """The other side of pickled pipes: all updates are there before their mean is taken."""
    while True:
        held, weights = [], []
        for _ in range(count):
            message = pipe.recv()
            if message is None:
                return
            held.append(message[0])
            weights.append(message[1])
        total = weighted_sum(held, weights)
        pipe.send({name: float(tensor.sum()) for name, tensor in total.items()})


def tree(quick: bool) -> dict[str, Any]:
    """16 updates of 25 MB: an aggregator in a process of its own, through shared memory and through a pickled pipe."""
    count, size, fan_in, turns = (
        16,
        (2**18 if quick else 25 * 2**20 // 4),
        4,
        2 if quick else 5,
    )
    updates = [{"w": torch.rand(size)} for _ in range(count)]
    weights = [1 / count] * count
    ours, theirs = Pipe()
    process = Process(target=collect, args=(theirs, count), daemon=True)
    process.start()

    def pickled() -> None:
        for update, weight in zip(updates, weights, strict=True):
            # as bytes of an array: torch would hand over a file descriptor in place of the values
            ours.send(({"w": _Pickled(update["w"].numpy())}, weight))
        ours.recv()

    with SharedUpdates(fan_in) as shared:
        for run in (lambda: shared(updates, weights), pickled):
            run()
        times: dict[str, list[float]] = {"shared": [], "pickled": []}
        for _ in range(turns):
            for name, call in (
                ("shared", lambda: shared(updates, weights)),
                ("pickled", pickled),
            ):
                begun = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - begun)
        flat = weighted_sum(updates, weights)["w"].double()
        off = float((shared(updates, weights)["w"].double() - flat).abs().max())
        peak = shared.peak()
    ours.send(None)
    process.join(10)
    ratio = median(times["pickled"]) / median(times["shared"])
    figures = {
        "updates": count,
        "bytes": size * 4,
        "fan_in": fan_in,
        "shared_s": round(median(times["shared"]), 4),
        "pickled_s": round(median(times["pickled"]), 4),
        "times faster": round(ratio, 2),
        "peak_updates": peak,
        "pickled_peak_updates": count + 1,
        "largest_error": off,
    }
    print(figures)
    return figures


class _Pickled(np.ndarray):
    """An array that becomes a tensor where it is unpickled."""

    def __new__(cls, values: np.ndarray) -> Any:
        return values.view(cls)

    def __reduce__(self) -> Any:
        return _tensor, (np.asarray(self),)


def _tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values)


def clients(quick: bool) -> dict[str, Any]:
    """1,000 clients on the digits, 100 rounds of FedAvg with all of them, and with 100 in each round."""
    figures: dict[str, Any] = {}
    for per_round in (0, 100):
        settings = {
            "policy": "fedavg",
            "clients": 1000,
            "per_round": per_round,
            "partition": "even",
            "steps": 20,
        }
        clock = simulated(settings, 0.1)
        clock.run(1)  # what is compiled and cached at the first call
        rounds = 2 if quick else 100
        begun, spent = time.perf_counter(), time.process_time()
        clock.run(1 + rounds)
        assert isinstance(clock.cohort, ClassifierCohort)
        figures[f"{per_round or 1000} a round"] = {
            "rounds": rounds,
            "seconds": round(time.perf_counter() - begun, 2),
            "processor_s": round(time.process_time() - spent, 2),
            "accuracy": round(clock.cohort.score(clock.parameters).accuracy, 4),
        }
        print(figures, flush=True)
    return figures


class TrueUpdates:
    """In the place of estimates what a client would really send now, which no server knows: the limit of estimates."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock

    def keep_model(self, version: int, parameters: Differences) -> None:
        """Nothing is needed of earlier models."""

    def forget_models(self, needed: set[int]) -> None:
        """Nothing is kept."""

    def refreshed(
        self, update: ClientUpdate, staleness: int, parameters: Differences
    ) -> ClientUpdate:
        work = [AssignedWork(update.client, update.steps)]
        now = update.version + staleness
        (true,) = self.clock.cohort.train(work, now, parameters, {}, ClientStep())
        return replace(update, difference=true.difference)


def fresh_run(kind: str, seed: int, quick: bool) -> tuple[dict[str, float], Any]:
    """Figures of a run of ``kind`` ("stale", "fresh" or "true"), and what replaced its stale updates."""
    samples = read_labelled("sklearn:digits")
    draw = np.random.default_rng(seed)
    alone = draw.permutation(np.flatnonzero(samples.labels == 9))
    rest = draw.permutation(np.flatnonzero(samples.labels != 9))
    rows = [*np.array_split(rest, 8), *np.array_split(alone, 2)]
    settings = {
        "policy": "fedbuff", "clients": 10, "buffer": 8, "steps": 5, "speeds": [1] * 8 + [20, 20],
        "unbiased": True, "staleness": 0.0,
    }  # fmt: skip
    partition = Partition("one class alone", tuple(np.sort(part) for part in rows))
    clock = simulated(settings, 0.3, partition)
    cohort = clock.cohort
    assert isinstance(cohort, ClassifierCohort)
    cohort.seed = seed
    fresh: Any = None
    if kind == "fresh":
        fresh = FreshUpdates(cohort.net, 5, 0.3, 0.0, 1.0, 20 if quick else 200)
    elif kind == "true":
        fresh = TrueUpdates(clock)
    clock.fresh = fresh
    of_class: list[float] = []
    for change in range(45 if quick else 160):
        clock.run(change + 1)
        if change >= 42:
            of_class.append(cohort.score(clock.parameters, alone).accuracy)
    figures = {
        "accuracy of the class, mean after 42 changes": round(fmean(of_class), 4),
        "accuracy of the class at the end": round(of_class[-1], 4),
        "accuracy": round(cohort.score(clock.parameters).accuracy, 4),
    }
    return figures, fresh


def fresh(quick: bool) -> dict[str, Any]:
    """Two of ten clients have one class alone, and their updates are 20 changes old; three seeds of data and draws."""
    figures: dict[str, Any] = {}
    gains, limits = [], []
    mean = "accuracy of the class, mean after 42 changes"
    for seed in range(1 if quick else 3):
        for kind in ("stale", "fresh", "true"):
            row, estimates = fresh_run(kind, seed, quick)
            figures[f"{kind}, seed {seed}"] = row
            print(kind, seed, row, flush=True)
            if kind == "fresh":
                errors = [pair for each in estimates.errors.values() for pair in each]
                figures[f"L1 errors, stale and fresh, seed {seed}"] = [
                    [round(a, 3), round(b, 3)] for a, b in errors
                ]
                figures[f"given up, seed {seed}"] = sorted(estimates.given_up)
        stale, ours, limit = (figures[f"{kind}, seed {seed}"][mean] for kind in ("stale", "fresh", "true"))  # fmt: skip
        gains.append(round(100 * (ours - stale), 1))
        limits.append(round(100 * (limit - stale), 1))
    figures["gain in points, by seed"] = gains
    figures["gain of the true updates, by seed"] = limits
    figures["gain in points"] = round(fmean(gains), 1)
    print(figures)
    return figures


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "policies": policies,
    "compass": compass,
    "momentum": momentum,
    "tree": tree,
    "clients": clients,
    "fresh": fresh,
}


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for part in asked.parts or PARTS:
        begun = time.perf_counter()
        figures = PARTS[part](asked.quick)
        results[part] = figures | {"took_s": round(time.perf_counter() - begun, 1)}
        if not asked.quick:
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
