"""Repeated paragraphs: one document keeps each, in any shards and order, and the cut text has all the others."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.curation.operators import cut, decisions, joint
from weft.curation.data_operators import Mapper, OperatorFailed
from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.curation.repeated_paragraphs import paragraph_spans, without_spans

POOL = ["one two three", "One, two three!", "alpha beta gamma\ndelta", "short", "four five six seven"]  # fmt: skip


@given(st.text("ab \n\t", max_size=40), st.sampled_from(["paragraph", "line"]))
@settings(deadline=None)
def test_paragraphs_are_all_of_the_text(text: str, unit: str) -> None:
    spans = list(paragraph_spans(text, unit))
    assert "".join(text[a:b] for a, b in spans) == text
    assert without_spans(text, [edge for span in spans for edge in span]) == ""
    assert without_spans(text, []) == text


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Documents, list[Documents]]:
    count = draw(st.integers(1, 6))
    texts = ["\n\n".join(draw(st.lists(st.sampled_from(POOL), max_size=4))) for _ in range(count)]  # fmt: skip
    documents = Documents([f"d{i}" for i in range(count)], texts)
    order = draw(st.permutations(range(count)))
    return documents, cut(documents, order, draw(st.lists(st.integers(0, count), max_size=3)))  # fmt: skip


def plain_repeated(documents: Documents, least_documents: int) -> dict[str, list[str]]:
    """Paragraphs of each document that a better one has, too, found without hashes."""

    def words(part: str) -> str:
        return " ".join("".join(c if c.isalnum() else " " for c in part.lower()).split())  # fmt: skip

    order = sorted(range(len(documents)), key=lambda i: (-len(documents.texts[i]), documents.ids[i]))  # fmt: skip
    parts = {
        i: [
            documents.texts[i][a:b]
            for a, b in paragraph_spans(documents.texts[i], "paragraph")
        ]
        for i in order
    }
    seen: set[str] = set()
    repeated: dict[str, list[str]] = {name: [] for name in documents.ids}
    for i in order:
        for part in parts[i]:
            key = words(part)
            owners = sum(key in map(words, others) for others in parts.values())
            if len(key.split()) < 3 or owners < least_documents:
                continue
            if key in seen:
                repeated[documents.ids[i]].append(part)
            seen.add(key)
    return repeated


@given(sharded(), st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_one_document_keeps_each_paragraph(
    drawn: tuple[Documents, list[Documents]], least: int
) -> None:
    documents, shards = drawn
    operator = joint("paragraphs", least_words=3, least_documents=least)
    rows = decisions(operator, shards)
    assert rows == decisions(operator, [documents])
    expected = plain_repeated(documents, least)
    for name, text in zip(documents.ids, documents.texts, strict=True):
        spans = rows[name]["repeated_spans"]
        pairs = list(zip(spans[::2], spans[1::2], strict=True))
        assert [text[a:b] for a, b in pairs] == expected[name]
        share = sum(b - a for a, b in pairs) / max(len(text), 1)
        assert rows[name]["repeated_share"] == pytest.approx(share)
        assert bool(rows[name]["reason"]) == (share > 0.5)


def test_marked_paragraphs_are_cut() -> None:
    shared = "This paragraph stands in two of the documents, word for word."
    documents = Documents(["a", "b"], [f"Own start.\n\n{shared}\n\nOwn end.", shared])
    rows = decisions(joint("paragraphs", least_words=5, keep="first", most_share=1), [documents])  # fmt: skip
    assert not rows["a"]["reason"] and not rows["b"]["reason"]
    marked = documents.with_columns({"repeated_spans": [rows[n]["repeated_spans"] for n in "ab"]})  # fmt: skip
    mapper = DataStep(operator="cut-repeated").build()
    assert isinstance(mapper, Mapper)
    result = mapper.map(marked)
    assert result.texts == [documents.texts[0], ""]
    assert mapper.map(result).texts == result.texts  # nothing is cut twice
    kept_by_b = decisions(
        joint("paragraphs", least_words=5, keep="best", score="s"),
        [documents.with_columns({"s": [0, 1]})],
    )
    marked = documents.with_columns({"repeated_spans": [kept_by_b[n]["repeated_spans"] for n in "ab"]})  # fmt: skip
    assert mapper.map(marked).texts == ["Own start.\n\nOwn end.", shared]
    with pytest.raises(OperatorFailed, match="put a step 'paragraphs' before it"):
        mapper.map(documents)


def test_lines_and_reason() -> None:
    header = "All rights are reserved by the makers of this file."
    documents = Documents(["a", "b"], [f"{header}\nx = 1\n", f"{header}\ny = 2\n"])
    rows = decisions(joint("paragraphs", unit="line", least_words=5), [documents])
    assert rows["a"]["reason"] == "" and not rows["a"]["repeated_spans"]
    assert rows["b"]["reason"] == "more than 50% of its text repeats other documents"
    assert rows["b"]["repeated_spans"] == [0, len(header) + 1]
