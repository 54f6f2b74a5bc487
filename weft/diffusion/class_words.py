"""Which image is meant by a word: the name or the number of a class."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from weft.errors import UsageError, nearest

#: The file of a checkpoint that has the names of the classes, as a list of JSON.
CLASS_FILE = "classes.json"
#: The word for an image of no class in particular.
NO_CLASS = "none"
#: Most classes that an error line names.
SHOWN_CLASSES = 12


def class_file(names: Sequence[str]) -> dict[str, bytes]:
    """Return the file with the ``names`` of classes for a checkpoint, as contents by file name; empty without names."""
    return {CLASS_FILE: json.dumps([*names]).encode()} if names else {}


def class_names(files: Mapping[str, bytes], classes: int) -> tuple[str, ...]:
    """Read the names of a model's classes from the ``files`` of its checkpoint, which are contents by file name.

    Returns an empty tuple if there is no such file, or if it has not ``classes`` names.
    """
    try:
        names = json.loads(files.get(CLASS_FILE, b"[]"))
    except ValueError:
        return ()
    fits = isinstance(names, list) and len(names) == classes
    return tuple(map(str, names)) if fits else ()


def class_number(word: str, classes: int, names: Sequence[str] = ()) -> int:
    """Return the number of the class that ``word`` names, or ``classes`` for "none".

    ``word``: name or number of a class. ``classes``: number of classes of the model. ``names``: their names; a word
    that is a name is not read as a number. Raises :class:`UsageError` for a word that names no class.
    """
    word = word.strip()
    known = {name.casefold(): number for number, name in enumerate(names)}
    if word.casefold() in known:
        return known[word.casefold()]
    if word.casefold() == NO_CLASS:
        return classes
    if not classes:
        raise UsageError(
            f"{word!r} is no class, as this model knows none; leave it out, or say none"
        )
    if word.isdecimal() and len(word) < 10 and int(word) < classes:
        return int(word)
    if not names:
        raise UsageError(
            f"{word[:80]!r} is not possible; the model's classes are 0 to {classes - 1}, and none"
        )
    if len(names) > SHOWN_CLASSES:
        raise UsageError(f"there is no class {word[:80]!r}; {nearest(word, names)}")
    listed = ", ".join(names)
    raise UsageError(
        f"there is no class {word[:80]!r}; the model's classes are {listed}, and none"
    )
