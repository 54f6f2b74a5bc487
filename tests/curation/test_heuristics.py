"""Rules of Gopher, C4 and FineWeb decide as datatrove's filters, whose decisions `bench/heuristics_peer.py` records."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.curation.web_pages import page, pages
from weft.curation.c4_page import kept_lines
from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.curation.page_statistics import fineweb_statistics, gopher_statistics
from weft.curation.repeated_parts import (
    repeated_gram_characters,
    repetition_statistics,
    top_gram_characters,
)
from weft.curation.split_words import count_sentences, split_words
from weft.errors import UsageError, WeftError

TABLE = json.loads(Path(__file__).with_name("datatrove_decisions.json").read_text())
#: spaCy takes "):" for a face, which is one word more or less where 80 % of words must have letters.
FACES = {77}


def documents(texts: list[str]) -> Documents:
    return Documents([f"page:{i}" for i in range(len(texts))], texts)


def reasons(name: str, texts: list[str], **values: Any) -> list[str]:
    step: Any = DataStep(operator=name, **values).build()
    return list(step.reasons(step.statistics(documents(texts))))


@pytest.mark.parametrize("name", ["gopher", "repetition", "c4", "fineweb"])
def test_decisions_are_those_of_datatrove(name: str) -> None:
    theirs = TABLE[name]
    texts = pages(len(theirs))
    if name == "c4":
        texts = ["\n".join(kept_lines(text)) for text in texts]
    ours = reasons(name, texts)
    differ = {
        i
        for i, pair in enumerate(zip(ours, theirs, strict=True))
        if len({*map(bool, pair)}) > 1
    }
    assert differ == (FACES if name == "gopher" else set())
    # neither all is kept nor all is dropped, and by several rules
    assert 40 < sum(map(bool, ours)) < 130
    assert len(set(ours)) >= 4


def test_the_same_rule_drops_the_page() -> None:
    """Each reason of datatrove stands for the same reason here."""
    for name in ("gopher", "repetition", "fineweb"):
        pairs = set(
            zip(TABLE[name], reasons(name, pages(len(TABLE[name]))), strict=True)
        )
        pairs = {(theirs, ours) for theirs, ours in pairs if theirs and ours}
        assert len({theirs for theirs, _ in pairs}) == len(pairs), pairs


def test_thresholds_are_late() -> None:
    """Statistics do not depend on what is called late, and 100 % is identity when every limit is open."""
    texts = pages(12)
    for name, late in (
        ("gopher", {"least_words": 5}),
        ("repetition", {"most_repeated_lines": 0.01}),
        ("c4", {"least_sentences": 40}),
        ("fineweb", {"most_short_lines": 0.01}),
    ):
        plain: Any = DataStep(operator=name).build()
        other: Any = DataStep(operator=name, **late).build()
        assert {*late} <= {*plain.late}
        columns = plain.statistics(documents(texts))
        assert columns == other.statistics(documents(texts))
        assert plain.reasons(columns) != other.reasons(columns)
    assert not any(
        reasons(
            "gopher", texts, least_words=0, least_word_length=0, most_word_length=99, most_hashes=9, most_ellipses=9,
            most_bullet_lines=1, most_ellipsis_lines=1, least_alphabetic=0, least_stop_words=0,
        )
    )  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.text(
        alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n.#…•-{'"))
    )
)
def test_statistics_of_any_text(text: str) -> None:
    """All are finite, no text is too strange, and words have all of the text but white space."""
    assert "".join(split_words(text)) == "".join(text.split())
    assert count_sentences(text) >= bool(text.strip())
    for values in (
        gopher_statistics(text),
        fineweb_statistics(text),
        repetition_statistics(text),
    ):
        assert all(math.isfinite(value) and value >= 0 for value in values.values())
    lines = kept_lines(text)
    assert len(lines) <= len(text.splitlines())


def test_no_text_is_dropped_by_name() -> None:
    assert reasons("gopher", ["", " \n"]) == ["words below 50"] * 2
    assert reasons("fineweb", ["", " \n"]) == ["lines with text below 1"] * 2
    assert reasons("c4", [""]) == ["sentences below 5"]
    assert reasons("repetition", [""]) == [""]


def test_words_are_split_as_by_hand() -> None:
    said = "Don't stop, it's Mr. Brown's e.g. (see well-known --all https://a.org/b)..."
    assert split_words(said) == [
        "Do", "n't", "stop", ",", "it", "'s", "Mr.", "Brown", "'s", "e.g.", "(", "see", "well", "-", "known", "--all",
        "https://a.org/b", ")", "...",
    ]  # fmt: skip
    assert count_sentences('Mr. Brown went. Did he? J. Smith said "no!" He left') == 4


def test_grams_by_hand() -> None:
    words = ["a", "b", "a", "b", "a", "b", "c", "d"]
    assert top_gram_characters(words, 2) == len("a b") * 3
    assert repeated_gram_characters(words, 2) == len("ab") * 2
    assert top_gram_characters(words, 9) == repeated_gram_characters(words, 9) == 0


def test_statistics_do_not_depend_on_the_shard() -> None:
    texts = [page(i) for i in range(6)]
    step: Any = DataStep(operator="repetition").build()
    whole = step.statistics(documents(texts))
    parts = [step.statistics(documents(texts[i : i + 2])) for i in (0, 2, 4)]
    for name, values in whole.items():
        assert values == [value for part in parts for value in part[name]]


def test_bad_words_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text("darn\nbig darn\n\nБля\n")
    texts = ["Big darn, and DARN.", "The darning needle.", "что бля", "fine"]
    assert reasons("bad-words", texts, path=str(file)) == [
        "a bad word",
        "",
        "a bad word",
        "",
    ]
    anywhere = reasons(
        "bad-words", texts, path=str(file), apart=False, most_bad_words=1
    )
    assert anywhere == ["more than 1 bad words", "", "", ""]
    first: Any = DataStep(operator="bad-words", path=str(file)).build()
    file.write_text("darn\n")
    second: Any = DataStep(operator="bad-words", path=str(file)).build()
    assert first.fingerprint() != second.fingerprint()
    file.write_text("\n")
    with pytest.raises(WeftError, match="is empty; write a word per line"):
        DataStep(operator="bad-words", path=str(file)).build()
    with pytest.raises(WeftError, match="cannot be read"):
        DataStep(operator="bad-words", path=str(tmp_path / "none")).build()
    with pytest.raises(UsageError, match="path"):
        DataStep(operator="bad-words")


def test_lines_of_c4() -> None:
    text = (
        "Home\nThis is a line. [3]\nThis is cut...\nWe use cookies here.\nPlease enable JavaScript { now }.\n"
        f"A long {'x' * 1001} word.\nAll is {'{'}well.\n"
    )
    assert kept_lines(text) == ["All is {well."]
    assert kept_lines(
        "Is it so [12]?\n said he. \nand that was the end", ended=False
    ) == ["Is it so ?", "and that was the end"]
    assert kept_lines("This is prose about privacy policy and lorem ipsum.") != []


@pytest.mark.parametrize("text", ["(" * 100_000, "!" * 100_000 + "x", "a." * 50_000])
def test_long_texts_without_spaces_take_no_longer(text: str) -> None:
    """Minified code and binary noise: time is proportional to the length, where its square would be minutes."""
    began = time.process_time()
    assert "".join(split_words(text)) == text
    assert count_sentences(text) == 1
    assert time.process_time() - began < 10
