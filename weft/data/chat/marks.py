"""Marks in a text on its way through a chat template: where the words of which message went.

A mark is made of code points that Unicode keeps free of characters (U+FDD0 to U+FDEF), so no text can contain one.
"""

import re
from dataclasses import dataclass
from itertools import groupby
from typing import Any

#: Before the name of a special token in somebody's words: it stays text.
_TEXT = "\ufdd0"
#: Around what a template has between ``{% generation %}`` and ``{% endgeneration %}``.
_OPEN, _CLOSE = "\ufdd1", "\ufdd2"
#: Around the number of a message, in digits of base 16.
_MESSAGE, _END, _ZERO = "\ufdd3", "\ufdd4", 0xFDE0

_MARK = re.compile(f"{_MESSAGE}([\ufde0-\ufdef]+){_END}|[\ufdd0-\ufdef]")
#: Where a message has its words. ``thinking`` and ``reasoning_content`` are two names of one thing.
_WORDS = ("content", "reasoning_content", "thinking")


def generated(text: str) -> str:
    """``text`` marked as what the model is to generate."""
    return f"{_OPEN}{text}{_CLOSE}"


def cleaned(value: Any) -> Any:
    """A JSON value in which no text holds a mark or a lone surrogate, which no tokenizer can encode."""
    if isinstance(value, str):
        return re.sub("[\ufdd0-\ufdef]", "\ufffd", value).encode(errors="replace").decode()
    return mapped(cleaned, value)


def mapped(change: Any, value: Any) -> Any:
    """A JSON list or object with ``change`` made to what is in it, keys included; any other value as it is."""
    if isinstance(value, dict):
        return {change(key): change(one) for key, one in value.items()}
    return [change(one) for one in value] if isinstance(value, list) else value


def protected(value: Any, names: re.Pattern[str]) -> Any:
    """A JSON value in which every one of ``names`` is marked as plain text."""
    if isinstance(value, str):
        return names.sub(lambda found: _TEXT + found[0], value)
    return mapped(lambda one: protected(one, names), value)


def numbered(message: dict[str, Any], number: int) -> dict[str, Any]:
    """``message`` with its words, and those of its calls of tools, between marks with ``number``."""
    digits = "".join(chr(_ZERO + int(digit, 16)) for digit in f"{number:x}")
    mark = f"{_MESSAGE}{digits}{_END}"

    def around(value: Any) -> Any:
        """The mark stands inside white space, which templates strip."""
        if isinstance(value, str):
            words = value.strip()
            return value.replace(words, f"{mark}{words}{mark}", 1) if words else value
        if isinstance(value, dict):
            return {key: around(one) for key, one in value.items()}
        return [around(one) for one in value] if isinstance(value, list) else value

    marked = dict(message)
    for key in _WORDS:
        if isinstance(parts := message.get(key), list):
            marked[key] = [part | {"text": around(part["text"])} if "text" in part else part for part in parts]
        elif key in message:
            marked[key] = around(message[key])
    if "tool_calls" in message:
        marked["tool_calls"] = []
        for call in message["tool_calls"]:
            function = call["function"]
            inside = around(function["arguments"])
            # A template may compare the name with those that it knows.
            name = around(function["name"]) if inside == function["arguments"] else function["name"]
            marked["tool_calls"].append(call | {"function": function | {"name": name, "arguments": inside}})
    return marked


@dataclass(frozen=True)
class Marked:
    """A rendered text without its marks, and where these were.

    ``words``: where words of a message begin or end, as its number and the position, in the order of the text.
    ``generations``: the spans between generation tags. ``plain``: where names of special tokens are somebody's words.
    """

    text: str
    words: tuple[tuple[int, int], ...]
    generations: list[tuple[int, int]]
    plain: frozenset[int]

    def groups(self, number: int) -> list[list[int]]:
        """The positions at which words of the message begin or end, in runs with no other message's between them."""
        runs = groupby(self.words, key=lambda word: word[0])
        return [[at for _, at in run] for found, run in runs if found == number]

    def own_text(self, names: re.Pattern[str]) -> str:
        """The text with those of ``names`` blanked out that are somebody's words."""
        return names.sub(lambda found: "\0" * len(found[0]) if found.start() in self.plain else found[0], self.text)


def read_marks(rendered: str) -> Marked:
    """Take the marks out of ``rendered``."""
    pieces: list[str] = []
    words: list[tuple[int, int]] = []
    generations, plain, opened = [], set(), []
    last = at = 0
    for found in _MARK.finditer(rendered):
        pieces.append(rendered[last : found.start()])
        at += len(pieces[-1])
        last = found.end()
        if found[1]:
            number = int("".join(f"{ord(digit) - _ZERO:x}" for digit in found[1]), 16)
            words.append((number, at))
        elif found[0] == _TEXT:
            plain.add(at)
        elif found[0] == _OPEN:
            opened.append(at)
        elif found[0] == _CLOSE and opened:
            generations.append((opened.pop(), at))
    pieces.append(rendered[last:])
    return Marked("".join(pieces), tuple(words), sorted(generations), frozenset(plain))
