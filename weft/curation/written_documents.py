"""What a data run writes of a shard: a file of documents, and the token ids."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from weft.curation.document_files import arrow, json_text, value_type
from weft.curation.documents import Documents
from weft.curation.kept_results import array_bytes, read_arrays
from weft.curation.step_counts import label_of
from weft.curation.work_folder import content_digest, read_intact, write_atomically

if TYPE_CHECKING:
    from weft.data.tokenizer import Tokenizer

#: The type of a column whose values have several types, and of one with whole numbers that no float is equal to.
JSON, LONG = "json", "long"


class ColumnType(NamedTuple):
    """Type of a column: Arrow's name of the type, or :data:`JSON`. ``where``: id of a document that has it."""

    kind: str
    where: str


class WrittenFile(NamedTuple):
    """A file that a task has written: its path below the folder of intermediate files, and the digest of its
    content.
    """

    name: str
    digest: str


def column_types(documents: Documents) -> dict[str, ColumnType]:
    """Return the type of each column of ``documents`` that has values, by the column's name."""
    types = {}
    for name, values in documents.columns.items():
        first = next((i for i, value in enumerate(values) if value is not None), None)
        if first is None:
            continue
        kind = _kind_of(values)
        if kind == JSON:  # the first document whose type is another
            other = next(
                (i for i, v in enumerate(values) if v is not None and type(v) is not type(values[first])),
                first,
            )  # fmt: skip
            types[name] = ColumnType(JSON, documents.ids[other])
        else:
            types[name] = ColumnType(kind, documents.ids[first])
    return types


def _kind_of(values: Sequence[Any]) -> str:
    """Return the type of a column, which is the same however the column is divided into shards.

    Whole numbers among others are floats, unless that would change them.
    """
    kinds = {type(value) for value in values if value is not None}
    if int in kinds and kinds <= {int, float}:
        largest = max(abs(value) for value in values if type(value) is int)
        if largest > 2**53:
            return LONG if kinds == {int} and largest < 2**63 else JSON
        return "int64" if kinds == {int} else "double"
    kind = value_type(values)
    if kind is not None and "int64" in str(kind):
        try:
            arrow().array(values, kind)
        except (OverflowError, arrow().ArrowInvalid):  # a number of more than 64 bits
            return JSON
    return JSON if kind is None else str(kind)


class Schema(NamedTuple):
    """Arrow types of all columns of a run's documents by name, and a line for the user about each column whose type
    changes from document to document.
    """

    types: dict[str, str]
    notes: list[str]


def common_schema(shards: Sequence[Mapping[str, Sequence[str]]]) -> Schema:
    """Return types with which the columns of all shards can be written to files of one schema.

    ``shards``: the types that :func:`column_types` returned for each shard.
    """
    types: dict[str, ColumnType] = {}
    notes: dict[str, str] = {}
    for shard in shards:
        for name, (kind, where) in shard.items():
            before = types.setdefault(name, ColumnType(kind, where))
            common = _common(before.kind, kind)
            if common == JSON and name not in notes:
                # objects are of no type of a table's, but of the same one everywhere
                same = before.where == where or before.kind == kind
                change = "" if same else f"{before.kind} in {before.where}, "
                notes[name] = (
                    f"column {name!r} holds values of several types or objects ({change}{kind} in {where}): "
                    "it is written as JSON texts"
                )
            types[name] = ColumnType(common, before.where)
    kinds = {name: types[name].kind for name in sorted(types)}
    return Schema(
        {name: "int64" if kind == LONG else kind for name, kind in kinds.items()},
        list(notes.values()),
    )


def _common(first: str, second: str) -> str:
    if first == second:
        return first
    for numbers, common in (({"int64", "double"}, "double"), ({"int64", LONG}, LONG)):
        if {first, second} == numbers:
            return common
    for this, other in ((first, second), (second, first)):
        if "<item: null>" in this and other.startswith("list<"):
            return other
    return JSON


