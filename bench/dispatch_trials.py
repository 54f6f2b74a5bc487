"""What trials of dispatch options cost, and how often they choose well, by drawn pass times; nothing is sent.

    python bench/dispatch_trials.py [--draws 100] [--passes 40 60 200] [--recorded TIMED.json] [--json FILE]

Seven options get times that are up to some three times the best one's. A pass takes its option's time, times noise of
the option, of the machine's state, which changes slowly, and now and then of a stall; the first pass with an option
takes twice as long, and, if buffers of the network are full, a pass after one with a slower option takes a share of the
difference longer. As in ``timed_dispatch.py`` a first run, of 200 passes or more, leaves its table, and the second is
judged, at another pace of the machine: by how much the mean of its passes without the slowest tenth is above that of
passes with the best option alone (``over best``), and by how much longer than the best its options take without noise
(``by its options``). ``drifting`` is noise that ``timed_dispatch.py`` has met on two cores that other programs use too.

``--recorded`` also replays the passes of every setting that ``timed_dispatch.py`` has recorded: a pass takes what its
option took at that time. Passes follow each other as they were recorded, from a drawn one on, and after each
:data:`ROW` from another one, so that draws differ and the machine's phases stay.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from weft.techniques.dispatch.timed.trials import OptionTimes

OPTIONS = 7
PASSES = (40, 60, 200)
#: Standard deviation of the logarithm of the pace of a machine from run to run.
PACE = 0.2
#: Passes of the first run at least.
BEFORE = 200
#: Number of recorded passes that follow each other.
ROW = 12


class Noise(NamedTuple):
    """Standard deviations of the logarithms of an option's noise and of a step of the machine's state, how likely a
    pass is to stall, what share of the difference a pass takes longer after one with a slower option, and what share of
    the machine's state stays from pass to pass.
    """

    option: float
    state: float
    stall: float
    carried: float
    stays: float


NOISES = {
    "quiet": Noise(0.03, 0.005, 0.01, 0.0, 0.95),
    "usual": Noise(0.05, 0.02, 0.03, 0.0, 0.95),
    "busy": Noise(0.1, 0.05, 0.05, 0.0, 0.95),
    "usual, full buffers": Noise(0.05, 0.02, 0.03, 0.1, 0.95),
    "drifting": Noise(0.13, 0.05, 0.03, 0.0, 0.99),
}


@dataclass
class Machine:
    """Draws the seconds of passes. ``bases``: the seconds of each option without noise."""

    draw: random.Random
    noise: Noise
    bases: list[float] = field(default_factory=list)
    state: float = 0.0
    pace: float = 1.0

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
        self.state *= self.noise.stays
        self.state += self.draw.gauss(0, self.noise.state)

    def restart(self) -> None:
        """Begin another run, which has to make its connections anew."""
        self.pace = math.exp(self.draw.gauss(0, PACE))
        self.seen.clear()

    def seconds(self, option: int, before: int) -> float:
        """Return the seconds of a pass with ``option``, after one with the option ``before``."""
        longer = max(0.0, self.bases[before] - self.bases[option])
        base = self.pace * (self.bases[option] + self.noise.carried * longer)
        seconds = base * math.exp(self.draw.gauss(0, self.widths[option]) + self.state)
        if self.draw.random() < self.noise.stall:
            seconds *= 1 + self.draw.expovariate(2)
        if option not in self.seen:
            self.seen.add(option)
            seconds *= 2
        return seconds


@dataclass
class Recorded:
    """Replays recorded passes. ``times``: the seconds of each option, pass by pass."""

    times: list[list[float]]
    draw: random.Random
    at: int = 0
    passes: int = 0

    def __post_init__(self) -> None:
        usual = [trimmed(each) for each in self.times]
        self.bases = [each / min(usual) for each in usual]
        self.seen = set[int]()

    def turn(self) -> None:
        """Go to the next pass."""
        count = len(self.times[0])
        drawn = self.passes % ROW == 0
        self.at = self.draw.randrange(count) if drawn else (self.at + 1) % count
        self.passes += 1

    def restart(self) -> None:
        """Begin another run, which has to make its connections anew."""
        self.passes = 0
        self.seen.clear()

    def seconds(self, option: int, before: int) -> float:
        """Return the seconds that ``option`` took at the time of the present pass."""
        seconds = self.times[option][self.at]
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


def driven(machine: Machine | Recorded, times: OptionTimes, passes: int) -> Run:
    """Run the choice of ``times`` for so many passes."""
    run = Run([], [], [[] for _ in machine.bases], times)
    for _ in range(passes):
        machine.turn()
        if times.due:
            times.learn(list(times.forward), list(times.backward))
        option, noted = times.next()
        seconds = machine.seconds(option, run.took[-1] if run.took else option)
        if noted:
            times.note(option, seconds / 3, seconds * 2 / 3)
        run.timed.append(seconds)
        run.took.append(option)
        for side, each in enumerate(run.fixed):
            each.append(machine.seconds(side, side))
    return run


def trimmed(seconds: list[float]) -> float:
    return statistics.mean(sorted(seconds)[: max(1, len(seconds) * 9 // 10)])


def judged(machines: Sequence[Machine | Recorded], passes: int) -> dict[str, float]:
    """Return medians, the worst, and the share within 3 %, over settings (``machines``)."""
    over, by, draws = [], [], len(machines)
    for machine in machines:
        options = len(machine.bases)
        before = max(passes, BEFORE)
        first = driven(machine, OptionTimes([inf] * options), before).times
        machine.restart()
        run = driven(machine, OptionTimes.resumed(first.kept()), passes)
        over.append(trimmed(run.timed) / min(map(trimmed, run.fixed)) - 1)
        by.append(statistics.mean(machine.bases[o] for o in run.took) - 1)
    return {
        "median over best": round(statistics.median(over), 4),
        "most over best": round(max(over), 3),
        "within 3 %": round(sum(x <= 0.03 for x in over) / draws, 3),
        "median by its options": round(statistics.median(by), 4),
        "mean by its options": round(statistics.mean(by), 4),
        "most by its options": round(max(by), 3),
        "within 3 % by its options": round(sum(x <= 0.03 for x in by) / draws, 3),
    }


def replayed(file: Path, draws: int) -> list[Recorded]:
    """Return about so many settings, each one of the ``file`` as often."""
    rows = json.loads(file.read_text())["settings"]
    return [
        Recorded(row["passes ms"], random.Random(f"{number}, {seed}"))
        for number, row in enumerate(rows)
        for seed in range(max(1, draws // len(rows)))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--passes", type=int, nargs="*", default=PASSES)
    parser.add_argument("--recorded", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    for passes in options.passes:
        sides: dict[str, Sequence[Machine | Recorded]] = {
            name: [Machine(random.Random(n), noise) for n in range(options.draws)]
            for name, noise in NOISES.items()
        }
        if options.recorded:
            sides["recorded"] = replayed(options.recorded, options.draws)
        for name, machines in sides.items():
            rows[f"{name}, {passes} passes"] = row = judged(machines, passes)
            print(f"{name}, {passes} passes: {row}", flush=True)
    if options.json:
        command = ["python", "bench/dispatch_trials.py", *sys.argv[1:]]
        result = {"command": " ".join(command), "draws": options.draws}
        options.json.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
