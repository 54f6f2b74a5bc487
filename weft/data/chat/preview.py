"""Conversations as a run would read them, in pieces that show which tokens the loss counts: for terminal and page."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from rich.text import Text

from weft.data.chat.encode import ChatEncoder
from weft.data.chat.source import chat_template, conversations, encode_record
from weft.data.tokenizer import Tokenizer
from weft.errors import UsageError
from weft.pages import render
from weft.recipe import Data


@dataclass(frozen=True)
class TokenRun:
    """Tokens in a row that are alike. ``weight``: 0 is read only; ``cut``: beyond what a row holds."""

    text: str
    weight: float
    special: bool
    cut: bool


@dataclass(frozen=True)
class Sample:
    """One conversation: where it stands, its pieces, and how many of its tokens are read, learned and cut off."""

    place: str
    pieces: tuple[TokenRun, ...]
    tokens: int
    learned: int
    cut: int

    @property
    def facts(self) -> str:
        cut = f", {self.cut} more cut off" if self.cut else ""
        return f"{self.tokens} tokens, {self.learned} learned{cut}"


def samples(data: Data, tokenizer: Tokenizer, count: int) -> list[Sample]:
    """The first ``count`` conversations of the recipe's sources."""
    sources = [source for source in data.sources if source.kind in ("chat", "preference")]
    if not sources:
        raise UsageError(
            "no data source is of kind 'chat' or 'preference'; weft data preview shows what is learned of conversations"
        )
    encoder = ChatEncoder(chat_template(data.chat, tokenizer), data.chat.learn)
    found: list[Sample] = []
    for source in sources:
        for place, talk in conversations(source):
            if len(found) == count:
                return found
            encoded = encode_record(encoder, place, talk)
            size, row = len(encoded.ids), data.seq_len // (2 if source.kind == "preference" else 1)
            cut = np.zeros(size, bool)
            if data.chat.truncation == "keep_end":
                cut[: max(0, size - row)] = True
            else:
                cut[row if data.chat.truncation == "keep_start" or size <= row else 0 :] = True
            special = np.isin(encoded.ids, [*tokenizer.specials.values()])
            alike = [*zip(encoded.weights.tolist(), special.tolist(), cut.tolist(), strict=True)]
            pieces, at = [], 0
            for key, run in groupby(range(size), key=alike.__getitem__):
                *_, last = run
                end = max(at, int(encoded.ends[last]))
                pieces.append(TokenRun(encoded.text[at:end], *key))
                at = end
            learned = int(((encoded.weights > 0) & ~cut)[1:].sum())
            found.append(Sample(str(place), tuple(pieces), int((~cut).sum()), learned, int(cut.sum())))
    return found


def coloured(sample: Sample, colour: bool) -> Text:
    """A sample for the terminal; without colours learned words stand between ⟦ and ⟧, and what is cut is left out."""
    text = Text(overflow="fold")
    shown = [piece for piece in sample.pieces if colour or not piece.cut]
    for learned, run in groupby(shown, key=lambda piece: piece.weight > 0 and not piece.cut):
        text.append("⟦" if learned and not colour else "")
        for piece in run:
            style = "dim strike" if piece.cut else "bold black on green" if learned else ""
            text.append(piece.text, f"{style} {'italic' if piece.special else ''}".strip() or None)
        text.append("⟧" if learned and not colour else "")
    return text


def page(name: str, data: Data, shown: Sequence[Sample]) -> str:
    """The samples as one HTML page."""
    learn = data.chat.learn if isinstance(data.chat.learn, str) else ", ".join(data.chat.learn)
    return render("data/chat/preview.html", name=name, samples=shown, learn=learn, seq_len=data.seq_len)
