"""Read sources of text: one string per document, always in the same order."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from weft.cache import digest
from weft.data.files import FilePart
from weft.data.placed_text import PlacedText
from weft.data.reading import file_state, open_file, reading
from weft.data.source_kinds import documents_of
from weft.data.source_report import SourceReport
from weft.errors import WeftError
from weft.paths import home_path
from weft.recipe import SOURCES, Source

#: Kinds of sources that are tokenized in pieces, from so many bytes on.
PIECED = ("stdlib", "text", "jsonl", "parquet")
LARGE = 2**25


def read_documents(source: Source, report: SourceReport | None = None) -> Iterator[str]:
    """Iterate over the texts of the documents of ``source`` in a deterministic order.

    ``report`` counts unread fields and skipped records. Raises :class:`WeftError`, which names the unreadable file.
    """
    return (document.text for document in placed_documents(source, report))


def placed_documents(
    source: Source, report: SourceReport | None = None
) -> Iterator[PlacedText]:
    """Iterate over the documents of ``source`` as :func:`read_documents` does, each with its file and its number in the
    file. ``report`` counts unread fields and skipped records.
    """
    report = report or SourceReport()
    if source.kind not in SOURCES:
        from weft.data.plugin_texts import plugin_documents

        yield from plugin_documents(source)
        return
    chosen = [home_path(source.path or "")]
    yield from documents_in(
        source,
        chosen if source.kind == "huggingface" else documents_of(source).read,
        report,
    )


def documents_in(
    source: Source,
    files: Sequence[Path],
    report: SourceReport,
    part: FilePart | None = None,
) -> Iterator[PlacedText]:
    """Yield the documents in the given ``files`` of a source, or in one ``part`` of a single file, each with its place.

    ``report`` counts unread fields and skipped records.
    """
    read = _text
    if source.kind not in ("stdlib", "text"):
        from weft.data import record_texts

        read = getattr(record_texts, f"{source.kind}_texts")
    for path in files:
        with reading(path, source.kind):
            for number, text in read(path, source, report, part):
                yield PlacedText(path, number, text)


def unread_files(source: Source) -> tuple[str, ...]:
    """Return a tuple with one line for the user, which names the files in a source's folder that are not read.

    The tuple is empty if all files are read.
    """
    if source.kind not in SOURCES or source.kind in ("huggingface", "tokens"):
        return ()
    return SourceReport(left=tuple(documents_of(source).left)).lines()


def is_tokenized_in_pieces(source: Source) -> bool:
    """Return whether a source is so large that it is tokenized in pieces, by several processes."""
    if source.kind not in PIECED:
        return False
    return sum(file_state(file)[0] for file in documents_of(source).read) > LARGE


def source_fingerprint(source: Source) -> str:
    """Return a digest of a source that changes with its files and with the settings by which they are read.

    The digest covers the path, size and modification time of every file.
    """
    if source.kind not in SOURCES:
        from weft.data.plugin_texts import plugin_fingerprint

        return plugin_fingerprint(source)
    read = documents_of(source).read
    stats = [(str(file.absolute()), *file_state(file)) for file in read]
    how = (
        [source.columns, source.roles, source.on_error]
        if source.columns or source.roles or source.skips
        else []
    )
    return digest(source.kind, source.field, stats, *how, *filter(None, [source.where]))


def _text(
    file: Path, source: Source, report: SourceReport, part: FilePart | None
) -> Iterator[tuple[int, str]]:
    with open_file(file) as stream:
        text = stream.read()
    # A few modules of Python declare another encoding.
    lenient = source.kind == "stdlib" and file.suffix == ".py"
    decoded = decode_file(file, text, source, report, lenient)
    if decoded is not None:
        yield 0, decoded


def decode_file(
    file: Path, content: bytes, source: Source, report: SourceReport, lenient: bool
) -> str | None:
    """Decode the ``content`` of a file of plain text as UTF-8.

    ``lenient``: whether invalid bytes are replaced by U+FFFD. Otherwise a file with invalid bytes raises
    :class:`WeftError`, unless the ``source`` skips such files by ``on_error``. Then ``report`` counts the file, and
    None is returned.
    """
    try:
        with reading(file, source.kind):
            return content.decode(errors="replace" if lenient else "strict")
    except WeftError as error:
        if not source.skips:
            raise
        report.skip(error)
        return None
