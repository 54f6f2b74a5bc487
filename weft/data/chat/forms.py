"""Published forms of conversations, each converted to that of chat templates."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from weft.data.chat.agents import from_adp, from_atif
from weft.data.chat.chat_turns import ConversationError
from weft.data.chat.conversation import Conversation, as_messages
from weft.data.chat.fields import (
    NAMES,
    Fields,
    build_conversation,
    messages_of,
    turns_of,
)
from weft.errors import nearest


class Form(NamedTuple):
    """A form of records that other programs publish, such as ShareGPT.

    ``name``: the form's name in recipes. ``needed``: the fields by which a record of the form is recognised. ``read``:
    the function that reads the fields of such a record as a conversation.
    """

    name: str
    needed: tuple[str, ...]
    read: Callable[[Fields], Conversation]


def _messages(fields: Fields, field: str = "messages") -> Conversation:
    return build_conversation(fields, messages_of(fields.needed(field, "messages")))


def _sharegpt(fields: Fields) -> Conversation:
    turns = turns_of(fields.needed("conversations", "sharegpt"))
    if not isinstance(turns, list):
        raise ConversationError("'conversations' is not a list of turns")
    return build_conversation(fields, turns)


def _prompt(
    fields: Fields, asked: str = "prompt", answered: str = "completion"
) -> Conversation:
    """Return a question and its answer: texts, or lists of messages of which the answer's alone are learned.

    ``history`` are pairs of what was said before.
    """
    first, second = (
        messages_of(fields.needed(name, "prompt")) for name in (asked, answered)
    )
    before, after = as_messages(first), as_messages(second, "assistant")
    if not isinstance(before, list) or not isinstance(after, list):
        names = f"{fields.name(asked)!r} and {fields.name(answered)!r}"
        raise ConversationError(f"{names} are each a text or a list of messages")
    asked_before = _earlier(fields) + before
    return build_conversation(fields, asked_before + after, hidden=len(asked_before))


def _alpaca(fields: Fields) -> Conversation:
    """``instruction``, perhaps ``input``, and ``output``; ``history`` are pairs of what was said before."""
    further = fields.take("input")
    asked = [fields.needed("instruction", "alpaca"), further or ""]
    answer = fields.needed("output", "alpaca")
    if not all(isinstance(text, str) for text in asked):
        raise ConversationError("'instruction' and 'input' are texts")
    turn = [
        {"role": "user", "content": "\n".join(filter(None, asked))},
        {"role": "assistant", "content": answer},
    ]
    return build_conversation(fields, _earlier(fields) + turn)


def _earlier(fields: Fields) -> list[Any]:
    """Return the turns of ``history``, pairs of an instruction and its answer."""
    pairs = fields.take("history") or []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in pairs
    ):
        raise ConversationError(
            "'history' is not a list of pairs of an instruction and an answer"
        )
    roles = ("user", "assistant")
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(roles, pair, strict=True)
    ]


#: Of the forms that fit a record the first counts; those that have a field under its first name come before others.
FORMS = (
    Form(
        "atif",
        ("steps", "schema_version"),
        lambda fields: build_conversation(fields, *from_atif(fields)),
    ),
    Form(
        "adp",
        ("content", "id"),
        lambda fields: build_conversation(fields, *from_adp(fields)),
    ),
    Form("messages", ("messages",), _messages),
    Form("sharegpt", ("conversations",), _sharegpt),
    Form("prompt", ("prompt", "completion"), _prompt),
    Form("alpaca", ("instruction", "output"), _alpaca),
    Form(
        "prompt", ("input", "output"), lambda fields: _prompt(fields, "input", "output")
    ),
    Form(
        "prompt",
        ("prompt", "output"),
        lambda fields: _prompt(fields, "prompt", "output"),
    ),
)


def read_record(
    record: Any, form: str = "auto", field: str | None = None
) -> Conversation:
    """Read the conversation in ``record``.

    ``form``: a name of :data:`FORMS`, or "auto" to recognise the form by the record's keys. ``field``: the field that
    holds the messages, if its name is not a usual one. Raises :class:`ConversationError` for a record without a
    conversation in this form.
    """
    if not isinstance(record, Mapping):
        raise ConversationError(f"expected a JSON object, got {type(record).__name__}")
    fields = Fields(record)
    if field is not None:
        if field not in record:
            raise ConversationError(
                f"no field {field!r}; set the source's 'field', {nearest(field, map(str, record))}"
            )
        return _messages(fields, field)
    form = "prompt" if form == "docstrings" else form
    fitting = [known for known in FORMS if form in ("auto", known.name)]
    if known := record_form(fields, fitting):
        return known.read(fields)
    if form != "auto":
        return fitting[0].read(fields)  # which says what is missing
    raise _unknown(fields)


def record_form(
    fields: Fields, forms: tuple[Form, ...] | list[Form] = FORMS
) -> Form | None:
    """Return the first of ``forms`` whose needed fields the record has, or None if no form fits."""
    exact = (
        known
        for known in forms
        if all(fields.record.get(name) is not None for name in known.needed)
    )
    alike = (known for known in forms if fields.has(*known.needed))
    candidates = [
        known for known in (*exact, *alike) if known.name != "adp" or _is_list(fields)
    ]
    trajectory = any(known.name == "atif" for known in forms) and fields.has("steps")
    return candidates[0] if candidates else FORMS[0] if trajectory else None


def _is_list(fields: Fields) -> bool:
    return isinstance(fields.record.get("content"), list)


def _unknown(fields: Fields) -> ConversationError:
    """Why a record has none of the forms, with the nearest."""
    keys = [str(key) for key in fields.record]
    shown = ", ".join(keys) or "no keys"
    has = f"a record with {shown if len(shown) <= 60 else f'{shown[:57]}...'} has none of the known forms"
    if fields.has("chosen", "rejected"):
        return ConversationError(
            f"{has}, but is a pair of answers; set data.kind = 'preference'"
        )
    for form in FORMS:  # one of which something is there, but empty
        empty = [
            fields.empty_name(name) for name in form.needed if not fields.has(name)
        ]
        if empty and all(empty):
            return ConversationError(
                f"its {empty[0]!r} is empty; leave the record out, or write something there"
            )
    if (near := _nearest(fields, keys)) is not None:
        return ConversationError(f"{has}; {near}")
    every = "; ".join(
        " and ".join(form.needed)
        for form in FORMS
        if form.needed[-1] not in ("schema_version", "id")
    )
    plain = "plain text is read by kind = 'jsonl' with its 'field'"
    return ConversationError(
        f"{has} ({every}); others are named by data.columns, and {plain}"
    )


def _close(field: str, keys: list[str]) -> list[str]:
    """Return the key that is nearly one of a field's names, if there is one."""
    named = [key for key in keys if not key.endswith("_id")]
    return [
        key
        for name in NAMES[field]
        for key in get_close_matches(name, named, n=1, cutoff=0.8)
    ][:1]


def _nearest(fields: Fields, keys: list[str]) -> str | None:
    """Return the form that a record nearly has, with what to write so that it has it; None if none is near."""
    best, line = 0.0, None
    for form in FORMS:
        if form.name in ("atif", "adp"):
            continue
        near = {
            name: _close(name, keys) for name in form.needed if not fields.has(name)
        }
        close = sum(0.9 for match in near.values() if match)
        score = (len(form.needed) - len(near) + close) / len(form.needed)
        if score > best:
            best = score
            meant = ", ".join(
                f'{match[0] if match else "NAME"} = "{name}"'
                for name, match in near.items()
            )
            line = f"the nearest is {' and '.join(form.needed)}: data.columns = {{ {meant} }}"
    return line
