"""Form in which a model writes tool calls. It is derived from the model's chat template, and used to find calls in
answers and to force answers to be calls.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from weft.data.chat.chat_template import ChatTemplate, TemplateError
from weft.data.chat.edges import common_length
from weft.data.chat.reasoning import thoughts_of
from weft.data.json_text import parse_json, parse_json_at
from weft.encodable import encodable
from weft.generate.grammar import BLANKS
from weft.serve.json_values import encodable_json
from weft.serve.protocol import Language

#: An example of a call, whose words no template has itself.
_NAME, _ARGUMENTS = "weft_example", {"weft_key": "weft_value"}
_WRITTEN = re.compile(r'\{\s*"weft_key"\s*:\s*"weft_value"\s*\}')
#: What Lark's notation writes otherwise, with the pairs that a backslash begins.
_IN_LARK = re.compile(r"\\?\n|\\.|/", re.DOTALL)
_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "-", "parameters": {"type": "object"}},
}


class CallHead(NamedTuple):
    """The beginning of a tool call in a text.

    Attributes:
        ``start``: index in the text where the call's JSON object begins.
        ``name``: the tool's name as the model has written it, not necessarily a string but any JSON value. It is known
            only if the arguments have begun.
        ``arguments``: index in the text where the call's arguments begin; None if that is not certain.
    """

    start: int
    name: Any = None
    arguments: int | None = None


class ReadCall(NamedTuple):
    """The tool's name in a complete call, any JSON value, and the call's arguments as JSON."""

    name: Any
    arguments: str


@dataclass(frozen=True)
class _Written:
    """``before`` and ``behind``: all text around the arguments in a call of ``weft_example``."""

    before: str
    behind: str

    def grammar(
        self, tools: Sequence[dict[str, Any]], form: Language | None = None
    ) -> str:
        """Return a grammar, in Lark's notation, of texts that call one of ``tools`` once, with arguments of its schema.

        A text of the language ``form`` is as good, if it is given.
        """
        ways, starts = [], [f"call{number}" for number in range(len(tools))]
        for number, tool in enumerate(tools):
            before, behind = (
                text.replace(_NAME, tool["name"]) for text in (self.before, self.behind)
            )
            # A bare call's brace is a word of its own: the longest word wins, and a form may begin with a brace too.
            words = [before[:1], before[1:]] if before.startswith("{") else [before]
            ways += [
                f"call{number}: {' '.join(map(_quoted, words))} arguments{number} {_quoted(behind)}",
                f"arguments{number}: {_as_lark(tool.get('parameters') or {'type': 'object'})}",
            ]
        if form is not None:
            starts.append("form")
            ways.append(f"form: {_as_lark(form.text)}")
        return "\n".join([f"start: {' | '.join(starts)}", *ways])

    def cut(self, name: str, arguments: str) -> str:
        """Return the text of a call that was cut in its arguments."""
        return self.before.replace(_NAME, name) + arguments


@dataclass(frozen=True)
class ObjectCalls(_Written):
    """Form of tool calls that are JSON objects with a name and arguments, as Qwen, Llama and Mistral write them.

    ``opening``, ``closing``: the texts before and after each object. ``name``, ``arguments``: the object's keys for the
    name and the arguments.
    """

    opening: str
    closing: str
    name: str
    arguments: str

    @property
    def anchor(self) -> str:
        """Text that marks the beginning of the first call in an answer; empty if calls have no text around them."""
        return self.opening

    def begins(self, text: str, names: Collection[str] | None) -> bool | None:
        """Return whether ``text``, the beginning of an answer, starts with a tool call. Used only if no text stands
        before calls; then a call starts with a brace. ``names``: not used in this form.
        """
        return text.startswith("{")

    def skipped(self, text: str) -> int:
        """Return the index in ``text`` behind the separators at its beginning. Separators stand before, between and
        after calls.
        """
        match = self._between.match(text)
        assert match is not None  # it can be nothing
        return match.end()

    def head(self, text: str, further: bool) -> CallHead | None:
        """Return the beginning of the call that follows the separators at the beginning of ``text``. Return None if no
        call follows. ``further``: not used in this form.
        """
        start = self.skipped(text)
        if not text.startswith("{", start):
            return None
        if head := self._head.match(text, start):
            return CallHead(start, json_or_none(head[1]), head.end())
        return CallHead(start)

    def complete(self, head: CallHead, written: str) -> ReadCall | None:
        """Return the call whose object is ``written``; None if that is no JSON. ``head``: beginning of the call."""
        value = json_or_none(written)
        if not isinstance(value, dict):
            return None
        given = value.get(self.arguments, {})
        # as confused models write objects
        is_text = isinstance(given, str) and isinstance(json_or_none(given), dict)
        arguments = given if is_text else encodable_json(given)
        if encodable(arguments) != arguments:
            arguments = encodable_json(json_or_none(arguments))
        name = value.get(self.name) if head.arguments is None else head.name
        return ReadCall(name, arguments)

    @cached_property
    def _between(self) -> re.Pattern[str]:
        return re.compile(
            rf"\s*(?:{re.escape(self.closing)})?[\s,;]*(?:{re.escape(self.opening)})?\s*"
        )

    @cached_property
    def _head(self) -> re.Pattern[str]:
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


@dataclass(frozen=True)
class NamedCalls(_Written):
    """Form in which a model writes tool calls: a name, then a JSON object of arguments, with fixed texts around both.

    DeepSeek's models write calls in this form.

    Attributes:
        ``opening``: text before the first name.
        ``again``: text before every further name.
        ``middle``: text between a name and its arguments.
        ``closing``: text after each call.
        ``last``: text after all calls.
    """

    opening: str
    again: str
    middle: str
    closing: str
    last: str

    @property
    def anchor(self) -> str:
        """Text that marks the beginning of the first call in an answer; empty if calls have no text around them."""
        tag = _TAG.match(self.opening)
        return tag[0] if tag else self.opening

    def begins(self, text: str, names: Collection[str] | None) -> bool | None:
        """Return whether ``text``, the beginning of an answer, starts with a call of one of ``names``. It is called
        only if no text stands before calls. Return None if ``text`` is too short to decide.
        """
        words = "".join(text.split())
        heads = ["".join(f"{name}{self.middle}{{".split()) for name in names or ()]
        if any(words.startswith(head) for head in heads):
            return True
        return None if any(head.startswith(words) for head in heads) else False

    def skipped(self, text: str) -> int:
        """Return the index in ``text`` behind the separators at its beginning. Separators stand after calls."""
        match = self._after.match(text)
        assert match is not None  # it can be nothing
        return match.end()

    def head(self, text: str, further: bool) -> CallHead | None:
        """Return the beginning of the call with which ``text`` begins. Return None if it begins with no call.
        ``further``: whether a call stands before ``text``.
        """
        head = (self._further if further else self._first).match(text)
        if head is None or not text.startswith("{", head.end()):
            return None
        return CallHead(head.end(), head[1], head.end())

    def complete(self, head: CallHead, written: str) -> ReadCall | None:
        """Return the call whose arguments are ``written``; None if they are no JSON. ``head``: the call's beginning."""
        is_object = isinstance(json_or_none(written), dict)
        return ReadCall(head.name, written) if is_object else None

    @cached_property
    def _first(self) -> re.Pattern[str]:
        return re.compile(f"{_loose(self.opening)}{self._name}")

    @cached_property
    def _further(self) -> re.Pattern[str]:
        # The separators take commas of their own, and give none back.
        again = "|".join(
            _loose(text.lstrip(" \t\r\n,;")) for text in (self.again, self.opening)
        )
        closing = f"(?:{_loose(self.closing)})?"
        return re.compile(rf"\s*+{closing}[\s,;]*+(?:{again}){self._name}")

    @property
    def _name(self) -> str:
        return rf"([a-zA-Z0-9_.-]+){_loose(self.middle)}"

    @cached_property
    def _after(self) -> re.Pattern[str]:
        return re.compile(rf"\s*(?:{_loose(self.closing)})?(?:{_loose(self.last)})?\s*")


