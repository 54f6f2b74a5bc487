"""Rows of Parquet files and of data sets that Hugging Face's ``datasets`` has saved, without what Arrow adds to them.

In Arrow all rows have the fields of all others, so that a row of a column of objects gets the keys of every other
row's object, with nothing in them. Such keys are dropped, at every depth. Null elements of lists, and what stands in
maps or in JSON columns, are the data's own and stay.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow


def rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a ``.parquet`` or ``.arrow`` file as objects, each with its number from 1."""
    number = 0
    for batch in _batches(file):
        columns = [
            (field.name, field.type, batch.column(i).to_pylist())
            for i, field in enumerate(batch.schema)
        ]
        for at in range(batch.num_rows):
            number += 1
            values = {name: _plain(column[at], kind) for name, kind, column in columns}
            yield (
                number,
                {name: value for name, value in values.items() if value is not None},
            )


def _batches(file: Path) -> Iterator["pyarrow.RecordBatch"]:
    import pyarrow
    import pyarrow.parquet

    if ".parquet" in file.suffixes:
        with pyarrow.parquet.ParquetFile(file) as table:
            yield from table.iter_batches(batch_size=1024)
        return
    with pyarrow.memory_map(str(file)) as stream:
        try:
            reader = pyarrow.ipc.open_stream(stream)
        except pyarrow.ArrowInvalid:
            saved = pyarrow.ipc.open_file(stream)
            reader = map(saved.get_batch, range(saved.num_record_batches))
        for batch in reader:
            for start in range(0, batch.num_rows, 1024):
                yield batch.slice(start, 1024)


def _plain(value: Any, kind: "pyarrow.DataType") -> Any:
    """A value of Arrow's type ``kind`` as JSON would have it."""
    from pyarrow import types

    if value is None:
        return None
    if getattr(kind, "extension_name", "") == "arrow.json":
        return json.loads(value)
    if types.is_struct(kind):
        members = {field.name: _plain(value[field.name], field.type) for field in kind}
        return {name: member for name, member in members.items() if member is not None}
    if types.is_map(kind):
        return {key: _plain(item, kind.item_type) for key, item in value}
    if (
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
    ):
        return [_plain(item, kind.value_type) for item in value]
    return value
