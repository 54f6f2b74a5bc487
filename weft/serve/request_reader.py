"""Reads the JSON of requests. A refusal names the wrong field; unused fields are logged once."""

import logging
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from weft.data.json_text import repeated_keys
from weft.errors import WeftError
from weft.serve.protocol import Modelled, Refusal
from weft.serve.request_fields import explained, take_idle

Q = TypeVar("Q", bound=Modelled)

#: So many names of fields without effect are logged; clients choose some of them.
MOST_LOGGED = 512

log = logging.getLogger("weft.serve")


class RequestReader:
    """Parses the JSON bodies of requests. When a field without effect comes for the first time, its name is logged."""

    def __init__(self) -> None:
        self.logged: set[str] = set()

    def read(self, kind: type[Q], body: bytes) -> Q:
        """Parse ``body`` as a request of the class ``kind``. Raises :class:`Refusal` for an invalid request, which
        names the wrong field.
        """
        try:
            given = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise Refusal(400, f"Invalid JSON: {error}") from None
        if repeated := repeated_keys(body):
            # the last value counts, as everywhere else
            self.note([f"{key} (given twice)" for key in repeated])
        if not isinstance(given, dict):
            raise Refusal(400, "a request should be an object of JSON")
        try:
            fields, idle = take_idle(kind.prepared(given), kind.fields(), kind.IDLE)
            request = kind.model_validate(fields)
        except ValidationError as error:
            where, why = explained(error, fields, kind.fields())
            raise _named(kind, where, why) from None
        except (ValueError, WeftError) as error:
            field, _, why = str(error).partition(": ")
            raise _named(kind, field, why) from None
        self.note(idle)
        return request

    def note(self, names: list[str]) -> None:
        """Log each field of ``names`` as a field without effect, unless it has been logged before."""
        fresh = sorted({shown_name(name) for name in names} - self.logged)
        fresh = fresh[: max(0, MOST_LOGGED - len(self.logged))]
        self.logged.update(fresh)
        if fresh:
            log.warning(
                "requests have fields that change nothing here: %s", ", ".join(fresh)
            )


def shown_name(name: str) -> str:
    """Return the name of a field, which a client may have chosen, as a short word of one line of the log."""
    return name[:64] if name.isprintable() else repr(name[:64])


def _named(kind: type[Modelled], where: str, why: str) -> Refusal:
    """Return a refusal that names a field as the client does."""
    for name, outside in kind.NAMES.items():
        if where == name or where.startswith(f"{name}."):
            where = outside + where.removeprefix(name)
            break
    return Refusal(400, f"{where}: {why}" if where else why, param=where or None)
