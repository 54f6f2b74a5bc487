"""Tokenize a source of conversations into the cache, with the weight of every token.

Beside the files of :mod:`weft.data.tokens` the folder has ``weights.bin`` (little-endian float32 per token: how much it
counts as a label) and ``lines.npy`` (int64 ``[documents, 2]``: file and line of each conversation). Of pairs of answers
each is a document, the chosen one first, and ``pairs.npy`` (float64 ``[2, pairs]``) has their weights and margins.
"""

import hashlib
import json
from array import array
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.cache import build_once, cache_root, digest
from weft.data.batch import Pairs
from weft.data.chat.chat_template import ChatTemplate
from weft.data.chat.encode import ChatEncoder
from weft.data.chat.notes import Notes
from weft.data.chat.recipe_encoder import chat_encoder, recipe_template
from weft.data.chat.record_tokens import ChatDocument, record_tokens
from weft.data.chat.samples import RecordLocation
from weft.data.corpora import source_fingerprint
from weft.data.files import source_files
from weft.data.source_report import SourceReport
from weft.data.token_writing import add_to_meta, write_documents
from weft.data.tokenizer import Tokenizer
from weft.data.tokens import Tokens, read_tokens
from weft.errors import WeftError
from weft.recipe import ANSWER_PAIRS, Chat, Source


def open_chats(
    source: Source, settings: Chat, tokenizer: Tokenizer, cache: Path | None = None
) -> Tokens:
    """Return the tokens of a source of conversations, encoded by ``tokenizer``. On first use, they are encoded into the
    cache, by several processes if the source is large.

    ``settings``: the recipe's section ``data.chat``. ``cache``: the folder of the cache; None: ``$WEFT_CACHE``, else
    ``~/.cache/weft``.
    """
    template = recipe_template(settings, tokenizer)
    encoder = chat_encoder(settings, template)

    def build(making: Path) -> None:
        tokenizer.save(making)
        _write(making, source, settings, encoder)

    written = [
        template.sources,
        template.variables,
        settings.learn,
        settings.control,
        settings.reasoning,
    ]
    date = settings.date or str(datetime.now().date()) if template.writes_date else ""
    key = digest(
        5, source_fingerprint(source), source.form, tokenizer.fingerprint, written, date
    )
    return read_tokens(build_once(cache_root(cache) / f"chats-{key}", build))


def _write(folder: Path, source: Source, settings: Chat, encoder: ChatEncoder) -> None:
    """Encode the conversations of a source into ``folder``, which has the files of the tokenizer already."""
    from weft.data.chat.encode_processes import (
        encode_process_count,
        records_of_processes,
    )

    tokenizer, report = encoder.template.tokenizer, SourceReport()
    places, content, alike = array("q"), hashlib.sha256(), True
    notes = Notes(tuple(encoder.template.stops))
    pairs: tuple[list[float], list[float]] = ([], [])
    paths = source_files(source)
    numbers = {path: number for number, path in enumerate(paths)}
    count = encode_process_count(source, paths)
    if count > 1:
        records = records_of_processes(source, settings, encoder, report, folder, count)
    else:
        records = record_tokens(source, report, encoder)
    with open(folder / "weights.bin", "wb", buffering=2**20) as out:

        def document(place: RecordLocation, encoded: ChatDocument) -> np.ndarray:
            nonlocal alike
            notes.add(place, encoded.facts)
            weights = encoded.weights.astype("<f4")
            alike = alike and bool(np.isin(weights, (0, 1)).all())
            out.write(weights.tobytes())
            content.update(weights.tobytes())
            places.extend((numbers[place.file], place.line))
            return encoded.ids

        def documents() -> Iterator[np.ndarray]:
            for record in records:
                yield from (document(record.place, each) for each in record.documents)
                if record.pair:
                    pairs[0].append(record.pair.weight)
                    pairs[1].append(record.pair.margin)

        name = f"data source {source.shown}"
        write_documents(
            folder, documents(), tokenizer.vocab, tokenizer.closing, name, close=False
        )
    np.save(folder / "lines.npy", np.array(places, np.int64).reshape(-1, 2))
    if source.kind in ANSWER_PAIRS:
        np.save(folder / "pairs.npy", np.array(pairs))
        content.update(np.array(pairs).tobytes())
    remove_written_fields(report, encoder.template)
    meta = json.loads((folder / "meta.json").read_text())
    fresh = {
        "fingerprint": digest(meta["fingerprint"], content.hexdigest()),
        "alike": alike,
    }
    add_to_meta(
        folder,
        fresh
        | {"files": [*map(str, paths)], "notes": [*report.lines(), *notes.sentences()]},
    )


