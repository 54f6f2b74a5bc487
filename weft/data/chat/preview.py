"""Preview conversations as a run reads them, with the learned tokens shown, in the terminal or on a page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import numpy as np
from rich.text import Text

from weft.data.chat.encode import ChatEncoder, Encoded
from weft.data.chat.notes import Notes
from weft.data.chat.recipe_encoder import chat_encoder, recipe_template
from weft.data.chat.record_tokens import encoded_records
from weft.data.chat.samples import RecordLocation
from weft.data.chat.source import remove_written_fields
from weft.data.corpora import unread_files
from weft.data.source_report import SourceReport
from weft.data.tokenizer import Tokenizer
from weft.errors import UsageError, WeftError
from weft.pages import render
from weft.recipe import ANSWER_PAIRS, CONVERSATIONS, Data, Source


@dataclass(frozen=True)
class TokenRun:
    """Run of successive tokens of a conversation with equal weight, kind and message, for the preview.

    Attributes:
        ``text``: the text of all tokens of the run.
        ``weight``: loss weight of each token, 0 if the tokens are not learned.
        ``special``: whether the tokens are special tokens.
        ``cut``: whether the tokens are beyond the length of a row, and so are left out of training.
        ``message``: number of the message whose words, or whose learned turn, contain the tokens; -1 for text that the
            template adds.
    """

    text: str
    weight: float
    special: bool
    cut: bool
    message: int

    @property
    def learned(self) -> bool:
        """Whether the loss counts these tokens: their weight is above 0 and they are not cut off."""
        return self.weight > 0 and not self.cut


@dataclass(frozen=True)
class Sample:
    """A conversation that ``weft data preview`` shows.

    Attributes:
        ``place``: file and line of the conversation's record.
        ``pieces``: the conversation's text as runs of tokens.
        ``tokens``: number of tokens that are read.
        ``learned``: number of tokens that the loss counts.
        ``cut``: number of tokens that are cut off, because the conversation is longer than a row.
        ``roles``: role of each message.
    """

    place: str
    pieces: tuple[TokenRun, ...]
    tokens: int
    learned: int
    cut: int
    roles: tuple[str, ...]

    @property
    def facts(self) -> str:
        """Numbers of tokens that are read, learned and cut off, as text."""
        cut = f", {self.cut} more cut off" if self.cut else ""
        return f"{self.tokens} tokens, {self.learned} learned{cut}"

    def as_json(self) -> dict[str, Any]:
        """Return the sample as JSON: the place of its record, its numbers of tokens, and its text in pieces.

        Each piece has its text, its role, and whether it is learned and cut off. The role is None for the template's
        own text that is not learned.
        """
        pieces = []
        for (message, learned, cut), run in groupby(
            self.pieces, key=lambda p: (p.message, p.learned, p.cut)
        ):
            role = self.roles[message] if message >= 0 else None
            piece = {
                "text": "".join(part.text for part in run),
                "learned": learned,
                "role": role,
            }
            pieces.append(piece | ({"cut": True} if cut else {}))
        counts = {"tokens": self.tokens, "learned": self.learned, "cut": self.cut}
        return {"place": self.place} | counts | {"pieces": pieces}


def preview_samples(
    data: Data, tokenizer: Tokenizer, count: int
) -> tuple[list[Sample], list[str]]:
    """Return the first ``count`` conversations over all sources in ``data``, and lines with notes about them.

    Raises :class:`UsageError` if no source is of a kind that holds conversations, and :class:`WeftError` if they hold
    none.
    """
    sources = [source for source in data.sources if source.kind in CONVERSATIONS]
    if not sources:
        raise UsageError(
            "no data source is of kind 'chat', 'preference' or 'feedback'; weft data preview shows what is learned of "
            "conversations"
        )
    encoder = chat_encoder(data.chat, recipe_template(data.chat, tokenizer))
    shown: list[Sample] = []
    notes, reports = (
        Notes(tuple(encoder.template.stops)),
        [SourceReport() for _ in sources],
    )
    for source, report in zip(sources, reports, strict=True):
        for place, encoded in islice(
            _encoded(source, report, encoder), count - len(shown)
        ):
            notes.add(place, encoded.facts)
            size, row = (
                len(encoded.ids),
                data.seq_len // (2 if source.kind in ANSWER_PAIRS else 1),
            )
            cut = np.zeros(size, bool)
            if data.chat.truncation == "keep_end":
                cut[: max(0, size - row)] = True
            else:
                cut[
                    row if data.chat.truncation == "keep_start" or size <= row else 0 :
                ] = True
            special = np.isin(encoded.ids, [*tokenizer.specials.values()])
            columns = encoded.weights, special, cut, _messages(encoded)
            alike = [*zip(*(column.tolist() for column in columns), strict=True)]
            pieces, at = [], 0
            for key, run in groupby(range(size), key=alike.__getitem__):
                *_, last = run
                end = max(at, int(encoded.ends[last]))
                pieces.append(TokenRun(encoded.text[at:end], *key))
                at = end
            learned = int(((encoded.weights > 0) & ~cut)[1:].sum())
            roles = tuple(message["role"] for message in encoded.followed.talk.messages)
            shown.append(
                Sample(
                    str(place),
                    tuple(pieces),
                    int((~cut).sum()),
                    learned,
                    int(cut.sum()),
                    roles,
                )
            )
        remove_written_fields(report, encoder.template)
    lines = [
        line
        for source, report in zip(sources, reports, strict=True)
        for line in (*unread_files(source), *report.lines())
    ]
    if not shown:
        named = ", ".join(str(source.path) for source in sources)
        them = "it" if len(sources) == 1 else "them"
        raise WeftError(
            "; ".join([f"{named}: there is no conversation in {them}", *lines])
        )
    return shown, lines + notes.sentences()


def _encoded(
    source: Source, report: SourceReport, encoder: ChatEncoder
) -> Iterator[tuple[RecordLocation, Encoded]]:
    """Yield the samples of a source, encoded, each with the place of its record; of judged answers not those beside
    them.
    """
    for place, _, parts in encoded_records(source, report, encoder):
        yield from (
            (place, encoded)
            for encoded in (parts[:1] if source.kind == "feedback" else parts)
        )


def _messages(encoded: Encoded) -> np.ndarray:
    """Return the number of the message whose words each token has, or whose learned turn, else -1; int64
    ``[tokens]``.
    """
    numbers = np.full(len(encoded.ids), -1)
    shown = encoded.followed.shown
    parts = [
        (min(group), max(group), i)
        for i in {word.message for word in shown.words}
        for group in shown.groups(i)
    ]
    turns = [
        (span.start, span.end, span.number)
        for span in encoded.spans
        if span.number >= 0
    ]
    for start, end, number in [*parts, *turns]:
        numbers[(encoded.starts < end) & (encoded.ends > start)] = number
    return numbers


def format_sample(sample: Sample, colour: bool) -> Text:
    """Format a sample for the terminal, with colours if ``colour`` is set.

    Without colours, learned words stand in ⟦⟧, and words that are cut off are left out.
    """
    text = Text(overflow="fold")
    shown = [piece for piece in sample.pieces if colour or not piece.cut]
    for learned, run in groupby(shown, key=lambda piece: piece.learned):
        text.append("⟦" if learned and not colour else "")
        for piece in run:
            style = (
                "dim strike" if piece.cut else "bold black on green" if learned else ""
            )
            text.append(
                piece.text,
                f"{style} {'italic' if piece.special else ''}".strip() or None,
            )
        text.append("⟧" if learned and not colour else "")
    return text


def preview_page(name: str, data: Data, shown: Sequence[Sample]) -> str:
    """Return an HTML page that shows the samples ``shown``, read with the settings ``data`` of the recipe ``name``."""
    learn = (
        data.chat.learn
        if isinstance(data.chat.learn, str)
        else ", ".join(data.chat.learn)
    )
    return render(
        "data/chat/preview.html",
        name=name,
        samples=shown,
        learn=learn,
        seq_len=data.seq_len,
    )
