"""What a fitted roofline leaves over, learned from its neighbours: Gaussian-process regression on log ratios.

Products and collectives run at speeds that jump with their sizes (tiles, waves, protocols), the same way in every run
of a system. A measured layout therefore tells about layouts of nearby sizes, and nothing about far ones: away from
what was measured the factor returns to one. Rasmussen & Williams 2006, section 2.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from weft.planner.fit import Measurement

Array = NDArray[np.float64]

#: Standard deviations (of the logarithm): of jumps near by, of trends three times as far, of repeated measurements.
NEAR, FAR, NOISE = 0.06, 0.1, 0.05
#: The factor stays within this, in logarithms.
BOUND = 0.25
#: Distance, in logarithms, at which a size says little about another.
LENGTHS = {
    "tokens": 0.5, "embed": 0.5, "tp": 0.5, "pp": 0.9, "data": 1.3, "microbatches": 1.2, "layers": 1.5, "seq": 0.8,
    "virtual": 0.8, "cp": 0.8, "experts": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Correction:
    """``points``: scaled log sizes ``[row, size]``; ``kinds``: what must agree ``[row, kind]``; ``weights``: [row]."""

    points: Array
    kinds: NDArray[np.str_]
    weights: Array

    def factor(self, rows: Sequence[Measurement]) -> Array:
        """Factor on the predicted seconds of each row."""
        points, kinds = describe(rows)
        return np.exp(
            np.clip(
                _kernel(points, kinds, self.points, self.kinds) @ self.weights,
                -BOUND,
                BOUND,
            )
        )

    def plain(self) -> dict[str, Any]:
        points, weights = self.points.round(4).tolist(), self.weights.round(5).tolist()
        return {"points": points, "kinds": self.kinds.tolist(), "weights": weights}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Self:
        return cls(
            np.array(plain["points"]),
            np.array(plain["kinds"]),
            np.array(plain["weights"]),
        )


def correct(rows: Sequence[Measurement], predicted: Array) -> Correction:
    """Learn from rows with a time and what the fitted model predicts for them."""
    points, kinds = describe(rows)
    left: Array = np.log(
        np.array([row.seconds for row in rows], dtype=float) / predicted
    )
    # one run gone wrong says nothing about its neighbours
    usual = 3 * 1.48 * float(np.median(np.abs(left)))
    left = np.clip(left, -usual, usual)
    kernel = _kernel(points, kinds, points, kinds) + NOISE**2 * np.eye(len(rows))
    return Correction(
        points, kinds, np.asarray(np.linalg.solve(kernel, left), dtype=np.float64)
    )


def describe(rows: Sequence[Measurement]) -> tuple[Array, NDArray[np.str_]]:
    sizes, kinds = [], []
    for row in rows:
        shape, plan = row.shape, row.plan
        size = (
            plan.micro_batch * plan.seq / plan.cp,
            shape.embed,
            plan.tp,
            plan.pp,
            plan.data,
            plan.microbatches,
        )
        sizes.append(
            (*size, shape.layers, plan.seq, plan.virtual, plan.cp, 1 + shape.experts)
        )
        kinds.append(
            (
                row.device,
                str(row.bits),
                str(plan.schedule),
                str(plan.recompute),
                str(plan.zero),
            )
        )
    lengths = np.array(list(LENGTHS.values()))
    return np.log(np.maximum(np.array(sizes, dtype=float), 1)) / lengths, np.array(
        kinds
    )


def _kernel(
    a: Array, a_kinds: NDArray[np.str_], b: Array, b_kinds: NDArray[np.str_]
) -> Array:
    distance = ((a[:, None] - b[None]) ** 2).sum(2)
    other = (a_kinds[:, None] != b_kinds[None]).sum(2)
    near = NEAR**2 * np.exp(-distance / 2 - 1.5 * other)
    return near + FAR**2 * np.exp(-distance / 18 - 0.7 * other)
