"""Find the learned characters of a rendered conversation: those that the model would have to write.

A template may mark them with generation tags. Otherwise the words of every message are followed through the template
(:mod:`weft.data.chat.followed`). A turn of the assistant begins where the prompt for it ends, and ends with the token
that closes it (:mod:`weft.data.chat.edges`). Of other turns, the words and the closing token are learned.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from weft.data.chat.chat_template import ChatTemplate, TemplateError
from weft.data.chat.conversation import Conversation
from weft.data.chat.edges import Edges
from weft.data.chat.followed import Followed, follow_words
from weft.data.chat.marks import parts_with_words

#: What helps where turns cannot be found.
_TAGS = "put {% generation %} and {% endgeneration %} around what the assistant writes"


class WeightedSpan(NamedTuple):
    """Characters ``start`` to ``end`` of a rendered text that are learned with ``weight``.

    ``number``: the message that the characters belong to, -1 if the span is not of a single message.
    """

    start: int
    end: int
    weight: float
    number: int


def learned_spans(
    template: ChatTemplate, talk: Conversation, learned: Sequence[float]
) -> tuple[Followed, list[WeightedSpan]]:
    """Render ``talk`` with marks, and return the marked text and the spans of it that are learned.

    ``learned``: loss weight of every message, 0 if it is not learned. Raises :class:`TemplateError` if the template
    refuses the conversation, or a turn cannot be found in its text.
    """
    followed = follow_words(template, talk)
    weights = {i: weight for i, weight in enumerate(learned) if weight}
    spans = _tagged(followed, learned) if template.tagged else []
    numbers = {span.number for span in spans}
    edges, last = Edges(followed), 0
    for i in weights:
        if i in numbers or (template.tagged and _is_assistant(talk, i)):
            continue
        if not (span := _turn(edges, i, last)):
            continue
        spans.append(WeightedSpan(*span, weights[i], i))
        _, last = span
    return followed, [span for span in spans if span.weight]


def _turn(edges: Edges, i: int, last: int) -> tuple[int, int] | None:
    """Return where the turn of message ``i`` begins, not before ``last``, and where it ends; None if it is left out."""
    followed = edges.followed
    message, words = followed.talk.messages[i], edges.words(i)
    unmarked = [
        part
        for part in parts_with_words(message)
        if (i, part) not in followed.parts and part != "name"
    ]
    if not words and unmarked:
        raise TemplateError(
            f"the chat template changes the words of a message, so what to learn cannot be found in its text; {_TAGS}"
        )
    if not words and any(
        (i, part) in followed.parts for part in parts_with_words(message)
    ):
        return None
    start = (
        edges.start(i, words)
        if _is_assistant(followed.talk, i)
        else words[0]
        if words
        else None
    )
    if start is None:
        raise TemplateError(
            f"where message {i + 1} begins in the text of the chat template cannot be found; {_TAGS}"
        )
    start = max(start, last)
    limit = words[0] if words else start
    if any(
        start < at < limit
        for other in range(len(followed.talk.messages))
        if other != i
        for at in followed.words(other)
    ):
        raise TemplateError(
            f"the chat template writes other messages where message {i + 1} seems to begin, so what to learn cannot be "
            f"told from them; {_TAGS}"
        )
    end = edges.end(i, words, start)
    return (start, max(end, start)) if end is not None else None


def _tagged(followed: Followed, learned: Sequence[float]) -> list[WeightedSpan]:
    """Return the spans between generation tags, each with the weight of the message whose it is."""
    talk, shown = followed.talk, followed.shown
    tagged = [(start, end) for start, end in shown.generations if start < end]
    turns = [i for i in range(len(talk.messages)) if _is_assistant(talk, i)]
    weights = {learned[i] for i in turns}
    spans = []
    for number, (start, end) in enumerate(tagged):
        inside = Counter(
            word.message
            for word in shown.words
            if start <= word.at <= end and word.message in turns
        )
        owner = inside.most_common(1)[0][0] if inside else None
        if owner is None and len(tagged) == len(turns):
            owner = turns[number]
        if owner is None:
            owner = _spoken_before(followed, start)
        if owner is None and len(weights) > 1:
            raise TemplateError(
                "which message stands between the generation tags of the chat template is not certain"
            )
        if owner is None:
            owner = turns[min(number, len(turns) - 1)]
        spans.append(WeightedSpan(start, end, learned[owner], owner))
    return spans


def _spoken_before(followed: Followed, place: int) -> int | None:
    """Return the assistant's message that ends before ``place``, where no words are, such as an end of turn by itself.

    None if that is uncertain, as another turn of the assistant's without words may stand there.
    """
    talk, words = followed.talk, followed.shown.words
    before = max(((w.at, w.message) for w in words if w.at <= place), default=None)
    after = min(((w.at, w.message) for w in words if w.at > place), default=None)
    if before is None:
        return None
    number = before[1]
    following = range(number + 1, len(talk.messages) if after is None else after[1])
    if any(_is_assistant(talk, i) for i in following):
        return None
    return number if _is_assistant(talk, number) else None


def _is_assistant(talk: Conversation, i: int) -> bool:
    return bool(talk.messages[i]["role"] == "assistant")