def remove_written_fields(report: SourceReport, template: ChatTemplate) -> None:
    """Remove from ``report.unread`` the fields of messages that the template uses."""
    start, text = "messages[].", "".join(template.sources)
    report.leave_out(
        lambda name: name.startswith(start) and name.removeprefix(start) in text
    )


class Fitted(NamedTuple):
    """Documents of a run, after conversations were cut to the length of a row.

    Attributes:
        ``starts``: index of each document's first token, int64 ``[documents]``.
        ``lengths``: number of tokens of each document, int64 ``[documents]``.
        ``note``: text for the user that says how many conversations were cut or left out.
        ``pairs``: the pairs of answers; None if documents form no pairs.
        ``records``: for each document, or each pair, the index of its record, from 0.
    """

    starts: np.ndarray
    lengths: np.ndarray
    note: str
    pairs: Pairs | None
    records: np.ndarray


def fit_conversations(tokens: Tokens, seq_len: int, truncation: str) -> Fitted:
    """Cut conversations to ``seq_len`` tokens, or each answer of a pair to half of ``seq_len``.

    ``truncation``: treatment of longer conversations. "keep_start" and "keep_end" keep one end, "drop" leaves the
    conversation out, and "error" raises an error. Pairs of equal answers are skipped.

    Raises :class:`WeftError`, which names file and line, for a conversation of more than ``seq_len`` tokens (with
    "error") or one that loses all its labels, and also if nothing is left.
    """
    row, seq_len = seq_len, seq_len // (2 if tokens.pairs is not None else 1)
    starts, ends = tokens.offsets[:-1], tokens.offsets[1:]
    long = ends - starts > seq_len
    if truncation == "error" and long.any():
        first = int(np.argmax(long))
        size = int(ends[first] - starts[first])
        remedy = "raise data.seq_len, or set data.chat.truncation to keep_start, keep_end or drop"
        limit = (
            f"data.seq_len = {row}"
            if tokens.pairs is None
            else f"half of data.seq_len = {row}"
        )
        raise WeftError(
            f"{tokens.place(first)}: {size} tokens are more than {limit}; {remedy}"
        )
    labels = (
        np.append(0, np.cumsum(tokens.weights > 0))
        if tokens.weights is not None
        else np.arange(1 + ends[-1])
    )
    # the first token is nobody's label
    some = labels[ends] > labels[np.minimum(starts + 1, ends)]
    if truncation == "drop":
        kept = some & ~long
    else:
        first_kept = (
            np.maximum(starts, ends - seq_len) if truncation == "keep_end" else starts
        )
        last_kept = np.minimum(first_kept + seq_len, ends)
        lost = some & (
            labels[last_kept] <= labels[np.minimum(first_kept + 1, last_kept)]
        )
        if lost.any():
            raise WeftError(
                f"{tokens.place(int(np.argmax(lost)))}: nothing that is learned is left of it in {seq_len} tokens "
                f"(data.seq_len = {row}); raise seq_len, or set data.chat.truncation = 'drop'"
            )
        starts, ends, kept = first_kept, last_kept, some
    whole = kept
    if tokens.pairs is not None:
        whole = kept.reshape(-1, 2).all(1)
        whole &= ~_alike(tokens.ids, starts.reshape(-1, 2), ends.reshape(-1, 2))
        kept = whole.repeat(2)
    if not kept.any():
        what = (
            "conversation has anything to learn"
            if tokens.pairs is None
            else "pair has two answers to compare"
        )
        raise WeftError(f"no {what} in data.seq_len = {row} tokens; raise seq_len")
    notes = (
        [f"{long.sum():,} cut to {seq_len} tokens"]
        if long.any() and truncation != "drop"
        else []
    )
    notes += [f"{(~whole).sum():,} left out"] if not whole.all() else []
    pairs = None if tokens.pairs is None else tokens.pairs[whole]
    return Fitted(
        starts[kept],
        (ends - starts)[kept],
        ", ".join(notes),
        pairs,
        _records(tokens, kept),
    )


def _records(tokens: Tokens, kept: np.ndarray) -> np.ndarray:
    """Which of the records each of the ``kept`` documents is from: int64, rising from 0."""
    number = int(kept.sum()) if tokens.pairs is None else int(kept.sum()) // 2
    if tokens.lines is None or tokens.pairs is not None:
        return np.arange(number)
    places = tokens.lines[kept]
    return np.append(0, np.cumsum((places[1:] != places[:-1]).any(1)))


def _alike(ids: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Which pairs are twice the same tokens, from which nothing can be learned; all ``[pairs, 2]`` and ``[pairs]``."""
    sizes = ends - starts
    alike = sizes[:, 0] == sizes[:, 1]
    for i in np.flatnonzero(alike):
        (a, b), (c, d) = zip(starts[i], ends[i], strict=True)
        alike[i] = np.array_equal(ids[a:b], ids[c:d])
    return alike
