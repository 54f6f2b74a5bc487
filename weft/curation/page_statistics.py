"""Statistics of a page by which Gopher and FineWeb tell prose from menus, lists and noise."""

from __future__ import annotations

from collections.abc import Collection

from weft.curation.repeated_parts import count_repeated
from weft.curation.split_words import is_symbol, split_words

#: Words of which prose has at least two (Rae et al. 2021).
STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")

_RANGES = (
    "21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e 1735-1736 17d4-17d6 "
    "17d9-17da 1803 1809 1944-1945 1aa8-1aab 1b4e-1b4f 1b5a-1b5b 1b5e-1b5f 1b7d-1b7f 1c3b-1c3c 1c7e-1c7f 2024 "
    "203c-203d 2047-2049 2cf9-2cfb 2e2e 2e3c 2e53-2e54 2e60-2e61 3002 a4ff a60e-a60f a6f3 a6f7 a876-a877 a8ce-a8cf "
    "a92f a9c8-a9c9 aa5d-aa5f aaf0-aaf1 abeb fe12 fe15-fe16 fe52 fe56-fe57 ff01 ff0e ff1f ff61 10a56-10a57 "
    "10f55-10f59 10f86-10f89 11047-11048 110be-110c1 11141-11143 111c5-111c6 111cd 111de-111df 11238-11239 "
    "1123b-1123c 112a9 113d4-113d5 1144b-1144c 115c2-115c3 115c9-115d7 11641-11642 1173c-1173e 11944 11946 "
    "11a42-11a43 11a9b-11a9c 11c41-11c42 11ef7-11ef8 11f43-11f44 16a6e-16a6f 16af5 16b37-16b38 16b44 16d6e-16d6f "
    "16e98 1bc9f 1da88"
)


def _characters(ranges: str) -> tuple[str, ...]:
    """Return the characters of hexadecimal code points and ranges of them, as in "21 61d-61f"."""
    bounds = [part.partition("-") for part in ranges.split()]
    return tuple(
        chr(code)
        for first, _, last in bounds
        for code in range(int(first, 16), int(last or first, 16) + 1)
    )


#: Marks that end a sentence in any script: Unicode's property Sentence_Terminal.
SENTENCE_MARKS = _characters(_RANGES)


def gopher_statistics(
    text: str, stop_words: Collection[str] = STOP_WORDS
) -> dict[str, float]:
    """Return the statistics of Gopher's quality rules by name (Rae et al. 2021, 2112.11446, appendix A1).

    Counts of symbols are relative to all words, including punctuation marks. For a text without words, all are 0.
    ``stop_words``: words that are common in the language.
    """
    words = split_words(text)
    plain = [word for word in words if not is_symbol(word)]
    lines = text.splitlines()
    bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
    ellipses = sum(line.rstrip().endswith(("...", "…")) for line in lines)
    alphabetic = sum(any(map(str.isalpha, word)) for word in words)
    return {
        "gopher_words": len(plain),
        "gopher_word_length": _ratio(sum(map(len, plain)), len(plain)),
        "gopher_hashes": _ratio(text.count("#"), len(words)),
        "gopher_ellipses": _ratio(text.count("...") + text.count("…"), len(words)),
        "gopher_bullet_lines": _ratio(bullets, len(lines)),
        "gopher_ellipsis_lines": _ratio(ellipses, len(lines)),
        "gopher_alphabetic": _ratio(alphabetic, len(words)),
        "gopher_stop_words": len({*stop_words} & {*words}),
    }


def fineweb_statistics(
    text: str, short: int = 30, ends: tuple[str, ...] = SENTENCE_MARKS
) -> dict[str, float]:
    """Return the statistics of FineWeb's own rules by name (Penedo et al. 2024, 2406.17557).

    Lines without text do not count. ``short``: a line of at most so many characters counts as short. ``ends``: marks
    that end a sentence.
    """
    lines = [line for line in text.split("\n") if line.strip()]
    repeated = count_repeated(lines).characters
    return {
        "fineweb_lines": len(lines),
        "fineweb_ended_lines": _ratio(
            sum(line.endswith(ends) for line in lines), len(lines)
        ),
        "fineweb_short_lines": _ratio(
            sum(len(line) <= short for line in lines), len(lines)
        ),
        "fineweb_repeated_characters": _ratio(repeated, len(text) - text.count("\n")),
        "fineweb_line_breaks": _ratio(text.count("\n"), len(split_words(text))),
    }


def _ratio(part: float, whole: float) -> float:
    """Return ``part / whole``, or 0 if there is no whole."""
    return part / whole if whole else 0.0
