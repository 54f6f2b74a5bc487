"""A conversation as several samples, where a template keeps the reasoning of the last question's turns only.

A model that is asked sees its earlier turns without their reasoning, and writes the reasoning of its own turn. So each
question whose turns would lose their reasoning becomes a sample that ends with them, in which they alone are learned;
all other turns are learned in the whole conversation. Every turn is learned once.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from weft.data.chat.chat_template import ChatTemplate
from weft.data.chat.conversation import Conversation
from weft.data.chat.followed import follow


def split_at_questions(
    template: ChatTemplate, talk: Conversation, learned: Sequence[float]
) -> list[Conversation]:
    """The samples of ``talk``, in order; ``learned`` is every message's weight, 0 for not at all.

    A conversation whose learned turns keep their reasoning, or that a template writes no reasoning of, stays whole.
    """
    lost = {i for i in reasoning_left_out(template, talk) if learned[i]}
    if not lost:
        return [talk]
    cut: set[int] = set()
    samples = []
    for question in questions(talk):
        inside, end = set(question), question.stop
        if not inside & lost:
            continue
        sample = _learning(talk, inside, end)
        if not reasoning_left_out(template, sample) & inside & lost:
            samples.append(sample)
            cut |= inside
    rest = set(range(len(talk.messages))) - cut
    if any(learned[i] for i in rest):
        samples.append(_learning(talk, rest, len(talk.messages)))
    return samples


def questions(talk: Conversation) -> list[range]:
    """The numbers of the messages from each question on to the next; those before the first question come first."""
    roles = [message["role"] for message in talk.messages]
    asked = [
        i
        for i, role in enumerate(roles)
        if role == "user" and (i == 0 or roles[i - 1] != "user")
    ]
    return [range(start, end) for start, end in pairwise([0, *asked, len(roles)])]


def reasoning_left_out(template: ChatTemplate, talk: Conversation) -> set[int]:
    """The numbers of the messages whose reasoning the template does not write."""
    return {
        number
        for number, part in follow(template, talk).left_out()
        if part == "reasoning"
    }


def _learning(talk: Conversation, numbers: set[int], end: int) -> Conversation:
    """The first ``end`` messages of ``talk``, of which those with ``numbers`` are learned as they are."""
    first = beginning(talk, end)
    weights = tuple(weight * (i in numbers) for i, weight in enumerate(first.weights))
    return replace(first, weights=weights)


def beginning(talk: Conversation, end: int) -> Conversation:
    """The first ``end`` messages of ``talk``."""
    marked = tuple(i for i in talk.marked if i < end)
    return replace(
        talk, messages=talk.messages[:end], weights=talk.weights[:end], marked=marked
    )
