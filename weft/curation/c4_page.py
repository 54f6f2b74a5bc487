"""Lines of a page that C4 keeps (Raffel et al. 2020, JMLR 21, section 2.2)."""

from __future__ import annotations

import re

_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_ENDS = (".", "?", "!", '"', "'")
_POLICIES = (
    "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies",
)  # fmt: skip


def kept_lines(
    text: str, least_words: int = 3, longest_word: int = 1000, ended: bool = True
) -> list[str]:
    """Return the lines of ``text`` that C4 keeps, without white space at both ends and without citations such as "[3]".

    A line is dropped if it has no punctuation mark at the end or ends with an ellipsis. It is also dropped if it has
    few words or a very long one, or is about JavaScript, cookies or terms of use. Lines for which C4 drops the whole
    page (:func:`is_filler`, :func:`is_program`) are kept, so that a later filter can drop the page.

    ``least_words``: fewest words of a line. ``longest_word``: most characters of a word. ``ended``: whether lines must
    end with a punctuation mark.
    """
    kept = []
    for line in map(str.strip, text.splitlines()):
        words = line.split()
        if len(words) < least_words or any(len(word) > longest_word for word in words):
            continue
        line = _CITATION.sub("", line)
        if ended and (not line.endswith(_ENDS) or line.endswith("...")):
            continue
        if is_filler(line) or is_program(line) or not _is_notice(line.lower()):
            kept.append(line)
    return kept


def is_filler(line: str) -> bool:
    """Return whether the line has the filler text "lorem ipsum", for which C4 drops the whole page."""
    return "lorem ipsum" in line.lower()


def is_program(line: str) -> bool:
    """Return whether the line looks like code, for which C4 drops the whole page.

    A line looks like code if it contains a curly bracket and is not about JavaScript.
    """
    return "{" in line and "javascript" not in line.lower()


def _is_notice(lower: str) -> bool:
    return "javascript" in lower or any(policy in lower for policy in _POLICIES)
