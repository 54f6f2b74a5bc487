"""Distributed causal attention as data: which rank computes which tile of the score matrix, and when.

The sequence is cut into blocks. A tile is one block of queries against one block of keys and values; a scheme is a
function from a number of ranks to a table of tiles. Transfers follow from the owners of blocks: a block that another
rank uses goes there a step ahead, and its result goes home a step later. Schemes differ in their tiles alone.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

from weft.errors import WeftError
from weft.registry import find


class Tile(NamedTuple):
    """A tile of the score matrix: the block ``q`` of queries against the block ``k`` of keys and values.

    Attributes:
        ``step``: the step in which the tile is computed.
        ``rank``: the rank that computes it.
        ``q``, ``k``: indices of the two blocks of the sequence.
        ``mask``: ``causal`` for a block against itself, ``full`` for a block against an earlier block.
    """

    step: int
    rank: int
    q: int
    k: int
    mask: str


class Move(NamedTuple):
    """A transfer of a block from rank ``source`` to rank ``target`` while ``step`` is computed.

    ``block``: index of the block of the sequence. ``kind``: which tensors of the block are sent.

        ``q``: queries, from the block's owner to the ranks that use them; in backward with the output's gradient and
            statistics.
        ``kv``: keys and values, from the block's owner to the ranks that use them.
        ``o``: results of queries, back to the block's owner: the output in forward, the queries' gradient in backward.
        ``dkv``: gradients of keys and values, back to the block's owner.
    """

    step: int
    kind: str
    block: int
    source: int
    target: int


class GuestBlock(NamedTuple):
    """The stay of a block on a rank that does not own it.

    Attributes:
        ``kind``: "q" for a block's queries, "kv" for its keys and values.
        ``block``: index of the block in the sequence.
        ``rank``: the rank that the block visits.
        ``first``, ``last``: the first and the last step in which that rank uses the block.
    """

    kind: str
    block: int
    rank: int
    first: int
    last: int


#: The kind of the result of a visiting block.
RESULT = {"q": "o", "kv": "dkv"}


class TableError(WeftError):
    """Raised for a table that does not compute attention; the message names the tile, the block or the rank."""


@dataclass(frozen=True)
class TileTable:
    """A scheme of attention for some number of ranks, as a table of tiles.

    ``name``: the scheme; ``owners[rank]``: the blocks whose queries, keys and values ``rank`` holds, in order;
    ``tiles``: the tiles of all ranks and steps; ``buffers``: the largest number of other ranks' blocks that a rank
    holds at once, those on their way to it included.
    """

    name: str
    owners: tuple[tuple[int, ...], ...]
    tiles: tuple[Tile, ...]
    buffers: int

    @property
    def ranks(self) -> int:
        return len(self.owners)

    @cached_property
    def owner(self) -> dict[int, int]:
        return {
            block: rank for rank, blocks in enumerate(self.owners) for block in blocks
        }

    @cached_property
    def steps(self) -> int:
        return 1 + max((t.step for t in self.tiles), default=-1)

    @cached_property
    def at(self) -> dict[tuple[int, int], list[Tile]]:
        """The tiles that each rank computes in each step, by ``(step, rank)``."""
        tiles: dict[tuple[int, int], list[Tile]] = defaultdict(list)
        for t in self.tiles:
            tiles[t.step, t.rank].append(t)
        return dict(tiles)

    @cached_property
    def visits(self) -> tuple[GuestBlock, ...]:
        """All stays of blocks on ranks that do not own them, each a :class:`GuestBlock`."""
        used: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        for t in self.tiles:
            for kind, block in (("q", t.q), ("kv", t.k)):
                if self.owner[block] != t.rank:
                    used[kind, block, t.rank].append(t.step)
        return tuple(
            sorted(
                GuestBlock(*key, min(steps), max(steps)) for key, steps in used.items()
            )
        )

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """The transfers of blocks, in an order that is the same on all ranks.

        A block that a rank needs comes from the owner or from another rank that had it one step before. If several
        ranks can send it, the nearest one before the receiver does, counted around the ring of ranks. The result for
        the block is sent straight to the block's owner.
        """
        # who else has a block at a step
        held: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        for v in self.visits:
            for step in range(v.first, v.last + 1):
                held[v.kind, v.block, step].append(v.rank)
        moves = []
        for v in self.visits:
            home = self.owner[v.block]
            holders = [home, *held[v.kind, v.block, v.first - 1]]
            source = min(holders, key=lambda rank: (v.rank - rank) % self.ranks)
            moves += [
                Move(v.first - 1, v.kind, v.block, source, v.rank),
                Move(v.last + 1, RESULT[v.kind], v.block, v.rank, home),
            ]
        return tuple(sorted(moves))

    @cached_property
    def moves_at(self) -> dict[int, list[tuple[int, Move]]]:
        """The transfers of blocks, by the step in which they happen.

        Each entry is a pair: the index of the transfer in :attr:`moves`, and the transfer.
        """
        moves: dict[int, list[tuple[int, Move]]] = defaultdict(list)
        for number, move in enumerate(self.moves):
            moves[move.step].append((number, move))
        return dict(moves)

    def only(self, needed: Callable[[Tile], bool]) -> "TileTable":
        """Return a table with only those tiles for which ``needed`` returns True, and with only the transfers that
        these tiles need.
        """
        return replace(self, tiles=tuple(t for t in self.tiles if needed(t)))


def validate_tiles(table: TileTable) -> TileTable:
    """Return the table if it computes causal attention; else raise :class:`TableError`.

    Every tile on or below the diagonal must be computed once, with the right mask, on a rank that has both of its
    blocks by then. No rank may hold more than ``table.buffers`` blocks of other ranks at once.
    """
    name, blocks = f"attention table {table.name!r}", sorted(chain(*table.owners))
    if len(blocks) < table.ranks or not all(table.owners):
        idle = [r for r, owned in enumerate(table.owners) if not owned]
        raise TableError(
            f"{name} has {len(blocks)} blocks for {table.ranks} ranks: rank {idle[0]} has none"
        )
    if blocks != list(range(len(blocks))):
        raise TableError(
            f"{name}: the owned blocks are {blocks}, not each of 0 to {len(blocks) - 1} once"
        )
    seen: dict[tuple[int, int], Tile] = {}
    for t in table.tiles:
        if not 0 <= t.rank < table.ranks or t.step < 0:
            raise TableError(
                f"{name}: {t} is on no rank of {table.ranks} or before the first step"
            )
        if t.q not in table.owner or not 0 <= t.k <= t.q:
            raise TableError(
                f"{name}: {t} is no tile of causal attention over {len(blocks)} blocks"
            )
        if t.mask != ("causal" if t.q == t.k else "full"):
            raise TableError(f"{name}: {t} has the wrong mask")
        if (t.q, t.k) in seen:
            raise TableError(
                f"{name}: tile (query {t.q}, key {t.k}) is doubled: {seen[t.q, t.k]} and {t}"
            )
        seen[t.q, t.k] = t
    missing = {(q, k) for q in blocks for k in range(q + 1)} - set(seen)
    if missing:
        q, k = min(missing)
        raise TableError(
            f"{name}: {len(missing)} tiles are missing, the first is (query {q}, key {k})"
        )
    there = {(kind, b, r, s) for r, owned in enumerate(table.owners) for b in owned for kind in RESULT
             for s in range(-1, table.steps)}  # fmt: skip
    there |= {
        (v.kind, v.block, v.rank, s)
        for v in table.visits
        for s in range(v.first, v.last + 1)
    }
    for m in table.moves:
        if m.kind in RESULT and (m.kind, m.block, m.source, m.step) not in there:
            raise TableError(f"{name}: {m} sends what rank {m.source} does not have")
    held = Counter(
        (v.rank, step) for v in table.visits for step in range(v.first - 1, v.last + 1)
    )
    (rank, step), most = max(
        held.items(), key=lambda item: item[1], default=((0, 0), 0)
    )
    if most > table.buffers:
        raise TableError(
            f"{name}: rank {rank} holds {most} visiting blocks at step {step}, not {table.buffers}"
        )
    return table


def zigzag_owners(ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each of ``ranks`` ranks, the blocks of the sequence that it owns: rank ``r`` has block ``r`` and the
    ``r``-th block from the end.

    A rank thus has an early and a late block, so that all ranks have equal work under the causal mask.
    """
    return tuple((r, 2 * ranks - 1 - r) for r in range(ranks))


