"""Encode conversations, a batch for each line of standard input: ``python -m weft.data.chat.encode_worker``."""

import base64
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.chat.columns import Renaming
from weft.data.chat.encode import ChatEncoder
from weft.data.chat.recipe_encoder import chat_encoder, recipe_template
from weft.data.chat.record_tokens import RecordTokens, record_tokens
from weft.data.chat.samples import PlacedRecords, RecordLocation
from weft.data.line_worker import answer_lines
from weft.data.source_report import SourceReport
from weft.data.tokenizer import load_tokenizer
from weft.recipe import Chat, Source


def begin_encoding(task: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """Return a function that encodes the records of a line, and returns its answer as :func:`encode_batch` does.

    ``task``: the folder with the tokenizer, the source, the recipe's section ``data.chat``, and the date and time that
    the chat template takes for the present ones.
    """
    source = Source.model_validate(task["source"])
    settings = Chat.model_validate(task["chat"])
    tokenizer = load_tokenizer(task["tokenizer"])
    now = datetime.fromisoformat(task["now"])
    encoder = chat_encoder(settings, recipe_template(settings, tokenizer, now))
    return lambda line: encode_batch(line, source, encoder)


def encode_batch(
    items: Sequence[dict[str, Any]], source: Source, encoder: ChatEncoder
) -> dict[str, Any]:
    """Encode a batch of records, and return tokens, report and the renamed columns that were seen, as plain data.

    ``items``: objects with ``file``, ``line`` and ``record``, or with the ``error`` of a line that is no record and is
    left out.
    """
    report, renaming = SourceReport(), Renaming(source.columns, source.roles)

    def records() -> PlacedRecords:
        for item in items:
            if "error" in item:
                report.skip(item["error"])
                continue
            yield RecordLocation(Path(item["file"]), item["line"]), item["record"]

    encoded = record_tokens(source, report, encoder, records(), renaming)
    packed = [*map(_packed, encoded)]
    return {
        "records": packed,
        "report": vars(report) | {"left": []},
        "seen": sorted(renaming.seen),
    }


def _packed(record: RecordTokens) -> dict[str, Any]:
    """Return the tokens of a record as plain data, numbers in base64."""
    documents = [
        {
            "ids": _text(each.ids.astype("<i8")),
            "weights": _text(each.weights.astype("<f4")),
            "left_out": sorted(each.facts.left_out),
            "stops": each.facts.stops,
        }
        for each in record.documents
    ]
    return {
        "file": str(record.place.file),
        "line": record.place.line,
        "documents": documents,
        "pair": record.pair,
    }


def _text(numbers: np.ndarray) -> str:
    return base64.b64encode(numbers.tobytes()).decode()


if __name__ == "__main__":
    answer_lines(begin_encoding)
