"""Decode ids that arrive one by one: whole characters only, without a text that may begin a stop string."""

from collections.abc import Iterable, Iterator, Sequence

from weft.data.tokenizer import Tokenizer

#: Ids that an incomplete character has at most, as its last byte is missing; and ids of which some must be more than
#: one.
MOST_PARTS, MOST_PENDING = 3, 8


class TextDecoder:
    """Decodes token ids one by one, up to the first of the stop strings ``stops``.

    The texts from :meth:`add` and :meth:`end` join to the text before the stop string, which may span several tokens.
    ``stopped``: the stop string that ended the text, or None.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.stopped: str | None = None
        self._shown: list[int] = []
        self._fresh: list[int] = []
        self._held = ""  # what a stop string may begin with

    def add(self, i: int) -> str:
        """Add token id ``i``, and return the text that no later id can change.

        Bytes of an incomplete character, and text that may begin a stop string, are held back until later ids decide.
        """
        self._fresh.append(i)
        # What new ids add to the text of the ones just before: tokenizers may drop the space of a first token.
        before, text = (
            self.tokenizer.decode(self._shown),
            self.tokenizer.decode(self._shown + self._fresh),
        )
        # U+FFFD at the end: some bytes of the last character are still to come.
        if len(text) > len(before) and not text.endswith("\ufffd"):
            self._shown, self._fresh = self._fresh, []
            return self._checked(text[len(before) :])
        if len(self._fresh) < MOST_PENDING:
            return ""
        # So many begin no character: the first ones are no text, or bytes that are none. Held for ever, each id would
        # take as long as all before it.
        certain, self._fresh = self._fresh[:-MOST_PARTS], self._fresh[-MOST_PARTS:]
        text = self.tokenizer.decode(self._shown + certain)
        if len(text) <= len(before):
            return ""
        self._shown = certain
        return self._checked(text[len(before) :])

    def end(self) -> str:
        """Return the text that is still held back, after the last id was added."""
        rest = self.tokenizer.decode(self._shown + self._fresh)[
            len(self.tokenizer.decode(self._shown)) :
        ]
        shown = self._checked(rest)
        return shown if self.stopped else shown + self._held

    def _checked(self, piece: str) -> str:
        """``piece`` behind what was held, up to a stop string or to what may become one."""
        if self.stopped:
            return ""
        text = self._held + piece
        stops = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if stops:
            at, self.stopped = min(stops, key=lambda place: place[0])
            return text[:at]
        begun = [
            n
            for stop in self.stops
            for n in range(1, len(stop))
            if text.endswith(stop[:n])
        ]
        self._held = text[len(text) - max(begun, default=0) :]
        return text[: len(text) - len(self._held)]


def stream_text(
    tokenizer: Tokenizer, ids: Iterable[int], stops: Sequence[str] = ()
) -> Iterator[str]:
    """Decode token ids one by one, and yield pieces of the text that later ids cannot change.

    ``stops``: stop strings. The text ends before the first of them; after it is complete, no further id is requested.
    """
    writer = TextDecoder(tokenizer, stops)
    for i in ids:
        if piece := writer.add(i):
            yield piece
        if writer.stopped:
            return
    if rest := writer.end():
        yield rest
