"""Does the fit of the repetition-aware law recover planted exponents and half-lives, and do proposed runs help it?

    python bench/planted_laws.py [--seeds 40] [--json bench/results/planted_laws.json]

Losses of small runs follow a planted law with two or three pools, with an error of 1 %. The same number of runs is
made in two ways. ``fixed``: 1, 2, 3, 4, 6, 8, 12 and 16 epochs on four sizes of each pool. ``proposed``: 1, 4 and 16
epochs, and then what ``weft data plan --propose 20 --longest 64`` names, again and again. A fit is right where all
exponents are within 10 % and all half-lives within 20 %. About 40 seconds on one core.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from step import machine, write

from weft.curation.repetition_design import propose_runs
from weft.curation.repetition_fit import PoolRun, fit_repetition_law
from weft.curation.repetition_law import PoolUtility, RepetitionLaw

RESULTS = Path(__file__).parent / "results" / "planted_laws.json"
#: Exponent and half-life of each pool.
LAWS = {
    "two pools": {"clean": (-0.25, 3.0), "noisy": (-0.15, 6.0)},
    "three pools": {"clean": (-0.3, 3.0), "mixed": (-0.2, 6.0), "noisy": (-0.1, 10.0)},
}
SIZES, NOISE = (30.0, 300.0, 3000.0, 30000.0), 0.01
FIXED, FIRST, LONGEST, BATCH = (1, 2, 3, 4, 6, 8, 12, 16), (1, 4, 16), 64, 20


def planted(pools: dict[str, tuple[float, float]]) -> RepetitionLaw:
    utilities = {name: PoolUtility(*each, 30000.0) for name, each in pools.items()}
    return RepetitionLaw(1.0, 0.3, 1.0, utilities)


def measure(
    law: RepetitionLaw, pool: str, size: float, epochs: int, chance: np.random.Generator
) -> PoolRun:
    """Return a run on a part of a pool, whose loss is the law's with an error."""
    alone = replace(law, pools={pool: replace(law.pools[pool], size=size)})
    loss = alone.loss([pool], size * epochs) * (1 + chance.normal(0, NOISE))
    return PoolRun(pool, size * epochs, epochs, loss)


def all_lengths(
    law: RepetitionLaw, lengths: tuple[int, ...], chance: np.random.Generator
) -> list[PoolRun]:
    return [
        measure(law, pool, size, epochs, chance)
        for pool in law.pools
        for size in SIZES
        for epochs in lengths
    ]


def with_proposed(
    law: RepetitionLaw, count: int, chance: np.random.Generator
) -> list[PoolRun]:
    """Return ``count`` runs, of which all but the first ones are proposed by those before."""
    runs = all_lengths(law, FIRST, chance)
    while len(runs) < count:
        fitted = fit_repetition_law(runs, resamples=0)
        missing = min(BATCH, count - len(runs))
        for each in propose_runs(fitted, runs, missing, LONGEST):
            runs.append(measure(law, each.pool, each.size, each.epochs, chance))
    return runs


def errors(law: RepetitionLaw, runs: list[PoolRun]) -> np.ndarray:
    """Return the relative errors of the fit, ``[pools, 2]``: of the exponent and of the half-life."""
    fitted = fit_repetition_law(runs, resamples=0).law.pools
    pairs = [
        (
            fitted[name].exponent / pool.exponent - 1,
            fitted[name].half_life / pool.half_life - 1,
        )
        for name, pool in law.pools.items()
    ]
    return np.abs(pairs)


def summary(each: list[np.ndarray]) -> dict[str, Any]:
    """Return in how many seeds a fit is right, and the errors over all seeds."""
    table = np.stack(each)  # [seeds, pools, 2]
    right = (table < np.array([0.1, 0.2])).all((1, 2))
    return {
        "right": int(right.sum()),
        "seeds": len(each),
        "largest_error_of_exponent": float(table[..., 0].max()),
        "largest_error_of_half_life": float(table[..., 1].max()),
        "rms_error_of_half_life": np.sqrt((table[..., 1] ** 2).mean(0)).tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    before, rows = machine(), {}
    for name, pools in LAWS.items():
        law = planted(pools)
        kinds: dict[str, list[np.ndarray]] = {"fixed": [], "proposed": []}
        for seed in range(given.seeds):
            fixed = all_lengths(law, FIXED, np.random.default_rng(seed))
            proposed = with_proposed(
                law, len(fixed), np.random.default_rng(10_000 + seed)
            )
            kinds["fixed"].append(errors(law, fixed))
            kinds["proposed"].append(errors(law, proposed))
        rows[name] = {"runs": len(fixed)} | {
            kind: summary(each) for kind, each in kinds.items()
        }
        print(name, rows[name], flush=True)
    write({"machine": before, "noise": NOISE, "laws": rows}, given.json)


if __name__ == "__main__":
    main()
