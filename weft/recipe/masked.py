"""Addresses and recipes without the parts that are secret."""

import re
from typing import Any

_ADDRESS = re.compile(r"^(\w[\w+.-]*://)(?:[^/?#]*@)?(.*)", re.DOTALL)


def masked_address(address: str) -> str:
    """Return ``address`` without parts that may be secret: a user's name and password, and the query and fragment of a
    web address. A text that is no address is returned as it is.
    """
    match = _ADDRESS.match(address)
    if match is None:
        return address
    scheme, rest = match.groups()
    if scheme in ("http://", "https://"):
        rest = re.split("[?#]", rest, maxsplit=1)[0]
    return f"{scheme}{rest}"


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
