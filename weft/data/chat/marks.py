"""Marks around the words of messages, which show where a chat template writes them.

Marks are code points that Unicode reserves as noncharacters (U+FDD0 to U+FDEF), so no text contains one.
"""

import re
from collections.abc import Collection, Iterator, Mapping
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
#: Where a message has its words. Those of reasoning are names of one thing.
_WORDS = {
    "content": "content",
    "reasoning_content": "reasoning",
    "thinking": "reasoning",
    "reasoning": "reasoning",
}


class JsonObject(dict[str, Any]):
    """Dictionary of a JSON object that also keeps the JSON text from which it was read (``text``), so that it can be
    written unchanged.
    """

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text


class WordMark(NamedTuple):
    """Position ``at`` in a rendered text where marked words of a message begin or end.

    ``message``: number of the message; ``part``: name of the message's part that holds the words, such as ``content``.
    """

    message: int
    at: int
    part: str


def mark_generated(text: str) -> str:
    """Return ``text`` with marks around it, invisible characters that no text contains. They say that the model
    generates the text.
    """
    return f"{_OPEN}{text}{_CLOSE}"


def without_marks(value: Any) -> Any:
    """Return a JSON value in whose texts characters are replaced that Weft uses as marks, or that tokenizers cannot
    encode.

    The characters of marks, Unicode's noncharacters U+FDD0 to U+FDEF, become U+FFFD. Lone surrogates become question
    marks.
    """
    if isinstance(value, str):
        return encodable(re.sub("[\ufdd0-\ufdef]", "\ufffd", value))
    return map_json(without_marks, value)


def map_json(change: Any, value: Any, rename: Any = None) -> Any:
    """Return a JSON value with ``change`` applied to the elements of a list or the values of an object.

    ``change``: function of one element or value. ``rename``: the function that is applied to the keys of an object, by
    default ``change`` as well. A value that is neither list nor object is returned unchanged.
    """
    if isinstance(value, dict):
        rename = rename or change
        items = {rename(key): change(item) for key, item in value.items()}
        if isinstance(value, JsonObject):
            return JsonObject(items, change(value.text))
        return items
    return [change(item) for item in value] if isinstance(value, list) else value


def mark_plain_names(value: Any, names: re.Pattern[str]) -> Any:
    """Mark the matches of ``names`` in all texts of a JSON value as plain text, by a mark before each match.

    ``names``: pattern that matches the names of special tokens.
    """
    if isinstance(value, str):
        return names.sub(lambda match: _TEXT + match[0], value)
    return map_json(lambda item: mark_plain_names(item, names), value)


def mark_words(
    message: dict[str, Any], number: int, parts: Collection[str] = PARTS
) -> dict[str, Any]:
    """Return a copy of ``message`` with marks, which carry the message's ``number``, around the words of its ``parts``.

    ``parts``: names of the parts to mark: "content", "reasoning", "arguments" (of tool calls) or "name" (of a called
    tool). The name of a tool is marked only if the arguments of its call have no words, because a template may compare
    names with others.
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
        return map_json(lambda item: around(item, part), value, lambda key: key)

    marked = dict(message)
    for key, part in _WORDS.items():
        if isinstance(content := message.get(key), list):
            marked[key] = [
                item | {"text": around(item["text"], part)}
                if isinstance(item, dict) and "text" in item
                else item
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
    """Return whether a JSON value holds a text of more than white space."""
    return any(text.strip() for text in _texts_in(value))


def count_marks(value: Any) -> int:
    """Return how many marks of messages or of their parts the texts of a JSON value contain."""
    return sum(text.count(_MESSAGE) for text in _texts_in(value))


def _texts_in(value: Any) -> Iterator[str]:
    """Iterate over the texts among the values of a JSON value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(item)


def parts_with_words(message: dict[str, Any]) -> list[str]:
    """Return the names of the parts of ``message`` that have words, such as "content".

    :func:`mark_words` can mark these parts.
    """
    parts = {
        part for key, part in _WORDS.items() if has_words(_texts(message.get(key)))
    }
    for call in message.get("tool_calls", ()):
        parts.add("arguments" if has_words(call["function"]["arguments"]) else "name")
    return [part for part in PARTS if part in parts]


def _texts(content: Any) -> Any:
    """Return the texts of a content that may be a list of parts."""
    if not isinstance(content, list):
        return content
    return [part.get("text") for part in content if isinstance(part, dict)]


@dataclass(frozen=True)
class Marked:
    """Rendered text without its marks, and the positions of the marks in it.

    ``words``: positions where words of messages begin or end, in the order of the text. ``generations``: the spans
    ``(start, end)`` that the template marks as generated by the model. ``plain``: positions where the name of a special
    token is plain words of a message.
    """

    text: str
    words: tuple[WordMark, ...]
    generations: list[tuple[int, int]]
    plain: frozenset[int]

    def runs(self, number: int) -> list[list[WordMark]]:
        """Return the marks of message ``number`` as runs that no mark of another message interrupts."""
        runs = groupby(self.words, key=lambda word: word.message)
        return [list(run) for message, run in runs if message == number]

    def groups(self, number: int) -> list[list[int]]:
        """Return the positions where words of message ``number`` begin or end, a list for each of its :meth:`runs`."""
        return [[word.at for word in run] for run in self.runs(number)]

    def own_text(self, names: re.Pattern[str]) -> str:
        """Return the text with names of special tokens blanked out where they are plain words of a message.

        ``names``: pattern that matches the names of special tokens.
        """
        return names.sub(
            lambda match: (
                "\0" * len(match[0]) if match.start() in self.plain else match[0]
            ),
            self.text,
        )


def read_marks(rendered: str) -> Marked:
    """Remove the marks from ``rendered``, a text that a chat template has written. Return the text without marks, and
    the positions of the marks in it.
    """
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
