"""Repetition-aware scaling law: the loss after so many samples of pools, some of them read again and again.

A pool is a part of the data. Its utility falls by half every ``half_life`` epochs, so that a repeated sample is worth
less than a new one (Goyal et al. 2024, "Scaling Laws for Data Filtering", where it is called QQT). The law follows the
paper, and not its published code, in which the irreducible loss is multiplied by the gain of later epochs, and shrinks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PoolUtility:
    """Utility of a pool of samples for training.

    Attributes:
        ``exponent``: exponent of the power law by which the reducible loss falls with the number of new samples; below
            0.
        ``half_life``: number of epochs after which the exponent has halved; infinity: repeated samples are as good as
            new ones.
        ``size``: number of samples in the pool, in the unit of the law, such as tokens.
    """

    exponent: float
    half_life: float
    size: float


@dataclass(frozen=True)
class RepetitionLaw:
    """Scaling law of the loss for training on repeated data, ``scale * u + floor``.

    ``u`` is a product over epochs: the growth of the number of samples in each epoch, to the power of an exponent that
    decays with repetition.

    Attributes:
        ``scale``: reducible loss after ``unit`` samples of any pool.
        ``floor``: irreducible loss.
        ``unit``: number of samples that counts as 1.
        ``pools``: utility of each pool, by name.
    """

    scale: float
    floor: float
    unit: float
    pools: Mapping[str, PoolUtility]

    def loss(self, chosen: Sequence[str], samples: float) -> float:
        """Return the loss after training on ``samples`` samples, drawn evenly from the union of the pools ``chosen``.

        As in the paper of this law (Goyal et al. 2024), an epoch of ``m`` pools is a pass over as many samples as one
        pool has. The exponent is the mean of the pools' exponents, and each half-life is ``m`` times as long. Pools of
        unequal sizes are weighed by their size.
        """
        pools = [self.pools[name] for name in chosen]
        total = sum(pool.size for pool in pools)
        shares = np.array([pool.size / total for pool in pools])
        exponents = np.array([pool.exponent for pool in pools])
        half_lives = len(pools) * np.array([pool.half_life for pool in pools])
        seen = epoch_ends(samples, total / len(pools)) / self.unit
        epochs = np.arange(len(seen))[:, None]
        # [epochs, pools]: the exponent of each pool in each epoch
        decayed = exponents * halvings(epochs, half_lives)
        logarithm = float((decayed @ shares) @ log_growth(seen))
        return float(self.scale * np.exp(logarithm) + self.floor)

    def ranked(self) -> list[str]:
        """Return the names of all pools, the best exponent first. Pools with equal exponents are sorted by name."""
        return sorted(self.pools, key=lambda name: (self.pools[name].exponent, name))


def epoch_ends(samples: float, size: float) -> np.ndarray:
    """Return the number of samples seen at the end of each epoch, float64 ``[epochs]``; the last is ``samples``.

    ``size``: number of samples of an epoch. The last epoch may be incomplete.
    """
    whole = max(1, int(np.ceil(samples / size * (1 - 1e-12))))
    ends = size * np.arange(1, whole + 1, dtype=np.float64)
    ends[-1] = samples
    return ends


def log_growth(seen: np.ndarray) -> np.ndarray:
    """Return the logarithm of the growth of ``seen``, the number of samples at the end of each epoch, ``[epochs]``.

    The first entry is the logarithm of the first number itself.
    """
    logarithms: np.ndarray = np.log(seen)
    return np.diff(logarithms, prepend=0.0)


def halvings(epochs: np.ndarray, half_lives: np.ndarray) -> np.ndarray:
    """Return the factor by which the exponent of a pool's law has decayed in each epoch, ``0.5 ** (epochs /
    half_lives)``, of the broadcast shape of both arguments.

    ``epochs`` count from 0. With a half-life of 0 only the first epoch counts; with an infinite one all count the same.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(epochs == 0, 0.0, epochs / half_lives)
    factor: np.ndarray = 0.5**ratio
    return factor


@dataclass(frozen=True)
class PoolChoice:
    """Choice of pools for a number of samples.

    Attributes:
        ``pools``: names of the chosen pools, the best first.
        ``epochs``: how often the union of the pools is read.
        ``loss``: loss that the law expects.
    """

    pools: tuple[str, ...]
    epochs: float
    loss: float


def pool_choices(law: RepetitionLaw, samples: float) -> list[PoolChoice]:
    """Return the choices to compare by ``law``: the best pool, the best two, and so on up to all pools.

    Each has its expected loss. ``samples``: number of samples to train on, repeated ones counted again.
    """
    ranked = law.ranked()
    choices = []
    for count in range(1, len(ranked) + 1):
        names = tuple(ranked[:count])
        size = sum(law.pools[name].size for name in names)
        choices.append(PoolChoice(names, samples / size, law.loss(names, samples)))
    return choices


def best_pools(law: RepetitionLaw, samples: float) -> PoolChoice:
    """Return the choice of pools with the lowest expected loss by ``law``, for training on ``samples`` samples.

    It is one of the choices of :func:`pool_choices`; of equal ones, the one with fewer pools.
    """
    return min(pool_choices(law, samples), key=lambda choice: choice.loss)
