"""Fields of a record: the names that programs give them, and which of them are read."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from weft.data.chat.chat_turns import (
    SPEAKERS,
    ConversationError,
    from_text,
    json_excerpt,
    role_of,
)
from weft.data.chat.conversation import OWN_VARIABLES, Conversation, conversation
from weft.data.chat.marks import without_marks
from weft.data.chat.masks import HIDDEN, LEARNED, read_flag, weight_of

#: A field, and the other names that it has in published data; of several that a record has the first is read.
NAMES: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "query"),
    "completion": ("completion", "response", "answer"),
    "instruction": ("instruction",),
    "input": ("input", "context"),
    "output": ("output", "response", "answer", "completion"),
    "system": ("system", "system_prompt"),
    "messages": ("messages",),
    "conversations": ("conversations", "conversation"),
    "chosen": ("chosen", "chosen_response"),
    "rejected": ("rejected", "rejected_response"),
    "history": ("history",),
    "tools": ("tools",),
    "functions": ("functions",),
    "chat_template_kwargs": ("chat_template_kwargs",),
    "weight": ("weight",),
    "margin": ("margin",),
    "label": ("label", "desirable", "kto_tag"),
}
#: What a record says about learning under a name whose meaning is not known.
_UNCLEAR = ("mask", "masks", "weights", "loss_masks", "loss_weights", "loss_weight")
#: Every name that means something in a record.
KNOWN = {name for names in NAMES.values() for name in names} | {*LEARNED, *HIDDEN}
#: A question and its answer, where each element of a list has both.
_TURN_PAIRS = (
    ("input", "output"),
    ("human", "assistant"),
    ("user", "assistant"),
    ("question", "answer"),
)
_SIDES = ("user", "assistant")
#: How dialogues in Anthropic's data begin.
_HUMAN = "\n\nHuman:"


class Fields:
    """Fields of a record. Readers take them one by one, and :meth:`unread` then returns the fields that nobody has
    taken.

    A field is named by Weft's name, and is also found under the names that other programs use (:data:`NAMES`).
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.record = dict(record)
        for key in [
            key for key in self.record if isinstance(key, str) and key not in KNOWN
        ]:
            plain = key.strip().lower()  # exports of tables have Question and Answer
            if plain in KNOWN and plain not in self.record:
                self.record[plain] = self.record.pop(key)
        self.taken: set[str] = set()

    def name(self, field: str) -> str | None:
        """Return the first of the names of ``field`` under which the record has a value, or None if it has no value."""
        return next(
            (
                name
                for name in NAMES.get(field, (field,))
                if self.record.get(name) is not None
            ),
            None,
        )

    def empty_name(self, field: str) -> str | None:
        """Return the key under which ``field`` is null in the record.

        Returns None if the field has a value, or if the record has none of the field's names.
        """
        names = NAMES.get(field, (field,))
        return (
            None
            if self.has(field)
            else next((name for name in names if name in self.record), None)
        )

    def has(self, *fields: str) -> bool:
        """Return whether the record has a value for each of the ``fields``, which are names that Weft uses."""
        return all(self.name(field) is not None for field in fields)

    def take(self, field: str) -> Any:
        """Return the value of ``field``, or None if the record has none, and mark the field as read."""
        name = self.name(field)
        if name is None:
            return None
        self.taken.add(name)
        return self.record[name]

    def needed(self, field: str, form: str) -> Any:
        """Return the value of ``field`` and mark the field as read.

        ``form``: name of the record's form, for the error. Raises :class:`ConversationError` if the record has no value
        for the field.
        """
        name = self.name(field)
        if name is None and (empty := self.empty_name(field)):
            raise ConversationError(
                f"its {empty!r} is empty; leave the record out, or write something there"
            )
        if name is None:
            others = ", ".join(map(repr, NAMES.get(field, ())[1:]))
            named = f" (or {others})" if others else ""
            raise ConversationError(
                f"no field {field!r}{named}, which a record of form {form!r} has; set the source's 'form', or name "
                f'yours: data.columns = {{ NAME = "{field}" }}'
            )
        return self.take(field)

    def unread(self) -> tuple[str, ...]:
        """Return the names of the fields that have a value and were not taken."""
        return tuple(
            str(k)
            for k, v in self.record.items()
            if k not in self.taken and v not in (None, "", [], {})
        )


def messages_of(value: Any) -> Any:
    """Convert a list of turns in any known form to a list of dictionaries. Any other value is returned unchanged.

    There are four forms: a list in JSON or Python syntax; a dictionary of columns with a list for each key; a single
    turn; and a text in which ``Human:`` and ``Assistant:`` begin the turns.
    """
    if isinstance(value, str) and value.startswith(_HUMAN):
        return _dialogue(value)
    meant = from_text(value)
    if (
        isinstance(meant, Mapping)
        and meant
        and all(isinstance(column, list) for column in meant.values())
    ):
        # A list of objects as a table of columns, which is how some libraries keep it.
        sizes = {len(column) for column in meant.values()}
        rows = zip(*meant.values(), strict=True) if len(sizes) == 1 else ()
        meant = [dict(zip(meant, row, strict=True)) for row in rows]
    elif isinstance(value, Mapping) and _is_turn(value):
        return [value]  # the only turn, which some exporters write without a list
    return (
        meant
        if isinstance(meant, list) and meant and all(map(_is_turn, meant))
        else value
    )


def _is_turn(value: Any) -> bool:
    return isinstance(value, Mapping) and ("role" in value or "from" in value)