def _arrow_type(kind: str) -> Any:
    pyarrow = arrow()
    plain = {
        "string": pyarrow.string(),
        "int64": pyarrow.int64(),
        "double": pyarrow.float64(),
        "bool": pyarrow.bool_(),
        "null": pyarrow.null(),
        JSON: pyarrow.string(),
    }
    if kind.startswith("list<item: "):
        return pyarrow.list_(_arrow_type(kind.removeprefix("list<item: ")[:-1]))
    return plain[kind]


def write_shard_documents(
    work: Path, documents: Documents, form: str, schema: Mapping[str, str]
) -> WrittenFile:
    """Write documents as a file of Parquet or JSON lines below ``work``, with id, text and the columns of ``schema``
    (Arrow types by name). Return the file.

    ``form``: "parquet" or "jsonl".
    """
    data = _as_parquet(documents, schema) if form == "parquet" else _as_lines(documents)
    digest = content_digest(data)
    name = f"written/{digest}.{form}"
    write_atomically(work / name, data)
    return WrittenFile(name, digest)


def _as_parquet(documents: Documents, schema: Mapping[str, str]) -> bytes:
    pyarrow = arrow()
    fields = [("id", pyarrow.string()), ("text", pyarrow.large_string())]
    own = documents.ids, documents.texts
    arrays = [pyarrow.array(v, kind) for v, (_, kind) in zip(own, fields, strict=True)]
    for name, kind in schema.items():
        values = documents.columns.get(name, [None] * len(documents))
        if kind == JSON:
            values = [json_text(value) for value in values]
        elif kind == "double":
            values = [None if value is None else float(value) for value in values]
        arrays.append(pyarrow.array(values, _arrow_type(kind)))
        fields.append((name, _arrow_type(kind)))
    sink = pyarrow.BufferOutputStream()
    table = pyarrow.table(arrays, pyarrow.schema(fields))
    pyarrow.parquet.write_table(table, sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _as_lines(documents: Documents) -> bytes:
    names = sorted(documents.columns)
    columns = [documents.columns[name] for name in names]
    lines = []
    for name, text, *values in zip(
        documents.ids, documents.texts, *columns, strict=True
    ):
        others = dict(zip(names, values, strict=True))
        record = {"id": name, "text": text} | others
        lines.append(json.dumps(record, ensure_ascii=False, default=str))
    return "".join(f"{line}\n" for line in lines).encode()


@cache
def _tokenizer_in(folder: Path) -> Tokenizer:
    from weft.data.tokenizer import load_tokenizer

    return load_tokenizer(str(folder))


class ShardTokens(NamedTuple):
    """Token ids of a shard, in a file.

    ``counts``: number of tokens by label of the source. ``file``: the file with the ids.
    """

    counts: dict[str, int]
    file: WrittenFile


def write_shard_tokens(
    work: Path, documents: Documents, tokenizer: Path
) -> ShardTokens:
    """Write the token ids of documents as a file below ``work``. ``tokenizer``: folder of the tokenizer."""
    loaded = _tokenizer_in(tokenizer)
    ids = [array.astype(np.uint32) for array in loaded.encode_many(documents.texts)]
    around = len(loaded.opening) + 1  # and the token that ends a document
    lengths = np.array([len(array) for array in ids], np.int64)
    counts: Counter[str] = Counter()
    for name, length in zip(documents.ids, lengths.tolist(), strict=True):
        counts[label_of(name)] += length + around if length else 0
    joined = np.concatenate(ids) if ids else np.empty(0, np.uint32)
    data = array_bytes({"ids": joined, "lengths": lengths})
    digest = content_digest(data)
    name = f"encoded/{digest}.arrays"
    write_atomically(work / name, data)
    return ShardTokens(dict(counts), WrittenFile(name, digest))


def shard_tokens(work: Path, file: WrittenFile) -> list[np.ndarray]:
    """Return the token ids of each document of a shard from its file below ``work``."""
    arrays = read_arrays(read_intact(work / file.name, file.digest))
    ends = np.cumsum(arrays["lengths"])[:-1]
    return np.split(arrays["ids"], ends) if len(arrays["lengths"]) else []
