"""Masks of turns: which turns the data marks as learned, under the names that programs use."""

import math
import re
from contextlib import suppress
from typing import Any, NamedTuple

from weft.data.chat.chat_turns import ConversationError, Message, json_excerpt

#: True, or 1, where a turn is learned; and where it is not.
LEARNED = ("train", "training", "trainable", "loss", "loss_mask")
HIDDEN = ("masked",)
WEIGHTS = ("weight", "loss_weight")
#: A key with one of these words is about what is learned, and nobody wants it ignored.
_WORDS = re.compile(
    r"(?:^|_)(?:masks?|masked|loss|train(?:ed|ing|able)?|weights?|learn(?:ed)?)(?:_|$)"
)


class TurnWeight(NamedTuple):
    """Loss weight of a turn, from the turn's masks and weights in the data.

    ``said``: whether the turn has masks or weights at all; ``marked``: whether a mask says that the turn is learned.
    """

    weight: float
    marked: bool
    said: bool


def take_weight(message: Message, name: str) -> TurnWeight:
    """Remove the masks and weights from ``message``, called ``name`` in errors, and return the loss weight they give.

    Raises :class:`ConversationError` for masks that contradict each other, are neither true nor false, or have a name
    that is not known.
    """
    weight = 1.0
    said: dict[str, bool] = {}
    marked = False
    keys = [key for key in message if _WORDS.search(_plain(key))]
    for key in keys:
        plain, value = _plain(key), message.pop(key)
        if plain in WEIGHTS:
            weight *= weight_of(value, f"the {key!r} of {name}")
        elif plain in LEARNED or plain in HIDDEN:
            said[key] = read_flag(value, key, name) == (plain in LEARNED)
            marked = marked or (plain in LEARNED and said[key])
        else:
            raise ConversationError(
                f"{name} has {key!r}, which says something about learning that is not known; known are "
                f"{', '.join((*LEARNED, *HIDDEN, *WEIGHTS))}: rename it by data.columns, or leave it out: "
                f'data.columns = {{ "messages.{key}" = "" }}'
            )
    if len(set(said.values())) > 1:
        raise ConversationError(
            f"{name} is learned and not learned: {' and '.join(said)} contradict each other"
        )
    return TurnWeight(weight * all(said.values()), marked, bool(keys))


def weight_of(value: Any, name: str) -> float:
    """Convert a weight in the data to a float. A missing weight (None or an empty text) is 1.

    Texts of numbers, which occur in CSV, are converted too. ``name``: name of the value in errors. Raises
    :class:`ConversationError` if ``value`` is not a number of at least 0.
    """
    if value is None or value == "":
        return 1.0
    number = number_of(value)
    if number is None or number < 0:
        raise ConversationError(
            f"{name} is {json_excerpt(value)}; a weight is a number of at least 0"
        )
    return number


def number_of(value: Any) -> float | None:
    """Return a finite number, or a text that holds one, as a float. Any other value gives None."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    with suppress(ValueError, OverflowError):
        number = float(value)
        return number if math.isfinite(number) else None
    return None


def read_flag(value: Any, key: str, name: str) -> bool:
    """Return a mask's value as a bool.

    ``value``: True, False, 1, 0, or a text of one of these in upper or lower case. ``key``: name of the mask; ``name``:
    name of the message in errors. Raises :class:`ConversationError` for any other value.
    """
    known = {
        "true": True,
        "1": True,
        "1.0": True,
        "false": False,
        "0": False,
        "0.0": False,
    }
    if (
        isinstance(value, (bool, int, float, str))
        and (meant := known.get(str(value).lower())) is not None
    ):
        return meant
    raise ConversationError(
        f"{name} has {json_excerpt(value)} as {key!r}, which is true or false; data.columns can leave it out"
    )


def _plain(key: str) -> str:
    """Return a key as ``snake_case``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).replace("-", "_").lower()
