"""Values NAME or NAME:ARGUMENT of options that name a technique, and what is wrong with those that are none."""

from collections.abc import Sequence
from typing import Any

from weft.errors import UsageError, nearest
from weft.registry import declared


def wrong_word(
    option: str,
    word: str,
    kind: str,
    plain: Sequence[str] = (),
    other: str = "",
    bare: str | None = None,
) -> UsageError:
    """Return the error for ``word``, a value of ``option`` that is not possible: its name or its argument is wrong.

    ``kind``: kind of the techniques that the option names. Their implementations have ``example``, an example of
    NAME:ARGUMENT or "", and ``argument``, words on the argument. ``plain``: names that the core handles itself.
    ``other``: words on values that name no technique. ``bare``: what implementations are given as the argument of a
    name alone.
    """
    techniques: dict[str, Any] = {t.name: t.implementation for t in declared(kind)}
    name, _, _ = word.partition(":")
    if (technique := techniques.get(name)) is not None and technique.example:
        needs = getattr(technique, "argument", "") or "another argument"
        return UsageError(
            f"{option} cannot be {word!r}: behind {name}: comes {needs}; give, for instance, {technique.example}"
        )
    if name in (*plain, *techniques):
        return UsageError(
            f"{option} cannot be {word!r}: nothing comes behind {name}; leave the rest out"
        )
    forms = [*plain]
    for alone, each in techniques.items():
        if not each.example or each.of_argument(bare) is not None:
            forms.append(alone)
        if each.example:
            forms.append(each.example)
    every = ", ".join(forms) + other
    near = nearest(name, [*plain, *techniques])
    hint = f"{near} Give" if near.endswith("?") else "give"
    return UsageError(f"{option} cannot be {word!r}; {hint} {every}")
