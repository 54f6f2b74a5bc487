"""Tool calls in the format of a model's own chat template: parsed from its text, or forced."""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

from weft.data.chat.template import ChatTemplate, TemplateError
from weft.generate.grammar import BLANKS
from weft.serve.protocol import Language

#: An example of a call, whose words no template has itself.
_NAME, _ARGUMENTS = "weft_example", {"weft_key": "weft_value"}
_WRITTEN = re.compile(r'\{\s*"weft_key"\s*:\s*"weft_value"\s*\}')


class Call(NamedTuple):
    name: str
    arguments: str  # JSON


class CallPiece(NamedTuple):
    """What is new of a call: its name when it begins (else None), and more text of its arguments."""

    number: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class CallForm:
    """How a template writes calls: a JSON object with the keys ``name`` and ``arguments``, in ``opening``, ``closing``.

    ``before`` and ``behind``: all text around the arguments in a call of ``weft_example``.
    """

    opening: str
    closing: str
    name: str
    arguments: str
    before: str
    behind: str

    def grammar(
        self, tools: Sequence[dict[str, Any]], form: Language | None = None
    ) -> str:
        """A grammar, in Lark's notation, of texts that call one of ``tools`` once, with arguments of its schema.

        A text of the language ``form`` is as good, if it is given.
        """
        ways, starts = [], [f"call{number}" for number in range(len(tools))]
        for number, tool in enumerate(tools):
            text, last = (
                part.replace(_NAME, tool["name"]) for part in (self.before, self.behind)
            )
            # A bare call's brace is a word of its own: the longest word wins, and a form may begin with a brace too.
            words = [text] if self.opening else [text[:1], text[1:]]
            before, behind = " ".join(map(_quoted, words)), _quoted(last)
            ways += [
                f"call{number}: {before} arguments{number} {behind}",
                f"arguments{number}: {_as_lark(tool.get('parameters') or {'type': 'object'})}",
            ]
        if form is not None:
            starts.append("form")
            ways.append(f"form: {_as_lark(form.text)}")
        return "\n".join([f"start: {' | '.join(starts)}", *ways])

    def begun(self, name: str, arguments: str) -> str:
        """What the model had written of a call when it was cut in its arguments."""
        return self.before.replace(_NAME, name) + arguments

    @cached_property
    def between(self) -> re.Pattern[str]:
        """Matches the text before, between and after calls."""
        return re.compile(
            rf"\s*(?:{re.escape(self.closing)})?[\s,;]*(?:{re.escape(self.opening)})?\s*"
        )

    @cached_property
    def head(self) -> re.Pattern[str]:
        """Matches a call up to its arguments, if its name comes first."""
        name, arguments = (
            re.escape(json.dumps(key)) for key in (self.name, self.arguments)
        )
        return re.compile(
            r"\{\s*"
            + name
            + r'\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
            + arguments
            + r"\s*:\s*(?=\{)"
        )


def _quoted(text: str) -> str:
    """``text`` as a word of a grammar; nothing for none."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _as_lark(form: str | dict[str, Any]) -> str:
    """A regular expression or a JSON schema in Lark's notation."""
    if isinstance(form, str):
        return (
            "/"
            + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", form).replace("\n", "\\n")
            + "/"
        )
    return f"%json {json.dumps(form | {'x-guidance': {'whitespace_pattern': BLANKS}})}"


def call_form(template: ChatTemplate) -> CallForm | None:
    """How ``template`` writes calls; None if it does not show tools to the model, or does not write calls as JSON."""
    tool = {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "-",
            "parameters": {"type": "object"},
        },
    }
    call = {
        "id": "callcall1",
        "type": "function",
        "function": {"name": _NAME, "arguments": _ARGUMENTS},
    }
    asked = {"role": "user", "content": "?"}
    try:
        with_tool = template.render([asked], [tool], prompt=True).text
        said = template.render(
            [asked, {"role": "assistant", "content": "", "tool_calls": [call]}], [tool]
        ).text
    except TemplateError:
        return None
    written = said[
        sum(
            1
            for _ in takewhile(
                lambda pair: pair[0] == pair[1], zip(with_tool, said, strict=False)
            )
        ) :
    ]
    arguments = _WRITTEN.search(written)
    if _NAME not in with_tool or arguments is None:
        return None
    for start in (
        brace.start() for brace in re.finditer(r"\{", written[: arguments.start() + 1])
    ):
        try:
            value, end = json.JSONDecoder().raw_decode(written, start)
        except ValueError:
            continue
        keys = {str(each): key for key, each in value.items()}
        if {_NAME, str(_ARGUMENTS)} <= keys.keys():
            plain = [
                template.specials.sub("", text)
                for text in (written[:start], written[end:])
            ]
            opening, closing = plain[0].lstrip(), plain[1].rstrip()
            before, behind = (
                written[start : arguments.start()],
                written[arguments.end() : end],
            )
            return CallForm(opening.strip(), closing.strip(), keys[_NAME], keys[str(_ARGUMENTS)],
                            opening + before, behind + closing)  # fmt: skip
    return None


