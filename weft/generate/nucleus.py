"""The nucleus of a row of probabilities (Holtzman et al. 2019, 1904.09751) without sorting the row, on the CPU.

A nucleus that begins to be found by sorting the likeliest tokens takes long where thousands of tokens are about as
likely. Here some values of the row, which lie at equal distances, are sorted. They say roughly how unlikely the last
token of the nucleus is, so that only the values near it must be sorted. What is left out is summed up for this, and not
what is kept: it has no large values, which the sorted ones could lack.
"""

import numpy as np
import torch
import torch.nn.functional as F

T = torch.Tensor

#: Distance between the values of a row that are sorted first.
STRIDE = 48

#: How many standard deviations, and how many values besides, the place that is looked for may lie beside the guess.
DOUBT = 3


def cut_to_nucleus(weights: T, least: float, total: float) -> T | None:
    """Return a copy of ``weights`` that keeps only the nucleus: the largest weights, as many as are needed for a sum of
    at least ``least``. All other weights are 0 in it. Of equal weights at the border, those with the lowest indices are
    kept.

    The border is looked for near a guess from a sample of the weights. Returns None if the guess was wrong.
    ``weights``: float32 or float64 ``[n]``, on the CPU, none below 0; ``total``: their sum.
    """
    row = weights.numpy()
    rising = np.sort(row[::STRIDE])
    tails = rising.cumsum(dtype=np.float64)
    at = min(int(tails.searchsorted((total - least) / STRIDE)), len(rising) - 1)
    spread = float(np.linalg.norm(rising[:at])) / max(float(rising[at]), 1e-30)
    reach = int(DOUBT * min(spread, len(rising))) + DOUBT
    # just below a value, so that equal ones are looked at
    low = float(np.nextafter(rising[at - reach], row.dtype.type(-1))) if at > reach else 0.0  # fmt: skip
    low = max(low, 0.0)  # most of a row is 0 where a grammar allows few tokens
    high = float(rising[at + reach]) if at + reach < len(rising) else np.inf
    near = np.flatnonzero((row > low) & (row <= high))
    kept = F.threshold(weights, low, 0)
    falling = np.sort(row[near])[::-1]
    ends = falling.cumsum(dtype=np.float64)
    above = float(kept.sum()) - float(ends[-1]) if len(near) else least
    if above >= least or above + ends[-1] < least:
        return None
    # sums are rounded, so that the last one may be just too small
    last = min(int(ends.searchsorted(least - above)), len(ends) - 1)
    values, border, cut = row[near], falling[last], kept.numpy()
    cut[near[values < border]] = 0
    if last + 1 < len(falling) and falling[last + 1] == border:
        wanted = int((falling[: last + 1] == border).sum())
        cut[near[values == border][wanted:]] = 0
    return kept
