"""Convert a turn of a conversation, in any spelling of exporters, to the form of chat templates.

Programs write the same turn in many ways: ``from`` and ``value`` for ``role`` and ``content``, ``gpt`` for
``assistant``, an empty list for no calls, arguments as text, objects as the answer of a tool.
"""

import ast
import json
from collections.abc import Mapping
from typing import Any

from weft.data.chat.marks import JsonObject, without_marks
from weft.data.json_text import RepeatedKey, check_numbers, parse_record
from weft.errors import WeftError, nearest

ROLES = ("system", "developer", "user", "assistant", "tool")
#: Names of speakers, in lower case.
SPEAKERS = {
    **{role: role for role in ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "ai"), "assistant"),
    # whose words are the call, as JSON
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
    **dict.fromkeys(
        ("function", "observation", "ipython", "tool_response", "function_response"),
        "tool",
    ),
}
_CALLING = ("function_call", "tool_call")
#: What is as good as left out where it is empty.
_EMPTY = ("name", "tool_calls", "tool_call_id", "function_call")

Message = dict[str, Any]


class ConversationError(WeftError):
    """Error of a record that holds no conversation to learn from. The message gives the reason."""


def plain_turn(turn: Any, number: int) -> tuple[Message, str]:
    """Convert a turn of a conversation to a message with the keys ``role``, ``content`` and ``tool_calls``.

    Returns the message, and a name of the turn for errors, such as ``message 3``. ``number``: position of the turn in
    its conversation, from 1. Fields that are ``null`` are removed. Raises :class:`ConversationError` for unknown roles
    and malformed calls.
    """
    turn = from_text(turn)
    if not isinstance(turn, Mapping):
        raise ConversationError(
            f"message {number} is {json_excerpt(turn)}; a message is an object with 'role' and 'content'"
        )
    name = (
        f"message {number}"
        if "role" in turn or "from" not in turn
        else f"turn {number}"
    )
    given = {key: value for key, value in turn.items() if value is not None}
    given = {
        key: value
        for key, value in given.items()
        if key not in _EMPTY or value not in ("", [], {})
    }
    other = {"from": "role", "value": "content"} | (
        {} if "value" in given else {"text": "content"}
    )
    message = {
        key if (new := other.get(key, key)) in given else new: value
        for key, value in given.items()
    }
    if (speaker := message.get("role")) is None:
        keys = f" (it has {', '.join(map(str, given))})" if given else ""
        raise ConversationError(f"{name} has no 'role'{keys}; {_naming(given)}")
    if not isinstance(speaker, str):
        raise ConversationError(
            f"{name} has {json_excerpt(speaker)} as its role, which is a text"
        )
    known = speaker.strip().lower()
    if known not in SPEAKERS:
        near = nearest(str(speaker), ROLES if name.startswith("message") else SPEAKERS)
        own = f'or say whose it is: data.roles = {{ "{speaker}" = "user" }}'
        raise ConversationError(
            f"{name} has the unknown role {json_excerpt(speaker)}; {near}; {own}"
        )
    role = message["role"] = SPEAKERS[known]
    if known in _CALLING:
        message["tool_calls"] = _called(
            message.pop("content", None), f"{name} ({known})"
        )
    elif role == "tool":
        message["content"] = _answer(message.get("content"))
    if "function_call" in message:
        calls = _called(message.pop("function_call"), f"{name} ({role})")
        message["tool_calls"] = message.get("tool_calls", calls)
    if calls := from_text(message.get("tool_calls")):
        message["tool_calls"] = _calls(calls, f"{name} ({role})")
    else:
        message.pop("tool_calls", None)
    return message, name


def _naming(given: Mapping[str, Any]) -> str:
    """Return the remedy for turns that name their speaker in another field."""
    key = next((str(key) for key in given if key not in ("content", "value")), "NAME")
    return f'name yours: data.columns = {{ "messages.{key}" = "role" }}'


def role_of(turn: Any) -> str | None:
    """Return the role of the speaker of ``turn``, or None if the turn names no speaker that Weft knows."""
    speaker = turn.get("role", turn.get("from")) if isinstance(turn, Mapping) else None
    return SPEAKERS.get(str(speaker).strip().lower())


def from_text(value: Any) -> Any:
    """Parse a string that holds a list or object in JSON or Python syntax. Any other value is returned unchanged, also
    JSON that gives a key twice.
    """
    if not isinstance(value, str) or value.strip()[:1] not in ("[", "{"):
        return value
    try:
        return parse_record(value)
    except RepeatedKey:
        return (
            value  # words that look like JSON, or what is refused where it is no text
        )
    except ValueError:
        pass
    try:  # as pandas writes it to CSV
        meant = ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value
    return meant if isinstance(meant, (list, dict)) else value


def json_excerpt(value: Any) -> str:
    """Return the JSON of a value, shortened to 40 characters, for error messages."""
    text = (
        "nothing"
        if value is None
        else json.dumps(value, ensure_ascii=False, default=str)
    )
    return text if len(text) <= 40 else f"{text[:37]}..."


def _answer(content: Any) -> Any:
    """Return a tool's answer as text: "" for null, JSON for objects and numbers."""
    if content is None:
        return ""
    parts = content if isinstance(content, list) else [None]
    if isinstance(content, str) or (
        parts and all(isinstance(p, Mapping) and p.get("type") == "text" for p in parts)
    ):
        return content
    return json.dumps(content, ensure_ascii=False)


def _called(value: Any, name: str) -> Any:
    """Return the calls in a turn's words or its ``function_call``."""
    calls = from_text(value)
    if isinstance(calls, str):
        raise ConversationError(f"{name} is not JSON")
    return calls if isinstance(calls, list) else [calls]


def _calls(calls: Any, name: str) -> list[Message]:
    """Calls of tools with their arguments as objects."""
    if isinstance(calls, Mapping):
        calls = [calls]
    if not isinstance(calls, list):
        raise ConversationError(
            f"{name} has {json_excerpt(calls)} as 'tool_calls', which is a list of calls"
        )
    checked = []
    for call in map(from_text, calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(
            function.get("name"), str
        ):
            raise ConversationError(
                f"{name} has the tool call {json_excerpt(call)}, which names no function"
            )
        try:
            arguments = _arguments(function.get("arguments"))
        except ValueError as error:
            raise ConversationError(
                f"{name} calls {function['name']!r} with arguments that cannot be read: {error}"
            ) from None
        if not isinstance(arguments, dict):
            raise ConversationError(
                f"{name} calls {function['name']!r} with arguments that are not a JSON object"
            )
        rest = {key: value for key, value in call.items() if value is not None}
        if function is call:  # its name and arguments stand beside what else it has
            function = {
                key: rest.pop(key) for key in list(rest) if key in ("name", "arguments")
            }
        if rest.get("id") == "":
            del rest["id"]
        # In the order of the data, as some templates write a whole call.
        typed = rest if "type" in rest else {"type": "function"} | rest
        checked.append(typed | {"function": dict(function) | {"arguments": arguments}})
    return checked


def _arguments(given: Any) -> Any:
    """Arguments of a call: an object, or JSON text of one, or such text once more as text; nothing is an empty one.

    An object that was given as text keeps the text, for templates that write it as it is. Raises ValueError for an
    object that gives a key twice, or that has what JSON cannot say.
    """
    text = ""
    for _ in range(2):
        if isinstance(given, str):
            text = given
            try:
                given = without_marks(parse_record(given)) if given.strip() else {}
            except json.JSONDecodeError:
                return None
    check_numbers(given)
    if text.strip() and isinstance(given, dict):
        return JsonObject(given, text)
    return {} if given is None else given
