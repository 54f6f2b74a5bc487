"""What trials of dispatch options cost, and how often they choose well, by drawn pass times; nothing is sent.

    python bench/dispatch_trials.py [--draws 300] [--json bench/results/dispatch_trials.json]

Seven options get times that are up to some three times the best one's. A pass takes its option's time, times noise of
the option, of the machine's state, which changes slowly, and now and then of a stall; the first pass with an option
takes twice as long. As in ``timed_dispatch.py`` a first run leaves its table, and the second is judged: by how much the
mean of its passes without the slowest tenth is above that of passes with the best option alone (``over best``), and by
how much longer than the best its options take without noise (``by its options``).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from weft.techniques.dispatch.timed.trials import OptionTimes

OPTIONS = 7
PASSES = (40, 60, 200)


class Noise(NamedTuple):
    """Standard deviations of the logarithms of an option's noise and of a step of the machine's state, and how likely
    a pass is to stall.
    """

    option: float
    state: float
    stall: float


NOISES = {
    "quiet": Noise(0.03, 0.005, 0.01),
    "usual": Noise(0.05, 0.02, 0.03),
    "busy": Noise(0.1, 0.05, 0.05),
}


@dataclass
class Machine:
    """Draws the seconds of passes. ``bases``: the seconds of each option without noise."""

    draw: random.Random
    noise: Noise
    bases: list[float] = field(default_factory=list)
    state: float = 0.0

    def __post_init__(self) -> None:
        self.bases = [1.0] + [
            math.exp(abs(self.draw.gauss(0, 0.6))) for _ in range(OPTIONS - 1)
        ]
        self.draw.shuffle(self.bases)
        self.widths = [
            self.noise.option * self.draw.uniform(0.5, 1.5) for _ in self.bases
        ]
        self.seen = set[int]()

    def turn(self) -> None:
        """Let the machine's state change."""
        self.state = 0.95 * self.state + self.draw.gauss(0, self.noise.state)

    def seconds(self, option: int) -> float:
        """Return the seconds of a pass with ``option``."""
        seconds = self.bases[option] * math.exp(
            self.draw.gauss(0, self.widths[option]) + self.state
        )
        if self.draw.random() < self.noise.stall:
            seconds *= 1 + self.draw.expovariate(2)
        if option not in self.seen:
            self.seen.add(option)
            seconds *= 2
        return seconds


class Run(NamedTuple):
    """A run's seconds pass by pass, the options it took, and the seconds of every option in the same passes."""

    timed: list[float]
    took: list[int]
    fixed: list[list[float]]
    times: OptionTimes


def driven(machine: Machine, times: OptionTimes, passes: int) -> Run:
    """Run the choice of ``times`` for so many passes."""
    run = Run([], [], [[] for _ in machine.bases], times)
    for _ in range(passes):
        machine.turn()
        if times.due:
            times.learn(list(times.forward), list(times.backward))
        option, noted = times.next()
        seconds = machine.seconds(option)
        if noted:
            times.note(option, seconds / 3, seconds * 2 / 3)
        run.timed.append(seconds)
        run.took.append(option)
        for side, each in enumerate(run.fixed):
            each.append(machine.seconds(side))
    return run


def trimmed(seconds: list[float]) -> float:
    return statistics.mean(sorted(seconds)[: max(1, len(seconds) * 9 // 10)])


def judged(noise: Noise, passes: int, draws: int) -> dict[str, float]:
    """Return medians, the worst, and the share of draws within 3 %, over drawn settings."""
    over, by = [], []
    for seed in range(draws):
        machine = Machine(random.Random(seed), noise)
        first = driven(machine, OptionTimes([inf] * OPTIONS), passes).times
        turn = first.turn if not first.rounds else 0
        run = driven(machine, OptionTimes(list(first.known), turn=turn), passes)
        over.append(trimmed(run.timed) / min(map(trimmed, run.fixed)) - 1)
        by.append(statistics.mean(machine.bases[o] for o in run.took) - 1)
    return {
        "median over best": round(statistics.median(over), 4),
        "most over best": round(max(over), 3),
        "within 3 %": round(sum(x <= 0.03 for x in over) / draws, 3),
        "median by its options": round(statistics.median(by), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    for name, noise in NOISES.items():
        for passes in PASSES:
            row = judged(noise, passes, options.draws)
            rows[f"{name}, {passes} passes"] = row
            print(f"{name}, {passes} passes: {row}")
    if options.json:
        result = {"command": "python bench/dispatch_trials.py", "draws": options.draws}
        options.json.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