class CallFinder:
    """Finds calls in a text that comes in pieces. All text from the beginning of the first call on is held back.

    ``streams``: calls are given out in pieces, once their names are known, and not only when they are complete.
    ``names``: what can be called (None: anything); with another name a text is no call. ``most``: calls at most.
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
        self._begun = self._found = False
        # where the last of them ends, and what was given out of the next one's arguments
        self._at = self._shown = 0

    def add(self, piece: str) -> tuple[str, list[CallPiece]]:
        """Add ``piece``; returns the text that is no call, as far as it is certain, and what is new of calls."""
        self.kept += piece
        text = "" if self._found else self._before()
        return text, list(self._news()) if self._found and (
            self.streams or self.most
        ) else []

    def _before(self) -> str:
        """The text before the first call, as far as it can be told."""
        # calls are bare objects: a text is one from its first character on, or none
        if not self.form.opening:
            text = self.kept.lstrip()
            self._begun, self._found = (
                bool(text) or self._begun,
                text.startswith("{") and not self._begun,
            )
            return "" if self._found or not text else self._release(len(self.kept))
        at = self.kept.find(self.form.opening)
        if at < 0:
            opening = self.form.opening
            held = max(
                (n for n in range(1, len(opening)) if self.kept.endswith(opening[:n])),
                default=0,
            )
            return self._release(len(self.kept) - held)
        self._found = True
        return self._release(at)

    @property
    def full(self) -> bool:
        """Whether there are as many calls as there can be."""
        return len(self.calls) == self.most

    def _is_callable(self, name: Any) -> bool:
        return isinstance(name, str) and (self.names is None or name in self.names)

    def _release(self, count: int) -> str:
        text, self.kept = self.kept[:count], self.kept[count:]
        return text

    def _next(self) -> int:
        """The index at which the next call begins, if there is one."""
        match = self.form.between.match(self.kept, self._at)
        assert match is not None  # it can be nothing
        return match.end()

    def _value(self, start: int) -> tuple[Any, int]:
        """The JSON value that begins at ``start``, and where it ends; None, and the text's end, if it is incomplete."""
        try:
            return json.JSONDecoder().raw_decode(self.kept, start)
        except ValueError:
            return None, len(self.kept)

    def _news(self) -> Iterator[CallPiece]:
        """What is new of calls."""
        while not self.full and self.kept.startswith("{", start := self._next()):
            value, end = self._value(start)
            head = self.form.head.match(self.kept, start) if self.streams else None
            if head and not self._is_callable(_read(head[1])):
                return
            if head:
                _, last = self._value(head.end())
                more = self.kept[head.end() + self._shown : last]
                if more:
                    yield CallPiece(
                        len(self.calls), None if self._shown else _read(head[1]), more
                    )
                self._shown += len(more)
            if not isinstance(value, dict) or not self._is_callable(
                value.get(self.form.name)
            ):
                return
            given = value.get(self.form.arguments, {})
            # as confused models write objects
            is_text = isinstance(given, str) and isinstance(_read(given), dict)
            arguments = given if is_text else json.dumps(given, ensure_ascii=False)
            call = Call(value[self.form.name], arguments)
            if not head:
                yield CallPiece(len(self.calls), *call)
            self.calls.append(call)
            self._at, self._shown = end, 0

    def end(self, finish: str) -> tuple[str, list[CallPiece], str]:
        """The text has ended for the reason ``finish``: the rest of it, the rest of calls, and the reason to report."""
        pieces = list(self._news()) if self._found else []
        if self.full:  # what stands behind the last call is left out
            return "", pieces, "tool_calls"
        left = self.kept[self._next() if self.calls else 0 :]
        called = self.calls and (finish == "stop" or not left)
        return "" if self._shown else left, pieces, "tool_calls" if called else finish


def _read(text: str) -> Any:
    """The value that ``text`` is in JSON; None if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None
