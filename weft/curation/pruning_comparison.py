"""Hard, easy or random: what a choice of examples is worth, measured on examples that are held out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.curation.best_documents import Keep, choose_best, score_order
from weft.curation.small_network import network_accuracy

#: Draws of random examples, whose accuracies are averaged.
_DRAWS = 3


class PruningComparison(NamedTuple):
    """How well small networks do if only part of the examples is kept for training: the hard, the easy or random ones.

    Attributes:
        ``hard``, ``easy``, ``random``: accuracy on held-out examples after training on the hardest, the easiest or
            random examples, equally many.
        ``held_out``: number of held-out examples.
        ``trained``: number of examples that are kept for training.
        ``noise``: standard error of an accuracy, from the number of held-out examples.
    """

    hard: float
    easy: float
    random: float
    held_out: int
    trained: int
    noise: float

    @property
    def better(self) -> str:
        """ "hard" or "easy": the choice of examples that gave the higher accuracy; "hard" if both are equal."""
        return "easy" if self.easy > self.hard else "hard"

    def lines(self, keep: str) -> list[str]:
        """Return lines for the user about the accuracies, with a warning if random examples do better than ``keep``.

        ``keep``: the choice that the user has made, "hard" or "easy".
        """
        lines = [
            f"accuracy on {self.held_out} held-out examples with {self.trained} others: hard {self.hard:.1%}, easy "
            f"{self.easy:.1%}, random {self.random:.1%} (standard error {self.noise:.1%})"
        ]
        own = self.hard if keep == "hard" else self.easy
        if self.random > own:
            lines.append(
                f"warning: random examples are better than {keep} ones here, {self.random:.1%} beside {own:.1%}; "
                "operator 'top' with keep = 'random' keeps random ones"
            )
        return lines


def compare_pruning(
    scores: np.ndarray,
    features: np.ndarray,
    labels: np.ndarray,
    ids: Sequence[str],
    share: float,
    floor: int = 0,
    held_out: float = 0.2,
    seed: int = 0,
) -> PruningComparison | None:
    """Train small networks on the hardest, the easiest and random examples, and compare their accuracies.

    Arguments:
        ``scores``: difficulty of each example, ``[examples]``.
        ``features``: inputs of the networks, float32 ``[examples, width]``.
        ``labels``: classes, int64 ``[examples]``.
        ``ids``: names of the examples, which together with ``seed`` determine all random choices.
        ``share``: share of the examples, without those held out, that is kept for training.
        ``floor``: fewest examples of a class that are kept.
        ``held_out``: share of the examples that is held out.

    Returns None if there are too few examples for a result: fewer than 20 held out, or fewer kept than 2 or than
    ``floor`` for each class. The same holds with a single class.
    """
    drawn = score_order(scores, ids, "random", seed + 1)
    apart = int(held_out * len(ids))
    judged, others = np.sort(drawn[:apart]), np.sort(drawn[apart:])
    count = round(share * len(others))
    classes = len(np.unique(labels[others]))
    if apart < 20 or count < max(2, floor * classes) or classes < 2:
        return None
    names = [ids[i] for i in others]

    def accuracy(keep: Keep, draw: int) -> float:
        order = score_order(scores[others], names, keep, draw)
        groups = labels[others].astype(np.str_)
        chosen = others[choose_best(order, count, groups, floor)]
        return network_accuracy(
            features[chosen],
            labels[chosen],
            features[judged],
            labels[judged],
            seed=seed,
        )

    random = float(np.mean([accuracy("random", seed + k) for k in range(_DRAWS)]))
    return PruningComparison(
        accuracy("high", 0),
        accuracy("low", 0),
        random,
        apart,
        count,
        float(np.sqrt(random * (1 - random) / apart)),
    )
