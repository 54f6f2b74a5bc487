"""Rename columns of records and turns, and roles of speakers, to the names that Weft reads."""

from collections.abc import Mapping
from typing import Any

from weft.data.chat.chat_turns import from_text
from weft.data.chat.fields import KNOWN, messages_of
from weft.data.chat.masks import HIDDEN, LEARNED, WEIGHTS
from weft.errors import UsageError, nearest

#: What means something in a turn.
IN_TURNS = {
    "role", "content", "from", "value", "name", "tool_calls", "tool_call_id", "function_call", "reasoning_content",
    *LEARNED, *HIDDEN, *WEIGHTS,
}  # fmt: skip


class Renaming:
    """Renames columns of a source's records, and roles of their turns, as the recipe's ``columns`` and ``roles`` say.

    ``columns`` and ``roles`` map names in the data to names that Weft reads. ``seen``: columns that occurred in the
    records so far. Raises :class:`UsageError` if a column or role is to get a name that Weft does not know.
    """

    def __init__(self, columns: Mapping[str, str], roles: Mapping[str, str]) -> None:
        for new in columns.values():
            if new and new not in KNOWN | IN_TURNS:
                raise UsageError(
                    f"data.columns: {new!r} means nothing; {nearest(new, sorted(KNOWN | IN_TURNS))}"
                )
        self.columns, self.roles = columns, roles
        self.seen: set[str] = set()

    def __call__(self, record: Any) -> Any:
        """Return ``record`` with its columns and roles renamed; columns renamed to "" are removed."""
        if not isinstance(record, Mapping) or not (self.columns or self.roles):
            return record
        renamed = dict(record)
        # Fields of turns first, as the mapping names them by what their list is called in the data.
        for name, new in sorted(
            self.columns.items(), key=lambda item: "." not in item[0]
        ):
            outer, dot, inner = name.partition(".")
            if name in renamed:
                self.seen.add(name)
                value = renamed.pop(name)
                renamed |= {new: value} if new else {}
            elif dot:
                for key in _lists_of_turns(renamed, outer):
                    renamed |= self._within(renamed, name, key, inner, new)
        return (
            {key: self._spoken(value) for key, value in renamed.items()}
            if self.roles
            else renamed
        )

    def missing(self) -> list[str]:
        """Return the columns that the recipe renames but that occurred in no record."""
        return [name for name in self.columns if name not in self.seen]

    def _within(
        self, record: dict[str, Any], name: str, outer: str, inner: str, new: str
    ) -> dict[str, Any]:
        """What changes where ``outer`` is a list of objects with ``inner``, or an object with it."""
        value = from_text(record[outer])
        if isinstance(value, Mapping) and inner in value:
            self.seen.add(name)
            rest = {key: item for key, item in value.items() if key != inner}
            return {outer: rest} | ({new: value[inner]} if new else {})
        if not isinstance(value, list):
            return {}
        turns = []
        for turn in map(from_text, value):
            if isinstance(turn, Mapping) and inner in turn:
                self.seen.add(name)
                # In its place, as templates that write a whole turn keep the order.
                turn = {
                    new if key == inner else key: item
                    for key, item in turn.items()
                    if new or key != inner
                }
            turns.append(turn)
        return {outer: turns}

    def _spoken(self, value: Any) -> Any:
        """Return a list of turns with the roles that the mapping gives to their speakers."""
        turns = messages_of(value)
        if not isinstance(turns, list):
            return value
        return [self._turn(turn) for turn in turns]

    def _turn(self, turn: Any) -> Any:
        if not isinstance(turn, Mapping):
            return turn
        changed = {
            key: self.roles.get(str(turn[key]), turn[key])
            for key in ("role", "from")
            if key in turn
        }
        return {key: changed.get(key, item) for key, item in turn.items()}


def _lists_of_turns(record: Mapping[str, Any], outer: str) -> list[str]:
    """Return the fields that ``outer`` names; ``messages`` stands for all lists of turns, as in errors."""
    named = [outer] if outer in record else []
    if outer != "messages":
        return named
    return named + [
        key
        for key in record
        if key != outer and key in KNOWN and isinstance(from_text(record[key]), list)
    ]
