"""The formats in which conversations are published, each converted to the one that chat templates take."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from weft.data.chat.agents import from_adp, from_atif
from weft.data.chat.conversation import Conversation, ConversationError, as_messages, conversation, unlearned
from weft.errors import nearest

#: Names of speakers in ShareGPT's form. ``function_call`` is the assistant's, as JSON.
_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


def _messages(record: Mapping[str, Any], field: str) -> Conversation:
    return conversation(record[field], record.get("tools"), record.get("weight"))


def _prompt(record: Mapping[str, Any]) -> Conversation:
    """``prompt`` and ``completion``: texts, or lists of messages of which the completion alone is learned."""
    asked, answered = as_messages(record["prompt"]), as_messages(record["completion"], "assistant")
    if not isinstance(asked, list) or not isinstance(answered, list):
        raise ConversationError("'prompt' and 'completion' are each a text or a list of messages")
    return conversation(unlearned(asked) + answered, record.get("tools"), record.get("weight"))


def _sharegpt(record: Mapping[str, Any]) -> Conversation:
    turns = record["conversations"]
    if not isinstance(turns, list):
        raise ConversationError("'conversations' is not a list of turns")
    messages = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping) or "from" not in turn or "value" not in turn:
            raise ConversationError(f"turn {number} of 'conversations' is not an object with 'from' and 'value'")
        speaker = str(turn["from"])
        if speaker not in _SPEAKERS:
            raise ConversationError(f"turn {number} is from the unknown {speaker!r}; {nearest(speaker, _SPEAKERS)}")
        rest = {key: value for key, value in turn.items() if key in ("weight", "train")}
        if speaker == "function_call":
            messages.append(rest | {"role": "assistant", "tool_calls": _parsed_calls(turn["value"], number)})
        else:
            messages.append(rest | {"role": _SPEAKERS[speaker], "content": turn["value"]})
    return conversation(messages, record.get("tools"), record.get("weight"))


def _parsed_calls(value: Any, number: int) -> list[Any]:
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise ConversationError(f"turn {number} (function_call) is not JSON") from None
    return calls if isinstance(calls, list) else [calls]


def _alpaca(record: Mapping[str, Any]) -> Conversation:
    """``instruction``, perhaps ``input``, and ``output``; ``history`` are pairs of what was said before."""
    earlier = record.get("history") or []
    if not isinstance(earlier, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in earlier):
        raise ConversationError("'history' is not a list of pairs of an instruction and an answer")
    asked = [record["instruction"], *([record["input"]] if record.get("input") else [])]
    if not all(isinstance(text, str) for text in asked):
        raise ConversationError("'instruction' and 'input' are texts")
    messages = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    for question, answer in [*earlier, ["\n".join(asked), record["output"]]]:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return conversation(messages, record.get("tools"), record.get("weight"))


#: What a record of each form has, and what reads it; of those that fit a record the first counts.
_FORMS: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], Conversation]]] = {
    "atif": (("steps",), from_atif),
    "adp": (("content", "id"), from_adp),
    "messages": (("messages",), lambda record: _messages(record, "messages")),
    "sharegpt": (("conversations",), _sharegpt),
    "prompt": (("prompt", "completion"), _prompt),
    "docstrings": (("prompt", "completion"), _prompt),
    "alpaca": (("instruction", "output"), _alpaca),
}


def read_record(record: Any, form: str = "auto", field: str | None = None) -> Conversation:
    """The conversation in ``record``. ``form``: which of the forms it has, or ``auto`` to see from its keys.

    ``field``: where the messages are, if they have another name. Raises :class:`ConversationError`.
    """
    if not isinstance(record, Mapping):
        raise ConversationError(f"expected a JSON object, got {type(record).__name__}")
    if field is not None:
        if field not in record:
            raise ConversationError(f"no field {field!r}; set the source's 'field', {nearest(field, record)}")
        return _messages(record, field)
    keys = {name: needed for name, (needed, _) in _FORMS.items()}
    if form == "auto":
        form = next((name for name, needed in keys.items() if all(key in record for key in needed)), form)
    if form == "auto":
        known = "; ".join(" and ".join(needed) for needed in keys.values())
        found = ", ".join(map(str, record)) or "no keys"
        raise ConversationError(f"a record with {found[:60]} has none of the known forms, which have {known}")
    if lacking := [key for key in keys[form] if key not in record]:
        raise ConversationError(
            f"no field {lacking[0]!r}, which a record of form {form!r} has; set the source's 'form'"
        )
    return _FORMS[form][1](record)
