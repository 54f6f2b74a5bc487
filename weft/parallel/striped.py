"""Cache pages whose tokens are spread over ranks that all attend, for texts too long for one rank.

The token at a position is computed and cached by the rank whose number is the position modulo the ranks (Striped
Attention, Brandon et al. 2023, 2311.09431). So every block lies on all ranks, each with an equal part of its tokens, of
any window and of the work under the causal mask; tables, shared blocks and copies are the same on all ranks. Keys and
values never travel. Queries travel to all ranks, and each rank's attention to its own keys comes back with its
log-sum-exp (DistAttention, Lin et al. 2024, 2401.02669): per token ``heads * head_dim`` numbers and one more per head,
for texts of any length. Linear layers cache one state per block, which cannot be cut by tokens: every rank has a share
of their heads, and gets these heads' queries, keys and values of all tokens.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from weft.layout.dims import part
from weft.models.attention import attend_forward, join, repeat_heads
from weft.models.numbers import wide
from weft.models.paged import KeyValuePages, LatentPages, StatePages, slots
from weft.models.segments import Segment, cut
from weft.models.spans import Span, own_segments
from weft.parallel.units import exchanged_rows

T = torch.Tensor

#: Side of causal squares on the CPU: there are as many on the diagonals of all ranks as tokens, so they are small.
SQUARE = 128


class Stripes:
    """The rank that owns each new token, where the tokens of every text are dealt out in turn to several ranks.

    The token at position ``p`` of a text belongs to rank ``p`` modulo the number of ranks. A row is one new token in a
    forward pass of generation. In tensors with the rows of all ranks, those of rank 0 come first, then those of rank 1,
    and so on.

    ``spans``: the new tokens of each text, and the number of its past tokens. ``size``: tokens of a cache block,
    counted over all ranks. ``group``: the ranks; None: this rank owns all tokens.
    """

    def __init__(
        self, spans: Sequence[Span], size: int, group: dist.ProcessGroup | None
    ) -> None:
        self.group = group
        self.ranks = group.size() if group else 1
        self.rank = group.rank() if group else 0
        places = [
            place
            for span in spans
            for place in range(span.past, span.past + span.last - span.first)
        ]
        self.owner = torch.tensor(places) % self.ranks
        self.order = self.owner.argsort(stable=True)
        self.place = self.order.argsort()
        self.counts = self.owner.bincount(minlength=self.ranks).tolist()
        self.first = sum(self.counts[: self.rank])
        self.own = self.order[self.first : self.first + self.count]
        self.pieces = self._cut(spans)
        self.spans = [
            own._replace(first=own.first - self.first, last=own.last - self.first)
            for own in (pieces[self.rank] for pieces in self.pieces)
        ]
        self.slots = slots(self.spans, size // self.ranks)

    @property
    def count(self) -> int:
        """Number of rows (new tokens of this forward pass) that this rank owns."""
        return self.counts[self.rank]

    def _cut(self, spans: Sequence[Span]) -> list[list[Span]]:
        """Cut every text into each rank's piece: its rows among those of all ranks, and its past tokens on the rank."""
        ends = [sum(self.counts[:rank]) for rank in range(self.ranks)]
        pieces: list[list[Span]] = []
        for span in spans:
            pieces.append([])
            for rank, first in enumerate(ends):
                past, end = (
                    -((rank - place) // self.ranks)
                    for place in (span.past, span.past + span.last - span.first)
                )
                ends[rank] += end - past
                piece = span._replace(first=first, last=ends[rank], past=past)
                pieces[-1].append(piece)
        return pieces

    def gathered(self, x: T) -> T:
        """Gather the rows ``x`` of all ranks: ``[own rows, ...]`` to ``[all rows, ...]``. Collective."""
        copies = x.repeat(self.ranks, *[1] * (x.dim() - 1))
        return self._exchanged(copies, [self.count] * self.ranks, self.counts)

    def returned(self, x: T) -> T:
        """Send the results ``x`` for all rows to the rows' owners: ``[all rows, ...]`` to ``[ranks, own rows, ...]``.

        Entry ``r`` of the result has the results of rank ``r`` for this rank's rows.
        """
        own = self._exchanged(x, self.counts, [self.count] * self.ranks)
        return own.unflatten(0, (self.ranks, self.count))

    def _exchanged(self, x: T, sent: list[int], received: list[int]) -> T:
        assert self.group is not None
        rows, work = exchanged_rows(x, sent, received, self.group)
        work.wait()
        return rows


class StripedKeys(KeyValuePages):
    """Cache pages that hold the keys and values of this rank's own tokens, an equal part of each block.

    ``stripes``: which tokens of the present forward pass this rank owns.
    """

    stripes: Stripes

    def __call__(self, q: T, k: T, v: T, cu_seqlens: T, window: int = 0) -> T:
        """Return the attention of this rank's new tokens to all cached and new tokens on all ranks. Collective.

        The result is ``[1, own tokens, heads or kv_heads, head_dim]``, padded to the length of ``q``. ``window``:
        number of tokens that a token sees, 0 for all.
        """
        self.keep(k, v)
        stripes, width = self.stripes, v.shape[-1]
        queries = stripes.gathered(q[0, : stripes.count])
        # [all rows, heads, width + 1]: the output beside its log-sum-exp
        out = queries.new_zeros(*queries.shape[:2], width + 1, dtype=wide(q.dtype))
        out[..., -1] = -torch.inf
        for of_text, span in zip(stripes.pieces, self.reading.spans, strict=True):
            if span.past + span.last > span.first:
                self._attend(queries, out, of_text, span, window)
        parts = stripes.returned(out)  # [ranks, own rows, heads, width + 1]
        total, logs = parts[0, ..., :-1], parts[0, ..., -1]
        for of_rank in parts[1:]:
            join(total, logs, of_rank[..., :-1], of_rank[..., -1])
        padding = q.shape[1] - stripes.count
        return F.pad(total.to(q.dtype), (0, 0, 0, 0, 0, padding))[None]

    def keep(self, k: T, v: T) -> None:
        """Write the keys ``k`` and values ``v`` of this rank's new tokens to the cache."""
        self.write(k, v)

    def _attend(
        self, queries: T, out: T, of_text: Sequence[Span], span: Span, window: int
    ) -> None:
        """Write to ``out`` the attention of a text's new tokens, on all ranks, to the keys on this rank.

        Of ranks ``c`` (queries) and ``r`` (keys), query ``m`` and key ``j`` of the text stand at ``c + m * ranks`` and
        ``r + j * ranks``. So the query sees the keys up to its own number, or to the one before where ``c < r``.
        """
        rank, ranks = self.stripes.rank, self.stripes.ranks
        keys, values, before = self.read(span, window and window // ranks + 3)
        for other, piece in enumerate(of_text):
            shift = int(other < rank)
            # keys that a query sees
            reach = (window - 1 + rank - other) // ranks + 1 - shift if window else 0
            past, first = piece.past - shift - before, piece.first
            if past < 0:  # the first of all sees nothing here
                past, first = 0, first + 1
            if piece.last > first and not (window and reach < 1):
                rows = slice(first, piece.last)
                attention, lse = attend_behind(queries[rows], keys, values, past, reach)
                out[rows, :, :-1] = attention[..., : out.shape[-1] - 1]
                out[rows, :, -1] = lse


def attend_behind(q: T, k: T, v: T, past: int, window: int) -> tuple[T, T]:
    """Return causal attention of a text's new tokens to its cached and new tokens, and the log-sum-exp of the scores.

    ``q``: queries of the new tokens, ``[tokens, heads, width]``. ``k``, ``v``: keys and values of the ``past`` cached
    tokens, followed by those of the new tokens. ``window``: number of tokens that a token sees, itself included; 0: all
    up to itself. The attention has the shape of ``q``. The log-sum-exp has a value for each new token and query head.
    """
    end = past + len(q)
    if len(q) > 1:
        pieces = own_segments(len(q), past, window)
        # whose results are too coarse to be joined
        if q.device.type == "cpu" and q.dtype != torch.bfloat16:
            pieces = [piece for s in pieces for piece in cut(s, SQUARE)]
        return attend_forward(q, k[:end], v[:end], pieces)
    # Without a mask the query heads that share a key head are so many queries: [group, kv_heads, width].
    shared = q[0].unflatten(0, (k.shape[1], -1)).transpose(0, 1).contiguous()
    start = max(0, end - window) if window else 0
    out, lse = attend_forward(
        shared, k, v, [Segment(0, len(shared), start, end, False)]
    )
    return out.transpose(0, 1).reshape(q.shape), lse.transpose(0, 1).reshape(1, -1)


class StripedLatents(StripedKeys):
    """Cache pages that hold latent vectors (multi-head latent attention) in the place of keys and values."""

    # attended to in absorbed form in any case, as nobody has all of a beginning
    tokens = 1

    def keep(self, k: T, v: T) -> None:
        """Write the latent vectors ``k`` of this rank's new tokens to the cache.

        ``v`` is a view of the first elements of ``k``, and is not written.
        """
        self.write(k)


class SplitStates(StatePages):
    """Cache pages of linear attention, where each rank computes some of the heads for the tokens of all ranks.

    A rank's pages hold the states of its own heads.

    ``stripes``: which tokens of the present forward pass this rank owns.
    """

    stripes: Stripes

    def __call__(self, q: T, k: T, v: T, cu_seqlens: T) -> T:
        """Return the linear attention of this rank's new tokens. Collective.

        The result is ``[1, own tokens, heads or kv_heads, head_dim]``, padded to the length of ``q``.
        """
        stripes, group = self.stripes, q.shape[2] // k.shape[2]
        shares = [
            part(q.shape[2], stripes.ranks, rank) for rank in range(stripes.ranks)
        ]
        # the first share is the largest
        (lo, hi), most = shares[stripes.rank], shares[0][1]
        own_rows = torch.cat((q, k, v), 2)[0, : stripes.count]
        whole = stripes.gathered(own_rows)[stripes.place]
        # [1, tokens, heads or kv_heads, head_dim] each
        heads = whole[None].split([x.shape[2] for x in (q, k, v)], 2)
        q_own, k_own, v_own = (
            repeat_heads(x, n)[:, :, lo:hi]
            for x, n in zip(heads, (1, group, group), strict=True)
        )
        out = super().__call__(q_own, k_own, v_own, cu_seqlens)[0, stripes.order]
        parts = stripes.returned(F.pad(out, (0, 0, 0, most - (hi - lo))))
        # [own tokens, heads, head_dim]
        own = torch.cat(
            [
                of_rank[:, : b - a]
                for of_rank, (a, b) in zip(parts, shares, strict=True)
            ],
            1,
        )
        return F.pad(own, (0, 0, 0, 0, 0, q.shape[1] - stripes.count))[None]


def striped(
    pages: KeyValuePages | StatePages, group: dist.ProcessGroup
) -> StripedKeys | SplitStates:
    """Return the cache pages to use in place of ``pages`` where the ranks of ``group`` share a text's tokens.

    The result is a :class:`StripedKeys` for keys and values or for latent vectors, and a :class:`SplitStates` for the
    states of linear attention.
    """
    if isinstance(pages, StatePages):
        lo, hi = part(len(pages.decay), group.size(), group.rank())
        return SplitStates(pages.size, pages.decay[lo:hi])
    return (StripedLatents if isinstance(pages, LatentPages) else StripedKeys)(
        pages.size // group.size()
    )
