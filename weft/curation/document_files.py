"""Documents as Arrow files that give back exactly the values that were written.

A column whose values have more than one type, or a type that Arrow has not, is kept as JSON texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weft.curation.documents import Documents
from weft.errors import WeftError

if TYPE_CHECKING:
    import pyarrow

#: Marks a column of JSON texts in the metadata of its field.
_JSON = {b"weft": b"json"}


def arrow() -> Any:
    """Import pyarrow, and return the module. Raises :class:`WeftError`, with how to install it, if it is missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise WeftError(
            "'weft data run' needs pyarrow, which is not installed; pip install 'weft[data]'"
        ) from None
    return pyarrow


def value_type(values: Iterable[Any]) -> Any:
    """Return the Arrow type that fits all ``values`` except None; None if their types differ or no Arrow type fits.

    Values without a common type have to be written as JSON.
    """
    pyarrow = arrow()
    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        return pyarrow.null()
    plain = {
        str: pyarrow.string(),
        int: pyarrow.int64(),
        float: pyarrow.float64(),
        bool: pyarrow.bool_(),
    }
    kind = kinds.pop()
    if kinds:
        return None
    if kind in plain:
        return plain[kind]
    if kind is list:
        inner = value_type(item for value in values if value for item in value)
        return None if inner is None else pyarrow.list_(inner)
    return None


def arrow_column(name: str, values: Sequence[Any]) -> Any:
    """Convert a column to Arrow, and return the pair of its field and its array.

    Values without a common Arrow type become JSON texts, which the field's metadata notes.
    """
    pyarrow = arrow()
    kind = value_type(values)
    if kind is not None:
        try:
            return pyarrow.field(name, kind), pyarrow.array(values, kind)
        except (OverflowError, pyarrow.ArrowInvalid):
            pass  # a number of more than 64 bits
    texts = [json_text(value) for value in values]
    return (
        pyarrow.field(name, pyarrow.string(), metadata=_JSON),
        pyarrow.array(texts, pyarrow.string()),
    )


def json_text(value: Any) -> str | None:
    """Return ``value`` as JSON text, for a column that no Arrow type fits; None stays None."""
    return (
        None
        if value is None
        else json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    )


def table_bytes(columns: Mapping[str, Sequence[Any]], keys: Sequence[bytes]) -> bytes:
    """Return the bytes of an Arrow file with ``columns`` by name. Equal values give equal bytes.

    ``keys``: 16 bytes for each row, which become the column ``_key``.
    """
    pyarrow = arrow()
    pairs = [arrow_column(name, values) for name, values in columns.items()]
    pairs.append(
        (
            pyarrow.field("_key", pyarrow.binary(16)),
            pyarrow.array(keys, pyarrow.binary(16)),
        )
    )
    table = pyarrow.table(
        [array for _, array in pairs], pyarrow.schema([field for field, _ in pairs])
    )
    sink = pyarrow.BufferOutputStream()
    options = pyarrow.ipc.IpcWriteOptions(compression="lz4")
    with pyarrow.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def read_table(data: bytes) -> pyarrow.Table:
    """Return the table of an Arrow file that :func:`table_bytes` has written."""
    pyarrow: Any = arrow()
    return pyarrow.ipc.open_file(pyarrow.BufferReader(data)).read_all()


def columns_of(table: pyarrow.Table) -> dict[str, list[Any]]:
    """Return the columns of a table as lists by name. Columns that were written as JSON texts are parsed."""
    columns = {}
    for field in table.schema:
        values = table.column(field.name).to_pylist()
        if (field.metadata or {}).get(b"weft") == b"json":
            values = [None if text is None else json.loads(text) for text in values]
        columns[field.name] = values
    return columns


def documents_table(documents: Documents, keys: Sequence[bytes]) -> bytes:
    """Return the bytes of an Arrow file with ``documents``; :func:`read_documents_table` reads it.

    ``keys``: 16 bytes for each document, which are stored with it.
    """
    columns = {f"column:{name}": values for name, values in documents.columns.items()}
    return table_bytes(
        {"id": documents.ids, "text": documents.texts} | columns, [*keys]
    )


def read_documents_table(
    data: bytes, rows: Sequence[int] | None = None
) -> tuple[Documents, list[bytes]]:
    """Return the documents and the row keys in an Arrow file, whose bytes :func:`documents_table` returned.

    ``rows``: indices of the rows to return, in this order; None: all rows.
    """
    table = read_table(data)
    if rows is not None:
        table = table.take(arrow().array(rows, arrow().int64()))
    columns = columns_of(table)
    keys = columns.pop("_key")
    ids, texts = columns.pop("id"), columns.pop("text")
    own = {name.removeprefix("column:"): values for name, values in columns.items()}
    return Documents(ids, texts, own), keys
