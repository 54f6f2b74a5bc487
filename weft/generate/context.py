"""Attention of a text to others beside its own tokens, wherever these stand in what it sees.

What a text sees is a row of tiles: blocks of other texts, of which so many tokens are there. Keys are never copied or
rotated again. A tile whose keys were rotated to other positions than those at which the text sees them is met by
queries that are turned by the difference, once for all of its tokens (as in Hogwild! Inference, Rodionov et al. 2025,
2504.06261); what the tiles make is merged by its log-sum-exp.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from weft.models.attention import Segment, attend_forward, join, wide
from weft.models.rope import angles, rotate
from weft.models.segments import earlier_keys, windowed

T = torch.Tensor


class Tile(NamedTuple):
    """The first ``tokens`` tokens of a table; its reader's queries are turned by ``turn`` positions."""

    table: Sequence[int]
    tokens: int
    turn: int = 0


def own_segments(tokens: int, past: int, window: int) -> list[Segment]:
    """What a text's last ``tokens`` tokens see of it, if ``past`` keys come before them."""
    earlier = earlier_keys(past, past + tokens, 0, past, window) if past else []
    pieces = [*windowed(past, past + tokens, window), *(s._replace(joins=True) for s in earlier)]
    return [s._replace(q0=s.q0 - past, q1=s.q1 - past) for s in pieces]


def turned(q: T, by: int, freq: T) -> T:
    """``q`` ``[tokens, heads, width]``, whose last elements are rotated, at positions that are ``by`` further on."""
    cos, sin = angles(torch.tensor([[by]], device=q.device), freq[None], q.dtype)
    width = 2 * len(freq)
    return torch.cat([q[..., :-width], rotate(q[None, ..., -width:], cos[0], sin[0])[0]], -1)


def attend_tiles(q: T, k: T, v: T, past: int, tiles: Iterable[tuple[T, T, int]], freq: T | None) -> T:
    """Attention of a text's last tokens ``q`` to its own keys ``k``, and to tiles: keys, values, and what turns ``q``.

    ``[tokens, heads or kv_heads, width]``.
    """
    own, lse = attend_forward(q, k, v, own_segments(len(q), past, 0))
    out = own.to(wide(q.dtype))
    for keys, values, turn in tiles:
        asked = turned(q, turn, freq) if turn and freq is not None else q
        join(out, lse, *attend_forward(asked, keys, values, [Segment(0, len(q), 0, len(keys), False)]))
    return out.to(q.dtype)
