"""Decontamination: every n-gram that a document shares with an evaluation set is counted, and the set is named."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.curation.data_operators import Filter, OperatorFailed
from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.curation.evaluation_index import (
    build_evaluation_index,
    count_overlaps,
    files_digest,
    set_names,
)
from weft.errors import UsageError, WeftError

QUESTION = (
    "If a train leaves at noon and another one two hours later, when do they meet?"
)


def write_lines(path: Path, records: list[object]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def rows(documents: Documents, **step: object) -> list[tuple[int, list[str], str]]:
    operator = DataStep(operator="decontaminate", **step).build()
    assert isinstance(operator, Filter)
    columns = operator.statistics(documents)
    reasons = operator.reasons(columns)
    return list(zip(columns["contamination_hits"], columns["contaminated_by"], reasons, strict=True))  # fmt: skip


def test_names_the_set_and_counts_places(tmp_path: Path) -> None:
    trains = write_lines(
        tmp_path / "trains.jsonl",
        [{"question": QUESTION, "answer": {"text": "at four", "id": 3}}],
    )
    short = write_lines(
        tmp_path / "short.test.jsonl",
        [{"q": "Which river flows through the old town of Bern?"}, {"q": "?"}],
    )
    documents = Documents(
        list("abcde"),
        [
            f"A riddle: {QUESTION.upper().replace(',', ' -')} Nobody knows.",
            "which river flows through the old town of bern",
            "at four, a train leaves; two hours later they meet",
            "",
            f"{QUESTION} {QUESTION} Which river flows through the old town of Bern?",
        ],
    )
    result = rows(documents, sets=[trains, short])
    # 16 words have 4 sequences of 13
    assert result[:4] == [
        (4, ["trains"], "contaminated by trains: 4 hits"),
        (1, ["short"], "contaminated by short: 1 hit"),
        (0, [], ""),
        (0, [], ""),
    ]
    assert result[4] == (
        9,
        ["trains", "short"],
        "contaminated by trains, short: 9 hits",
    )
    lenient = rows(documents, sets=[trains, short], most_hits=4)
    assert [bool(reason) for *_, reason in lenient] == [False] * 4 + [True]


LETTERS = st.lists(st.sampled_from("abc"), max_size=12).map(" ".join)


@given(st.lists(LETTERS, min_size=1, max_size=4), st.lists(LETTERS, max_size=4), st.integers(1, 4))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_counts_are_those_of_the_plain_way(
    tmp_path_factory: pytest.TempPathFactory, examples: list[str], texts: list[str], n: int
) -> None:  # fmt: skip
    path = tmp_path_factory.mktemp("sets") / "set.jsonl"
    write_lines(path, [{"text": text} for text in [*examples, "z z z z z"]])
    grams = set()
    for words in map(str.split, [*examples, "z z z z z"]):
        size = min(len(words), n)
        if size >= min(2, n):
            grams |= {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}
    counts = count_overlaps(texts, build_evaluation_index([str(path)], n, 2))
    for text, hits, sets in zip(texts, counts.hits, counts.sets, strict=True):
        words = text.split()
        expected = sum(
            tuple(words[i : i + size]) in grams
            for size in range(1, n + 1)
            for i in range(len(words) - size + 1)
        )
        assert hits == expected and bool(sets[0]) == (expected > 0)


def test_reads_files_of_many_kinds(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(
        pyarrow.table({"q": [QUESTION, None], "n": [1, 2]}), tmp_path / "a.parquet"
    )
    (tmp_path / "b.txt").write_text(QUESTION)
    (tmp_path / "c.json").write_text(json.dumps([{"turns": [{"content": QUESTION}]}]))
    documents = Documents(["x"], [QUESTION])
    for path in ("a.parquet", "b.txt", "c.json", "*.json", "."):
        (hits, sets, _), = rows(documents, sets=[str(tmp_path / path)])  # fmt: skip
        assert hits == 4 and len(sets) == 1, path
    assert set_names(["x/test.jsonl", "y/test.jsonl", "z/gsm8k.jsonl"]) == (
        "x/test.jsonl",
        "y/test.jsonl",
        "gsm8k",
    )


def test_digest_follows_contents(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [QUESTION])
    before = files_digest([path])
    assert before == files_digest([path])
    write_lines(tmp_path / "a.jsonl", [QUESTION + "!"])
    assert before != files_digest([path])
    operator = DataStep(operator="decontaminate", sets=[path]).build()
    assert operator.fingerprint() == files_digest([path])


def test_one_line_for_what_cannot_be_read(tmp_path: Path) -> None:
    documents = Documents(["x"], [QUESTION])
    with pytest.raises(WeftError, match="nowhere: there is no such file"):
        rows(documents, sets=[str(tmp_path / "nowhere")])
    with pytest.raises(OperatorFailed, match="none of its 1 texts has 8 words"):
        rows(documents, sets=[write_lines(tmp_path / "few.jsonl", [{"a": "two words"}])])  # fmt: skip
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(WeftError, match=r"cannot read .*bad.parquet as an evaluation set"):  # fmt: skip
        rows(documents, sets=[str(tmp_path / "bad.parquet")])
    with pytest.raises(UsageError, match="sets"):
        DataStep(operator="decontaminate", sets=[])
