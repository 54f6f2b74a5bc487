"""Answers that were judged good or bad one by one, for KTO (Ethayarajh et al. 2024).

A sample pairs its answer with another record's answer to the same prompt. By the likelihood of such mismatched answers,
KTO measures how far the model has moved from its reference. The other answer is the next one that differs.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from weft.data.chat.chat_turns import ConversationError, role_of
from weft.data.chat.conversation import as_messages
from weft.data.chat.fields import (
    Fields,
    messages_of,
    tools_of,
    variables_of,
    weight_of_record,
    with_system,
)
from weft.data.chat.pairs import AnswerPair, answer_side, question_of

P = TypeVar("P")

#: What a record may say of an answer, besides true, false, 1 and 0.
_GOOD = {"true", "1", "yes", "good", "desirable", "up", "thumbs_up", "+1"}
_BAD = {"false", "0", "no", "bad", "undesirable", "down", "thumbs_down", "-1"}


@dataclass(frozen=True)
class Judgement:
    """An answer to a prompt, with the verdict whether it is good.

    Attributes:
        ``prompt``: the prompt's messages.
        ``answer``: the answer's messages.
        ``good``: whether the answer was judged good.
        ``weight``: weight in the loss.
        ``tools``: tools that the assistant may call.
        ``unread``: names of the record's fields that are not used.
        ``variables``: variables for the chat template.
    """

    prompt: tuple[Any, ...]
    answer: tuple[Any, ...]
    good: bool
    weight: float
    tools: Any = None
    unread: tuple[str, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)


def read_judgements(record: Any) -> list[Judgement]:
    """Read the judged answers of ``record``: one with a ``label``, or the two in ``chosen`` and ``rejected``.

    A labelled answer is the ``completion`` of a ``prompt``, or the assistant's turns at the end of ``messages``. Raises
    :class:`ConversationError` for a record that holds neither.
    """
    if not isinstance(record, Mapping):
        raise ConversationError(f"expected a JSON object, got {type(record).__name__}")
    fields = Fields(record)
    weight, tools = weight_of_record(fields), tools_of(fields)
    variables = variables_of(fields)
    if fields.has("chosen", "rejected") and not fields.has("label"):
        prompt = _prompt(fields.take("prompt"), fields)
        sides = [
            (_turns(fields.take(name), name), name == "chosen")
            for name in ("chosen", "rejected")
        ]
    else:
        if not fields.has("label"):
            raise ConversationError(
                "no 'label', which says whether the answer is good; name yours: data.columns = { NAME = \"label\" }"
            )
        good = _is_good(fields.take("label"))
        prompt, answer = _question_and_answer(fields)
        sides = [(answer, good)]
    unread = fields.unread()
    return [
        Judgement(tuple(prompt), tuple(answer), good, weight, tools, unread, variables)
        for answer, good in sides
    ]


def _question_and_answer(fields: Fields) -> tuple[list[Any], list[Any]]:
    """Return the prompt and the answer of a record, each as messages."""
    turns = next(
        (name for name in ("messages", "conversations") if fields.has(name)), None
    )
    if turns and not fields.has("output"):
        messages = messages_of(fields.take(turns))
        if not isinstance(messages, list):
            raise ConversationError(f"{turns!r} is not a list of messages")
        last = next(
            (
                i
                for i in range(len(messages), 0, -1)
                if role_of(messages[i - 1]) != "assistant"
            ),
            0,
        )
        if last in (0, len(messages)):
            raise ConversationError(
                f"its {turns!r} do not end with an answer of the assistant's to somebody's turn"
            )
        return with_system(messages[:last], fields.take("system")), messages[last:]
    name, asked = question_of(fields)
    if not name:
        fields.needed("prompt", "feedback")  # which says what is missing
    answer = (
        fields.take("completion")
        if fields.has("completion")
        else fields.needed("output", "feedback")
    )
    return _prompt(asked, fields), _turns(answer, "completion")


def _prompt(given: Any, fields: Fields) -> list[Any]:
    return with_system(_turns(given, "prompt", "user"), fields.take("system"))


def _turns(given: Any, name: str, role: str = "assistant") -> list[Any]:
    turns = as_messages(messages_of(given), role)
    if not isinstance(turns, list) or not turns:
        raise ConversationError(f"{name!r} is a text or a list of messages")
    return turns


def _is_good(label: Any) -> bool:
    word = str(label).strip().lower()
    if isinstance(label, float) and label in (0.0, 1.0):
        word = str(int(label))
    if word not in _GOOD | _BAD:
        raise ConversationError(
            f"its 'label' is {str(label)[:40]!r}; a label is true (good) or false (bad)"
        )
    return word in _GOOD


def pair_with_others(
    judgements: Iterable[tuple[P, Judgement]],
) -> Iterator[tuple[P, AnswerPair | ConversationError]]:
    """Pair each judged answer with the answer of another record, because the KTO loss compares the two.

    ``judgements``: pairs of a place (file and line of the record) and a judged answer, in order. The other answer is
    the next one in this order that differs from the judged answer, or the first of all if none follows. Both are put
    after the prompt of the judged answer.

    Yields each place with its pair, or with an error if all answers are equal or the answers cannot be read. The
    ``margin`` of a pair is 1 if the judged answer is good, and -1 if it is bad.
    """
    waiting: list[tuple[P, Judgement]] = []  # all with the same answer
    first: list[Judgement] = []  # the first two answers that differ
    for place, judgement in judgements:
        if not first or (len(first) == 1 and judgement.answer != first[0].answer):
            first.append(judgement)
        if waiting and waiting[0][1].answer != judgement.answer:
            yield from ((where, _pair(each, judgement)) for where, each in waiting)
            waiting = []
        waiting.append((place, judgement))
    for where, each in waiting:
        other = next((rival for rival in first if rival.answer != each.answer), None)
        if other is None:
            reason = "all answers are the same, and KTO compares each with another; give records with different ones"
            yield where, ConversationError(reason)
        else:
            yield where, _pair(each, other)


def _pair(judgement: Judgement, other: Judgement) -> AnswerPair | ConversationError:
    try:
        own, beside = (
            answer_side(
                judgement.prompt,
                list(answer),
                "completion",
                judgement.tools,
                judgement.unread,
                judgement.variables,
            )
            for answer in (judgement.answer, other.answer)
        )
    except ConversationError as error:
        return error
    return AnswerPair(own, beside, judgement.weight, 1.0 if judgement.good else -1.0)
