"""Reads the messages of a live conversation: those of clients, and this server's earlier answers.

Records to learn from are judged more strictly (:mod:`weft.data.chat.conversation`): a turn that is empty teaches
nothing, but an answer can be empty.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from hashlib import blake2b
from typing import Any

from weft.data.chat.conversation import ROLES, Message
from weft.data.chat.marks import without_marks
from weft.data.json_text import parse_json
from weft.errors import UsageError, nearest
from weft.serve.protocol import shown_json

#: Names of a message's reasoning; templates read the first two.
REASONING = ("reasoning_content", "thinking", "reasoning")
#: Types of parts that are texts, and under which key.
_TEXTS = dict.fromkeys(
    ("text", "input_text", "output_text", "reasoning_text", "summary_text"), "text"
)
_TEXTS["refusal"] = "refusal"


def read_live(messages: Sequence[Any]) -> list[Message]:
    """Convert the ``messages`` of a request to the form that chat templates read. Raises :class:`UsageError` for an
    invalid message.

    The content of each message becomes a text. Arguments of tool calls become objects. Arguments that are no JSON
    object, as of a call that was cut off, stay text.
    """
    return [
        _message(without_marks(message), number)
        for number, message in enumerate(messages)
    ]


def _message(message: Any, number: int) -> Message:
    name = f"message {number}"
    if not isinstance(message, Mapping):
        raise UsageError(
            f"{name} is {shown_json(message)}; a message is an object with 'role' and 'content'"
        )
    given = {key: value for key, value in message.items() if value is not None}
    role = given.get("role")
    if role not in (*ROLES, "function"):
        lacks = (
            "has no role"
            if role is None
            else f"has the unknown role {shown_json(role)}"
        )
        raise UsageError(f"{name} {lacks}; {nearest(str(role), ROLES)}")
    if "content" not in message and role in ("user", "system", "developer"):
        alike = get_close_matches("content", given, 1)
        alike = alike or [key for key in ("text", "value") if key in given]
        instead = f" in place of {alike[0]!r}" if alike else ""
        raise UsageError(f"{name} ({role}) has no 'content'; give it one{instead}")
    if "audio" in given:
        raise UsageError(f"{name} ({role}) has 'audio'; only texts are read")
    read = given | {
        "role": "tool" if role == "function" else role,
        "content": content_text(given.get("content"), name),
    }
    calls = read.pop("tool_calls", None) or []
    # as clients asked before there were tools
    if function := read.pop("function_call", None):
        calls = [{"type": "function", "function": function}]
    if calls:
        read["tool_calls"] = _calls(calls, f"{name} ({role})")
    reasoning = next(
        (given[key] for key in REASONING if isinstance(given.get(key), str)), None
    )
    return read if not reasoning else read | dict.fromkeys(REASONING[:2], reasoning)


def with_short_ids(talk: Sequence[Message]) -> list[Message]:
    """Return the conversation ``talk`` with tool calls whose ids are nine letters and digits, which is all that some
    templates of Mistral's take. Other ids are replaced, equal ones by equal ones.
    """
    read = []
    for message in talk:
        read.append(dict(message))
        if isinstance(name := message.get("tool_call_id"), str):
            read[-1]["tool_call_id"] = _short_id(name)
        if calls := message.get("tool_calls"):
            read[-1]["tool_calls"] = [
                call | {"id": _short_id(call["id"])}
                if isinstance(call.get("id"), str)
                else call
                for call in calls
            ]
    return read


def _short_id(name: str) -> str:
    if len(name) == 9 and name.isascii() and name.isalnum():
        return name
    return blake2b(name.encode()).hexdigest()[:9]


def content_text(content: Any, name: str) -> str:
    """Return the text of ``content``, the content of a chat message: a text, or a list of parts with texts. Raises
    :class:`UsageError` for other content; ``name`` is the content's name in the error.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise UsageError(
            f"{name} has {shown_json(content)} as 'content'; give a text, or parts of type 'text'"
        )
    texts = []
    for part in content:
        key = (
            _TEXTS.get(str(part.get("type", "text")))
            if isinstance(part, Mapping)
            else None
        )
        text = part if isinstance(part, str) else part.get(key) if key else None
        if not isinstance(text, str):
            raise UsageError(
                f"{name} has the part {shown_json(part)}; only parts of type 'text' are read"
            )
        texts.append(text)
    return "".join(texts)


def _calls(calls: Any, name: str) -> list[Message]:
    if not isinstance(calls, list):
        raise UsageError(
            f"{name} has {shown_json(calls)} as 'tool_calls', which is a list of calls"
        )
    read = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(
            function.get("name"), str
        ):
            raise UsageError(
                f"{name} has the tool call {shown_json(call)}, which names no function"
            )
        about = {
            key: value
            for key, value in call.items()
            if value is not None and key not in ("name", "arguments")
        }
        # marks and lone surrogates may stand in its escapes
        arguments = without_marks(arguments_of(function.get("arguments")))
        read.append(
            {"type": "function"}
            | about
            | {"function": dict(function) | {"arguments": arguments}}
        )
    return read


def arguments_of(given: Any) -> Any:
    """Return the arguments of a tool call as a dictionary. ``given``: a dictionary, or its JSON text, even if that is
    encoded twice. Missing arguments (None, ``null`` or blank text) become an empty dictionary. Any other value is
    returned unchanged.
    """
    value = given
    for _ in range(3):
        if not isinstance(value, str):
            break
        if not value.strip():
            return {}
        try:
            value = parse_json(value)
        except ValueError:
            break
    if value is None:
        return {}
    return value if isinstance(value, dict) else given
