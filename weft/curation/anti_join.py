"""Left anti-join of a sample of rows: whether rows of one table are missing in another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.curation.table_footers import LakeTable, time_unit, type_kind

if TYPE_CHECKING:
    import pyarrow

#: Rows of a table that are compared at once.
BATCH_ROWS = 1 << 16
#: NaN in rows: equal to itself, as no float is.
_NAN = ("NaN",)
Row = tuple[Any, ...]


@dataclass(frozen=True)
class RowSample:
    """Rows that were drawn from a table, to look for them in other tables.

    Attributes:
        ``names``: names of the columns.
        ``types``: Arrow types of the columns.
        ``table``: the rows as an Arrow table.
        ``size``: number of rows.
    """

    names: tuple[str, ...]
    types: Mapping[str, pyarrow.DataType]
    table: pyarrow.Table
    size: int


def sample_rows(table: LakeTable, rows: int | None, seed: int) -> RowSample | None:
    """Draw ``rows`` rows of ``table`` at random without replacement, or take all rows if ``rows`` is None.

    Only row groups with drawn rows are read. Returns None if pyarrow cannot read the rows. ``seed``: seed of the
    choice.
    """
    import pyarrow
    import pyarrow.parquet

    count = table.rows if rows is None else min(rows, table.rows)
    chosen = np.arange(table.rows)
    if count < table.rows:
        random = np.random.default_rng(seed)
        chosen = np.sort(random.choice(table.rows, count, replace=False))
    parts = []
    start = 0
    try:
        for path in table.files:
            with pyarrow.parquet.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    end = start + file.metadata.row_group(group).num_rows
                    within = chosen[(chosen >= start) & (chosen < end)] - start
                    if len(within):
                        parts.append(file.read_row_group(group).take(within))
                    start = end
    except pyarrow.ArrowNotImplementedError:
        return None
    schema = pyarrow.schema(list(table.types.items()))
    drawn = schema.empty_table()
    if parts:
        drawn = pyarrow.concat_tables(parts, promote_options="default")
    return RowSample(tuple(table.types), table.types, drawn, count)


def missing_rows(sample: RowSample, within: LakeTable) -> int | None:
    """Return how many distinct rows of ``sample`` are not in the table ``within``; None if the rows cannot be compared.

    DuckDB does the comparison where it is installed and all columns have the same plain types in both tables. Otherwise
    ``within`` is read in batches, and rows with a value that does not occur in the sample are skipped.
    """
    if sample.size == 0:
        return 0
    import pyarrow

    if _duckdb_compares(sample, within):
        count = _missing_in_duckdb(sample, within)
        if count is not None:
            return count

    try:
        return len(_missing_in_batches(sample, within))
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError, ValueError):
        return None


def _duckdb_compares(sample: RowSample, within: LakeTable) -> bool:
    """Return whether DuckDB is installed, and its equality is that of this module for these columns."""
    try:
        import duckdb  # noqa: F401
    except ImportError:
        return False
    folded = {name.casefold() for name in within.types}
    plain = ("number", "boolean", "text", "timestamp", "date")
    return (
        bool(sample.names)
        and len(folded) == len(within.types)  # names differ by more than case
        and all(
            kind == within.types[name] and type_kind(kind) in plain
            for name, kind in sample.types.items()
        )
    )


def _missing_in_duckdb(sample: RowSample, within: LakeTable) -> int | None:
    """Return how many different rows of ``sample`` are not in ``within``, None if DuckDB cannot say."""
    import duckdb

    def quoted(name: str) -> str:
        return '"' + name.replace('"', '""') + '"'

    names = [quoted(name) for name in sample.names]
    equal = " AND ".join(f"a.{n} IS NOT DISTINCT FROM b.{n}" for n in names)
    connection = duckdb.connect()
    try:
        connection.register("sampled", sample.table)
        query = (
            f"SELECT count(*) FROM (SELECT DISTINCT * FROM sampled) a WHERE NOT EXISTS "
            f"(SELECT 1 FROM read_parquet($files, hive_partitioning = false) b WHERE {equal})"
        )
        files = [str(file) for file in within.files]
        (count,) = connection.execute(query, {"files": files}).fetchone() or (0,)
        return int(count)
    except duckdb.Error:  # a type that it does not read
        return None
    finally:
        connection.close()


def _missing_in_batches(sample: RowSample, within: LakeTable) -> set[Row]:
    """Return the rows of ``sample`` that are not in ``within``."""
    import pyarrow.parquet

    if not sample.names:  # rows without columns are equal
        return set() if within.rows else {()}
    left = set(_rows([sample.table[name] for name in sample.names]))
    by_column = [set(values) for values in zip(*left, strict=True)]
    for path in within.files:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH_ROWS, columns=list(sample.names)):
                columns = [batch.column(name) for name in sample.names]
                mask = _candidates(columns, by_column)
                if mask is not None:
                    columns = [column.filter(mask) for column in columns]
                left.difference_update(_rows(columns))
                if not left:
                    return left
    return left


def _candidates(
    columns: Sequence[pyarrow.Array], values: Sequence[set[Any]]
) -> pyarrow.Array | None:
    """Return which rows of ``columns`` have in every column one of the ``values`` of the sample; None: all may."""
    import pyarrow.compute

    mask = None
    for column, wanted in zip(columns, values, strict=True):
        plain = _plain(column)
        kept = _value_set(plain.type, time_unit(column.type), wanted)
        if kept is None:
            continue
        is_in = pyarrow.compute.is_in(plain, value_set=kept)
        mask = is_in if mask is None else pyarrow.compute.and_(mask, is_in)
    return mask


def _value_set(
    kind: pyarrow.DataType, unit: int, wanted: set[Any]
) -> pyarrow.Array | None:
    """Return the values of the sample that a column of type ``kind`` can hold; None if the type is not plain."""
    import pyarrow
    from pyarrow import types

    if type_kind(kind) == "nested":
        return None
    values: list[Any] = []
    for value in wanted:
        if value is None:
            values.append(None)
        elif unit and isinstance(value, int):
            if value % unit == 0:
                values.append(value // unit)
        elif types.is_integer(kind) and _is_number(value):
            if value == int(value):
                values.append(int(value))
        elif types.is_floating(kind) and value == _NAN:
            values.append(float("nan"))
        elif types.is_floating(kind) and _is_number(value):
            # is_in tells the two zeros apart
            values += [float(value)] if value else [0.0, -0.0]
        elif isinstance(value, str | bytes | bool):
            values.append(value)
        elif value != _NAN:
            return None
    try:
        return pyarrow.array(values, kind)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError):
        return None


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return (
        isinstance(value, int | float | Decimal)
        and not isinstance(value, bool)
        and abs(value) != float("inf")
    )


def _plain(column: pyarrow.Array) -> pyarrow.Array:
    """Return ``column`` decoded and with times as integers of their unit."""
    import pyarrow
    from pyarrow import types

    kind = column.type
    if types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = kind.value_type
    if time_unit(kind):
        return column.cast(pyarrow.int32() if kind.bit_width == 32 else pyarrow.int64())
    if type_kind(kind) == "text":
        return column.cast(pyarrow.large_string())
    if type_kind(kind) == "bytes":
        return column.cast(pyarrow.large_binary())
    return column.cast(pyarrow.float32()) if types.is_float16(kind) else column


def _rows(columns: Sequence[pyarrow.Array]) -> Iterator[Row]:
    """Yield the rows of ``columns`` as tuples that are equal if the rows are."""
    values = []
    for column in columns:
        unit = time_unit(column.type)
        plain = _plain(column).to_pylist()
        values.append([_hashable(value, unit) for value in plain])
    return zip(*values, strict=True)


def _hashable(value: Any, unit: int) -> Any:
    if unit:
        return None if value is None else value * unit
    if isinstance(value, float) and value != value:
        return _NAN
    if isinstance(value, list | tuple):
        return tuple(_hashable(member, 0) for member in value)
    if isinstance(value, dict):
        return tuple((key, _hashable(value[key], 0)) for key in sorted(value))
    return value
