"""Marks in a text on its way through a chat template: where the words of which message went.

A mark is made of code points that Unicode keeps free of characters (U+FDD0 to U+FDEF), so no text can contain one.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from weft.encodable import encodable

#: Before the name of a special token in somebody's words: it stays text.
_TEXT = "\ufdd0"
#: Around what a template has between ``{% generation %}`` and ``{% endgeneration %}``.
_OPEN, _CLOSE = "\ufdd1", "\ufdd2"
#: Around the number of a message and of its part, in digits of base 16.
_MESSAGE, _END, _ZERO = "\ufdd3", "\ufdd4", 0xFDE0

_MARK = re.compile(f"{_MESSAGE}([\ufde0-\ufdef]+){_END}|[\ufdd0-\ufdef]")
#: The parts of a message that hold words: its content, its reasoning, and arguments and names of the tools it calls.
PARTS = ("content", "reasoning", "arguments", "name")
#: Where a message has its words. ``thinking`` and ``reasoning_content`` are two names of one thing.
_WORDS = {
    "content": "content",
    "reasoning_content": "reasoning",
    "thinking": "reasoning",
}


class JsonObject(dict[str, Any]):
    """A JSON object that was given as ``text``."""

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text


class WordMark(NamedTuple):
    """Words of a part of message number ``message`` begin or end at the position ``at`` of a text."""

    message: int
    at: int
    part: str


def generated(text: str) -> str:
    """``text`` marked as what the model is to generate."""
    return f"{_OPEN}{text}{_CLOSE}"


def cleaned(value: Any) -> Any:
    """A JSON value in which no text holds a mark or a lone surrogate, which no tokenizer can encode."""
    if isinstance(value, str):
        return encodable(re.sub("[\ufdd0-\ufdef]", "\ufffd", value))
    return mapped(cleaned, value)


def mapped(change: Any, value: Any) -> Any:
    """A JSON list or object with ``change`` made to what is in it, keys included; any other value as it is."""
    if isinstance(value, JsonObject):
        return JsonObject(
            {change(key): change(item) for key, item in value.items()},
            change(value.text),
        )
    if isinstance(value, dict):
        return {change(key): change(item) for key, item in value.items()}
    return [change(item) for item in value] if isinstance(value, list) else value


def protected(value: Any, names: re.Pattern[str]) -> Any:
    """A JSON value in which every one of ``names`` is marked as plain text."""
    if isinstance(value, str):
        return names.sub(lambda match: _TEXT + match[0], value)
    return mapped(lambda item: protected(item, names), value)


def numbered(
    message: dict[str, Any], number: int, parts: Collection[str] = PARTS
) -> dict[str, Any]:
    """``message`` with the words of its ``parts`` between marks with ``number``.

    The name of a tool is marked only where the arguments of its call have no words: a template may compare the name
    with those that it knows.
    """

    def mark(part: str) -> str:
        code = len(PARTS) * number + PARTS.index(part)
        return f"{_MESSAGE}{''.join(chr(_ZERO + int(digit, 16)) for digit in f'{code:x}')}{_END}"

    def around(value: Any, part: str) -> Any:
        """The mark stands inside white space, which templates strip."""
        if isinstance(value, str):
            words = value.strip()
            return (
                value.replace(words, f"{mark(part)}{words}{mark(part)}", 1)
                if words and part in parts
                else value
            )
        if isinstance(value, JsonObject):
            return JsonObject(
                {key: around(item, part) for key, item in value.items()},
                around(value.text, part),
            )
        if isinstance(value, dict):
            return {key: around(item, part) for key, item in value.items()}
        return (
            [around(item, part) for item in value] if isinstance(value, list) else value
        )

    marked = dict(message)
    for key, part in _WORDS.items():
        if isinstance(content := message.get(key), list):
            marked[key] = [
                item | {"text": around(item["text"], part)} if "text" in item else item
                for item in content
            ]
        elif key in message:
            marked[key] = around(message[key], part)
    if "tool_calls" in message:
        marked["tool_calls"] = []
        for call in message["tool_calls"]:
            function = call["function"]
            arguments, name = function["arguments"], function["name"]
            if has_words(arguments):
                arguments = around(arguments, "arguments")
            else:
                name = around(name, "name")
            marked["tool_calls"].append(
                call | {"function": function | {"name": name, "arguments": arguments}}
            )
    return marked


def has_words(value: Any) -> bool:
    """Whether a JSON value holds a text that is more than white space."""
    if isinstance(value, str):
        return bool(value.strip())
    inside = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list)
        else ()
    )
    return any(has_words(item) for item in inside)


def count_marks(value: Any) -> int:
    """How many ends of marked words a JSON value has."""
    if isinstance(value, str):
        return value.count(_MESSAGE)
    inside = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list)
        else ()
    )
    return sum(map(count_marks, inside))


def parts_with_words(message: dict[str, Any]) -> list[str]:
    """The parts of a message that :func:`numbered` can mark."""
    parts = {
        part for key, part in _WORDS.items() if has_words(_texts(message.get(key)))
    }
    for call in message.get("tool_calls", ()):
        parts.add("arguments" if has_words(call["function"]["arguments"]) else "name")
    return [part for part in PARTS if part in parts]


def _texts(content: Any) -> Any:
    """The texts of a content that may be a list of parts."""
    return (
        [part.get("text") for part in content] if isinstance(content, list) else content
    )


@dataclass(frozen=True)
class Marked:
    """A rendered text without its marks, and where these were.

    ``words``: where words of messages begin or end, in the order of the text.
    ``generations``: the spans between generation tags. ``plain``: where names of special tokens are somebody's words.
    """

    text: str
    words: tuple[WordMark, ...]
    generations: list[tuple[int, int]]
    plain: frozenset[int]

    def groups(self, number: int) -> list[list[int]]:
        """The positions at which words of the message begin or end, in runs with no other message's between them."""
        runs = groupby(self.words, key=lambda word: word.message)
        return [[word.at for word in run] for message, run in runs if message == number]

    def own_text(self, names: re.Pattern[str]) -> str:
        """The text with those of ``names`` blanked out that are somebody's words."""
        return names.sub(
            lambda match: (
                "\0" * len(match[0]) if match.start() in self.plain else match[0]
            ),
            self.text,
        )


def read_marks(rendered: str) -> Marked:
    """Take the marks out of ``rendered``."""
    pieces: list[str] = []
    words: list[WordMark] = []
    generations, plain, opened = [], set(), []
    last = at = 0
    for mark in _MARK.finditer(rendered):
        pieces.append(rendered[last : mark.start()])
        at += len(pieces[-1])
        last = mark.end()
        if mark[1]:
            code = int("".join(f"{ord(digit) - _ZERO:x}" for digit in mark[1]), 16)
            words.append(WordMark(code // len(PARTS), at, PARTS[code % len(PARTS)]))
        elif mark[0] == _TEXT:
            plain.add(at)
        elif mark[0] == _OPEN:
            opened.append(at)
        elif mark[0] == _CLOSE and opened:
            generations.append((opened.pop(), at))
    pieces.append(rendered[last:])
    return Marked("".join(pieces), tuple(words), sorted(generations), frozenset(plain))
