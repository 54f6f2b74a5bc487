"""Text from ids that arrive one by one: whole characters only, holding back what may begin a stop string."""

from collections.abc import Iterable, Iterator, Sequence

from weft.data.tokenizer import Tokenizer


class Writer:
    """The pieces that :meth:`add` and :meth:`end` return add up to the text of all ids, up to the first stop string.

    ``stopped`` is the stop string that has come, if any; it may have begun in one token and ended in another.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.stopped: str | None = None
        self._shown: list[int] = []
        self._fresh: list[int] = []
        self._held = ""  # what a stop string may begin with

    def add(self, i: int) -> str:
        """What can be shown now that ``i`` has come."""
        self._fresh.append(i)
        # What new ids add to the text of the ones just before: tokenizers may drop the space of a first token.
        before, text = (
            self.tokenizer.decode(self._shown),
            self.tokenizer.decode(self._shown + self._fresh),
        )
        # U+FFFD at the end: some bytes of the last character are still to come.
        if len(text) <= len(before) or text.endswith("\ufffd"):
            return ""
        self._shown, self._fresh = self._fresh, []
        return self._checked(text[len(before) :])

    def end(self) -> str:
        """What is left when no more ids come."""
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
    """Text of ``ids`` piece by piece, and no id more is asked for once one of ``stops`` has come."""
    writer = Writer(tokenizer, stops)
    for i in ids:
        if piece := writer.add(i):
            yield piece
        if writer.stopped:
            return
    if rest := writer.end():
        yield rest
