"""Finds tool calls in a model's text, as the text comes in pieces."""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from weft.serve.call_form import CallForm, CallHead
from weft.serve.object_extent import ObjectExtent

#: The beginning of a call is looked for until so many characters stand before its arguments: at every piece of text
#: the search begins anew, and a model may write white space or a name without end. At the end of the text it is looked
#: for once more, at any length.
LONGEST_HEAD = 1024


class Call(NamedTuple):
    """A complete tool call: the name of the tool, and its arguments as JSON."""

    name: str
    arguments: str  # JSON


class CallPiece(NamedTuple):
    """A new piece of a tool call in a stream.

    ``number``: number of the call in its answer, from 0. ``name``: name of the tool in the call's first piece, None in
    its other pieces. ``arguments``: further text of the call's arguments, which are JSON.
    """

    number: int
    name: str | None
    arguments: str


class AnswerEnd(NamedTuple):
    """The end of an answer.

    ``text``: the rest of the answer's text. ``calls``: the last pieces of its tool calls. Both were held back until it
    was clear whether they were text or a call. ``finish``: the finish reason to report.
    """

    text: str
    calls: list[CallPiece]
    finish: str


class _OpenCall:
    """A call that has begun. ``head``: the beginning of the call."""

    def __init__(self, head: CallHead) -> None:
        self.head = head
        self.shown = 0  # characters of its arguments that were given out
        self.object, self._arguments = ObjectExtent(), ObjectExtent()

    def add(self, piece: str) -> str:
        """Take ``piece``, the next part of the text from the call's object on. Return the part of it that belongs to
        the call's arguments.
        """
        length = self.object.length
        self.object.add(piece)
        if self.head.arguments is None:
            return ""
        rest = piece[max(0, self.head.arguments - self.head.start - length) :]
        return rest[: self._arguments.add(rest)]


class CallFinder:
    """Finds tool calls in an answer whose text comes in pieces.

    All text from the beginning of the first call on is held back. A piece takes a time that does not grow with the
    text before it.

    Args:
        ``form``: how the model writes calls.
        ``streams``: whether the arguments of a call are returned in pieces as they come, as soon as its name is known.
            Otherwise a call is returned when it is complete.
        ``names``: names of the tools that may be called; None: any name. A call with any other name counts as text.
        ``most``: largest number of calls; None: any number.
    """

    def __init__(
        self,
        form: CallForm,
        streams: bool = False,
        names: Collection[str] | None = None,
        most: int | None = None,
    ) -> None:
        self.form, self.streams, self.names, self.most = form, streams, names, most
        self._pieces: list[str] = []
        self.calls: list[Call] = []  # those that are whole
        self._begun = self._reached = False
        self._open: _OpenCall | None = None
        # characters in which no call has begun, and whether the text goes on with what can be no call
        self._searched, self._broken = 0, False

    @property
    def kept(self) -> str:
        """Text that was held back: behind the last complete call, or from the beginning of the first call on."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def add(self, piece: str) -> tuple[str, list[CallPiece]]:
        """Take a further ``piece`` of the answer's text. Return the text that certainly belongs to no call, and a list
        of the new pieces of calls.
        """
        self._pieces.append(piece)
        text = "" if self._reached else self._before()
        return text, list(self._news(piece)) if self._reached and (
            self.streams or self.most
        ) else []

    def _before(self) -> str:
        """Return the text before the first call, as far as it is certain."""
        if not self.form.anchor:
            return self._before_alone()
        at = self.kept.find(self.form.anchor)
        if at < 0:
            anchor = self.form.anchor
            held = max(
                (n for n in range(1, len(anchor)) if self.kept.endswith(anchor[:n])),
                default=0,
            )
            return self._release(len(self.kept) - held)
        self._reached = True
        return self._release(at)

    def _before_alone(self) -> str:
        """Return the text before the first call if calls stand alone: the whole text is a call, or it has none."""
        if not (text := self.kept.lstrip()) and not self._begun:
            return ""
        begins = False if self._begun else self.form.begins(text, self.names)
        self._reached, self._begun = begins is True, begins is False
        return self._release(len(self.kept)) if self._begun else ""

    @property
    def full(self) -> bool:
        """Whether the answer has the largest number of tool calls that it may have."""
        return len(self.calls) == self.most

    def _is_callable(self, name: Any) -> bool:
        return isinstance(name, str) and (self.names is None or name in self.names)

    def _release(self, count: int) -> str:
        kept = self.kept
        self._pieces = [kept[count:]]
        return kept[:count]

    def _news(self, piece: str, last: bool = False) -> Iterator[CallPiece]:
        """Yield the new parts of calls. ``piece``: the latest part of the text. ``last``: whether no text follows."""
        while not self.full and not self._broken:
            if self._open is None:
                if (begun := self._begin(last)) is None:
                    return
                self._open, piece = begun
            call, number = self._open, len(self.calls)
            more, early = (
                call.add(piece),
                self.streams and call.head.arguments is not None,
            )
            if call.head.arguments is not None and not self._is_callable(
                call.head.name
            ):
                self._broken = True
                return
            if early and more:
                yield CallPiece(number, None if call.shown else call.head.name, more)
                call.shown += len(more)
            if not call.object.complete:
                return
            written = self.kept[call.head.start :][: call.object.length]
            read = self.form.complete(call.head, written)
            if read is None or not self._is_callable(read.name):
                self._broken = True
                return
            self.calls.append(Call(*read))
            if not early:
                yield CallPiece(number, *read)
            self._release(call.head.start + call.object.length)
            self._open, self._searched = None, 0

    def _begin(self, last: bool) -> tuple[_OpenCall, str] | None:
        """Return the call that begins in the text, and the text from its object on. Return None if none has begun.
        ``last``: whether no text follows.
        """
        if self._searched > LONGEST_HEAD and not last:
            return None
        text = self.kept
        self._searched = len(text)
        if (head := self.form.head(text, bool(self.calls))) is None:
            return None
        written = text[head.start :]
        if head.arguments is None and not last and len(text) <= LONGEST_HEAD:
            # its name may yet come, unless the call is complete
            extent = ObjectExtent()
            extent.add(written)
            if not extent.complete:
                return None
        return _OpenCall(head), written

    def end(self, finish: str) -> AnswerEnd:
        """End the answer, whose generation has ended for the reason ``finish``: "stop" or "length". Return the text and
        the calls that were held back. The finish reason in the result is "tool_calls" if the answer ends with a
        complete call.
        """
        pieces = list(self._news("", True)) if self._reached else []
        if self.full:  # what stands behind the last call is left out
            return AnswerEnd("", pieces, "tool_calls")
        left = self.kept[self.form.skipped(self.kept) if self.calls else 0 :]
        called = self.calls and (finish == "stop" or not left)
        shown = self._open is not None and self._open.shown
        return AnswerEnd(
            "" if shown else left, pieces, "tool_calls" if called else finish
        )
