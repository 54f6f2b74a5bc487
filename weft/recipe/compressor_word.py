"""Finds the compressor that a recipe names, such as ``topk:0.01``; without PyTorch."""

from typing import Any

from weft.errors import UsageError, nearest
from weft.registry import Registered, declared, find, names

#: The word for messages that are sent as they are.
NONE = "none"


def technique_of(word: str) -> Registered | None:
    """Return the registered compressor that ``word`` names, such as ``topk:0.01``; None if no compressor has this
    name.

    The argument after the name (a number of bits, or the text after the colon) is not checked.
    """
    name = word.strip().partition(":")[0]
    stem = name.rstrip("0123456789")
    for known in (name, stem):
        if known in names("compressor"):
            technique = find("compressor", known)
            if name in _words(technique):
                return technique
    return None


def _words(technique: Registered) -> tuple[str, ...]:
    return getattr(technique.implementation, "words", ()) or (technique.name,)


def compressor_of(word: str) -> Any:
    """Return the compressor that ``word`` names, such as ``topk:0.01``; None for the word ``none``.

    The compressor is a :class:`weft.sync.compressor.Compressor`. Raises :class:`UsageError` for an unknown name, or
    an argument that the compressor does not accept.
    """
    name, colon, argument = word.strip().partition(":")
    if word.strip() == NONE:
        return None
    if name == NONE:
        raise UsageError(
            f"compressor {word!r} takes nothing after its name; write {name!r}"
        )
    if technique := technique_of(name):
        compressor: Any = technique.implementation
        return compressor.of_word(name, argument if colon else None)
    words = [NONE, *(word for t in declared("compressor") for word in _words(t))]
    raise UsageError(f"there is no compressor {name!r}; {nearest(name, words)}")
