"""Read the records of a source as conversations or pairs of answers, each with its place."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from weft.data.chat.chat_turns import ConversationError
from weft.data.chat.columns import Renaming
from weft.data.chat.conversation import Conversation
from weft.data.chat.forms import read_record
from weft.data.chat.judged import Judgement, pair_with_others, read_judgements
from weft.data.chat.pairs import AnswerPair, garbled_pair, read_pair
from weft.data.files import read_records, source_files
from weft.data.reading import naming_file, reading
from weft.data.source_report import SourceReport
from weft.errors import UsageError, WeftError
from weft.recipe import Source

S = TypeVar("S")
#: Records with their places, as the files of a source have them.
PlacedRecords = Iterator[tuple["RecordLocation", Any]]


class RecordLocation(NamedTuple):
    """Place of a record: its file and line. In files without lines, the line is the record's number."""

    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def messages_field(source: Source) -> str | None:
    """Return ``source.field``, the name of the field with the messages, or None if the recipe does not set it."""
    return (
        None if source.field == Source.model_fields["field"].default else source.field
    )


def placed_records(
    source: Source, wrong: Callable[[Any], None] | None
) -> PlacedRecords:
    """Yield ``(place, record)`` for each record in the files of a source, with the columns' names as they are in the
    file.

    ``wrong``: called with the error for a line that is no record; None: the error is raised.
    """
    for file in source_files(source):
        with reading(file, source.kind):
            for number, record in read_records(file, wrong):
                yield RecordLocation(file, number), record


def read_samples(
    source: Source,
    report: SourceReport | None = None,
    records: PlacedRecords | None = None,
    renaming: Renaming | None = None,
) -> Iterator[tuple[RecordLocation, Conversation | AnswerPair]]:
    """Yield ``(place, content)`` for each record of a source, in order.

    The content is a conversation or, in sources of preferences and judgements, a pair of answers. Errors name file and
    line. With ``on_error = "skip"`` malformed records are skipped. ``report`` counts records, skipped records and
    unread fields. ``records``: the records to read, such as a part of the source, as :func:`placed_records` yields
    them; None: all records of the source. ``renaming``: the object that renames columns, and that notes which of them
    occur; None: a new one. Raises :class:`UsageError` if all records were read and a column that the recipe renames is
    in none of them.
    """
    report = report or SourceReport()
    renamed = renaming or Renaming(source.columns, source.roles)
    every = records is None
    if records is None:
        records = placed_records(source, report.skip if source.skips else None)
    if source.kind == "feedback":
        judged = (
            (place, judgement)
            for place, record in _read(records, source, report, renamed, _judgements)
            for judgement in record
        )
        for place, pair in pair_with_others(judged):
            if isinstance(pair, ConversationError):
                _refuse(pair, place, source, report)
                continue
            report.count(pair.chosen.unread)
            yield place, pair
        check_renamed_columns(source, renamed)
        return
    read = partial(_sample, source=source)
    for place, sample in _read(records, source, report, renamed, read):
        talks = (
            (sample.chosen, sample.rejected)
            if isinstance(sample, AnswerPair)
            else (sample,)
        )
        report.count(name for talk in talks for name in talk.unread)
        yield place, sample
    if every:
        check_renamed_columns(source, renamed)


def check_renamed_columns(source: Source, renamed: Renaming) -> None:
    """Raise :class:`UsageError` if a column that the recipe renames is in no record."""
    if missing := renamed.missing():
        raise UsageError(
            f"data.columns names {missing[0]!r}, which no record at {source.shown} has; leave it out"
        )


def _read(
    records: PlacedRecords,
    source: Source,
    report: SourceReport,
    renamed: Renaming,
    read: Callable[..., S],
) -> Iterator[tuple[RecordLocation, S]]:
    """Yield what ``read(record, file=...)`` makes of each record, whose columns are renamed before."""
    for place, record in records:
        with naming_file(place.file, source.kind):
            try:
                sample = read(renamed(record), file=place.file)
            except (ConversationError, RecursionError) as error:
                _refuse(error, place, source, report)
                continue
        yield place, sample


def _refuse(
    error: Exception, place: RecordLocation, source: Source, report: SourceReport
) -> None:
    """Raise what is wrong with a record, or count it where such records are left out."""
    reason = "nested too deeply" if isinstance(error, RecursionError) else error
    refused = WeftError(f"{place}: {reason}")
    if not source.skips:
        raise refused from None
    report.skip(refused)


def _judgements(record: object, *, file: Path) -> list[Judgement]:
    return read_judgements(record)


def _sample(record: object, *, source: Source, file: Path) -> Conversation | AnswerPair:
    """What one record holds. What Python code documents has one form, and files of records have their own."""
    documented = file.suffix == ".py"
    if source.kind == "preference":
        return read_pair(garbled_pair(record) if documented else record)  # type: ignore[arg-type]
    form = "auto" if source.form == "docstrings" else source.form
    return read_record(record, form, None if documented else messages_field(source))
