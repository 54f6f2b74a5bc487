"""Conversations in the form of chat templates, checked when they are read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from weft.data.chat.chat_turns import (
    ROLES,
    ConversationError,
    Message,
    from_text,
    json_excerpt,
    plain_turn,
)
from weft.data.chat.marks import without_marks
from weft.data.chat.masks import take_weight, weight_of
from weft.data.json_text import RepeatedKey, check_numbers, parse_record

#: A message's reasoning under any of its names; templates read the first two.
_REASONING = ("reasoning_content", "thinking", "reasoning")
#: What a template is given of a conversation, which no variable of the user's may be.
OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
#: What messages are known to have; anything else is a template's to use.
_KNOWN = {"role", "content", "name", "tool_calls", "tool_call_id", *_REASONING}


@dataclass(frozen=True)
class Conversation:
    """A conversation that has been read from a record and checked, ready for a chat template.

    Attributes:
        ``messages``: the messages in the form of chat templates.
        ``tools``: the tools that the assistant may call, as JSON schemas; None without tools.
        ``weights``: loss weight that the data gives each message, 1 by default; 0: not learned.
        ``weight``: loss weight of the whole conversation, by which the weights of messages are multiplied.
        ``masks``: pairs of the number of a message and the weight of its tokens, from masks in the data. They apply
            even if ``data.chat.learn`` is "all", where all other tokens have weight 1.
        ``variables``: variables that the record gives the template.
        ``unread``: names of the record's fields that Weft does not use. A field of a message is named
            ``messages[].name``, and is nevertheless passed to the template.
        ``marked``: numbers (from 0) of the messages that a mask in the data marks as learned.
    """

    messages: tuple[Message, ...]
    tools: tuple[Message, ...] | None
    weights: tuple[float, ...]
    weight: float = 1.0
    masks: tuple[tuple[int, float], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = field(default=(), compare=False)
    marked: tuple[int, ...] = field(default=(), compare=False)

    def learned(self, learn: str | Sequence[str]) -> tuple[float, ...]:
        """Return the loss weight of every message, 0 for messages that are not learned.

        ``learn``: which messages are learned: "assistant", "last" (the assistant's last), "all", or a list of roles.
        """
        roles = {"assistant": ("assistant",), "last": ("assistant",), "all": ROLES}.get(
            str(learn), tuple(learn)
        )
        chosen = [
            i for i, message in enumerate(self.messages) if message["role"] in roles
        ]
        chosen = chosen[-1:] if learn == "last" else chosen
        return tuple(
            self.weight * own * (i in chosen) for i, own in enumerate(self.weights)
        )


def conversation(
    messages: Any,
    tools: Any = None,
    weight: Any = None,
    unread: Sequence[str] = (),
    hidden: int = 0,
    variables: Mapping[str, Any] | None = None,
) -> Conversation:
    """Check ``messages``, objects with a role and content, and return them as a :class:`Conversation`.

    Turns may be in the forms of several other programs (:mod:`weft.data.chat.chat_turns`), and masks of messages are
    applied (:mod:`weft.data.chat.masks`). Raises :class:`ConversationError` for malformed messages, tools or weights,
    and if no turn is the assistant's.

    Arguments:
        ``tools``: tools that the assistant may call.
        ``weight``: loss weight of the whole conversation.
        ``unread``: names of the record's fields that are not used.
        ``hidden``: number of messages at the start that are a prompt and not learned.
        ``variables``: variables for the template.
    """
    checked = check_messages(messages)
    turns = [
        take_weight(message, f"message {number}")
        for number, message in enumerate(checked, 1)
    ]
    if not any(m["role"] == "assistant" for m in checked):
        raise ConversationError(
            "it has no turn of the assistant's to learn from; leave it out"
        )
    more = {
        f"messages[].{key}"
        for message in checked
        for key in message.keys() - _KNOWN
        if message[key]
    }
    return Conversation(
        tuple(checked),
        _tools(tools),
        tuple(0.0 if i < hidden else turn.weight for i, turn in enumerate(turns)),
        weight_of(weight, "its 'weight'"),
        masks=tuple(
            (i, turn.weight)
            for i, turn in enumerate(turns)
            if turn.said and turn.weight != 1
        ),
        unread=(*unread, *sorted(more)),
        marked=tuple(i for i, turn in enumerate(turns) if turn.marked),
        variables=variables or {},
    )


def as_messages(given: Any, role: str = "user") -> Any:
    """Return ``given``, if it is a text, as a list of one message with this ``role``. Any other value is returned
    unchanged.
    """
    return [{"role": role, "content": given}] if isinstance(given, str) else given


def check_messages(messages: Any) -> list[Message]:
    """Check a list of messages, and return it in the form of chat templates.

    ``messages``: a list of objects with a role and content, or the JSON text of such a list. No turn of the assistant
    is required. Raises :class:`ConversationError` for malformed messages, and for the answer of a tool that was not
    called.
    """
    messages = from_text(messages)
    if not isinstance(messages, list) or not messages:
        raise ConversationError(
            f"a conversation is a list of messages, not {json_excerpt(messages)}{_repeated(messages)}"
        )
    checked = [
        _message(without_marks(message), number)
        for number, message in enumerate(messages, 1)
    ]
    _check_answers(checked)
    return checked


def _repeated(messages: Any) -> str:
    """Return what is to be said of messages that were left as a text because an object in it gives a key twice."""
    try:
        if isinstance(messages, str):
            parse_record(messages)
    except RepeatedKey as error:
        return f"; {error}"
    except ValueError:
        pass
    return ""


def _message(turn: Any, number: int) -> Message:
    message, name = plain_turn(turn, number)
    role, content = message["role"], message.get("content")
    if not isinstance(content, (str, list, type(None))):
        raise ConversationError(
            f"{name} ({role}) has {json_excerpt(content)} as 'content'; words are a text"
        )
    for part in content if isinstance(content, list) else ():
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise ConversationError(
                f"{name} ({role}) has the part {json_excerpt(part)}; only parts of type 'text' are read"
            )
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise ConversationError(
                f"{name} ({role}) has {json_excerpt(reasoning)} as its reasoning; that is a text"
            )
        message = {"thinking": reasoning} | message | {"reasoning_content": reasoning}
    if "tool_calls" in message:
        if role != "assistant":
            raise ConversationError(
                f"{name} ({role}) calls tools; only the assistant does"
            )
    elif content is None or (
        role == "assistant" and not _text(content).strip() and not reasoning
    ):
        alike = get_close_matches("content", message, 1, 0.8) if content is None else []
        instead = f" in place of {alike[0]!r}" if alike and alike != ["content"] else ""
        raise ConversationError(
            f"{name} ({role}) is empty; leave it out, or give it 'content'{instead}"
        )
    return message


def _text(content: Any) -> str:
    return (
        content
        if isinstance(content, str)
        else "".join(part["text"] for part in content or ())
    )


def _check_answers(messages: Sequence[Message]) -> None:
    """What a tool answers must have been asked, where both have an id."""
    asked: set[str] = set()
    for number, message in enumerate(messages, 1):
        asked |= {
            call["id"]
            for call in message.get("tool_calls", ())
            if isinstance(call.get("id"), str)
        }
        answered = message.get("tool_call_id")
        if answered is not None and answered not in asked:
            raise ConversationError(
                f"message {number} (tool) answers the call {json_excerpt(answered)}, which nobody made"
            )


def _tools(tools: Any) -> tuple[Message, ...] | None:
    if isinstance(tools, str):
        try:
            tools = parse_record(tools) if tools.strip() else None
        except json.JSONDecodeError:
            raise ConversationError("its 'tools' are a text that is not JSON") from None
        except ValueError as error:
            raise ConversationError(
                f"its 'tools' are a text that cannot be read: {error}"
            ) from None
    if tools in (None, [], {}):
        return None
    if isinstance(tools, list):
        tools = [from_text(tool) for tool in tools]
    if not isinstance(tools, list) or not all(
        isinstance(tool, Mapping) for tool in tools
    ):
        raise ConversationError(
            f"its 'tools' are {json_excerpt(tools)}, not a list of JSON schemas"
        )
    try:
        check_numbers(tools)
    except ValueError as error:
        raise ConversationError(f"its 'tools' cannot be read: {error}") from None
    return tuple(without_marks([dict(tool) for tool in tools]))
