"""Styles of rephrased texts: what a generator is asked to do with a passage."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from weft.data.reading import reading
from weft.errors import UsageError, nearest
from weft.paths import home_path

#: Where a passage stands in a prompt.
TEXT = "{text}"
#: Prompts of the four styles of Maini et al. 2024 (WRAP), in words of ours.
STYLES = {
    "simple": (
        "Rewrite the passage below in very short and simple sentences, with words that a small child knows. Keep all "
        "facts. Write the new passage only.\n\n{text}"
    ),
    "wikipedia": (
        "Rewrite the passage below in clear, high-quality English, like an article of Wikipedia. Keep all facts. Write "
        "the new passage only.\n\n{text}"
    ),
    "terse": (
        "Rewrite the passage below as tersely as possible, in the dense language of scholars, with rare and exact "
        "words. Keep all facts. Write the new passage only.\n\n{text}"
    ),
    "question-answer": (
        "Turn the passage below into a conversation of questions and answers, each on a line of its own that begins "
        'with "Question:" or "Answer:". Cover all facts. Write the conversation only.\n\n{text}'
    ),
}
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


def prompts_of_styles(styles: Sequence[str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the prompt of each of ``styles`` by its name, in their order. Every prompt contains the placeholder
    :data:`TEXT`.

    ``own``: prompts of the user's own styles by name, each a text with :data:`TEXT` or the path of a file with such a
    text. A prompt with the name of a style in :data:`STYLES` replaces that style's prompt. Raises :class:`UsageError`
    for unknown styles, and for prompts without the placeholder; :class:`weft.errors.WeftError` for files that cannot be
    read.
    """
    known = STYLES | dict(own)
    for name in own:
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"the style {name!r} has no name for ids of documents; use small letters, digits and '-'"
            )
        if name not in styles:
            raise UsageError(
                f"the prompt of {name!r} is not used; add {name!r} to styles, or leave the prompt out"
            )
    if not styles:
        raise UsageError(f"styles is empty; give some of {', '.join(STYLES)}")
    prompts = dict[str, str]()
    for name in styles:
        if name not in known:
            raise UsageError(
                f"there is no style {name!r}; {nearest(name, known)}, or give its prompt in prompts"
            )
        if name in prompts:
            raise UsageError(f"the style {name!r} stands twice in styles; remove one")
        prompts[name] = _prompt(name, known[name])
    return prompts


def _prompt(style: str, given: str) -> str:
    """Return the prompt that ``given`` is, or that the file ``given`` contains."""
    if TEXT in given:
        return given
    path = home_path(given)
    if "\n" in given or not os.path.isfile(path):
        raise UsageError(
            f"the prompt of style {style!r} has no {TEXT} where the passage goes, and is no file: {given[:80]!r}"
        )
    with reading(path, "a prompt"):
        text = path.read_text(encoding="utf-8")
    if TEXT not in text:
        raise UsageError(f"the prompt in {path} has no {TEXT} where the passage goes")
    return text
