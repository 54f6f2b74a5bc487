"""Split a conversation into several samples, for templates that keep reasoning only after the last question.

At generation a model sees earlier turns without their reasoning, and writes that of its own turn. So each question
whose turns would lose their reasoning becomes a sample that ends with these turns and learns only them. All other
turns are learned in the whole conversation. Every turn is learned once.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from weft.data.chat.chat_template import ChatTemplate
from weft.data.chat.conversation import Conversation
from weft.data.chat.followed import follow_words


def split_at_questions(
    template: ChatTemplate, talk: Conversation, learned: Sequence[float]
) -> list[Conversation]:
    """Split ``talk`` into samples, in order, in which learned turns keep their reasoning.

    Chat templates drop the reasoning of turns before the last question. Therefore, each answer whose learned turns
    would lose reasoning gets a sample of its own: the conversation up to this answer, in which only this answer is
    learned. All other learned turns are learned in one last sample, the whole conversation; so are answers of which the
    template never writes any reasoning. A conversation stays whole if no learned turn would lose its reasoning.
    ``learned``: loss weight of every message, 0 if it is not learned.
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
        # some templates write it in turns that call tools alone, others only in those that do not
        if inside & lost - reasoning_left_out(template, sample):
            samples.append(sample)
            cut |= inside
    rest = set(range(len(talk.messages))) - cut
    if any(learned[i] for i in rest):
        samples.append(_learning(talk, rest, len(talk.messages)))
    return samples


def questions(talk: Conversation) -> list[range]:
    """Cut a conversation before each question, and return for each piece the range of its message numbers.

    A question is a message of the user that does not follow another message of the user. The first piece, which
    precedes the first question, may be empty.
    """
    roles = [message["role"] for message in talk.messages]
    asked = [
        i
        for i, role in enumerate(roles)
        if role == "user" and (i == 0 or roles[i - 1] != "user")
    ]
    return [range(start, end) for start, end in pairwise([0, *asked, len(roles)])]


def reasoning_left_out(template: ChatTemplate, talk: Conversation) -> set[int]:
    """Return the numbers of the messages of ``talk`` whose reasoning the template does not write."""
    return {
        number
        for number, part in follow_words(template, talk).left_out()
        if part == "reasoning"
    }


def _learning(talk: Conversation, numbers: set[int], end: int) -> Conversation:
    """Return the first ``end`` messages of ``talk``, of which those with ``numbers`` are learned as they are."""
    first = first_messages(talk, end)
    weights = tuple(weight * (i in numbers) for i, weight in enumerate(first.weights))
    return replace(first, weights=weights)


def first_messages(talk: Conversation, end: int) -> Conversation:
    """Return the conversation of the first ``end`` messages of ``talk``."""
    marked = tuple(i for i in talk.marked if i < end)
    return replace(
        talk, messages=talk.messages[:end], weights=talk.weights[:end], marked=marked
    )
