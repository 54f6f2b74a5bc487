"""Read rows of Parquet files and of data sets that Hugging Face's ``datasets`` has saved.

In Arrow all objects of a column have the keys of all others, null where their row has none. Keys that are null are
dropped at every depth. Null elements of lists, and nulls in maps and JSON columns, are the data's own and stay.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow


def read_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read a ``.parquet`` or ``.arrow`` file, and yield ``(number, row)`` for each row, with numbers from 1.

    A row is a dictionary of values by column name, without the columns whose value is null.
    """
    import pyarrow

    records = (
        _plain(record, pyarrow.struct(list(batch.schema)))
        for batch in _batches(file)
        for record in batch.to_pylist()
    )
    yield from enumerate(records, 1)


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
    """Return a value of Arrow's type ``kind`` as JSON would have it."""
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
