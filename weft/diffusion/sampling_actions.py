"""A sampling table as a table of actions, which ``weft/schedule/`` validates, simulates and draws.

A row becomes two actions for each layer: ``sK`` projects queries, keys and values, and ``sA`` attends and ends the
layer. Keys that another rank reads leave behind ``sK`` and are awaited before ``sA``, so that a table whose ages are
above 0 has a whole step for every transfer.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from weft.diffusion.sampling_table import DenoisingRow, KeyBlock, SamplingTable
from weft.schedule.actions import Action, Table, Value
from weft.schedule.kinds import Kind, declare_kind

N = declare_kind(Kind("sN", "noise of a block", "#94a3b8", parameters=False))
E = declare_kind(Kind("sE", "embedding of latents", "#0891b2", parameters=False))
K = declare_kind(Kind("sK", "queries, keys and values", "#2563eb", parameters=False))
A = declare_kind(Kind("sA", "attention and the rest of a layer", "#15803d", parameters=False))  # fmt: skip
P = declare_kind(Kind("sP", "prediction of a tile", "#be185d", parameters=False))
U = declare_kind(Kind("sU", "velocity and update of latents", "#f0a021", parameters=False))  # fmt: skip
O = declare_kind(Kind("sO", "a finished block", "#9333ea", parameters=False))

#: Names of values. ``OPEN`` is a layer that has projected and not yet attended; it stays on its rank.
HIDDEN, OPEN = "h", "open"


class TokenPiece(NamedTuple):
    """Part of a block of tokens that a value of a sampling table holds: tokens ``first`` to ``end - 1`` of the block.

    ``kind``: "kv" for keys and values, "z" for latents, "v" for predictions.
    """

    kind: str
    first: int
    end: int


def piece_of(value: Value) -> TokenPiece | None:
    """Return which tokens of a block ``value`` (name of a tensor of a sampling table) holds; None if it is something
    else, such as hidden states.
    """
    kind, _, rest = value.name.partition(" ")
    if kind not in ("kv", "z", "v"):
        return None
    first, _, end = rest.split(" ")[0].partition("-")
    return TokenPiece(kind, int(first), int(end))


class SamplingActions:
    """Actions of a sampling table: the computations of its rows, in the form that pipeline schedules use.

    Attributes:
        ``source``: the sampling table.
        ``table``: the actions, without transfers. The stage of an action is a layer. Its microbatch is ``step * blocks
            + block``, with the first block of its row.
    """

    def __init__(self, source: SamplingTable) -> None:
        self.source = source
        self.count = len(source.blocks)
        #: the pieces of keys and values that rows read, by (step, layer, block)
        self._keys: dict[tuple[int, int, int], dict[KeyBlock, None]] = defaultdict(dict)
        #: the pieces of latents that rows read, by (number of steps behind them, block)
        self._latents: dict[tuple[int, int], dict[tuple[int, int], None]] = defaultdict(
            dict
        )
        #: the row of an action, by its microbatch and stage
        self.rows: dict[tuple[int, int], DenoisingRow] = {}
        for row in source.rows:
            self._note(row)
        self.table = self._table()

    def number(self, step: int, block: int) -> int:
        """Return the microbatch number by which actions name the pair of a denoising ``step`` and a ``block`` of
        tokens.
        """
        return step * self.count + block

    def row_of(self, action: Action) -> DenoisingRow:
        """Return the row of the sampling table to which ``action`` belongs.

        ``action``: an action of the kind :data:`K` (queries, keys and values), :data:`A` (attention and the rest of a
        layer), :data:`E` (embedding) or :data:`U` (update of latents).
        """
        return self.rows[action.microbatch, action.stage]

    def row_writing(self, hidden: Value) -> DenoisingRow:
        """Return the row of the sampling table whose computation results in ``hidden``, the input of a layer."""
        return self.rows[hidden.microbatch, max(hidden.stage - 1, 0)]

    def joined(self, row: DenoisingRow) -> list[KeyBlock]:
        """Return the token ranges of other blocks whose latents join the queries of ``row``, sorted by block."""
        return sorted(key for key in row.keys if key.joined)

    def _note(self, row: DenoisingRow) -> None:
        last = row.layers.end == self.source.layers
        for key in row.keys:
            if key.joined:
                if row.layers.first == 0:
                    at = (row.step - key.age, key.block)
                    self._latents[at][key.first, key.end] = None
                continue
            for layer in range(*row.layers):
                at_layer = (row.step - key.age, layer, key.block)
                self._keys[at_layer][KeyBlock(key.block, key.first, key.end)] = None
        for block in self.inputs(row):
            if row.layers.first == 0 or last:
                self._latents[row.step, block][0, self.source.blocks[block]] = None
            if last and row.step + 1 == self.source.steps:
                self._latents[row.step + 1, block][0, self.source.blocks[block]] = None

    def inputs(self, row: DenoisingRow) -> tuple[int, ...]:
        """Return the blocks whose latents are the input of ``row``.

        They are its own blocks. A row of the small image, which guides tiles, begins with the latents of all tiles.
        """
        guide = self.source.guide
        if guide is None or guide not in row.queries:
            return row.queries
        return tuple(range(guide))

    def prediction_value(self, step: int, block: int) -> Value:
        """Return the value (name of a tensor in the table) that holds the prediction for ``block`` in ``step``."""
        name = f"v 0-{self.source.blocks[block]}"
        return Value(name, 0, self.number(step, block))

    def key_value(self, step: int, layer: int, key: KeyBlock) -> Value:
        """Return the value (name of a tensor in the table) that holds the keys and values of ``key``.

        ``step``, ``layer``: the step and the layer at which they are computed.
        """
        name = f"kv {key.first}-{key.end}"
        return Value(name, layer, self.number(step, key.block))

    def latent_value(
        self, after: int, block: int, first: int, end: int, rank: int
    ) -> Value:
        """Return the value (name of a tensor) that holds latents of tokens ``first`` to ``end - 1`` of ``block``.

        ``after``: number of steps taken before. With 0 the latents are the initial noise, which every ``rank`` draws
        for itself.
        """
        name = f"z {first}-{end}" + ("" if after else f" {rank}")
        return Value(name, 0, self.number(after, block))

    def _whole_latents(self, after: int, block: int, rank: int) -> Value:
        return self.latent_value(after, block, 0, self.source.blocks[block], rank)

    def _of_row(self, row: DenoisingRow) -> Iterator[Action]:
        """Yield the actions of ``row``, in order."""
        source, m = self.source, self.number(row.step, row.queries[0])
        rank, layers = row.rank, row.layers
        hidden = Value(HIDDEN, layers.first, m)
        own = [self._whole_latents(row.step, block, rank) for block in self.inputs(row)]
        if layers.first == 0:
            before = [
                self.latent_value(row.step - key.age, key.block, key.first, key.end, rank)
                for key in self.joined(row)
            ]  # fmt: skip
            yield Action(rank, E, 0, m, (), (*before, *own), (hidden,))
        for layer in range(*layers):
            written = [
                self.key_value(row.step, layer, piece)
                for block in row.queries
                for piece in self._keys[row.step, layer, block]
            ]
            reads = [
                self.key_value(row.step - key.age, layer, key)
                for key in row.keys
                if not key.joined
            ]
            opened = Value(OPEN, layer, m)
            yield Action(rank, K, layer, m, (), (hidden,), (opened, *written))
            hidden = Value(HIDDEN, layer + 1, m)
            yield Action(rank, A, layer, m, (), (opened, *reads), (hidden,))
        if layers.end < source.layers:
            return
        if source.tiles is None:
            yield self._update(row, (hidden, *own))
            return
        predicted = self.prediction_value(row.step, row.queries[0])
        yield Action(rank, P, source.layers - 1, m, (), (hidden,), (predicted,))
        if self.inputs(row) == row.queries:
            guides = [
                self.prediction_value(row.step - guide.age, guide.block)
                for guide in row.guides
            ]
            yield self._update(row, (predicted, *own, *guides))

    def _update(self, row: DenoisingRow, reads: tuple[Value, ...]) -> Action:
        source, m, rank = self.source, reads[0].microbatch, row.rank
        fresh = [
            self.latent_value(row.step + 1, block, first, end, rank)
            for block in row.queries
            for first, end in self._latents[row.step + 1, block]
        ]
        at = (rank, U, source.layers - 1, m)
        return Action(*at, (), reads, tuple(fresh))

    def _finished(self) -> dict[int, list[int]]:
        """Return the blocks that rank 0 takes over before a row, by the row's index.

        Of another rank's block it computes as many rows more as a pipeline is long, so that it need not stand still.
        """
        source = self.source
        taken: dict[int, list[int]] = defaultdict(list)
        for index, row in enumerate(source.rows):
            if row.queries[0] == source.guide:
                continue
            if row.layers.end == source.layers and row.step + 1 == source.steps:
                later = source.ranks * (source.ranks - 1) if row.rank else 0
                if source.tiles is not None:
                    later = len(source.rows)
                taken[min(index + 1 + later, len(source.rows))] += row.queries
        return taken

    def _noise(self, actions: list[Action]) -> list[Action]:
        """Return the actions of a rank with one before them for each block whose noise the rank reads."""
        pieces: dict[int, dict[Value, None]] = defaultdict(dict)
        for value in (value for action in actions for value in action.reads):
            if value.microbatch < self.count and value.name.startswith("z "):
                pieces[value.microbatch][value] = None
        out = []
        for action in actions:
            for value in action.reads:
                if (
                    written := pieces.get(value.microbatch, {})
                    if value.name.startswith("z ")
                    else {}
                ):
                    del pieces[value.microbatch]
                    rank, block = action.rank, value.microbatch
                    out.append(Action(rank, N, rank, block, (), (), tuple(written)))
            out.append(action)
        return out

    def _steps_on(self, index: int, rank: int, update: Action) -> bool:
        """Return whether row ``index`` is of ``rank`` and of a later step than ``update``, or behind the last."""
        if index == len(self.source.rows):
            return True
        row = self.source.rows[index]
        return row.rank == rank and row.step > update.microbatch // self.count

    def _table(self) -> Table:
        source = self.source
        ranks: list[list[Action]] = [[] for _ in range(source.ranks)]
        finished = self._finished()
        # tiles of a rank are all predicted before one is updated, as they may be guided by each other
        waiting: list[list[Action]] = [[] for _ in range(source.ranks)]
        for index in range(len(source.rows) + 1):
            for rank, updates in enumerate(waiting):
                if updates and self._steps_on(index, rank, updates[0]):
                    ranks[rank] += updates
                    updates.clear()
            for block in finished.get(index, ()):
                last = self._whole_latents(source.steps, block, 0)
                ranks[0].append(Action(0, O, 0, last.microbatch, (), (last,)))
            if index == len(source.rows):
                break
            row = source.rows[index]
            for action in self._of_row(row):
                self.rows[action.microbatch, action.stage] = row
                late = source.tiles is not None and action.kind == U
                (waiting if late else ranks)[row.rank].append(action)
        paths = tuple(
            tuple(range(source.layers)) for _ in range((source.steps + 1) * self.count)
        )
        orders = tuple(tuple(self._noise(actions)) for actions in ranks)
        return Table(source.name, orders, source.layers, paths)
