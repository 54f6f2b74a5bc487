"""A shard between two steps: its documents in a file, and which of them are kept, with what columns, in another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from weft.curation.document_files import (
    columns_of,
    documents_table,
    json_text,
    read_documents_table,
    read_table,
    table_bytes,
)
from weft.curation.documents import Documents
from weft.curation.work_folder import (
    content_digest,
    read_intact,
    words_digest,
    write_atomically,
)


@dataclass(frozen=True)
class ShardState:
    """Where the documents of a shard are. Intermediate files are named by the digest of their content.

    Attributes:
        ``texts``: digest of the file of documents.
        ``rows``: digest of the file that says which of the documents are kept, with further columns; "" if all are
            kept.
        ``context``: digest of the steps that have computed the statistics in the columns.
        ``documents``: number of documents that are kept.
    """

    texts: str
    rows: str
    context: str
    documents: int

    def as_json(self) -> dict[str, Any]:
        """Return the state as values that JSON can hold: ``ShardState(**values)`` is the state again."""
        return asdict(self)

    @property
    def digest(self) -> str:
        """Digest of the shard's documents with their columns; equal digests mean equal documents."""
        return words_digest(self.texts, self.rows)


@dataclass(frozen=True)
class ShardDocuments:
    """The documents of a shard in memory.

    Attributes:
        ``documents``: the documents that are kept so far.
        ``keys``: 16-byte digest of each document's id, text and columns, except statistics.
        ``rows``: row of each document in the file that the shard was read from.
        ``added``: names of the columns that this file does not have.
        ``texts``: digest of this file, which is also its name.
        ``context``: digest of the steps that have computed the statistics in the columns. Equal key and context mean
            equal input of an operator.
    """

    documents: Documents
    keys: list[bytes]
    rows: list[int]
    added: tuple[str, ...]
    texts: str
    context: str

    def select(self, indices: Sequence[int]) -> ShardDocuments:
        """Return a shard with only the documents at ``indices``, in this order. Their keys and rows go with them."""
        return replace(
            self,
            documents=self.documents.select(indices),
            keys=[self.keys[i] for i in indices],
            rows=[self.rows[i] for i in indices],
        )

    def with_statistics(
        self, columns: dict[str, list[Any]], digest: str
    ) -> ShardDocuments:
        """Return a copy with further ``columns``, whose values for a document follow from that document alone.

        ``digest``: digest of the step that has computed the columns. The documents keep their keys, because key and
        digest together determine the values.
        """
        return replace(
            self,
            documents=self.documents.with_columns(columns),
            added=tuple(dict.fromkeys((*self.added, *columns))),
            context=words_digest(self.context, digest),
        )

    def with_decided(
        self, columns: dict[str, list[Any]], digest: str
    ) -> ShardDocuments:
        """Return a copy with further ``columns``, whose values for a document also depend on other documents.

        ``digest``: digest of the step that has computed the columns. A document's old key does not determine these
        values, so its new key is a digest of the old key and the values.
        """
        keys = self.keys
        if columns:
            values = zip(*columns.values(), strict=True)
            pairs = zip(self.keys, values, strict=True)
            keys = [digest_key(key, json_text([*row]) or "") for key, row in pairs]
        return replace(self.with_statistics(columns, digest), keys=keys)


def digest_key(*parts: str | bytes) -> bytes:
    """Return a digest, of 16 bytes, of the sequence ``parts``. It also depends on where the parts are divided."""
    digest = xxhash.xxh3_128()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def document_keys(documents: Documents) -> list[bytes]:
    """Return the 16-byte digest of each document's id, text and columns, by which results for the document are found
    again.
    """
    names = sorted(documents.columns)
    if not names:
        pairs = zip(documents.ids, documents.texts, strict=True)
        return [digest_key(name, text) for name, text in pairs]
    head = json_text(names) or ""
    columns = [documents.columns[name] for name in names]
    rows = zip(documents.ids, documents.texts, *columns, strict=True)
    return [
        digest_key(name, text, head, json_text(values) or "")
        for name, text, *values in rows
    ]


def write_base(work: Path, documents: Documents) -> ShardState:
    """Write documents to a file ``texts/DIGEST.arrow`` in the folder ``work``; return a state in which all are kept."""
    data = documents_table(documents, document_keys(documents))
    digest = content_digest(data)
    path = texts_file(work, digest)
    if not path.exists():
        write_atomically(path, data)
    return ShardState(digest, "", "", len(documents))


def texts_file(work: Path, digest: str) -> Path:
    """Return the path of the file of documents with this digest. ``work``: the folder of intermediate files."""
    return work / "texts" / f"{digest}.arrow"


def rows_file(work: Path, digest: str) -> Path:
    """Return the path of the file with this digest that says which documents are kept.

    ``work``: the folder of intermediate files.
    """
    return work / "rows" / f"{digest}.arrow"


def save_shard(work: Path, shard: ShardDocuments) -> ShardState:
    """Write which documents of a shard are kept, and the columns that steps have added, below the folder ``work``.

    Returns the state from which :func:`load_shard` reads the shard again.
    """
    columns = {
        f"column:{name}": shard.documents.columns[name] for name in sorted(shard.added)
    }
    data = table_bytes({"row": shard.rows} | columns, shard.keys)
    digest = content_digest(data)
    path = rows_file(work, digest)
    if not path.exists():
        write_atomically(path, data)
    return ShardState(shard.texts, digest, shard.context, len(shard.rows))


def load_shard(work: Path, state: ShardState) -> ShardDocuments:
    """Read the documents of a shard's ``state`` from the folder of intermediate files ``work``.

    Raises :class:`WeftError` for a damaged file, which it names and deletes.
    """
    data = read_intact(texts_file(work, state.texts), state.texts)
    if not state.rows:
        documents, keys = read_documents_table(data)
        rows = list(range(len(documents)))
        return ShardDocuments(documents, keys, rows, (), state.texts, state.context)
    kept = read_table(read_intact(rows_file(work, state.rows), state.rows))
    columns = columns_of(kept)
    rows, keys = columns.pop("row"), columns.pop("_key")
    documents, _ = read_documents_table(data, rows)
    own = {name.removeprefix("column:"): values for name, values in columns.items()}
    added = tuple(own)
    return ShardDocuments(
        documents.with_columns(own), keys, rows, added, state.texts, state.context
    )
