"""DADAO as one process sees it: the reference for islands that exchange for themselves.

It moves whole vectors of all islands by their own formulas, with the clock in common and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from weft.techniques.sync.dadao.dynamics import Dynamics

if TYPE_CHECKING:
    from weft.sync.simulated_round import One, Round
    from weft.techniques.sync.dadao import DADAOSettings

NAMES = ("anchor", "ahead", "dual", "dual_ahead", "pull", "pull_ahead")


def drift(replica: One, root: float, nu: float, time: float) -> None:
    """Advance the six vectors of the simulated island ``replica`` by ``time`` without an event, by the eigenvectors of
    the differential equation. ``root``, ``nu``: constants of the equation, :attr:`Dynamics.root` and
    :attr:`Dynamics.shift`. ``time`` is the equation's own, of which ``sync.pace`` passes between two gradients.
    """
    half = 1 / (2 * root)
    # rows and columns in the order of NAMES
    slope = np.array([
        [-root / 8, root / 8, 0, 0, 0, 0], [root / 8, -root / 8, 0, 0, 0, 0],
        [0, 0, -root / 4, root / 4, 0, 0], [0, -half * nu, -half, 0, -half, 0],
        [0, 0, 0, 0, -root / 4, root / 4], [0, 0, 0, 0, root / 8, -root / 8],
    ])  # fmt: skip
    values, vectors = np.linalg.eig(slope.astype(complex))
    matrix = ((vectors * np.exp(values * time)) @ np.linalg.inv(vectors)).real
    before = [replica.kept[name].clone() for name in NAMES]
    for row, name in zip(matrix, NAMES, strict=True):
        parts = [float(share) * x for share, x in zip(row, before, strict=True)]
        replica.kept[name].copy_(torch.stack(parts).sum(0))


def simulate_interval(at: Round, own: DADAOSettings) -> Dynamics:
    """Simulate one parameter on all islands over one interval: a gradient on each island, then all exchanges up to the
    next gradients. ``at``: the parameter's values on the islands; ``own``: DADAO's settings.
    Returns the dynamics, which have the clock.
    """
    root = (1 / (2 * own.condition)) ** 0.5
    nu = 1 / (8 * own.condition * own.stride)
    dynamics = Dynamics.of(own, at.how, len(at.ones))
    for replica in at.ones.values():
        kept = replica.kept
        residual = kept["anchor"] - replica.now
        residual = residual - nu * kept["anchor"] - kept["dual_ahead"]
        kept["anchor"].sub_(own.stride * residual)
        kept["ahead"].sub_(own.stride / root * residual)
        kept["dual_ahead"].add_(residual + root / 4 * residual)
    clocks = dict.fromkeys(at.ones, 0.0)
    for event in dynamics.clock(at.step // at.how.every):
        a, b = event.islands
        for i in (a, b):
            drift(at.ones[i], root, nu, own.pace * (event.time - clocks[i]))
            clocks[i] = event.time
        said = {i: at.ones[i].kept["dual"] + at.ones[i].kept["pull"] for i in (a, b)}
        strength = 2 * dynamics.mixing[0] * own.pace / dynamics.rate / root
        for i, other in ((a, b), (b, a)):
            at.ones[i].kept["pull"].sub_((said[i] - said[other]) / 2)
            at.ones[i].kept["pull_ahead"].sub_(strength * (said[i] - said[other]))
    for i, replica in at.ones.items():
        drift(replica, root, nu, own.pace * (1 - clocks[i]))
        replica.now.copy_(replica.kept["anchor"])
    return dynamics
