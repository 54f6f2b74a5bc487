"""Proof that a sampling table samples: every layer of every block once per step, from keys that are there in time."""

from collections import defaultdict
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

from weft.diffusion.sampling_actions import SamplingActions
from weft.diffusion.sampling_scheme import SamplingSettings
from weft.diffusion.sampling_table import (
    DenoisingRow,
    SamplingShape,
    SamplingTable,
    SamplingTableError,
    exact_table,
)
from weft.errors import UsageError, nearest
from weft.registry import find, names
from weft.schedule.actions import ScheduleError, Table, Value
from weft.schedule.lower import FREE, lower
from weft.schedule.validate import run_dry
from weft.section import Section, validated

#: The table that loses nothing, which needs no technique.
EXACT = "exact"


def validate_sampling(table: SamplingTable) -> SamplingTable:
    """Return the table if it computes a whole sample; otherwise raise :class:`SamplingTableError`.

    The rules: every layer of every block is computed once in every step. The latents of a block stay on one rank. A row
    attends to all of its own keys, to no token twice, and to no key that is computed later or before the first step.
    """
    name = f"sampling table {table.name!r}"
    seen: dict[tuple[int, int, int], DenoisingRow] = {}
    for row in table.rows:
        _check_row(name, table, row)
        for layer in range(*row.layers):
            for block in row.queries:
                if (row.step, layer, block) in seen:
                    raise SamplingTableError(
                        f"{name}: layer {layer} of block {block} in step {row.step} is computed twice, by "
                        f"{_said(seen[row.step, layer, block])} and {_said(row)}"
                    )
                seen[row.step, layer, block] = row
    for step, layer, block in product(
        range(table.steps), range(table.layers), range(len(table.blocks))
    ):
        # what guides tiles is computed where they read it
        if block == table.guide or (step, layer, block) in seen:
            continue
        raise SamplingTableError(
            f"{name}: layer {layer} of block {block} in step {step} is computed by no row"
        )
    homes: dict[int, set[int]] = defaultdict(set)
    for (_, layer, block), row in seen.items():
        if layer + 1 == table.layers and block != table.guide:
            homes[block].add(row.rank)
    for block, ranks in homes.items():
        if len(ranks) > 1:
            raise SamplingTableError(
                f"{name}: the latents of block {block} are updated on ranks {sorted(ranks)}; let one keep them"
            )
    for row in table.rows:
        _check_guides(name, table, row, seen)
    return table


def _check_guides(
    name: str,
    table: SamplingTable,
    row: DenoisingRow,
    seen: dict[tuple[int, int, int], DenoisingRow],
) -> None:
    """Raise :class:`SamplingTableError` if ``row`` is guided by what no row of ``seen`` predicts."""
    what = f"{name}: {_said(row)}"
    if row.guides and table.tiles is None:
        raise SamplingTableError(
            f"{what} is guided, and the table has no tiles; leave its guides out"
        )
    if table.tiles is None:
        return
    if len(row.queries) > 1 or row.layers != (0, table.layers):
        raise SamplingTableError(
            f"{what} is of a table of tiles; let it compute all layers of one tile"
        )
    if len({guide.block for guide in row.guides} | {*row.queries}) <= len(row.guides):
        raise SamplingTableError(f"{what} is guided by a block twice, or by itself")
    for guide in row.guides:
        before = row.step - guide.age
        if guide.age < 0 or (before, table.layers - 1, guide.block) not in seen:
            raise SamplingTableError(
                f"{what} is guided by block {guide.block} of step {before}, which no row predicts; add a row for it"
            )
        near = guide.block == table.guide or guide.block in table.tiles.sharing(row.queries[0])  # fmt: skip
        if row.queries[0] == table.guide or not near:
            raise SamplingTableError(
                f"{what} is guided by block {guide.block}, which shares no tokens with it"
            )


def _said(row: DenoisingRow) -> str:
    layers = f"layers {row.layers.first} to {row.layers.end - 1}"
    blocks = ", ".join(map(str, row.queries))
    return (
        f"the row of {layers} for block {blocks} in step {row.step} on rank {row.rank}"
    )


