"""Duplicates through the executor: all operators in one pipeline, in any shards; the card says what was dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from weft.curation.data_run import run_pipeline
from weft.curation.read_pipeline import build_pipeline
from weft.errors import UsageError, WeftError

STORY = [
    " ".join(f"the {chr(97 + i)}{chr(97 + j)} of number {chr(98 + i)} is here" for i in range(20)) + "."
    for j in range(3)
]  # fmt: skip
LICENCE = "All of this may be copied by anybody who keeps this very paragraph."
QUESTION = (
    "Which of the two trains that leave at noon will be there before the other one?"
)
TEXTS = [
    STORY[0],
    STORY[0] + "  ",
    STORY[0].replace("number b", "letter b") + " And so on.",
    f"{STORY[1]}\n\n{LICENCE}",
    f"{STORY[2]}\n\n{LICENCE}",
    f"A riddle. {QUESTION}",
    "short",
    "Short!",
]

#: What the runs have noted.
notes: list[str] = []


def run(
    folder: Path, steps: list[dict[str, Any]], shards: int, sizes: list[int]
) -> Path:
    start = 0
    for number, size in enumerate(sizes):
        path = folder / f"data/{number}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        part = TEXTS[start : start + size]
        vectors = [[float(len(text)), 1.0] for text in part]
        lines = [json.dumps({"text": t, "vector": v}) for t, v in zip(part, vectors, strict=True)]  # fmt: skip
        path.write_text("\n".join(lines))
        start += size
    tree = {
        "sources": [{"kind": "jsonl", "path": str(folder / "data")}],
        "steps": steps,
        "shards": shards,
    }
    result = run_pipeline(build_pipeline(tree), folder / "out", 0)
    notes.extend(result.notes)
    return folder / "out"


def steps(folder: Path) -> list[dict[str, Any]]:
    questions = folder / "riddles.jsonl"
    questions.write_text(json.dumps({"q": QUESTION, "a": "the second"}))
    return [
        {"operator": "decontaminate", "sets": [str(questions)]},
        {"operator": "exact", "keep": "first"},
        {"operator": "paragraphs", "most_share": 0.9},
        {"operator": "cut-repeated"},
        {"operator": "minhash"},
    ]


def test_all_of_them_in_any_shards(tmp_path: Path) -> None:
    notes.clear()
    outputs = []
    for shards, sizes in ((1, [8]), (3, [1, 1, 3, 2, 1])):
        folder = tmp_path / str(shards)
        folder.mkdir()
        out = run(folder, steps(folder), shards, sizes)
        tables = [pyarrow.parquet.read_table(f) for f in sorted((out / "documents").glob("*.parquet"))]  # fmt: skip
        texts = sorted(row["text"] for table in tables for row in table.to_pylist())
        card = json.loads((out / "card.json").read_text())
        outputs.append((texts, card["steps"]))
        (source,) = card["sources"]
        assert source["contaminated"] == 1 and source["duplicates"] == 3
        reasons = [step["reasons"] for step in card["steps"]]
        assert reasons == [
            {"contaminated by riddles": 1},
            {"duplicate of another document": 1},
            {},
            {},
            {"near-duplicate of another document": 2},
        ]
    assert outputs[0] == outputs[1]
    assert (
        notes
        == [
            "steps[0] (decontaminate): 1 texts of riddles are not looked for, as they have fewer than 8 words"
        ]
        * 2
    )
    texts = outputs[0][0]
    assert len(texts) == 4 and sum(LICENCE in text for text in texts) == 1
    # the longest of the near-duplicates
    assert any("And so on." in text for text in texts)


def test_embeddings_of_a_column(tmp_path: Path) -> None:
    step = {"operator": "semantic", "column": "vector", "eps": 1e-5, "keep": "longest"}
    out = run(tmp_path, [step], 2, [3, 5])
    card = json.loads((out / "card.json").read_text())
    assert card["steps"][0]["left"] < 8
    assert card["sources"][0]["duplicates"] == 8 - card["steps"][0]["left"]


def test_what_no_document_can_be_blamed_for_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=r"steps\[0\] \(exact\): steps.score = 'quality': no earlier step"):  # fmt: skip
        run(tmp_path, [{"operator": "exact", "keep": "best", "score": "quality"}], 1, [8])  # fmt: skip
    with pytest.raises(WeftError, match=r"steps\[0\] \(cut-repeated\)"):
        run(tmp_path, [{"operator": "cut-repeated"}], 1, [8])
    with pytest.raises(UsageError, match="there is no such file"):
        run(tmp_path, [{"operator": "decontaminate", "sets": ["nowhere.jsonl"]}], 1, [8])  # fmt: skip
