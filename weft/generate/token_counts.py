"""The distinct tokens of a text that grows, and how often each has been written, for penalties.

Each token is counted once, when it comes: a step never walks through the text.
"""

from array import array
from collections.abc import Iterable

import numpy as np
import torch


class TokenCounts:
    """Counts how often each token is written behind ``prompt``. Tokens that occur only in ``prompt`` are listed with
    the count 0. ``written``: tokens that are already behind the prompt and are counted at once.
    """

    def __init__(self, prompt: Iterable[int] = (), written: Iterable[int] = ()) -> None:
        self._places: dict[int, int] = {}
        self._ids, self._counts = array("q"), array("d")
        for token in prompt:
            self._place(token)
        self.add(written)

    def add(self, written: Iterable[int]) -> None:
        """Add the tokens ``written`` to the counts; each occurrence counts once."""
        for token in written:
            self._counts[self._place(token)] += 1

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a pair of tensors ``[n]`` about the distinct tokens of the prompt and the text: their ids, int64, and
        how often each has been written behind the prompt, float64.
        """
        ids, counts = np.array(self._ids, np.int64), np.array(self._counts, np.float64)
        return torch.from_numpy(ids), torch.from_numpy(counts)

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token)
            self._counts.append(0)
        return place
