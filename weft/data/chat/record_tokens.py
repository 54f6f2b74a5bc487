"""Token ids and weights of the conversations of a source, record after record."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from weft.data.chat.chat_template import TemplateError
from weft.data.chat.columns import Renaming
from weft.data.chat.conversation import Conversation
from weft.data.chat.encode import ChatEncoder, Encoded
from weft.data.chat.notes import Facts
from weft.data.chat.pairs import AnswerPair
from weft.data.chat.samples import PlacedRecords, RecordLocation, read_samples
from weft.data.source_report import SourceReport
from weft.errors import WeftError
from weft.recipe import Source


class ChatDocument(NamedTuple):
    """Tokens of a conversation: ``ids`` int ``[tokens]``, loss ``weights`` float32 ``[tokens]``, and ``facts``."""

    ids: np.ndarray
    weights: np.ndarray
    facts: Facts


class PairWeight(NamedTuple):
    """Weight of a pair of answers in the loss, and the margin between them."""

    weight: float
    margin: float


class RecordTokens(NamedTuple):
    """Tokens of one record of a source. ``place``: file and line of the record. ``documents``: tokens of each
    conversation of the record. ``pair``: weight and margin if the documents are a pair of answers; None if they are no
    pair.
    """

    place: RecordLocation
    documents: list[ChatDocument]
    pair: PairWeight | None


def encoded_records(
    source: Source,
    report: SourceReport,
    encoder: ChatEncoder,
    records: PlacedRecords | None = None,
    renaming: Renaming | None = None,
) -> Iterator[tuple[RecordLocation, Conversation | AnswerPair, list[Encoded]]]:
    """Yield ``(place, record, samples)`` for each record of a source.

    ``place``: file and line. ``record``: the conversation or the pair of answers. ``samples``: the encoded
    conversations that the record gives; a pair gives two, the chosen answer first. Errors name file and line. With
    ``on_error = "skip"`` malformed records are skipped, and ``report`` counts them. ``records`` and ``renaming``: as
    for :func:`weft.data.chat.samples.read_samples`.
    """
    for place, sample in read_samples(source, report, records, renaming):
        try:
            if isinstance(sample, AnswerPair):
                encoded = [
                    encoder.encode(sample.chosen),
                    encoder.encode(sample.rejected),
                ]
            else:
                encoded = [encoder.encode(part) for part in encoder.samples(sample)]
        except TemplateError as error:
            refused = WeftError(f"{place}: {error}")
            if not source.skips:
                raise refused from None
            report.skip_counted(refused)
            continue
        yield place, sample, encoded


def record_tokens(
    source: Source,
    report: SourceReport,
    encoder: ChatEncoder,
    records: PlacedRecords | None = None,
    renaming: Renaming | None = None,
) -> Iterator[RecordTokens]:
    """Yield the tokens of each record of a source, without what only a preview needs.

    The arguments are those of :func:`encoded_records`. ``report`` also counts turns that the data marks as learned, and
    that the recipe does not learn from.
    """
    for place, sample, encoded in encoded_records(
        source, report, encoder, records, renaming
    ):
        documents = [
            ChatDocument(each.ids, each.weights, each.facts) for each in encoded
        ]
        if isinstance(sample, AnswerPair):
            talk, pair = sample.chosen, PairWeight(sample.weight, sample.margin)
        else:
            talk, pair = sample, None
        _count_unheeded(report, encoder, talk)
        yield RecordTokens(place, documents, pair)


def _count_unheeded(
    report: SourceReport, encoder: ChatEncoder, talk: Conversation
) -> None:
    """Count turns that the data marks as learned, and that the recipe does not learn from."""
    if encoder.learn != "all" and talk.marked:
        learned = Conversation(
            talk.messages, None, (1.0,) * len(talk.messages)
        ).learned(encoder.learn)
        report.turns.update(
            str(talk.messages[i]["role"]) for i in talk.marked if not learned[i]
        )