def _check_row(name: str, table: SamplingTable, row: DenoisingRow) -> None:
    what = f"{name}: {_said(row)}"
    if not 0 <= row.rank < table.ranks or not 0 <= row.step < table.steps:
        raise SamplingTableError(
            f"{what} is on none of {table.ranks} ranks or in none of {table.steps} steps"
        )
    if not 0 <= row.layers.first < row.layers.end <= table.layers:
        raise SamplingTableError(f"{what} has none of {table.layers} layers")
    if not row.queries or sorted(set(row.queries)) != list(row.queries):
        raise SamplingTableError(f"{what} has no blocks in ascending order")
    count = len(table.blocks)
    if not 0 <= row.queries[0] <= row.queries[-1] < count:
        raise SamplingTableError(f"{what} has a block beyond the table's {count}")
    ranges: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for key in row.keys:
        if not 0 <= key.block < count or not 0 <= key.first < key.end <= table.blocks[key.block]:  # fmt: skip
            raise SamplingTableError(f"{what} attends to {key}, which does not exist")
        if key.age < (-1 if key.joined else 0):
            raise SamplingTableError(
                f"{what} attends to {key}, which is of a later step"
            )
        if row.step - key.age < 0:
            raise SamplingTableError(
                f"{what} attends to keys of {key.age} steps ago, before the first step; "
                "let more steps at the beginning be synchronous"
            )
        if row.step - key.age > table.steps:
            raise SamplingTableError(f"{what} attends to {key}, after the last step")
        ranges[key.block].append((key.first, key.end))
    for block, spans in ranges.items():
        spans.sort()
        for before, after in pairwise(spans):
            if after[0] < before[1]:
                raise SamplingTableError(
                    f"{what} counts token {after[0]} of block {block} twice"
                )
    for block in row.queries:
        own = [key for key in row.keys if key.block == block]
        whole = all(key.age == 0 and not key.joined for key in own)
        if not whole or sum(key.end - key.first for key in own) < table.blocks[block]:
            raise SamplingTableError(
                f"{what} does not attend to all fresh keys of its own block {block}"
            )


def _check_order(lowered: Table) -> None:
    """Raise :class:`SamplingTableError` if a rank reads what it computes only later."""
    for actions in lowered.ranks:
        there: set[Value] = set()
        for action in actions:
            missing = [value for value in action.reads if value not in there]
            if missing:
                raise SamplingTableError(
                    f"sampling table {lowered.name!r}: {action} needs {missing[0]}, which its rank computes later; "
                    "let keys of blocks that are computed later be older"
                )
            if action.kind == FREE:
                there.difference_update(action.reads)
            there.update(action.writes)


class RunnableTable:
    """A validated sampling table, with the transfers between its ranks.

    Attributes:
        ``source``: the sampling table.
        ``actions``: its computations, and the row that each belongs to.
        ``lowered``: the same computations with sends, receives and frees of values.
        ``window``: largest number of messages in flight between two ranks if senders never block.
    """

    def __init__(self, source: SamplingTable) -> None:
        self.source = validate_sampling(source)
        self.actions = SamplingActions(source)
        try:
            self.lowered: Table = lower(self.actions.table)
            _check_order(self.lowered)
            most = run_dry(self.lowered, window=sum(map(len, self.lowered.ranks)) + 1)
        except ScheduleError as error:
            raise SamplingTableError(
                str(error).replace("schedule", "sampling table", 1)
            ) from None
        self.window = max(most.values(), default=1)


def sampling_scheme_of(word: str) -> Any:
    """Return the sampling scheme that ``word`` names, with its settings: ``NAME`` or ``NAME:KEY=VALUE,KEY=VALUE``.

    Raises :class:`UsageError` for an unknown name, an unknown setting, or a value that is not possible.
    """
    name, _, rest = word.partition(":")
    if name not in names("sampling-table"):
        plain = f"{EXACT} has no settings" if name == EXACT else f"there is no {name!r}"
        known = [EXACT, *names("sampling-table")]
        raise UsageError(f"--table {word}: {plain}; {nearest(name, known)}")
    technique = find("sampling-table", name, f"--table {name}")
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key in values:
            raise UsageError(
                f"--table {word}: {item!r} is not one setting of the form key=value"
            )
        values[key] = value
    settings: type[Section] = technique.settings or SamplingSettings
    return technique.implementation(validated(settings, values, f"--table {word}"))


@lru_cache(maxsize=16)
def sampling_table_of(word: str, shape: SamplingShape) -> RunnableTable:
    """Build and validate the sampling table of the scheme that ``word`` names, for the sizes in ``shape``.

    ``word``: "exact", or a word that :func:`sampling_scheme_of` reads. Raises :class:`UsageError` for a table that the
    shape does not allow.
    """
    try:
        if word == EXACT:
            return RunnableTable(exact_table(shape))
        return RunnableTable(sampling_scheme_of(word).table(shape))
    except SamplingTableError as error:
        raise UsageError(str(error)) from None
