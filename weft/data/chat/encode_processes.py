"""Encode the conversations of a large source by several processes, in the order of the source."""

from __future__ import annotations

import base64
import json
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.chat.columns import Renaming
from weft.data.chat.encode import ChatEncoder
from weft.data.chat.encode_worker import encode_batch
from weft.data.chat.notes import Facts
from weft.data.chat.record_tokens import ChatDocument, PairWeight, RecordTokens
from weft.data.chat.samples import RecordLocation, check_renamed_columns, placed_records
from weft.data.line_processes import LineProcesses
from weft.data.reading import file_state
from weft.data.source_report import SourceReport
from weft.data.tokenize_pieces import tokenize_process_count
from weft.errors import WeftError
from weft.recipe import Chat, Source

#: Bytes of a source's files from which on processes pay, and characters of a batch of records.
LARGE, BATCH = 2**23, 2**17
#: Batches for each process that are under way at most.
AHEAD = 3

Batch = list[dict[str, Any]]


def encode_process_count(source: Source, files: Sequence[Path]) -> int:
    """Return how many processes encode a source of conversations, whose files are ``files``; 1: only the calling
    process.

    The result is 1 for a small source, and for judged answers, because each is paired with one of another record.
    """
    if source.kind == "feedback":
        return 1
    size = sum(file_state(file)[0] for file in files)
    if size < LARGE:
        return 1
    # conversations take several times as long as plain text of the same size
    return tokenize_process_count(8 * size)


def records_of_processes(
    source: Source,
    settings: Chat,
    encoder: ChatEncoder,
    report: SourceReport,
    tokenizer: Path,
    count: int,
) -> Iterator[RecordTokens]:
    """Yield the tokens of each record of a source, which ``count`` processes encode.

    Records, report and errors are those of :func:`weft.data.chat.record_tokens.record_tokens`. ``settings``: the
    recipe's section ``data.chat``, of which ``encoder`` was made. ``tokenizer``: folder with the tokenizer's files.
    """
    task = {
        "tokenizer": str(tokenizer),
        "source": source.model_dump(mode="json"),
        "chat": settings.model_dump(mode="json"),
        "now": (encoder.template.now or datetime.now()).isoformat(),
    }
    renaming = Renaming(source.columns, source.roles)
    with LineProcesses("weft.data.chat.encode_worker", task, count) as processes:
        pending = deque[Future[Any]]()
        for future in _submitted(source, encoder, processes):
            pending.append(future)
            if len(pending) >= AHEAD * count:
                yield from _joined(pending.popleft(), report, renaming)
        while pending:
            yield from _joined(pending.popleft(), report, renaming)
    check_renamed_columns(source, renaming)


def _submitted(
    source: Source, encoder: ChatEncoder, processes: LineProcesses
) -> Iterator[Future[Any]]:
    """Yield the answer to each batch of records, in their order; what cannot be read is an error in its place."""
    batches = _batches(source)
    while True:
        try:
            batch = next(batches, None)
        except WeftError as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            yield failed
            return
        if batch is None:
            return
        about = next((item["file"] for item in batch if "file" in item), source.shown)
        try:
            line = json.dumps(batch)
        except (TypeError, ValueError, RecursionError):
            # values that only Python has, such as dates of a Parquet file
            yield _here(batch, source, encoder)
            continue
        yield processes.submit(line, about)


def _here(batch: Batch, source: Source, encoder: ChatEncoder) -> Future[Any]:
    """Encode a batch in this process."""
    future: Future[Any] = Future()
    try:
        future.set_result(encode_batch(batch, source, encoder))
    except WeftError as error:
        future.set_exception(error)
    return future


def _batches(source: Source) -> Iterator[Batch]:
    """Yield the records of a source in batches. Those before an error are a batch of their own."""
    batch: Batch = []
    held = 0

    def wrong(error: object) -> None:
        batch.append({"error": str(error)})

    records = placed_records(source, wrong if source.skips else None)
    while True:
        try:
            place, record = next(records)
        except (StopIteration, WeftError) as error:
            if batch:
                yield batch
            if isinstance(error, WeftError):
                raise
            return
        batch.append({"file": str(place.file), "line": place.line, "record": record})
        held += _size(record)
        if held > BATCH:
            yield batch
            batch, held = [], 0


def _size(value: Any) -> int:
    """Return about how many characters the strings in ``value`` have."""
    size, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, (dict, list)):
            size += 8
            left.extend(item.values() if isinstance(item, dict) else item)
    return size


def _joined(
    future: Future[Any], report: SourceReport, renaming: Renaming
) -> Iterator[RecordTokens]:
    """Yield the records of an answer, and add its report and the columns that it has seen to those of the source."""
    answer = future.result()
    report.add(answer["report"])
    renaming.seen.update(answer["seen"])
    for record in answer["records"]:
        documents = [
            ChatDocument(
                np.frombuffer(base64.b64decode(each["ids"]), "<i8"),
                np.frombuffer(base64.b64decode(each["weights"]), "<f4"),
                Facts(frozenset(each["left_out"]), each["stops"]),
            )
            for each in record["documents"]
        ]
        pair = record["pair"] and PairWeight(*record["pair"])
        place = RecordLocation(Path(record["file"]), record["line"])
        yield RecordTokens(place, documents, pair)
