"""Simulator of heat in a rod, which sends every time step to a training while it runs (recipes/data/heat.toml).

    python examples/heat.py --part 0 --parts 2

A rod of length 1 has one temperature at first, and then two others at its ends. Backward Euler on ``POINTS`` points
solves the heat equation for a sweep over the first temperature, from cold to hot, with random ends and conductivities.
Temperatures are divided by 1,000 kelvins, so that all numbers are between 0 and 1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np

from weft.streams import producer

#: Inner points of the rod, time steps of a simulation, and seconds of a step.
POINTS, STEPS, SECONDS = 32, 25, 0.02


def parameters(simulations: int, seed: int) -> np.ndarray:
    """Return first temperature, both ends and conductivity of each simulation, float64 ``[simulations, 4]``."""
    random = np.random.default_rng(seed).random((simulations, 4))
    random[:, 0] = (np.arange(simulations) + random[:, 0]) / simulations
    return random


def fields(chosen: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the temperatures ``[POINTS]`` after each time step of the simulation with the parameters ``chosen``."""
    start, left, right, conductivity = chosen
    ratio = 0.5 * (0.1 + conductivity) * SECONDS * (POINTS + 1) ** 2
    system = np.diag(np.full(POINTS, 1 + 2 * ratio))
    system += np.diag(np.full(POINTS - 1, -ratio), 1) + np.diag(np.full(POINTS - 1, -ratio), -1)  # fmt: skip
    inverse = np.linalg.inv(system)
    field = np.full(POINTS, start)
    for _ in range(STEPS):
        known = field.copy()
        known[0] += ratio * left
        known[-1] += ratio * right
        field = inverse @ known
        yield field


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--part", type=int, default=0, help="which part of the sweep")
    words.add_argument("--parts", type=int, default=1, help="parts of the sweep")
    words.add_argument("--simulations", type=int, default=200, help="of all parts")
    words.add_argument("--seed", type=int, default=0, help="of the sweep")
    words.add_argument(
        "--pause",
        type=float,
        default=0.0,
        help="seconds per sample, as if it were slower",
    )
    given = words.parse_args()
    sweep = np.array_split(parameters(given.simulations, given.seed), given.parts)
    with producer() as stream:
        for chosen in sweep[given.part]:
            for step, field in enumerate(fields(chosen), 1):
                if given.pause and stream.wants(stream.samples):
                    time.sleep(given.pause)
                stream.send({"parameters": chosen, "time": [step / STEPS], "field": field})  # fmt: skip


if __name__ == "__main__":
    main()