def turns_of(value: Any) -> Any:
    """Return a conversation as a list of turns, from any form that :func:`messages_of` knows, or from a list of pairs.

    Each element of a list of pairs is a dictionary with a question and its answer. They become a turn of the user and a
    turn of the assistant. A value in an unknown form is returned unchanged.
    """
    pairs = from_text(value)
    if (
        not isinstance(pairs, list)
        or not pairs
        or not all(isinstance(two, Mapping) for two in pairs)
    ):
        return messages_of(value)
    keys = next(
        (keys for keys in _TURN_PAIRS if all({*two} == {*keys} for two in pairs)), None
    )
    if keys is None:
        return messages_of(value)
    return [
        {"role": role, "content": two[key]}
        for two in pairs
        for role, key in zip(_SIDES, keys, strict=True)
    ]


def _dialogue(text: str) -> list[dict[str, str]]:
    """Return the turns of a dialogue as Anthropic's data has it; without the empty one that a prompt ends with."""
    _, *pieces = re.split(r"\n\n(Human|Assistant):", text)
    said = zip(pieces[::2], pieces[1::2], strict=True)
    turns = [
        {"role": SPEAKERS[who.lower()], "content": words.strip()} for who, words in said
    ]
    return turns[:-1] if not turns[-1]["content"] else turns


def build_conversation(
    fields: Fields, messages: Any, unread: Sequence[str] = (), hidden: int = 0
) -> Conversation:
    """Build a conversation from ``messages`` and from the record's system message, tools, weight and masks.

    ``fields``: the fields of the record, from which these values are taken. ``unread``: names of further fields that
    are not used. ``hidden``: number of messages at the start that are a prompt and not learned; a system message from
    the record is counted with them.
    """
    tools, weight = tools_of(fields), weight_of_record(fields)
    variables = variables_of(fields)
    for key in (*LEARNED, *HIDDEN):
        if (values := fields.take(key)) is not None:
            messages = _masked(messages, key, from_text(values))
    whole = with_system(messages, fields.take("system"))
    hidden += len(whole) - len(messages) if hidden else 0
    unread = (*fields.unread(), *unread)
    return conversation(whole, tools, weight, unread, hidden, variables)


def tools_of(fields: Fields) -> Any:
    """Return the tools of a record from ``tools``, or from the older field ``functions`` in the form of ``tools``."""
    tools, functions = fields.take("tools"), from_text(fields.take("functions"))
    if tools or not functions or not isinstance(functions, list):
        return tools
    return [{"type": "function", "function": function} for function in functions]


def variables_of(fields: Fields) -> dict[str, Any]:
    """Take the variables that a record gives its chat template, from TRL's field ``chat_template_kwargs``.

    The field holds a JSON object, or the text of one. Raises :class:`ConversationError` for any other value, and for a
    variable with a name that is reserved, such as ``messages``.
    """
    given = from_text(fields.take("chat_template_kwargs"))
    if given in (None, "", [], "null"):
        return {}
    if not isinstance(given, Mapping):
        raise ConversationError(
            f"its 'chat_template_kwargs' are {json_excerpt(given)}; they are an object with variables of the template"
        )
    if taken := sorted(OWN_VARIABLES & given.keys()):
        raise ConversationError(
            f"its 'chat_template_kwargs' have {taken[0]!r}, which is no variable of the user's; leave it out"
        )
    return without_marks(
        {key: value for key, value in given.items() if value is not None}
    )


def weight_of_record(fields: Fields) -> float:
    """Take the loss weight of a whole record: its ``weight``, or 0 if a mask of the record hides it.

    Masks that are lists apply to single messages and are not read here. Raises :class:`ConversationError` for an
    unknown mask.
    """
    weight = weight_of(fields.take("weight"), "its 'weight'")
    for key in (*LEARNED, *HIDDEN):
        value = from_text(fields.record.get(key))
        if value is not None and not isinstance(value, list):
            fields.take(key)
            del fields.record[key]
            weight *= read_flag(value, key, "the record") == (key in LEARNED)
    if unclear := next(
        (key for key in _UNCLEAR if fields.record.get(key) is not None), None
    ):
        raise ConversationError(
            f"it has {unclear!r}, which says something about learning that is not known; known are "
            f"{', '.join((*LEARNED, *HIDDEN))} and weight: rename it by data.columns, or leave it out: "
            f'data.columns = {{ {unclear} = "" }}'
        )
    return weight


def with_system(messages: Any, system: Any) -> Any:
    """Return ``messages`` after a system message with the text ``system``, unless they begin with that message.

    Raises :class:`ConversationError` if ``messages`` begin with another system message.
    """
    if system in (None, ""):
        return messages
    if not isinstance(system, str):
        raise ConversationError(
            f"its 'system' is {json_excerpt(system)}; words are a text"
        )
    messages = messages_of(messages)
    if not isinstance(messages, list):
        return messages  # which is said where they are checked
    first: Any = messages[0] if messages else None
    if role_of(first) in ("system", "developer"):
        if first.get("content", first.get("value")) == system:
            return messages
        raise ConversationError(
            "it has a system turn, and another text as 'system' beside it; leave one out: "
            'data.columns = { system = "" } drops the latter'
        )
    return [{"role": "system", "content": system}, *messages]


def _masked(messages: Any, key: str, values: list[Any]) -> Any:
    """``messages`` with one mask each, from a list beside them."""
    messages = messages_of(messages)
    if not isinstance(messages, list) or len(messages) != len(values):
        raise ConversationError(
            f"its {key!r} is a list of {len(values)}, which is not one for each message"
        )
    return [
        m | {key: v} if isinstance(m, dict) else m
        for m, v in zip(messages, values, strict=True)
    ]
