"""Reads preference pairs, two answers to one prompt, in their published forms."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from weft.data.chat.chat_turns import ConversationError, role_of
from weft.data.chat.conversation import Conversation, as_messages, conversation
from weft.data.chat.fields import (
    Fields,
    messages_of,
    tools_of,
    turns_of,
    variables_of,
    weight_of_record,
    with_system,
)
from weft.data.chat.forms import record_form
from weft.data.chat.masks import HIDDEN, LEARNED, number_of


class AnswerPair(NamedTuple):
    """Two conversations with the same prompt, one with the chosen answer and one with the rejected answer.

    Only the answers are learned. ``weight``: weight of the pair in the loss. ``margin``: by how much the score of the
    chosen answer should exceed the score of the rejected answer.
    """

    chosen: Conversation
    rejected: Conversation
    weight: float
    margin: float


def read_pair(record: Any) -> AnswerPair:
    """Read the pair in ``record`` from ``chosen``, ``rejected`` (texts or lists of messages) and maybe ``prompt``.

    Without ``prompt``, or if ``prompt`` is a text and the answers are whole conversations, the prompt is the common
    beginning of both answers. A ``system`` field becomes the first message of the prompt. Raises
    :class:`ConversationError` for a record that holds no pair.
    """
    if not isinstance(record, Mapping):
        raise ConversationError(f"expected a JSON object, got {type(record).__name__}")
    fields = Fields(record)
    if lacking := [key for key in ("chosen", "rejected") if not fields.has(key)]:
        if len(lacking) == 2 and record_form(fields):
            raise ConversationError(
                "it is one conversation, and no pair of answers; set data.kind = 'chat' and leave out loss.kind"
            )
        raise ConversationError(
            f"no {lacking[0]!r}; a pair of answers has 'chosen', 'rejected' and perhaps 'prompt': name yours by "
            f'data.columns = {{ NAME = "{lacking[0]}" }}'
        )
    chosen, rejected = (messages_of(fields.take(key)) for key in ("chosen", "rejected"))
    asked_by, prompt = question_of(fields)
    if not (isinstance(chosen, str) and isinstance(rejected, str)):
        if not (isinstance(chosen, list) and isinstance(rejected, list)):
            raise ConversationError(
                "'chosen' and 'rejected' are each a text, or each a list of messages"
            )
        asked = [message for message, _ in _alike(chosen[:-1], rejected[:-1])]
        # which both answers repeat
        if isinstance(prompt, list) and prompt == asked[: len(prompt)]:
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        elif asked and (not isinstance(prompt, list) or _begins_anew(asked[0], prompt)):
            if asked_by and not any(_says(message, prompt) for message in asked):
                # another text than what was asked: said as not read
                fields.taken.discard(str(fields.name(asked_by)))
            prompt, chosen, rejected = (
                asked,
                chosen[len(asked) :],
                rejected[len(asked) :],
            )
    elif prompt is None:
        # The prompt ends with a word, so that no token of an answer is cut.
        prompt = "".join(a for a, _ in _alike(chosen, rejected))
        prompt = prompt[: 1 + max(prompt.rfind(space) for space in " \n\t")]
        chosen, rejected, prompt = (
            chosen[len(prompt) :],
            rejected[len(prompt) :],
            prompt.rstrip(),
        )
    if not prompt:
        raise ConversationError(
            "no 'prompt', and 'chosen' and 'rejected' do not begin alike"
        )
    prompt = as_messages(prompt)
    if not isinstance(prompt, list):
        raise ConversationError("'prompt' is a text or a list of messages")
    prompt = with_system(prompt, fields.take("system"))
    weight, margin = weight_of_record(fields), _margin(fields.take("margin"))
    tools, variables = tools_of(fields), variables_of(fields)
    if of_turns := next((key for key in (*LEARNED, *HIDDEN) if fields.has(key)), None):
        raise ConversationError(
            f"its {of_turns!r} is a list; masks of a pair's turns stand in the turns themselves"
        )
    sides = [
        answer_side(prompt, answer, name, tools, fields.unread(), variables)
        for answer, name in ((chosen, "chosen"), (rejected, "rejected"))
    ]
    return AnswerPair(sides[0], sides[1], weight, margin)


def question_of(fields: Fields) -> tuple[str, Any]:
    """Take the question of a record, and return the name of the field that holds it, and its value.

    Returns "" and None if the record has no question. The text of a field ``input`` is appended to the text of
    ``instruction``.
    """
    names = ("prompt", "instruction", "conversations", "messages", "input")
    name = next((name for name in names if fields.has(name)), "")
    asked = (
        (turns_of if name == "conversations" else messages_of)(fields.take(name))
        if name
        else None
    )
    if (
        name == "instruction"
        and isinstance(further := fields.take("input"), str)
        and further
    ):
        asked = f"{asked}\n{further}" if asked else further
    return name, asked


def _begins_anew(message: Any, prompt: Sequence[Any]) -> bool:
    """Return whether answers that begin with ``message`` are whole conversations, and do not go on with ``prompt``."""
    role = role_of(message)
    return role in ("system", "developer") or (
        role == "user" and any(role_of(turn) == "user" for turn in prompt)
    )


def _says(message: Any, text: Any) -> bool:
    """Return whether a message has ``text`` in its words."""
    words = (
        message.get("content", message.get("value"))
        if isinstance(message, Mapping)
        else None
    )
    return isinstance(words, str) and isinstance(text, str) and text.strip() in words


def _alike(chosen: Sequence[Any], rejected: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """What both begin with, twice."""
    return takewhile(
        lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)
    )


def garbled_pair(record: Mapping[str, str]) -> dict[str, str]:
    """Return a record with a pair of answers, made from a record with ``prompt`` and ``completion``.

    The completion is the chosen answer, and its words in reverse order are the rejected answer.
    """
    answer = record["completion"]
    return {
        "prompt": record["prompt"],
        "chosen": answer,
        "rejected": " ".join(reversed(answer.split())),
    }


def answer_side(
    prompt: Sequence[Any],
    answer: Any,
    name: str,
    tools: Any,
    unread: Sequence[str],
    variables: Mapping[str, Any],
) -> Conversation:
    """Build a conversation of ``prompt``, which is not learned, and ``answer``, which is learned.

    ``answer``: a text or a list of messages, called ``name`` in errors. ``tools``: tools that the assistant may call.
    ``unread``: names of the record's fields that are not used. ``variables``: variables for the chat template.
    """
    answers = as_messages(answer, "assistant")
    if not any(role_of(turn) == "assistant" for turn in answers):
        raise ConversationError(f"{name!r} has no turn of the assistant's")
    try:
        return conversation(
            [*prompt, *answers],
            tools,
            unread=unread,
            hidden=len(prompt),
            variables=variables,
        )
    except ConversationError as error:
        raise ConversationError(f"prompt and {name!r}: {error}") from None


def _margin(value: Any) -> float:
    if value in (None, ""):
        return 0.0
    if (number := number_of(value)) is None:
        raise ConversationError(
            f"its 'margin' is {str(value)[:40]!r}, which is no number"
        )
    return number
