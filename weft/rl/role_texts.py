"""Texts that travel to a role of reinforcement learning in other processes, and the numbers that come back.

A text goes as token ids of 4 bytes and marks of 1 byte per token. Only marked tokens have a number, of 8 bytes each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.net.wire import Frame

#: A text: its token ids, and for each token whether a number of it is wanted.
MarkedText = tuple[Sequence[int], Sequence[bool]]
#: Bytes of a token's id and mark, and of the number of a marked token.
TOKEN_BYTES, NUMBER_BYTES = 5, 8


def packed_texts(texts: Sequence[MarkedText]) -> list[memoryview]:
    """Return the bytes of ``texts``: all token ids, then all marks."""
    ids = np.concatenate([np.asarray(ids, np.int32) for ids, _ in texts])
    marks = np.concatenate([np.asarray(marks, np.uint8) for _, marks in texts])
    return [ids.data.cast("B"), marks.data.cast("B")]


def unpacked_texts(payload: memoryview, lengths: Sequence[int]) -> list[MarkedText]:
    """Return the texts in ``payload`` (:func:`packed_texts`). ``lengths``: number of tokens of each text."""
    tokens, edges = sum(lengths), np.cumsum(lengths)[:-1]
    ids = np.frombuffer(payload, np.int32, tokens)
    marks = np.frombuffer(payload, np.uint8, tokens, offset=4 * tokens).astype(bool)
    both = zip(np.split(ids, edges), np.split(marks, edges), strict=True)
    return [(i.tolist(), m.tolist()) for i, m in both]


def packed_numbers(
    numbers: Iterable[np.ndarray], texts: Sequence[MarkedText]
) -> memoryview:
    """Return the bytes of the numbers of all marked tokens. ``numbers``: for each text float64 ``[n]``."""
    marked = [of[np.asarray(m)] for of, (_, m) in zip(numbers, texts, strict=True)]
    # a view, because Python casts no buffer of 0 numbers
    return np.concatenate(marked).view(np.uint8).data


def unpacked_numbers(
    payload: memoryview, texts: Sequence[MarkedText]
) -> list[np.ndarray]:
    """Return for each text its numbers in ``payload`` (:func:`packed_numbers`), float64 ``[n]``; 0 where no token is
    marked.
    """
    masks = [np.asarray(marks, bool) for _, marks in texts]
    edges = np.cumsum([mask.sum() for mask in masks])[:-1]
    values = np.split(np.frombuffer(payload, np.float64), edges)
    results = []
    for mask, own in zip(masks, values, strict=True):
        whole = np.zeros(len(mask))
        whole[mask] = own
        results.append(whole)
    return results


def shared_texts(frame: Frame, mesh: Mesh) -> list[MarkedText]:
    """Return the texts of the request ``frame``, of which only the first process has the contents. Collective."""
    given = [
        unpacked_texts(frame.payload, frame.head["lengths"]) if frame.payload else []
    ]
    if mesh.layout.world > 1:
        dist.broadcast_object_list(given, src=0)
    return given[0]


def shared_returns(
    frame: Frame, texts: Sequence[MarkedText], mesh: Mesh
) -> list[np.ndarray]:
    """Return the numbers of ``texts`` in ``frame``, of which only the first process has the contents. Collective."""
    first = process_number(mesh) == 0
    given = [unpacked_numbers(frame.payload, texts) if first else []]
    if mesh.layout.world > 1:
        dist.broadcast_object_list(given, src=0)
    return given[0]


def process_number(mesh: Mesh) -> int:
    """Return this process's number among those of ``mesh``."""
    return 0 if mesh.step_group is None else mesh.step_group.rank()
