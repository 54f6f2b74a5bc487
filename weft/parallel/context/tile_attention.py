"""Run a table of tiles, forward and backward: one operator that autograd and recompute see as a whole.

While a step is computed, the blocks of the next one arrive and the results of the last one go home. Backward runs the
same table with the global log-sum-exp, which makes its tiles independent of each other. Documents leave tiles, or
parts of them, without work; a block that no query elsewhere needs does not travel.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.errors import UsageError
from weft.models.attention import attend_backward, attend_forward, join, set_backward
from weft.models.numbers import wide
from weft.models.segments import Segment, earlier_keys, windowed
from weft.parallel.context.tables import RESULT, GuestBlock, TileTable, tile_table_of

T = torch.Tensor
Key = tuple[str, int]
#: Gradients of queries, keys and values; operators of PyTorch return plain tuples.
TileGradients = tuple[T, T, T]


class TilePiece(NamedTuple):
    """One call of the attention kernel: a part of a query block against a part of a key block.

    Attributes:
        ``rows``: the tokens of the query block.
        ``cols``: the tokens of the key block.
        ``segments``: the rectangles and triangles of scores to compute, in coordinates of these rows and columns.
        ``q``, ``k``: indices of the query block and of the key block in the sequence.
    """

    rows: slice
    cols: slice
    segments: list[Segment]
    q: int
    k: int


class Trip:
    """The part of a tile table that one rank runs for given documents: pieces of tiles, and transfers of their
    blocks.

    A tile is a block of queries against a block of keys. ``table``: says which rank computes which tile in which
    step; ``cu``: boundaries of the documents, from 0, as indices in the flattened whole rows of all ranks' tokens;
    ``lengths``: for each block of the sequence, its number of tokens in a row; ``peers``: global ranks, in the order
    in which the table numbers them; ``index``: this rank's position among them; ``window``: number of tokens that a
    token sees, itself included, 0 for all of its document.
    """

    def __init__(
        self, table: TileTable, cu: tuple[int, ...], lengths: tuple[int, ...], peers: Sequence[int], index: int,
        window: int = 0,
    ) -> None:  # fmt: skip
        _check(table, cu, lengths, peers)
        self.rows = cu[-1] // sum(lengths)
        self.work = {
            (t.q, t.k): tile_pieces(cu, lengths, t.q, t.k, window) for t in table.tiles
        }
        self.table = table.only(lambda t: bool(self.work[t.q, t.k]))
        self.steps = table.steps
        self.lengths, self.peers, self.index = lengths, peers, index
        self.ends: dict[int, list[GuestBlock]] = defaultdict(list)
        for visit in self.table.visits:
            if visit.rank == index:
                self.ends[visit.last].append(visit)

    def tokens(self, block: int) -> int:
        """Return the number of tokens of ``block`` in all rows of the batch together."""
        return self.rows * self.lengths[block]

    def cut(self, x: T) -> dict[int, T]:
        """Cut ``[rows, tokens held, ...]`` into this rank's blocks ``[rows * length, ...]``, by index of the block.

        ``length``: tokens of the block in a row.
        """
        own = self.table.owners[self.index]
        parts = x.split([self.lengths[b] for b in own], dim=1)
        return {
            b: part.flatten(0, 1).contiguous()
            for b, part in zip(own, parts, strict=True)
        }

    def whole(self, blocks: dict[int, T]) -> T:
        """Join blocks ``[rows * length, ...]`` to ``[rows, tokens held, ...]``, the inverse of :meth:`cut`."""
        own = self.table.owners[self.index]
        return torch.cat(
            [blocks[b].unflatten(0, (self.rows, self.lengths[b])) for b in own], dim=1
        )

    def run(
        self,
        held: dict[Key, list[T]],
        like: dict[str, list[T]],
        blank: dict[str, tuple[float, ...]],
        compute: Callable[[list[T], list[T], TilePiece], dict[str, list[T]]],
        merge: Callable[[list[T], list[T]], None],
    ) -> dict[Key, list[T]]:
        """Run the table; return the results for the blocks that this rank owns, by kind and index of the block.

        A kind says which tensors of a block are meant: "q" (queries), "kv" (keys and values), "o" (results of queries)
        or "dkv" (results of keys and values). A list has the tensors of one kind, such as keys and values.

        ``held``: the tensors of this rank's own blocks, by kind and index; blocks of other ranks are added while this
        rank uses them. ``like``: for each kind, empty tensors with the data type and row shape of its tensors.
        ``blank``: for each kind of result, the value with which each of its tensors is filled before anything is merged
        into it. ``compute``: function from queries, keys and values, and one :class:`TilePiece` to the piece's results
        by kind. ``merge``: adds the second list of results to the first, in place.
        """
        totals: dict[Key, list[T]] = {}
        leaving: dict[Key, list[T]] = {}

        def fresh(kind: str, block: int) -> list[T]:
            given = zip(like[kind], blank[kind], strict=True)
            return [
                x.new_full((self.tokens(block), *x.shape[1:]), value)
                for x, value in given
            ]

        def add(
            kind: str, block: int, parts: list[T], rows: slice = slice(None)
        ) -> None:
            total = totals.get((kind, block))
            # the first of all, and whole
            if total is None and len(parts[0]) == self.tokens(block):
                totals[kind, block] = [
                    part.to(x.dtype) for part, x in zip(parts, like[kind], strict=True)
                ]
                return
            if total is None:
                total = totals[kind, block] = fresh(kind, block)
            merge([x[rows] for x in total], parts)

        for step in range(-1, self.steps + 1):
            arriving, moves = self._start(step, held, leaving, like, blank)
            for tile in self.table.at.get((step, self.index), ()):
                for piece in self.work[tile.q, tile.k]:
                    results = compute(held["q", tile.q], held["kv", tile.k], piece)
                    for kind, parts in results.items():
                        of_query = kind == "o"
                        block = tile.q if of_query else tile.k
                        add(kind, block, parts, piece.rows if of_query else piece.cols)
            try:
                for move in moves:
                    move.wait()
            except RuntimeError as error:  # a limit is over, or a rank is lost
                error.add_note(self._waited_for(step))
                raise
            leaving = {}
            for visit in self.ends.get(step, ()):
                del held[visit.kind, visit.block]
                if (result := (RESULT[visit.kind], visit.block)) in totals:
                    leaving[result] = totals.pop(result)
            for kind, block, tensors in arriving:
                if kind in blank:
                    add(kind, block, tensors)
                else:
                    held[kind, block] = tensors
        own = [
            (kind, block) for kind in blank for block in self.table.owners[self.index]
        ]
        return {key: totals.get(key) or fresh(*key) for key in own}

    def _waited_for(self, step: int) -> str:
        """Return in words which transfers of ``step`` this rank takes part in."""
        ways = [
            f"{m.kind} of block {m.block} from rank {self.peers[m.source]} to {self.peers[m.target]}"
            for _, m in self.table.moves_at.get(step, ())
            if self.index in (m.source, m.target)
        ]
        return f"in step {step} of attention table {self.table.name!r}, whose transfers are: {', '.join(ways)}"

    def _start(
        self,
        step: int,
        held: dict[Key, list[T]],
        leaving: dict[Key, list[T]],
        like: dict[str, list[T]],
        results: Container[str],
    ) -> tuple[list[tuple[str, int, list[T]]], list[dist.Work]]:
        """Start the transfers of a step; both ends number them alike and give them in the same order, as NCCL needs."""
        arriving, ops = [], []
        for number, m in self.table.moves_at.get(step, ()):
            if self.index not in (m.source, m.target) or m.kind not in like:
                continue
            sends = m.source == self.index
            if sends:
                tensors = (leaving if m.kind in results else held)[m.kind, m.block]
            else:
                tensors = [
                    x.new_empty(self.tokens(m.block), *x.shape[1:])
                    for x in like[m.kind]
                ]
                arriving.append((m.kind, m.block, tensors))
            peer = self.peers[m.target if sends else m.source]
            for i, tensor in enumerate(tensors):
                op = dist.isend if sends else dist.irecv
                ops.append(
                    dist.P2POp(op, tensor.contiguous(), peer, tag=4 * number + i)
                )
        return arriving, dist.batch_isend_irecv(ops) if ops else []


def _check(
    table: TileTable,
    cu: tuple[int, ...],
    lengths: tuple[int, ...],
    peers: Sequence[int],
) -> None:
    """Raise :class:`UsageError` for documents or lengths that do not fit the table, on all ranks alike."""
    if len(peers) != table.ranks or len(lengths) != len(table.owner):
        raise UsageError(
            f"attention table {table.name!r} is for {table.ranks} ranks and {len(table.owner)} blocks, "
            f"not for {len(peers)} and {len(lengths)}"
        )
    for number, (start, end) in enumerate(pairwise(cu)):
        if end <= start:
            raise UsageError(
                f"document {number} of the batch has {end - start} tokens; leave out empty documents"
            )
    row = sum(lengths)
    if cu[0] != 0 or cu[-1] % row or not set(range(0, cu[-1], row)) <= set(cu):
        raise UsageError(
            f"documents at {cu[0]} to {cu[-1]} do not fill rows of {row} tokens"
        )


def tile_pieces(
    cu: tuple[int, ...], lengths: tuple[int, ...], q: int, k: int, window: int = 0
) -> list[TilePiece]:
    """List the kernel calls for query block ``q`` against key block ``k``; the list is empty if no query needs a key.

    ``q`` and ``k`` are indices of blocks of the sequence. ``cu``: boundaries of the documents, from 0, as indices in
    the flattened whole rows; ``lengths``: for each block, its number of tokens in a row; ``window``: number of tokens
    that a token sees, itself included, 0 for all.

    A call computes segments (parts of the score matrix), whose coordinates count from the begin of the call's rows and
    columns. Without a window, a block against itself has one causal segment per document. A block against an earlier
    block has at most one full segment per row, for the document that spans both blocks.
    """
    starts, row = [0, *accumulate(lengths)], sum(lengths)
    nq, nk, rows = lengths[q], lengths[k], cu[-1] // sum(lengths)
    segments = []
    if not nq or not nk:
        return []
    for r in range(rows):
        q_base, k_base = r * row + starts[q], r * row + starts[k]
        at = bisect_right(cu, q_base)
        if q == k:
            inside = cu[at : bisect_right(cu, q_base + nq - 1)]
            edges = (edge - q_base + r * nq for edge in (q_base, *inside, q_base + nq))
            for a, b in pairwise(edges):
                segments += windowed(a, b, window)
        elif cu[at - 1] < k_base + nk:  # the document of the first query
            k0, q1 = max(cu[at - 1], k_base), min(cu[at], q_base + nq)
            to_q, to_k = r * nq - q_base, r * nk - k_base
            segments += [
                s._replace(
                    q0=s.q0 + to_q,
                    q1=s.q1 + to_q,
                    k0=s.k0 + to_k,
                    k1=s.k1 + to_k,
                    joins=False,
                )
                for s in earlier_keys(q_base, q1, k0, k_base + nk, window)
            ]
    full = len(segments) == rows and all(
        (s.q1 - s.q0, s.k1 - s.k0) == (nq, nk) for s in segments
    )
    if segments and (q == k or full):
        return [TilePiece(slice(0, rows * nq), slice(0, rows * nk), segments, q, k)]
    return [
        TilePiece(
            slice(s.q0, s.q1),
            slice(s.k0, s.k1),
            [s._replace(q0=0, q1=s.q1 - s.q0, k0=0, k1=s.k1 - s.k0)],
            q,
            k,
        )
        for s in segments
    ]


@lru_cache(maxsize=16)
def _trip(
    scheme: str, cu: tuple[int, ...], lengths: tuple[int, ...], seq: int, peers: tuple[int, ...], index: int,
    window: int,
) -> Trip:  # fmt: skip
    """Return the trip, which is the same for all layers of one window, forward and backward."""
    table = tile_table_of(scheme, len(peers))
    blocks = len(table.owner)
    lengths = lengths or (seq * len(peers) // blocks,) * blocks
    return Trip(table, cu, lengths, peers, index, window)


def trip_of(
    q: T,
    cu_seqlens: T,
    scheme: str,
    peers: Sequence[int],
    index: int,
    lengths: Sequence[int],
    window: int = 0,
) -> Trip:
    """Return the part of a context scheme that this rank runs for given documents: pieces of tiles, and transfers of
    blocks.

    A tile is a block of queries against a block of keys. The sequence is cut into blocks, and each rank owns one or
    two of them.

    Args:
        ``q``: queries of this rank, ``[batch, seq held, heads, head_dim]``; only the shape matters.
        ``cu_seqlens``: boundaries of the documents, from 0, as indices in the flattened whole rows of all ranks'
            tokens.
        ``scheme``: name of the scheme.
        ``peers``: global ranks, in the order in which the scheme's table numbers them.
        ``index``: this rank's position among ``peers``.
        ``lengths``: for each block of the sequence, on all ranks, its number of tokens in a row; empty if all are
            equal.
        ``window``: number of tokens that a token sees, itself included; 0 for all.
    """
    cu, seq = tuple(cu_seqlens.tolist()), q.shape[1]
    return _trip(scheme, cu, tuple(lengths), seq, tuple(peers), index, window)


@torch.library.custom_op("weft::tile_attention", mutates_args=())
def tile_attention(
    q: T, k: T, v: T, cu_seqlens: T, scheme: str, peers: Sequence[int], index: int, lengths: Sequence[int],
    window: int = 0,
) -> tuple[T, T]:  # fmt: skip
    """Return causal attention over the ranks ``peers``: ``out`` like ``q``, and ``lse`` ``[batch * seq held, heads]``.

    ``lse`` is the log-sum-exp of each query's scores. The sequence is cut into blocks, and each rank owns one or two of
    them. docs/reference/techniques.md counts the bytes that travel.

    Args:
        ``q, k, v``: ``[batch, seq held, heads or kv_heads, head_dim]``, for the tokens of the blocks that this rank
            owns.
        ``cu_seqlens``: boundaries of the documents, from 0, as indices in the flattened whole rows of all ranks'
            tokens.
        ``scheme``: name of the context scheme.
        ``peers``: global ranks, in the order in which the scheme's table numbers them.
        ``index``: this rank's position among ``peers``.
        ``lengths``: for each block of the sequence, on all ranks, its number of tokens in a row; empty if all are
            equal.
        ``window``: number of tokens that a token sees, itself included; 0 for all.
    """
    trip = trip_of(q, cu_seqlens, scheme, peers, index, lengths, window)
    qs, ks, vs = trip.cut(q), trip.cut(k), trip.cut(v)
    held = {("q", b): [x] for b, x in qs.items()} | {
        ("kv", b): [ks[b], vs[b]] for b in ks
    }
    none, high = q[0, :0], wide(q.dtype)
    like = {
        "q": [none],
        "kv": [k[0, :0], v[0, :0]],
        "o": [none.to(high), none[..., 0].to(high)],
    }

    def compute(query: list[T], block: list[T], piece: TilePiece) -> dict[str, list[T]]:
        (q,), (k, v), cols = query, block, piece.cols
        results = attend_forward(q[piece.rows], k[cols], v[cols], piece.segments)
        return {"o": list(results)}

    def merge(total: list[T], part: list[T]) -> None:
        join(*total, *part)

    done = trip.run(held, like, {"o": (0.0, -torch.inf)}, compute, merge)
    out = trip.whole({b: done["o", b][0] for b in qs}).to(q.dtype)
    return out, trip.whole({b: done["o", b][1] for b in qs}).flatten(0, 1)


@torch.library.custom_op("weft::tile_attention_backward", mutates_args=())
def tile_attention_backward(
    grad: T, q: T, k: T, v: T, out: T, lse: T, cu_seqlens: T, scheme: str, peers: Sequence[int], index: int,
    lengths: Sequence[int], window: int = 0,
) -> TileGradients:  # fmt: skip
    """Return the gradients of queries, keys and values.

    Args:
        ``grad``: gradient of the attention's output.
        ``q, k, v``: the inputs of :func:`tile_attention`.
        ``out, lse``: its results.
        ``cu_seqlens``: boundaries of the documents, from 0, as indices in the flattened whole rows of all ranks'
            tokens.
        ``scheme``: name of the context scheme.
        ``peers``: global ranks, in the order in which the scheme's table numbers them.
        ``index``: this rank's position among ``peers``.
        ``lengths``: for each block of the sequence, on all ranks, its number of tokens in a row; empty if all are
            equal.
        ``window``: number of tokens that a token sees, itself included; 0 for all.
    """
    trip = trip_of(q, cu_seqlens, scheme, peers, index, lengths, window)
    queries = [trip.cut(x) for x in (q, grad, out, lse.unflatten(0, q.shape[:2]))]
    keys = [trip.cut(x) for x in (k, v)]
    held = {("q", b): [x[b] for x in queries] for b in queries[0]} | {
        ("kv", b): [x[b] for x in keys] for b in keys[0]
    }
    like = {
        "q": [q[0, :0], grad[0, :0], out[0, :0], lse[:0]],
        "kv": [k[0, :0], v[0, :0]],
    }
    like |= {
        "o": [q[0, :0].to(lse.dtype)],
        "dkv": [x.to(lse.dtype) for x in like["kv"]],
    }

    def compute(query: list[T], block: list[T], piece: TilePiece) -> dict[str, list[T]]:
        q, grad, out, lse = (x[piece.rows] for x in query)
        k, v = (x[piece.cols] for x in block)
        dq, dk, dv = attend_backward(grad, q, k, v, out, lse, piece.segments)
        return {"o": [dq], "dkv": [dk, dv]}

    def merge(total: list[T], part: list[T]) -> None:
        for a, b in zip(total, part, strict=True):
            a += b

    done = trip.run(held, like, {"o": (0.0,), "dkv": (0.0, 0.0)}, compute, merge)
    dq = trip.whole({b: done["o", b][0] for b in queries[0]}).to(q.dtype)
    dk, dv = (
        trip.whole({b: done["dkv", b][i] for b in keys[0]}).to(k.dtype) for i in (0, 1)
    )
    return dq, dk, dv


@tile_attention.register_fake
def _(q: T, *rest: Any) -> tuple[T, T]:
    return q.new_empty(q.shape), q.new_empty(
        q.shape[0] * q.shape[1], q.shape[2], dtype=wide(q.dtype)
    )


set_backward(tile_attention, tile_attention_backward)