def contiguous_owners(ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each of ``ranks`` ranks, the blocks of the sequence that it owns: rank ``r`` has only block ``r``."""
    return tuple((r,) for r in range(ranks))


def tiles_between(
    step: int, rank: int, queries: Collection[int], keys: Collection[int]
) -> list[Tile]:
    """Return the tiles of query blocks ``queries`` and key blocks ``keys``, without those above the causal diagonal.

    All tiles are computed by ``rank`` in step ``step``.
    """
    return [
        Tile(step, rank, q, k, "causal" if q == k else "full")
        for q in queries
        for k in keys
        if k <= q
    ]


def circle(
    name: str, owners: tuple[tuple[int, ...], ...], travels: str, buffers: int
) -> TileTable:
    """Return the table of ring attention: in step ``t``, rank ``r`` works with the blocks of rank ``(r - t) % ranks``.

    ``name``: the scheme; ``owners``: the blocks of each rank; ``travels``: whether blocks of queries ("q") or of keys
    and values ("kv") go around the ring; ``buffers``: number of other ranks' blocks that a rank may hold.
    """
    size, tiles = len(owners), []
    for step in range(size):
        for rank in range(size):
            here, passing = owners[rank], owners[(rank - step) % size]
            tiles += tiles_between(
                step, rank, *((here, passing) if travels == "kv" else (passing, here))
            )
    return TileTable(name, owners, tuple(tiles), buffers)


@lru_cache(maxsize=64)
def tile_table_of(scheme: str, ranks: int) -> TileTable:
    """Return the validated tile table of the context scheme named ``scheme`` for ``ranks`` ranks."""
    return validate_tiles(find("context", scheme).implementation().table(ranks))
