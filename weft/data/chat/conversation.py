"""A conversation as chat templates take it, checked when it is read."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.data.chat.marks import cleaned
from weft.errors import WeftError, nearest

ROLES = ("system", "developer", "user", "assistant", "tool")
#: A message's reasoning under any of its names; templates read the first two.
_REASONING = ("reasoning_content", "thinking", "reasoning")

Message = dict[str, Any]


class ConversationError(WeftError):
    """A record that holds no conversation to learn from; the message says why."""


@dataclass(frozen=True)
class Conversation:
    """``messages`` and ``tools`` as templates take them.

    ``weights``: of every message, 1 unless the data says otherwise (0: not learned). ``weight``: of the whole sample.
    """

    messages: tuple[Message, ...]
    tools: tuple[Message, ...] | None
    weights: tuple[float, ...]
    weight: float = 1.0

    def learned(self, learn: str | Sequence[str]) -> tuple[float, ...]:
        """The weight of every message when ``learn`` ("assistant", "last", "all", or roles) is learned from."""
        roles = {"assistant": ("assistant",), "last": ("assistant",), "all": ROLES}.get(str(learn), tuple(learn))
        chosen = [i for i, message in enumerate(self.messages) if message["role"] in roles]
        chosen = chosen[-1:] if learn == "last" else chosen
        return tuple(self.weight * own * (i in chosen) for i, own in enumerate(self.weights))


def conversation(messages: Any, tools: Any = None, weight: Any = None) -> Conversation:
    """Check ``messages`` (a list of objects with a role and words) and bring them into the form templates expect.

    Arguments of tool calls become objects if they are JSON text, ``null`` is as good as nothing. A message may say
    ``weight`` or ``train``. Raises :class:`ConversationError`.
    """
    checked = check_messages(messages)
    weights = tuple(_message_weight(message, number) for number, message in enumerate(checked, 1))
    if not any(m["role"] == "assistant" for m in checked):
        raise ConversationError("it has no turn of the assistant's to learn from; leave it out")
    return Conversation(tuple(checked), _tools(tools), weights, weight_of(weight, "its 'weight'"))


def as_messages(given: Any, role: str = "user") -> Any:
    """A text as a list of one message by ``role``; anything else as it is."""
    return [{"role": role, "content": given}] if isinstance(given, str) else given


def unlearned(messages: Sequence[Any]) -> list[Any]:
    """The messages with a note that they are not learned from."""
    return [message | {"train": False} if isinstance(message, dict) else message for message in messages]


def check_messages(messages: Any) -> list[Message]:
    """``messages`` in the form templates expect, of a conversation that may also be one to go on with."""
    if not isinstance(messages, list) or not messages:
        raise ConversationError(f"a conversation is a list of messages, not {_shown(messages)}")
    checked = [_message(cleaned(message), number) for number, message in enumerate(messages, 1)]
    _check_answers(checked)
    return checked


def weight_of(value: Any, name: str) -> float:
    """A weight of the data's as a number: 1 where there is none."""
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConversationError(f"{name} is {_shown(value)}; a weight is a number of at least 0")
    return float(value)


def _message(message: Any, number: int) -> Message:
    name = f"message {number}"
    if not isinstance(message, Mapping):
        raise ConversationError(f"{name} is {_shown(message)}; a message is an object with 'role' and 'content'")
    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        lacks = "has no 'role'" if role is None else f"has the unknown role {_shown(role)}"
        raise ConversationError(f"{name} {lacks}; {nearest(str(role), ROLES)}")
    content = message.get("content")
    if not isinstance(content, (str, list, type(None))):
        raise ConversationError(f"{name} ({role}) has {_shown(content)} as 'content'; words are a text")
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ConversationError(f"{name} ({role}) has the part {_shown(part)}; only parts of type 'text' are read")
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise ConversationError(f"{name} ({role}) has {_shown(reasoning)} as its reasoning; that is a text")
        message = {"thinking": reasoning} | message | {"reasoning_content": reasoning}
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"], f"{name} ({role})")
        if role != "assistant":
            raise ConversationError(f"{name} ({role}) calls tools; only the assistant does")
    elif content is None or (role == "assistant" and not _text(content).strip() and not reasoning):
        raise ConversationError(f"{name} ({role}) is empty; leave it out, or give it 'content'")
    return message


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def _calls(calls: Any, name: str) -> list[Message]:
    if not isinstance(calls, list) or not calls:
        raise ConversationError(f"{name} has {_shown(calls)} as 'tool_calls', which is a list of calls")
    checked = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConversationError(f"{name} has the tool call {_shown(call)}, which names no function")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = None
        if not isinstance(arguments, dict):
            raise ConversationError(f"{name} calls {function['name']!r} with arguments that are not a JSON object")
        rest = {key: value for key, value in call.items() if value is not None and key not in ("name", "arguments")}
        checked.append({"type": "function"} | rest | {"function": dict(function) | {"arguments": arguments}})
    return checked


def _check_answers(messages: Sequence[Message]) -> None:
    """What a tool answers must have been asked, where both have an id."""
    asked: set[str] = set()
    for number, message in enumerate(messages, 1):
        asked |= {call["id"] for call in message.get("tool_calls", ()) if isinstance(call.get("id"), str)}
        answered = message.get("tool_call_id")
        if answered is not None and answered not in asked:
            raise ConversationError(f"message {number} (tool) answers the call {_shown(answered)}, which nobody made")


def _message_weight(message: Message, number: int) -> float:
    """Take ``weight`` and ``train`` out of ``message``."""
    train = message.pop("train", message.pop("training", True))
    if not isinstance(train, bool):
        raise ConversationError(f"message {number} has {_shown(train)} as 'train', which is true or false")
    return weight_of(message.pop("weight", None), f"the 'weight' of message {number}") * train


def _tools(tools: Any) -> tuple[Message, ...] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            raise ConversationError("its 'tools' are a text that is not JSON") from None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ConversationError(f"its 'tools' are {_shown(tools)}, not a list of JSON schemas")
    return tuple(cleaned([dict(tool) for tool in tools]))


def _shown(value: Any) -> str:
    """A JSON value as an error shows it."""
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."
