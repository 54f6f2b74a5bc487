"""Encode conversations, a batch for each line of standard input: ``python -m weft.data.chat.encode_worker TASK``."""

import base64
import json
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.chat.columns import Renaming
from weft.data.chat.encode import ChatEncoder
from weft.data.chat.recipe_encoder import chat_encoder, recipe_template
from weft.data.chat.record_tokens import RecordTokens, record_tokens
from weft.data.chat.samples import PlacedRecords, RecordLocation
from weft.data.source_report import SourceReport
from weft.data.tokenizer import load_tokenizer
from weft.errors import UsageError, WeftError
from weft.recipe import Chat, Source


def encode_lines(task: str) -> None:
    """Run a worker process: encode the records of each line of standard input, and answer it with a line.

    ``task``: JSON of the folder with the tokenizer, the source, the recipe's section ``data.chat``, and the date and
    time that the chat template takes for the present ones. The worker ends when its input ends, at the latest after one
    more batch, so it does not outlive its parent.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    given = json.loads(task)
    source = Source.model_validate(given["source"])
    settings = Chat.model_validate(given["chat"])
    tokenizer = load_tokenizer(given["tokenizer"])
    now = datetime.fromisoformat(given["now"])
    encoder = chat_encoder(settings, recipe_template(settings, tokenizer, now))
    for line in sys.stdin:
        try:
            answer = encode_batch(json.loads(line), source, encoder)
        except WeftError as error:
            answer = {"error": str(error), "usage": isinstance(error, UsageError)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


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
    encode_lines(sys.argv[1])
