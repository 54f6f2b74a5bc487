"""Follow the words of messages through a chat template by marks."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

from weft.data.chat.chat_template import ChatTemplate, TemplateError
from weft.data.chat.chat_turns import Message
from weft.data.chat.conversation import Conversation
from weft.data.chat.marks import Marked, count_marks, mark_words, parts_with_words


class Anchor(NamedTuple):
    """Position of the same words in two rendered texts: of a whole conversation, and of some of its messages.

    The two texts are aligned by it, to find out what the template writes differently after the words. ``other``:
    position in the text of fewer messages. ``text``: position in the text of the whole conversation.
    """

    other: int
    text: int


@dataclass(frozen=True)
class Followed:
    """Rendered text of a conversation, with marks that show where the words of each message are in the text.

    ``template`` has rendered the conversation ``talk``. ``shown``: the text and the positions of its marks. ``parts``:
    the parts of messages that are marked, as pairs of message number and name of the part, such as ``content``.
    """

    template: ChatTemplate
    talk: Conversation
    shown: Marked
    parts: frozenset[tuple[int, str]]

    @cached_property
    def own(self) -> str:
        """Rendered text in which names of special tokens are blanked out where they are plain words of a message."""
        return self.shown.own_text(self.template.ends)

    @cached_property
    def _messages(self) -> list[Message]:
        return _marked(self.talk.messages, self.parts)

    def words(self, number: int) -> list[int]:
        """Return the text positions where runs of words of message ``number`` begin and end.

        If the template writes the message several times, they are the positions of the last time; empty without words.
        """
        groups = self.shown.groups(number)
        return groups[-1] if groups else []

    def up_to(
        self, count: int, more: Sequence[Message] = (), prompt: bool = False
    ) -> Marked | None:
        """Render the first ``count`` messages of the conversation, then the messages ``more``, with marks.

        Returns None if the template refuses them. ``prompt``: whether the text ends with the template's prompt for the
        assistant.
        """
        try:
            return self.template.render(
                [*self._messages[:count], *more],
                self.talk.tools,
                prompt,
                self.talk.variables,
            )
        except TemplateError:
            return None

    def anchor(self, other: Marked, before: int, limit: int) -> Anchor:
        """Return the last position that the whole conversation's text and ``other`` have in common, as a position in
        each.

        ``other``: rendered text of only some of the messages, with marks. Positions are compared at marks, the places
        where words of a message begin or end. ``before``: only marks of messages with a number below this count.
        ``limit``: largest allowed position in the whole conversation's text (attribute ``shown``). Both positions are 0
        if the texts have no such mark in common.
        """
        for mark in reversed(other.words):
            here = [
                at
                for message, at, _ in self.shown.words
                if message == mark.message < before and at <= limit
            ]
            if here:
                return Anchor(mark.at, here[-1])
        return Anchor(0, 0)

    def left_out(self) -> list[tuple[int, str]]:
        """Return a list of the message parts that the template does not write, as pairs ``(number, name)``.

        ``number``: number of the message. ``name``: name of the part, such as ``reasoning``.
        """
        written = Counter((message, part) for message, _, part in self.shown.words)
        missing = []
        for number, message in enumerate(self.talk.messages):
            for part in parts_with_words(message):
                marks = written[number, part] if (number, part) in self.parts else -1
                if 0 <= marks < self._least(number, part) or (
                    marks < 0 and not _stands(message, part, self.shown.text)
                ):
                    missing.append((number, part))
                elif part == "content" and marks % 2:  # one end of it was cut off
                    missing += [
                        (number, lost)
                        for lost in _cut_off(message["content"], self.shown.text)
                    ]
        return missing

    def _least(self, number: int, part: str) -> int:
        """Return how many marks of a part the template writes if it leaves out no call of a message."""
        if part not in ("arguments", "name"):
            return 1
        calls = self.template.of(self.talk.tools).adapted(self._messages[number])[
            "tool_calls"
        ]
        return sum(count_marks(call["function"][part]) for call in calls)


def follow_words(template: ChatTemplate, talk: Conversation) -> Followed:
    """Render ``talk`` by ``template``, with marks around all words that the template writes unchanged.

    Words that the template compares, such as the start of a message or a tool's name, stay unmarked.
    """
    render = partial(template.render, tools=talk.tools, variables=talk.variables)
    shown = render(talk.messages)
    every = [
        (i, part)
        for i, message in enumerate(talk.messages)
        for part in parts_with_words(message)
    ]

    def attempt(parts: Sequence[tuple[int, str]]) -> Marked | None:
        try:
            again = render(_marked(talk.messages, parts))
        except TemplateError:
            return None
        return again if again.text == shown.text else None

    if (marked := attempt(every)) is not None:
        return Followed(template, talk, marked, frozenset(every))
    kept: list[tuple[int, str]] = []
    for part in every:
        if (again := attempt([*kept, part])) is not None:
            kept.append(part)
            marked = again
    return Followed(
        template, talk, shown if marked is None else marked, frozenset(kept)
    )


def _marked(
    messages: Sequence[Message], parts: Collection[tuple[int, str]]
) -> list[Message]:
    """Return the messages with ``parts`` marked."""
    chosen: dict[int, set[str]] = {}
    for number, part in parts:
        chosen.setdefault(number, set()).add(part)
    return [
        mark_words(message, i, chosen.get(i, ())) for i, message in enumerate(messages)
    ]


def _stands(message: Message, part: str, text: str) -> bool:
    """Return whether words that could not be marked may be in ``text``: a line of a content is; others count as
    written.
    """
    content = message.get("content")
    words = (
        content
        if isinstance(content, str)
        else "\n".join(piece["text"] for piece in content or ())
    )
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return part != "content" or any(line in text for line in lines)


def _cut_off(content: object, text: str) -> list[str]:
    """Return the parts of which words are missing in ``text``, of a content that a template has cut."""
    if not isinstance(content, str) or content.strip() in text:
        return []
    before, thought, _ = content.partition("</think>")
    reasoning = before.rpartition("<think>")[2].strip()
    if not thought:
        return ["content"]
    return ["reasoning"] if reasoning and reasoning not in text else []
