"""L-GreCo: choose how strongly to compress each tensor, for the smallest total size within a total error.

Tensors differ in how much they lose when they are compressed: one loses little at rank 2, another needs rank 8. Given
the squared error and the size of each tensor under each of a few alternatives, one per tensor is chosen, so
that the bytes add up to the least, and the errors to no more than with one setting for all (Markov et al. 2024).
:func:`allocate_compressors` does it all. It depends on nothing but its arguments, so islands that call it with tensors
on which they have agreed need to say nothing to each other, and can call it again whenever the tensors have changed.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from weft.sync.compressor import Compressor

T = torch.Tensor

#: Choices for the first tensors that are kept beside each other while the next one is looked at. Fewer than these are
#: all that matter; of more, those that differ least in their errors are thinned out.
KEPT = 4_000


def allocate_compressors(
    tensors: Mapping[str, T], default: Compressor, seed: int = 0
) -> dict[str, Compressor]:
    """Choose a compressor for each of ``tensors``: ``default`` or a variant of it (:meth:`Compressor.alternatives`).

    Returns the compressors by the tensors' names. Neither the total bytes nor the total squared error are larger than
    with ``default`` for all tensors. ``seed``: seed of the compressors' random choices.
    """
    options = {name: alternatives_of(default, x.shape) for name, x in tensors.items()}
    errors = [
        [squared_error(choice, x, seed) for choice in options[name]]
        for name, x in tensors.items()
    ]
    sizes = [
        [choice.nbytes(x.shape, x.dtype) for choice in options[name]]
        for name, x in tensors.items()
    ]
    usual = [choices.index(default) for choices in options.values()]
    chosen = smallest(errors, sizes, total(errors, usual))
    # by what was thinned out
    if chosen is None or total(sizes, chosen) > total(sizes, usual):
        chosen = usual
    return {
        name: choices[i]
        for (name, choices), i in zip(options.items(), chosen, strict=True)
    }


def alternatives_of(default: Compressor, shape: Sequence[int]) -> list[Compressor]:
    """Return the compressor ``default`` and variants of it, to choose from for a tensor of ``shape``.

    A variant differs from ``default`` in one setting: the rank of low-rank factors, the share of elements that are
    kept, or the bits of an element. No compressor is returned twice.
    """
    return list(dict.fromkeys(default.alternatives(shape)))


def squared_error(compressor: Compressor, x: T, seed: int = 0) -> float:
    """Return the squared error of compressing ``x`` once by ``compressor``, with the random choices of ``seed``.

    For a compressor with a warm start it is the error in the second round.
    """
    payload = compressor.encode(x, seed)
    if (warm := compressor.warm(payload)) is not None:
        payload = compressor.encode(x, seed, warm)
    return float(
        (compressor.decode(payload, x.shape, seed) - x).double().square().sum()
    )


def total(table: Sequence[Sequence[float]], chosen: Sequence[int]) -> float:
    """Return the sum of one entry from each row of ``table``.

    ``chosen``: for each row, the index of the entry that counts.
    """
    return sum(row[i] for row, i in zip(table, chosen, strict=True))


def smallest(
    errors: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], budget: float
) -> list[int] | None:
    """Choose an alternative for each tensor, such that the total size is least and the total error is within a budget.

    ``errors[t][a]`` and ``sizes[t][a]``: error and size of tensor ``t`` with its alternative ``a``. ``budget``: the
    largest total error that is allowed. Returns the index of the alternative for each tensor, or None if no choice is
    within the budget.

    The search goes from tensor to tensor, and drops every partial choice that another one beats in both sums (Nemhauser
    & Ullmann 1969). While at most :data:`KEPT` partial choices remain, the result is optimal. If there are more, some
    are dropped: the result then may be larger than the optimum, but is always within the budget.
    """
    # by the tensors after each
    least_left = np.cumsum([0.0, *(min(row) for row in errors[:0:-1])])[::-1]
    error, size = np.zeros(1), np.zeros(1, dtype=np.int64)
    origins: list[np.ndarray] = []
    for own_errors, own_sizes, left in zip(errors, sizes, least_left, strict=True):
        # [kept, alternatives], flat
        sums = (error[:, None] + np.asarray(own_errors)).ravel()
        bytes_ = (size[:, None] + np.asarray(own_sizes, dtype=np.int64)).ravel()
        order = np.lexsort((bytes_, sums))
        # sums in another order may round otherwise
        order = order[sums[order] + left * (1 - 1e-9) <= budget]
        least = np.minimum.accumulate(bytes_[order])
        better = order[
            np.flatnonzero(np.diff(least, prepend=np.iinfo(np.int64).max) < 0)
        ]
        if len(better) > KEPT:
            place = (sums[better] / budget * KEPT).astype(np.int64)
            # the last of each, which has fewest bytes
            better = better[np.flatnonzero(np.diff(place, append=KEPT + 1))]
        error, size = sums[better], bytes_[better]
        origins.append(better)
    if not len(size):
        return None
    chosen, at = [], len(size) - 1  # sizes fall where errors rise
    for own_errors, better in zip(reversed(errors), reversed(origins), strict=True):
        at, candidate = divmod(int(better[at]), len(own_errors))
        chosen.append(candidate)
    return chosen[::-1]