CallForm: TypeAlias = ObjectCalls | NamedCalls


def _loose(text: str) -> str:
    """Return a pattern of ``text`` that takes any white space around and inside it. What it has taken it does not give
    back: with several such patterns in a row, a long run of white space would take its length cubed.
    """
    words = ["", *map(re.escape, text.split()), ""]
    return r"\s*+".join(words)


def _quoted(text: str) -> str:
    """Quote ``text`` as a word of a grammar; return an empty text for an empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _as_lark(form: str | dict[str, Any]) -> str:
    """Return a regular expression or a JSON schema in Lark's notation."""
    if isinstance(form, str):
        return f"/{_IN_LARK.sub(_lark_piece, form)}/"
    return f"%json {json.dumps(form | {'x-guidance': {'whitespace_pattern': BLANKS}})}"


def _lark_piece(match: re.Match[str]) -> str:
    """Return a piece of a regular expression, matched by ``_IN_LARK``, as it stands between slashes in one line."""
    piece = match[0]
    if piece.endswith("\n"):
        return "\\n"
    return "\\/" if piece == "/" else piece


def json_or_none(text: str) -> Any:
    """Parse ``text`` as JSON and return the value; None if the text is not valid JSON, or too deeply nested."""
    try:
        return parse_json(text)
    except ValueError:
        return None


