"""Pages as the web has them, drawn from a seed: prose, menus, lists, code, repetition and notices of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

_VOCABULARY = (
    "the of and to that have with be a in it is was for on as at by from they we you his her which or an were their "
    "been has more when who will would about out up into them then some could time these two may first new now "
    "people river mountain garden morning evening kitchen letter window engine station harbour village teacher "
    "painter question answer journey history weather language number picture system market company music story "
    "bridge road winter summer water light paper stone forest island doctor farmer captain quickly slowly early "
    "later together between around beautiful ancient modern quiet heavy remarkable small large important different "
    "several certain walked looked turned carried opened followed reached measured explained remembered discovered "
    "described"
)
_WORDS = _VOCABULARY.split()
_MENUS = (
    "Home|About us|Contact|Login|Register|Cart (0)|Search|Help|FAQ|News|Blog|Next|Previous|Share|"
    "Like|Print this page|© 2019|Privacy policy|Terms of use|Follow us|RSS|Shop|Top 10|Back to top|Reply|"
    "Report"
)
_MENU = _MENUS.split("|")
_NOTICES = (
    "This site uses cookies to give you the best experience.",
    "Please enable JavaScript in your browser to see this page.",
    "By going on you accept our terms of use and the privacy policy.",
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit.",
    "function show(x) { return document.title; }",
    "Then write function show(x) { return document.title; } into the page.",
    "In JavaScript a block {like this one} is in brackets.",
    "Read more...",
    "The rest is for members only ...",
)


def page(number: int) -> str:
    """The text of a page."""
    rng = Random(number)
    makers: list[Callable[[Random], str]] = [
        _prose, _prose, _prose, _menu, _bullets, _code, _repeated, _tags, _cut, _poem,
    ]  # fmt: skip
    parts = [rng.choice(makers)(rng) for _ in range(rng.choice((1, 1, 2, 2, 3, 5)))]
    if rng.random() < 0.3:
        parts.insert(rng.randrange(len(parts) + 1), rng.choice(_NOTICES))
    return rng.choice(("\n", "\n\n", "\n\n\n")).join(parts)


def pages(count: int) -> list[str]:
    return [page(number) for number in range(count)]


def _sentence(rng: Random, end: str = "") -> str:
    words = rng.choices(_WORDS, k=rng.randint(4, 22))
    if rng.random() < 0.3:
        words[rng.randrange(len(words) - 1)] += ","
    if rng.random() < 0.1:
        words[-1] += rng.choice((" [3]", " [12]", " (see below)", " don't", " it's"))
    if rng.random() < 0.08:
        words.insert(1, rng.choice(("Mr. Brown", "Dr. Hill", "e.g.", "J. Smith")))
    text = " ".join(words)
    return text[0].upper() + text[1:] + (end or rng.choice((*"......!?", '."')))


def _prose(rng: Random) -> str:
    paragraphs = [
        " ".join(_sentence(rng) for _ in range(rng.randint(1, 7)))
        for _ in range(rng.randint(1, 4))
    ]
    return "\n".join(paragraphs)


def _menu(rng: Random) -> str:
    return "\n".join(rng.choices(_MENU, k=rng.randint(3, 20)))


def _bullets(rng: Random) -> str:
    mark = rng.choice("•-*")
    lines = [
        f"{mark} {' '.join(rng.choices(_WORDS, k=rng.randint(2, 9)))}" for _ in range(9)
    ]
    return "\n".join(lines)


def _code(rng: Random) -> str:
    names = [rng.choice(_WORDS) for _ in range(6)]
    lines = [
        f"    {name} = {rng.randint(0, 99)} + x[{i}]" for i, name in enumerate(names)
    ]
    return "\n".join(["def main(x):", *lines, "    return x"])


def _repeated(rng: Random) -> str:
    sentence = _sentence(rng)
    lines = [sentence if rng.random() < 0.5 else _sentence(rng) for _ in range(8)]
    return rng.choice(("\n", "\n\n", " ")).join(lines)


def _tags(rng: Random) -> str:
    return " ".join(f"#{word}" for word in rng.choices(_WORDS, k=rng.randint(2, 30)))


def _cut(rng: Random) -> str:
    ends = ("...", "…", "...", "")
    lines = [_sentence(rng, "…")[:-1] + rng.choice(ends) for _ in range(6)]
    return "\n".join(lines)


def _poem(rng: Random) -> str:
    lines = [" ".join(rng.choices(_WORDS, k=rng.randint(2, 6))) for _ in range(10)]
    return "\n".join(line + rng.choice(("", ",", ".")) for line in lines)
