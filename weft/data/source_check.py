"""Check the first records of every source, before a model is read or ranks are started."""

import codecs
from itertools import islice
from pathlib import Path

from weft.data.corpora import read_documents
from weft.data.files import format_of, source_files
from weft.data.reading import file_state, open_file, reading
from weft.data.source_kinds import check_kind, documents_of
from weft.errors import WeftError
from weft.recipe import CONVERSATIONS, SOURCES, Data, Source

#: Records of each source that are looked at.
FIRST = 16


def check_sources(data: Data) -> None:
    """Raise :class:`WeftError` for a source of ``data`` that is missing, empty, or cannot be read as its kind.

    Of each source only the first records are read. Data sets of plugins are not checked, as reading them may take long.
    """
    apart = None
    if isinstance(data.validation, str):
        from weft.data.validation_file import validation_source

        apart = validation_source(data)
    for source in (*data.sources, *([apart] if apart else [])):
        if source.kind in SOURCES and (source.kind, source.path) != ("stdlib", None):
            _check(source)


def _check(source: Source) -> None:
    check_kind(source)
    plain, chats = source.kind in ("text", "stdlib"), source.kind in CONVERSATIONS
    if source.kind == "huggingface":
        first: list[object] = [*islice(read_documents(source), FIRST)]
    elif source.kind == "tokens":
        first = [*source_files(source)]
    elif plain:  # of which a document is a whole file
        texts = [file for file in documents_of(source).read if file_state(file)[0]]
        first = [*texts]
        for file in texts[:FIRST]:
            with reading(file, source.kind):
                _check_begins(file, source)
    elif _is_large(source_files(source)[0]):
        return
    elif chats:
        from weft.data.chat.samples import read_samples

        first = [*islice(read_samples(source), FIRST)]
    else:
        first = [*islice(read_documents(source), FIRST)]
    if not any(first):
        what = (
            "conversation"
            if source.kind == "chat"
            else "pair of answers"
            if chats
            else "document"
        )
        read = "" if not chats else "; JSON lines, JSON, CSV, TSV and Parquet are read"
        raise WeftError(
            f"data source {source.shown} holds no {what}; check where it comes from{read}"
        )


def _check_begins(file: Path, source: Source) -> None:
    """Raise :class:`ValueError` if a file of plain text does not begin with text."""
    if source.kind == "text":
        with open_file(file) as stream:
            head = stream.read(2**12)
        # its last character may be cut
        codecs.getincrementaldecoder("utf-8")().decode(head)


def _is_large(file: Path) -> bool:
    """Return whether a look at the first record takes long, as all of a file of JSON must be read for that."""
    return format_of(file) == ".json" and file_state(file)[0] > 2**26
