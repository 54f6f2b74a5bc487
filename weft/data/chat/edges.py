"""Find where turns begin and end in the text of a conversation.

The text is compared with texts of fewer messages, starting at the end of common words. Texts are compared by units
(:data:`_UNIT`), so that ``<think>`` and ``<tool_call>`` differ from their first character.
"""

import re
from itertools import takewhile

from weft.data.chat.followed import Followed
from weft.data.chat.marks import Marked, mark_words

#: A tag, a word, or any other character by itself.
_UNIT = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]|\w+|.", re.DOTALL)

#: What an assistant says to show how the template begins a turn of its.
_WORD = "weft"


class Edges:
    """Finds where each turn begins and ends in the rendered text of the conversation ``followed``.

    The text that the template writes between two turns is remembered by their roles. A later turn with the same text
    around it is found without rendering the conversation again.
    """

    def __init__(self, followed: Followed) -> None:
        self.followed = followed
        self.template, self.text = followed.template, followed.own
        self._openings: dict[tuple[str, str], int] = {}
        self._closings: dict[str, str] = {}

    def words(self, i: int) -> list[int]:
        """Return the positions in the text where the words of message ``i`` begin and end, in order.

        Words are what the message itself says: content, reasoning, and names and arguments of tool calls, without text
        that the template adds. Words of tool calls that the template repeats in a later turn are left out.
        """
        words = self.followed.words(i)
        if not words or not self.followed.talk.messages[i].get("tool_calls"):
            return words
        alone = self.followed.up_to(i + 1)
        runs = alone.runs(i) if alone is not None else []
        if not runs:
            return words
        # A later turn may repeat a name among words of its own. Reasoning may be left out where other turns follow.
        said = sum(mark.part != "reasoning" for mark in runs[-1])
        for run in reversed(self.followed.shown.runs(i)):
            others = [at for at, mark in enumerate(run) if mark.part != "reasoning"]
            if len(others) >= said > 0:
                return [mark.at for mark in run[: others[said - 1] + 1]]
        return words[: len(runs[-1])]

    def start(self, i: int, words: list[int]) -> int | None:
        """Return the position where the assistant's message ``i`` begins, or None if it cannot be found with certainty.

        The message begins after the text that the template writes as a prompt for the assistant. ``words``: the result
        of :meth:`words` for message ``i``.
        """
        limit = words[0] if words else len(self.text)
        known, place = self._before(i, limit) if words else (None, 0)
        if known is not None and known in self._openings:
            return place + self._openings[known]
        start = self._after_prompt(i, limit)
        if (start is None or start > limit) and self._only_calls(i):
            start = self._after_last(i, limit)
        if start is None or start > limit:
            start = words[0] if words else None
        if known is not None and start is not None and start >= place:
            self._openings[known] = start - place
        return start

    def _before(self, i: int, limit: int) -> tuple[tuple[str, str] | None, int]:
        """Return the role of the message before ``i``, the text from its words to ``limit``, and where that begins."""
        ends = [
            at
            for message, at, _ in self.followed.shown.words
            if message == i - 1 and at <= limit
        ]
        if not ends:
            return None, 0
        return (
            self.followed.talk.messages[i - 1]["role"],
            self.text[ends[-1] : limit],
        ), ends[-1]

    def _only_calls(self, i: int) -> bool:
        """Return whether only calls of message ``i`` are marked, whose turn begins before their arguments."""
        return {part for number, part in self.followed.parts if number == i} <= {
            "arguments",
            "name",
        }

    def _after_last(self, i: int, limit: int) -> int | None:
        """Return where the messages before ``i`` end, compared with a text that ends there; None if uncertain."""
        before = self.followed.up_to(i)
        if before is None:
            return None
        anchor = self.followed.anchor(before, i, limit)
        alike = common_length(before.text[anchor.other :], self.text[anchor.text :])
        return anchor.text + alike if alike else None

    def _after_prompt(self, i: int, limit: int) -> int | None:
        """Return where the template's text before message ``i`` ends, by the prompt for it or by a plain turn."""
        prompt = self.followed.up_to(i, prompt=True)
        if prompt is None:
            return self._after_plain_turn(i, limit, "")
        anchor = self.followed.anchor(prompt, i, limit)
        opening, rest = prompt.text[anchor.other :], self.text[anchor.text :]
        whole = rest.startswith(opening)
        if whole and anchor.text + len(opening) == limit:
            return limit
        without = self.followed.up_to(i)
        header = _beyond(prompt, without)
        if header == "":
            return self._after_plain_turn(i, limit, opening)
        if whole:
            return anchor.text + len(opening)
        if header:
            # A message before may close in another way where it is the last.
            find = self.text.rfind if limit < len(self.text) else self.text.find
            at = find(header, anchor.text, limit)
            if at >= 0:
                return at + len(header)
        plain = self._plain_turn(i, limit)
        if plain is not None and self.text.startswith(plain[1], plain[0]):
            return plain[0] + len(plain[1])
        # a prompt may end with more than a turn begins with, such as <think>
        alike = common_length(opening, rest)
        into_header = header is None or alike > len(opening) - len(header)
        if alike and into_header and not self.template.ends.search(opening[alike:]):
            return anchor.text + alike
        return self._after_plain_turn(i, limit, "")

    def _after_plain_turn(self, i: int, limit: int, closing: str) -> int | None:
        """Return where the template's own text before a turn ends, by how it begins a turn of one word.

        ``closing``: what closes the message before; if only white space follows it, that is the model's to write.
        """
        plain = self._plain_turn(i, limit)
        if plain is None:
            return None
        place, opening = plain
        rest = self.text[place:]
        if (
            closing
            and opening.startswith(closing)
            and not opening[len(closing) :].strip()
        ):
            opening = closing
        alike = common_length(opening, rest)
        if alike < len(opening) and (
            not alike or self.template.ends.search(opening[alike:])
        ):
            return None
        return place + alike

    def _plain_turn(self, i: int, limit: int) -> tuple[int, str] | None:
        """Return the template's text before a turn of one word in place of message ``i``, and where it begins."""
        probe = mark_words({"role": "assistant", "content": _WORD}, i)
        shown = self.followed.up_to(i, [probe])
        groups = shown.groups(i) if shown is not None else []
        if shown is None or not groups:
            return None
        anchor = self.followed.anchor(shown, i, limit)
        return anchor.text, shown.text[anchor.other : groups[-1][0]]

    def end(self, i: int, words: list[int], start: int) -> int | None:
        """Return the position where the turn of message ``i`` ends, or None if the template does not write the message.

        ``words``: the result of :meth:`words` for message ``i``. ``start``: position where the turn begins.
        """
        after = words[-1] if words else start
        rest = self.text[after:]
        role = self.followed.talk.messages[i]["role"]
        known = self._closings.get(role, "")
        if words and known and rest.startswith(known):
            return after + len(known)
        closing = self._closing(i, words, after)
        if closing is None:
            return None
        if tokens := [*self.template.ends.finditer(closing)]:
            stop = next(
                (token for token in tokens if token[0] in self.template.stops),
                tokens[-1],
            )
            closing = closing[: stop.end()]
            if words:
                self._closings[role] = closing
            return after + len(closing)
        # A template without an end of turn: the next turn's first token ends this one if generation ends there.
        following = len(closing) + len([*takewhile(str.isspace, rest[len(closing) :])])
        token = self.template.ends.match(rest, following)
        return after + (
            token.end() if token and token[0] in self.template.stops else len(closing)
        )

    def _closing(self, i: int, words: list[int], after: int) -> str | None:
        """Return the text after ``after`` that message ``i`` also has at the end of a conversation."""
        rest = self.text[after:]
        if i == len(self.followed.talk.messages) - 1:
            return rest
        alone = self.followed.up_to(i + 1)
        if alone is None:
            return "" if words else None
        if words:
            groups = alone.groups(i)
            tail = alone.text[groups[-1][-1] :] if groups else ""
        else:
            anchor = self.followed.anchor(alone, i, after)
            tail = alone.text[anchor.other + after - anchor.text :]
        return rest[: common_length(tail, rest)]


def _beyond(prompt: Marked, without: Marked | None) -> str | None:
    """Return what a prompt adds to the text ``without`` it, or None if that is uncertain."""
    if without is None:
        return None
    if without.text.startswith(
        prompt.text
    ):  # there is no prompt, though conversations may end with a token of their own
        return ""
    return (
        prompt.text[len(without.text) :]
        if prompt.text.startswith(without.text)
        else None
    )


def common_length(first: str, second: str) -> int:
    """Return the length in characters of the common prefix of two texts.

    The prefix does not end inside a tag or word, unless it is all of ``first``.
    """
    if second.startswith(first):
        return len(first)
    count = 0
    for a, b in zip(_UNIT.finditer(first), _UNIT.finditer(second), strict=False):
        if a[0] != b[0]:
            break
        count = a.end()
    return count
