"""Which characters of a rendered conversation are learned from: those that the model would have to write itself.

A template may say so with generation tags. Where it does not, the words of every message are followed through it by
marks (:mod:`weft.data.chat.marks`). A turn of the assistant's begins where the prompt for it ends, and ends with the
token that closes it; what is learned of another's turn are its words and what closes them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from weft.data.chat.conversation import Conversation
from weft.data.chat.marks import Marked, numbered
from weft.data.chat.template import ChatTemplate, TemplateError


class WeightedSpan(NamedTuple):
    """Characters ``start`` to ``end`` of a text, learned with ``weight``."""

    start: int
    end: int
    weight: float


class SpanFinder:
    """Finds what is learned of conversations that one template writes; remembers how it begins and ends turns."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.openings: dict[str, str] = {}
        self.closings: dict[str, str] = {}

    def spans(self, talk: Conversation, learned: Sequence[float]) -> tuple[Marked, list[WeightedSpan]]:
        """The text of ``talk``, and what is learned of it; ``learned`` is every message's weight, 0 for not at all."""
        shown = self.template.render(talk.messages, talk.tools)
        mine = {i: weight for i, weight in enumerate(learned) if weight}
        every = [weight for message, weight in zip(talk.messages, learned, strict=True) if _is_assistant(message)]
        if self.template.tagged and len(mine) == len(every) and len({*every}) == 1:
            return shown, [WeightedSpan(start, end, every[0]) for start, end in shown.generations]
        words = self._words(talk, shown, [*mine])
        own = shown.own_text(self.template.specials)
        found, before = [], 0
        for i in words:
            if self.template.tagged and _is_assistant(talk.messages[i]):
                tagged = [s for s in shown.generations if any(s[0] <= at <= s[1] for at in words[i])]
                found += [WeightedSpan(*span, mine[i]) for span in tagged]
                before = max([before, *(end for _, end in tagged)])
                continue
            start = self._start(talk, i, own, before, words[i])
            before = words[i][-1] + len(self._closing(talk, i, own[words[i][-1] :]))
            found.append(WeightedSpan(start, before, mine[i]))
        return shown, found

    def _words(self, talk: Conversation, shown: Marked, numbers: Sequence[int]) -> dict[int, list[int]]:
        """Where the words of the numbered messages are in the text; a template may leave some out.

        Words of a message that stand in several places are a turn in the last of them. All messages are marked if they
        can be: a template may look at how a message of the user's begins.
        """
        for some in (range(len(talk.messages)), numbers):
            marked = [numbered(m, i) if i in some else m for i, m in enumerate(talk.messages)]
            try:
                again = self.template.render(marked, talk.tools)
            except TemplateError:
                continue
            if again.text == shown.text:
                return {i: groups[-1] for i in numbers if (groups := again.groups(i))}
        raise TemplateError(
            "the chat template changes the words of a message, so what to learn cannot be found in its text; put "
            "{% generation %} and {% endgeneration %} around what the assistant writes"
        )

    def _start(self, talk: Conversation, i: int, own: str, before: int, words: Sequence[int]) -> int:
        """Where message ``i`` begins, not before ``before``: after what a prompt for it ends with, or its words."""
        if i == 0 or not _is_assistant(talk.messages[i]):
            return words[0]
        role = talk.messages[i - 1]["role"]
        opening = self.openings.get(role, "")
        # Nobody's words can hold a special token, so the nearest one is the template's even if it writes words twice.
        end = words[-1] if self.template.specials.search(opening) else words[0]
        at = own.rfind(opening, before, end) if opening else -1
        if at < 0:
            opening = self.openings[role] = self._opening(talk, i)
            end = words[-1] if self.template.specials.search(opening) else words[0]
            at = own.rfind(opening, before, end)
            while opening and at < 0:  # a prompt may end with more than a turn begins with, such as <think>
                opening = opening[:-1]
                at = own.rfind(opening, before, words[0])
        return at + len(opening) if opening else words[0]

    def _opening(self, talk: Conversation, i: int) -> str:
        """What the template writes between the words before message ``i`` and what the model is to write."""
        given = [*talk.messages[: i - 1], numbered(talk.messages[i - 1], i)]
        try:
            shown = self.template.render(given, talk.tools, prompt=True)
        except TemplateError:
            return ""
        return shown.text[shown.words[-1][1] :] if shown.words else ""

    def _closing(self, talk: Conversation, i: int, rest: str) -> str:
        """What closes message ``i`` in the ``rest`` of the text: up to the last special token, if there is one."""
        role = talk.messages[i]["role"]
        known = self.closings.get(role, "")
        if known and rest.startswith(known):
            return known
        closing = rest if i == len(talk.messages) - 1 else self._cut_after(talk, i, rest)
        specials = [*self.template.specials.finditer(closing)]
        if specials:
            closing = self.closings[role] = closing[: specials[-1].end()]
        return closing

    def _cut_after(self, talk: Conversation, i: int, rest: str) -> str:
        """What follows the words of message ``i`` both in the conversation up to there and in ``rest``."""
        try:
            shown = self.template.render([*talk.messages[:i], numbered(talk.messages[i], i)], talk.tools)
        except TemplateError:
            return ""
        tail = shown.text[shown.words[-1][1] :] if shown.words else ""
        alike = next((k for k, (a, b) in enumerate(zip(tail, rest, strict=False)) if a != b), min(len(tail), len(rest)))
        return tail[:alike]


def _is_assistant(message: object) -> bool:
    return isinstance(message, dict) and message["role"] == "assistant"
