"""Comparisons of an answer with a right answer, each a function of both texts that returns the reward, 0 or 1.

No text is executed. Numbers are compared as decimal numbers of bounded length, so that a huge number costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

#: A number in ASCII digits, with or without commas between thousands.
NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", re.ASCII)
#: Characters of a number that still counts as one, and those at the end of a text in which its last number is sought.
LONGEST_NUMBER, TAIL = 60, 10_000


def last_number(text: str) -> Decimal | None:
    """Return the last number in the last :data:`TAIL` characters of a text.

    Returns None if there is no number, or if it is longer than :data:`LONGEST_NUMBER` characters.
    """
    last = ""
    for match in NUMBER.finditer(text[-TAIL:]):
        last = match.group()
    if not last or len(last) > LONGEST_NUMBER:
        return None
    return Decimal(last.replace(",", ""))


def _exact(answer: str, right: str) -> float:
    return float(answer.strip() == right.strip())


def _contains(answer: str, right: str) -> float:
    return float(bool(right.strip()) and right.strip() in answer)


def _number(answer: str, right: str) -> float:
    number = last_number(right)
    return float(number is not None and last_number(answer) == number)


def _regex(answer: str, right: str) -> float:
    return float(bool(re.fullmatch(right, answer.strip(), re.DOTALL)))


#: The comparisons by name. ``exact``: the same text but for blanks around it. ``contains``: the right answer stands in
#: the answer. ``number``: the last number of both is the same. ``regex``: the right answer is a regular expression that
#: the whole answer matches.
SCORERS: dict[str, Callable[[str, str], float]] = {
    "exact": _exact,
    "contains": _contains,
    "number": _number,
    "regex": _regex,
}
