"""Tables of Parquet files, as their footers describe them: columns, ranges of values, rows and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.errors import UsageError, WeftError

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

#: Nanoseconds of a unit of time.
UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
#: Nanoseconds of a day.
DAY = 86_400 * 10**9


class ColumnRange(NamedTuple):
    """Range of a column's values according to the files' footers.

    Attributes:
        ``low``, ``high``: smallest and largest value, in a form that can be compared over types; None if unknown.
        ``is_whole``: whether all values lie between them, apart from nulls and NaN.
        ``nulls``: number of nulls; None if unknown.
        ``values``: number of values, including nulls.
    """

    low: Any
    high: Any
    is_whole: bool
    nulls: int | None
    values: int


@dataclass(frozen=True)
class LakeTable:
    """A table of one or more Parquet files of the same columns, as far as their footers describe it.

    Attributes:
        ``name``: its path, as given.
        ``files``: its files, sorted.
        ``rows``: number of rows.
        ``size``: bytes of the files.
        ``types``: Arrow type of each column by name.
        ``ranges``: range of each column by name, without nested columns.
        ``footer_bytes``: bytes of the footers that were read.
    """

    name: str
    files: tuple[Path, ...]
    rows: int
    size: int
    types: Mapping[str, pyarrow.DataType]
    ranges: Mapping[str, ColumnRange]
    footer_bytes: int


def table_files(places: Sequence[Path], whole_folders: bool) -> dict[str, list[Path]]:
    """Return the Parquet files of each table by the table's name.

    ``places``: files, or folders that are searched with all their subfolders. ``whole_folders``: whether all Parquet
    files of a folder are one table; otherwise each file is a table. Raises :class:`UsageError` for a place that does
    not exist or has no such files.
    """
    tables: dict[str, list[Path]] = {}
    for place in places:
        if place.is_file():
            files = [place]
        else:
            files = sorted(p for p in place.rglob("*.parquet") if p.is_file())
            files = [f for f in files if not _is_hidden(f.relative_to(place))]
        if not files:
            state = "no Parquet file in it" if place.is_dir() else "no such folder"
            raise UsageError(f"{place}: there is {state}; give folders of .parquet files")  # fmt: skip
        for file in files:
            name = str(file.parent if whole_folders and place.is_dir() else file)
            if file not in tables.setdefault(name, []):
                tables[name].append(file)
    return tables


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def read_lake_table(name: str, files: Sequence[Path]) -> LakeTable:
    """Read the footers of ``files``, but no rows, and return the table ``name`` of these files.

    Raises :class:`WeftError` for a damaged file, and for files whose columns differ.
    """
    footers = [_footer(file) for file in files]
    types = dict(_types(files[0], footers[0].metadata))
    for file, footer in zip(files, footers, strict=True):
        if dict(_types(file, footer.metadata)) != types:
            raise WeftError(
                f"{file} has other columns or types than {files[0]}: they are not one table"
            )
    return LakeTable(
        name,
        tuple(files),
        sum(footer.metadata.num_rows for footer in footers),
        sum(file.stat().st_size for file in files),
        types,
        _ranges(types, [footer.metadata for footer in footers]),
        sum(footer.size for footer in footers),
    )


def read_lake_tables(
    places: Sequence[Path], whole_folders: bool = False
) -> tuple[list[LakeTable], dict[str, str]]:
    """Read the footers of all tables in ``places``. Returns the tables, and the reason for each that cannot be read, by
    name.

    ``places`` and ``whole_folders``: the arguments of :func:`table_files`. Raises :class:`UsageError` if pyarrow is
    missing, and :class:`WeftError` if no table can be read.
    """
    files = table_files(places, whole_folders)
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UsageError(
            "tables of Parquet need pyarrow; pip install 'weft[data]'"
        ) from None
    tables = []
    unread = {}
    for name, of_table in files.items():
        try:
            tables.append(read_lake_table(name, of_table))
        except WeftError as error:
            unread[name] = str(error)
    if not tables:
        raise WeftError(f"no table can be read: {next(iter(unread.values()))}")
    return tables, unread


class _Footer(NamedTuple):
    metadata: pyarrow.parquet.FileMetaData
    size: int


def _footer(file: Path) -> _Footer:
    """Return the metadata of a Parquet file, and the number of bytes that were read."""
    import pyarrow
    import pyarrow.parquet

    try:
        with file.open("rb") as stream:
            end = stream.seek(-8, 2) + 8
            tail = stream.read(8)
            size = int.from_bytes(tail[:4], "little") + 8
            if tail[4:] != b"PAR1" or size + 4 > end:
                raise WeftError(f"{file} is no whole Parquet file; write it again")
            stream.seek(-size, 2)
            footer = stream.read(size)
        # a file of no more than its footer
        buffer = pyarrow.BufferReader(b"PAR1" + footer)
        return _Footer(pyarrow.parquet.ParquetFile(buffer).metadata, size)
    except (OSError, ValueError) as error:  # pyarrow's errors are these, too
        reason = str(error).partition("\n")[0]
        raise WeftError(f"cannot read the footer of {file}: {reason}") from None


def _types(
    file: Path, metadata: pyarrow.parquet.FileMetaData
) -> Iterator[tuple[str, pyarrow.DataType]]:
    """Yield name and type of every column."""
    schema = metadata.schema.to_arrow_schema()
    for field in schema:
        if len(schema.get_all_field_indices(field.name)) > 1:
            raise WeftError(f"{file} has two columns {field.name!r}; rename one")
        yield field.name, field.type


def type_kind(kind: pyarrow.DataType) -> str:
    """Return the kind of an Arrow type, such as "number". Only values of one kind can be equal, also if their types
    differ.
    """
    from pyarrow import types

    if types.is_dictionary(kind):
        return type_kind(kind.value_type)
    if types.is_boolean(kind):
        return "boolean"
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    if types.is_string(kind) or types.is_large_string(kind) or _is_view(kind, "string"):
        return "text"
    if _is_bytes(kind):
        return "bytes"
    if types.is_timestamp(kind):
        return "instant" if kind.tz else "timestamp"
    if types.is_date(kind) or types.is_time(kind) or types.is_duration(kind):
        return str(kind).partition("[")[0].rstrip("3264")
    return "null" if types.is_null(kind) else "nested"


def _is_view(kind: pyarrow.DataType, of: str) -> bool:
    return str(kind) == f"{of}_view"


def _is_bytes(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    return (
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or _is_view(kind, "binary")
    )


def time_unit(kind: pyarrow.DataType) -> int:
    """Return the length in nanoseconds of the unit in which a temporal type counts, such as 1,000 for microseconds.

    Returns 0 for types that are not temporal.
    """
    from pyarrow import types

    if types.is_dictionary(kind):
        return time_unit(kind.value_type)
    if types.is_date32(kind):
        return DAY
    if types.is_date64(kind):
        return UNITS["ms"]
    if types.is_timestamp(kind) or types.is_time(kind) or types.is_duration(kind):
        return UNITS[kind.unit]
    return 0


def _ranges(
    types: Mapping[str, pyarrow.DataType],
    footers: Iterable[pyarrow.parquet.FileMetaData],
) -> dict[str, ColumnRange]:
    """Return the range of every column that is not nested."""
    # a dot in a path leads into a nested column
    plain = {
        name: kind
        for name, kind in types.items()
        if type_kind(kind) != "nested" and "." not in name
    }
    chunks: dict[str, list[tuple[Any, int, bool]]] = {name: [] for name in plain}
    for metadata in footers:
        # others cut long texts, which moves the ends
        exact = (metadata.created_by or "").startswith("parquet-cpp")
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            for index in range(group.num_columns):
                column = group.column(index)
                if column.path_in_schema in chunks:
                    chunk = column.statistics, group.num_rows, exact
                    chunks[column.path_in_schema].append(chunk)
    return {name: _range(kind, chunks[name]) for name, kind in plain.items()}


def _range(
    kind: pyarrow.DataType, chunks: Sequence[tuple[Any, int, bool]]
) -> ColumnRange:
    """Return the range of a column of type ``kind`` over its chunks: statistics, rows, whether its ends are exact."""
    ends: list[Any] = []
    is_whole = True
    nulls: int | None = 0
    for statistics, rows, exact in chunks:
        known = statistics is not None and statistics.has_null_count
        missing = statistics.null_count if known else None
        nulls = None if nulls is None or missing is None else nulls + missing
        if missing == rows:
            continue  # no value that could lie elsewhere
        if statistics is None or not statistics.has_min_max:
            is_whole = False
            continue
        pair = [_comparable(kind, statistics, end, exact) for end in ("min", "max")]
        if None in pair:
            is_whole = False
            continue
        ends += pair
    values = sum(rows for _, rows, _ in chunks)
    low, high = (min(ends), max(ends)) if ends else (None, None)
    return ColumnRange(low, high, is_whole, nulls, values)


def _comparable(kind: pyarrow.DataType, statistics: Any, end: str, exact: bool) -> Any:
    """Return an end of a range in a form that is comparable over the types of its kind; None if it cannot be."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if unit := time_unit(kind):
        raw = getattr(statistics, f"{end}_raw")
        return raw * unit if isinstance(raw, int) else None
    if types.is_float16(kind):
        return None
    value = getattr(statistics, end)
    if type_kind(kind) in ("text", "bytes"):
        if not exact:
            return None
        # in the order of their bytes, as Parquet has it
        return value.encode() if isinstance(value, str) else value
    if isinstance(value, float) and value != value:
        return None
    return value
