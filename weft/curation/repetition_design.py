"""Which small runs to make next, so that the half-lives of all data pools are known best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.curation.repetition_fit import FittedLaw, PoolRun
from weft.curation.repetition_law import RepetitionLaw
from weft.errors import UsageError

#: How many times as many epochs as the longest run a proposed run has at most.
LONGER = 4
#: Step of the numeric derivatives, relative to the parameter.
STEP = 1e-5
#: Added to the information about each parameter, so that it can be inverted before all parameters are determined.
WEAK = 1e-6


@dataclass(frozen=True)
class ProposedRun:
    """A small run on one pool that would narrow the half-lives.

    Attributes:
        ``pool``: name of the pool.
        ``size``: number of samples of the part of the pool that is read.
        ``epochs``: how often that part is read.
        ``uncertainty``: largest relative standard error of a pool's half-life, over all pools, after this run and the
            runs proposed before it.
    """

    pool: str
    size: float
    epochs: int
    uncertainty: float

    def text(self) -> str:
        """Return the proposed run as a line for the user."""
        return (
            f"{self.pool}, {self.epochs} epochs of {self.size:,.0f} tokens "
            f"(then every half-life is known to {self.uncertainty:.0%} or better)"
        )


def half_life_errors(fitted: FittedLaw, runs: Sequence[PoolRun]) -> dict[str, float]:
    """Return the standard error of each pool's half-life, as a share of it, after a fit to ``runs``.

    It is the Cramér-Rao bound if the law ``fitted`` is true: no unbiased fit to these runs has a smaller error.
    """
    names = sorted(fitted.law.pools)
    rows = _sensitivities(fitted.law, names, runs)
    return dict(
        zip(names, _errors(rows.T @ rows, len(names), fitted.noise), strict=True)
    )


def propose_runs(
    fitted: FittedLaw, runs: Sequence[PoolRun], count: int, longest: float | None = None
) -> list[ProposedRun]:
    """Return ``count`` runs, each of which narrows most what the runs before it leave open.

    ``fitted``: the law as fitted to ``runs``. A run is worth what it takes from the sum of the squared errors of all
    half-lives. Proposed runs read the parts of pools that ``runs`` have read, and no more samples than the largest of
    them, so that none costs more than a run that was made. ``longest``: most epochs of a proposed run; None: four times
    those of the longest of ``runs``. Raises :class:`UsageError` if the shortest candidate is longer than that.
    """
    law, names = fitted.law, sorted(fitted.law.pools)
    candidates = _candidates(runs, longest or LONGER * max(run.epochs for run in runs))
    if not candidates:
        raise UsageError(
            f"no run of at most {longest:g} epochs can be proposed; the longest has to be 1 epoch or more"
        )
    rows = _sensitivities(law, names, candidates)
    measured = _sensitivities(law, names, runs)
    information = measured.T @ measured
    proposed = []
    for _ in range(count):
        # [candidates]: sum of the squared errors of half-lives with each candidate
        left = [
            float(
                (_errors(information + np.outer(row, row), len(names), 1.0) ** 2).sum()
            )
            for row in rows
        ]
        best = int(np.argmin(left))
        information = information + np.outer(rows[best], rows[best])
        worst = _errors(information, len(names), fitted.noise).max()
        run = candidates[best]
        proposed.append(
            ProposedRun(run.pool, run.size, round(run.epochs), float(worst))
        )
    return proposed


def _candidates(runs: Sequence[PoolRun], longest: float) -> list[PoolRun]:
    """Return runs of 1, 2, 4 and more epochs, up to ``longest``, on the parts of pools that ``runs`` have read."""
    most = max(run.samples for run in runs)
    parts = sorted({(run.pool, float(f"{run.size:.6g}")) for run in runs})
    lengths = [2**power for power in range(int(np.log2(max(0.5, longest))) + 1)]
    return [
        PoolRun(pool, size * epochs, epochs, 1.0)
        for pool, size in parts
        for epochs in lengths
        if size * epochs <= 1.001 * most
    ]


def _sensitivities(
    law: RepetitionLaw, names: Sequence[str], runs: Sequence[PoolRun]
) -> np.ndarray:
    """Return the derivatives of the logarithm of each run's loss, ``[runs, parameters]``.

    The parameters are the logarithm of the scale, the floor, the logarithm of the unit, each pool's exponent, and the
    logarithm of each pool's half-life.
    """
    count = len(names)
    zero = np.zeros(3 + 2 * count)

    def changed(change: np.ndarray) -> RepetitionLaw:
        pools = {
            name: replace(
                law.pools[name],
                exponent=law.pools[name].exponent + change[3 + i],
                half_life=law.pools[name].half_life * np.exp(change[3 + count + i]),
            )
            for i, name in enumerate(names)
        }
        return RepetitionLaw(
            law.scale * float(np.exp(change[0])),
            law.floor + float(change[1]),
            law.unit * float(np.exp(change[2])),
            pools,
        )

    def losses(change: np.ndarray) -> np.ndarray:
        each = changed(change)
        alone = [
            replace(
                each, pools={run.pool: replace(each.pools[run.pool], size=run.size)}
            ).loss([run.pool], run.samples)
            for run in runs
        ]
        return np.log(alone)

    columns = []
    for i in range(len(zero)):
        change = zero.copy()
        change[i] = STEP
        columns.append((losses(change) - losses(-change)) / (2 * STEP))
    return np.stack(columns, axis=1)


def _errors(information: np.ndarray, count: int, noise: float) -> np.ndarray:
    """Return the standard errors of the logarithms of half-lives, ``[pools]``.

    ``information``: sum of the outer products of the runs' derivatives. ``count``: number of pools.
    """
    inverse = np.linalg.inv(information + WEAK * np.eye(len(information)))
    return noise * np.sqrt(np.diag(inverse)[-count:])
