"""Finds tool calls in a model's text, as the text comes in pieces."""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from weft.serve.call_form import CallForm


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


class CallFinder:
    """Finds tool calls in an answer whose text comes in pieces.

    All text from the beginning of the first call on is held back.

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
        self.form, self.streams, self.names, self.most, self.kept = (
            form,
            streams,
            names,
            most,
            "",
        )
        self.calls: list[Call] = []  # those that are whole
        self._begun = self._reached = False
        # where the last of them ends, and what was given out of the next one's arguments
        self._at = self._shown = 0

    def add(self, piece: str) -> tuple[str, list[CallPiece]]:
        """Take a further ``piece`` of the answer's text. Return the text that certainly belongs to no call, and a list
        of the new pieces of calls.
        """
        self.kept += piece
        text = "" if self._reached else self._before()
        return text, list(self._news()) if self._reached and (
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
        text, self.kept = self.kept[:count], self.kept[count:]
        return text

    def _news(self) -> Iterator[CallPiece]:
        """Yield the new parts of calls."""
        while not self.full and (call := self.form.read(self.kept, self._at)):
            early = call.so_far if self.streams else None
            if early is None and call.arguments is None:
                return
            if not self._is_callable(call.name):
                return
            number = len(self.calls)
            if early is not None:
                more = early[self._shown :]
                if more:
                    yield CallPiece(number, None if self._shown else call.name, more)
                self._shown += len(more)
            if call.arguments is None:
                return
            self.calls.append(Call(call.name, call.arguments))
            if early is None:
                yield CallPiece(number, *self.calls[-1])
            self._at, self._shown = call.end, 0

    def end(self, finish: str) -> AnswerEnd:
        """End the answer, whose generation has ended for the reason ``finish``: "stop" or "length". Return the text and
        the calls that were held back. The finish reason in the result is "tool_calls" if the answer ends with a
        complete call.
        """
        pieces = list(self._news()) if self._reached else []
        if self.full:  # what stands behind the last call is left out
            return AnswerEnd("", pieces, "tool_calls")
        left = self.kept[self.form.skipped(self.kept, self._at) if self.calls else 0 :]
        called = self.calls and (finish == "stop" or not left)
        return AnswerEnd(
            "" if self._shown else left, pieces, "tool_calls" if called else finish
        )