def _json_at(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at ``start``, and where it ends; None, and the text's end, if it is incomplete
    or too deeply nested.
    """
    try:
        return parse_json_at(text, start)
    except ValueError:
        return None, len(text)


def call_form(template: ChatTemplate) -> CallForm | None:
    """Return the form in which the chat template ``template`` writes tool calls. The result is None if the template
    does not write arguments as JSON, or does not show tools to the model.
    """
    asked = {"role": "user", "content": "?"}
    try:
        prompt = template.render([asked], [_TOOL], prompt=True).text
        written = _calls_of(template, prompt, 1)
    except TemplateError:
        return None
    arguments = _WRITTEN.search(written)
    if _NAME not in prompt or arguments is None:
        return None
    return _object_calls(written, arguments) or _named_calls(template, prompt, written)


def shows_tools(template: ChatTemplate) -> bool:
    """Return whether the chat template ``template`` writes into the prompt which tools a request offers."""
    try:
        return (
            _NAME in template.render([{"role": "user", "content": "?"}], [_TOOL]).text
        )
    except TemplateError:
        return False


def _calls_of(template: ChatTemplate, prompt: str, count: int) -> str:
    """Return the text in which the assistant calls the example ``count`` times, after ``prompt``."""
    calls = [
        {
            "id": f"callcall{number}",
            "type": "function",
            "function": {"name": _NAME, "arguments": _ARGUMENTS},
        }
        for number in range(count)
    ]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    text = template.render([{"role": "user", "content": "?"}, said], [_TOOL]).text
    written = text[common_length(prompt, text) :]
    # Some templates write empty reasoning before a last turn (Qwen3's), and a model other words in its place.
    if thoughts := thoughts_of(template.source):
        before, name, rest = written.partition(_NAME)
        written = before.rpartition(thoughts.closing)[2] + name + rest
    return template.ends.sub("", written)


def _object_calls(written: str, arguments: re.Match[str]) -> ObjectCalls | None:
    for brace in re.finditer(r"\{", written[: arguments.start() + 1]):
        start = brace.start()
        value, end = _json_at(written, start)
        keys = {str(item): key for key, item in (value or {}).items()}
        if {_NAME, str(_ARGUMENTS)} <= keys.keys():
            opening, closing = written[:start].lstrip(), written[end:].rstrip()
            return ObjectCalls(
                before=opening + written[start : arguments.start()],
                behind=written[arguments.end() : end] + closing,
                opening=opening.strip(),
                closing=closing.strip(),
                name=keys[_NAME],
                arguments=keys[str(_ARGUMENTS)],
            )
    return None


def _named_calls(template: ChatTemplate, prompt: str, single: str) -> NamedCalls | None:
    try:
        written = _calls_of(template, prompt, 2)
    except TemplateError:  # it writes one call at a time
        written = single + single
    pieces = re.split(f"({_NAME}|{_WRITTEN.pattern})", written)
    # its name and its arguments stand in each call once
    if [*map(len, pieces[1::2])][::2] != [len(_NAME)] * 2 or len(pieces) != 9:
        return None
    opening, middle, between, behind = (
        pieces[0].lstrip(),
        pieces[2],
        pieces[4],
        pieces[8],
    )
    between, behind = between.lstrip(), behind.rstrip()
    each = common_length(between, behind.lstrip())
    return NamedCalls(
        before=f"{opening}{_NAME}{middle}",
        behind=behind,
        opening=opening.strip(),
        again=between[each:].strip(),
        middle=middle.strip(),
        closing=between[:each].strip(),
        last=behind.lstrip()[each:].strip(),
    )
