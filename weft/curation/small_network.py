"""Small networks on vectors of documents: several runs at once, to score examples and to compare choices of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

#: Units of the hidden layer, learning rate, and examples of a batch.
HIDDEN, RATE, BATCH = 64, 1e-2, 64


class SmallNetworks:
    """Networks of one hidden layer, trained together with different initial weights and orders of the data.

    ``width``: number of features of an example; ``classes``: number of classes; ``runs``: number of networks;
    ``seed``: seed of the initial weights and of the batches.
    """

    def __init__(self, width: int, classes: int, runs: int, seed: int) -> None:
        import torch

        self.runs = runs
        self.random = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> torch.Tensor:
            values = torch.randn(runs, *shape, generator=self.random)
            return (values / shape[0] ** 0.5).requires_grad_()

        self.weights = [drawn(width, HIDDEN), drawn(HIDDEN, classes)]
        self.biases = [
            torch.zeros(runs, 1, n, requires_grad=True) for n in (HIDDEN, classes)
        ]
        self.optimizer = torch.optim.Adam([*self.weights, *self.biases], lr=RATE)

    def logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[runs, examples, classes]`` of ``inputs``, ``[runs or 1, examples, width]``."""
        import torch

        inputs = inputs.expand(self.runs, -1, -1)
        hidden = torch.relu(torch.baddbmm(self.biases[0], inputs, self.weights[0]))
        return torch.baddbmm(self.biases[1], hidden, self.weights[1])

    def train(
        self,
        features: np.ndarray,
        labels: np.ndarray,
        steps: int,
        after_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Train all networks for ``steps`` steps by Adam, on batches that each network draws for itself.

        ``features``: float32 ``[examples, width]``; ``labels``: int64 ``[examples]``; ``after_step``: called with the
        number of the step, from 1.
        """
        import torch
        import torch.nn.functional as F

        inputs, truth = torch.from_numpy(features), torch.from_numpy(labels)
        for step in range(1, steps + 1):
            chosen = torch.randint(
                len(truth), (self.runs, min(BATCH, len(truth))), generator=self.random
            )
            logits = self.logits(inputs[chosen])
            loss = F.cross_entropy(logits.flatten(0, 1), truth[chosen].flatten())
            self.optimizer.zero_grad()
            (loss * self.runs).backward()
            self.optimizer.step()
            after_step(step)

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """Return the probability of each class, float64 ``[runs, examples, classes]``.

        ``features``: float32 ``[examples, width]``.
        """
        import torch

        with torch.no_grad():
            logits = self.logits(torch.from_numpy(features)[None])
        return np.asarray(logits.softmax(-1).double().numpy())


def standardized(features: np.ndarray, like: np.ndarray | None = None) -> np.ndarray:
    """Return ``features``, ``[examples, width]``, shifted and scaled per column to mean 0 and deviation 1, as float32.

    ``like``: features whose means and deviations are used in place of those of ``features``.
    """
    source = features if like is None else like
    deviation = source.std(0)
    scaled = (features - source.mean(0)) / np.where(deviation > 1e-6, deviation, 1)
    return np.ascontiguousarray(scaled, np.float32)


def network_accuracy(
    features: np.ndarray,
    labels: np.ndarray,
    judged_features: np.ndarray,
    judged_labels: np.ndarray,
    runs: int = 3,
    steps: int = 150,
    seed: int = 0,
) -> float:
    """Train ``runs`` networks on ``features`` and ``labels``, and return their mean accuracy on other examples.

    ``judged_features``, ``judged_labels``: the other examples. Features are ``[examples, width]``, labels int64
    ``[examples]``. ``steps``: number of training steps. ``seed``: seed of the initial weights and of the batches.
    """
    classes = int(max(labels.max(), judged_labels.max())) + 1
    networks = SmallNetworks(features.shape[1], classes, runs, seed)
    networks.train(standardized(features), labels, steps)
    guesses = networks.probabilities(standardized(judged_features, features)).argmax(-1)
    return float((guesses == judged_labels).mean())
