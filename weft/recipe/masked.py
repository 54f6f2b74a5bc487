"""Addresses and recipes without the parts that are secret."""

import re
from collections.abc import Iterator
from typing import Any

#: An address: its scheme, perhaps a user's name and password, and the rest. A password may have slashes, as the keys of
#: object stores do. Only web addresses have ports; in others all up to the last @ may be a password that has one.
_ADDRESS = re.compile(
    r"(?:((?i:https?)://)(?:[^/?#]*@|[^/?#@:\[]*:(?!\d*(?:[/?#]|$))[^@\s]*@)?"
    r"|(\w[\w+.-]*://)(?:[^/\s]*:\S*@|[^/?#]*@)?)(.*)",
    re.DOTALL,
)
#: Where addresses are in a text: each ends at the quote that ends it if it begins with one, and else where the next
#: address begins, or at the end of the text.
_PLACES = re.compile(
    r"""(?<=(["']))\w[\w+.-]*://.*?(?=\1|$)|"""
    r"""\w[\w+.-]*://.*?(?=[\s,;|](?:[\w.-]+=)?["']?\w[\w+.-]*://|$)""",
    re.DOTALL,
)
#: Parts of a web address' query that say which form, version or part of a file is asked for, and are no secrets.
_PUBLIC = re.compile(
    r"(?:download|dl|inline|raw)(?:=(?:[01]|true|false|yes|no)?)?"
    r"|(?:alt|export|format)=[a-z]{1,8}"
    r"|(?:lang|limit|offset|page|part|shard|split|version|year)=[\w.-]{1,16}"
    r"|(?:ref|rev|revision)=(?:[0-9a-f]{7,40}|[\w./-]{1,24})"
)


def masked_address(address: str) -> str:
    """Return ``address`` without parts that may be secret: a user's name and password, and the query and fragment of a
    web address. A text that is no address is returned as it is.
    """
    match = _ADDRESS.match(address)
    if match is None:
        return address
    web, other, rest = match.groups()
    return f"{web}{re.split('[?#]', rest, maxsplit=1)[0]}" if web else f"{other}{rest}"


def masked_text(text: str) -> str:
    """Return ``text``, such as the word ``data.path="https://..."`` of a command line, with every address in it as
    :func:`masked_address` returns them. Where an address has no clear end, more is left out rather than less.
    """
    return _PLACES.sub(lambda place: masked_address(place[0]), text)


def masked_values(value: Any) -> Any:
    """Return ``value``, JSON values such as a recipe's settings, with all addresses in it as :func:`masked_address`
    returns them.
    """
    if isinstance(value, str):
        return masked_address(value)
    if isinstance(value, dict):
        return {key: masked_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked_values(item) for item in value]
    return value


def has_secrets(value: Any) -> bool:
    """Return whether an address in ``value``, JSON values such as a recipe's settings, has parts that may be secret.

    A query that only asks for a form, version or part of a file, such as ``download=true``, has none.
    """
    return any(
        masked_address(address) not in (address, _without_public_query(address))
        for address in _addresses(value)
    )


def _without_public_query(address: str) -> str:
    path, _, query = address.partition("?")
    return path if all(map(_PUBLIC.fullmatch, query.split("&"))) else address


def unmasked_values(value: Any, given: Any) -> Any:
    """Return ``value``, JSON values from a record, with the addresses as they stand in ``given``, where these have
    secret parts.

    ``given``: JSON values with the full addresses, in the same order where several differ in their secrets alone.
    """
    known: dict[str, list[str]] = {}
    for address in _addresses(given):
        known.setdefault(masked_address(address), []).append(address)
    return _replaced(value, known)


def _replaced(value: Any, known: dict[str, list[str]]) -> Any:
    if isinstance(value, str) and (full := known.get(masked_address(value))):
        return full.pop(0) if len(full) > 1 else full[0]
    if isinstance(value, dict):
        return {key: _replaced(item, known) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, known) for item in value]
    return value


def _addresses(value: Any) -> Iterator[str]:
    if isinstance(value, str) and _ADDRESS.match(value):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _addresses(item)
