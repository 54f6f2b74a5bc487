"""Containment: which tables hold all rows of others.

A table is contained in another one if that has all of its columns, and all of its rows in them. Rows are sets: how
often one is repeated does not count. Nulls are equal to each other, so are NaNs, and numbers are equal if their values
are, whatever their types. No step here can drop a true containment (Shah et al. 2023, R2D2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.curation.anti_join import missing_rows, sample_rows
from weft.curation.table_footers import LakeTable, type_kind


@dataclass(frozen=True)
class ContainmentEdge:
    """A containment: all examined rows of ``table`` are in the table ``within``.

    Attributes:
        ``table``, ``within``: names of the tables.
        ``rows``: number of examined rows.
        ``is_proved``: whether all rows of the table were examined.
    """

    table: str
    within: str
    rows: int
    is_proved: bool


@dataclass(frozen=True)
class ContainmentGraph:
    """Which tables contain which others, as a graph.

    Attributes:
        ``tables``: all tables, by name.
        ``edges``: the containments, which no check has refuted.
        ``dropped``: number of ordered pairs of tables that each check has refuted, by "schema", "ranges" and "rows".
        ``uncompared``: pairs ``(table, within)`` whose rows cannot be compared, such as those with values that pyarrow
            does not convert. They are no edges.
    """

    tables: dict[str, LakeTable]
    edges: list[ContainmentEdge]
    dropped: dict[str, int]
    uncompared: list[tuple[str, str]] = field(default_factory=list)


def schema_allows(table: LakeTable, within: LakeTable) -> bool:
    """Return whether ``within`` has all columns of ``table``, in types whose values can be equal."""
    for name, kind in table.types.items():
        if name not in within.types:
            return False
        kinds = {type_kind(kind), type_kind(within.types[name])}
        if len(kinds) > 1 and not _may_be_null(table, name):
            return False
    return True


def _may_be_null(table: LakeTable, name: str) -> bool:
    """Return whether a column may hold nothing but nulls, which have no type."""
    values = table.ranges.get(name)
    return table.rows == 0 or values is None or values.nulls in (None, values.values)


def ranges_allow(table: LakeTable, within: LakeTable) -> bool:
    """Return whether the column ranges in the files' footers permit that ``within`` contains ``table``."""
    for name, own in table.ranges.items():
        other = within.ranges.get(name)
        if other is None or type_kind(table.types[name]) != type_kind(
            within.types[name]
        ):
            continue
        if own.nulls and other.nulls == 0:
            return False
        has_values = own.nulls is not None and own.nulls < own.values
        if has_values and other.nulls == other.values:
            return False
        if own.low is None or not other.is_whole or other.low is None:
            continue
        if own.low < other.low or own.high > other.high:
            return False
    return True


def containment_graph(
    tables: Sequence[LakeTable], rows: int | None = 64, seed: int = 0
) -> ContainmentGraph:
    """Find which of ``tables`` contain which others: by their schemas, by ranges in footers, by rows.

    ``rows``: number of rows of a table that are looked for in another one, drawn by ``seed``; None: all rows. If only a
    sample is looked for, missing rows may go unnoticed: if a share f of the rows is missing, the containment is still
    reported with a probability of at most (1 - f)^rows.
    """
    tables = sorted(tables, key=lambda table: table.name)
    dropped = Counter({"schema": 0, "ranges": 0, "rows": 0})
    edges: list[ContainmentEdge] = []
    uncompared: list[tuple[str, str]] = []
    for table in tables:
        allowed = []
        for within in tables:
            if within is table:
                continue
            if not schema_allows(table, within):
                dropped["schema"] += 1
            elif not ranges_allow(table, within):
                dropped["ranges"] += 1
            else:
                allowed.append(within)
        sample = sample_rows(table, rows, seed) if allowed else None
        for within in allowed:
            missing = None if sample is None else missing_rows(sample, within)
            pair = table.name, within.name
            if sample is None or missing is None:
                uncompared.append(pair)
            elif missing:
                dropped["rows"] += 1
            else:
                is_proved = sample.size == table.rows
                edges.append(ContainmentEdge(*pair, sample.size, is_proved))
    return ContainmentGraph(
        {table.name: table for table in tables}, edges, dict(dropped), uncompared
    )
