"""Values NAME or NAME:ARGUMENT of options that name a technique, and what is wrong with those that are none."""

from collections.abc import Sequence
from typing import Any

from weft.errors import UsageError, nearest
from weft.registry import declared, find, names


def chosen_technique(kind: str, word: str) -> Any | None:
    """Return the technique of ``kind`` that ``word`` names, built from its argument; None if there is none of that
    name, or if its argument is not valid.

    Implementations have a class method ``of_argument``. It takes the text after the first colon, or None where there is
    no colon, and returns None for an argument that is not valid.
    """
    name, colon, argument = word.partition(":")
    if name not in names(kind):
        return None
    technique: Any = find(kind, name).implementation
    return technique.of_argument(argument if colon else None)


def wrong_word(
    option: str, word: str, kind: str, plain: Sequence[str] = (), other: str = ""
) -> UsageError:
    """Return the error for ``word``, a value of ``option`` that is not possible: its name or its argument is wrong.

    ``kind``: kind of the techniques that the option names. Their implementations have ``example``, an example of
    NAME:ARGUMENT or "", and ``argument``, words on the argument. ``plain``: names that the core handles itself.
    ``other``: words on values that name no technique.
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
        if not each.example or each.of_argument(None) is not None:
            forms.append(alone)
        if each.example:
            forms.append(each.example)
    every = ", ".join(forms) + other
    near = nearest(name, [*plain, *techniques])
    hint = f"{near} Give" if near.endswith("?") else "give"
    return UsageError(f"{option} cannot be {word!r}; {hint} {every}")
