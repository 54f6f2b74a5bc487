"""Scores through `weft data run`: columns in the written files, the same for any shards, thresholds without a pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.curation.web_pages import pages
from weft.curation.data_run import run_pipeline
from weft.curation.example_texts import ExampleText
from weft.curation.hashed_ngrams import NgramSettings
from weft.curation.ngram_classifier import NgramClassifier, save_classifier
from weft.curation.read_pipeline import build_pipeline
from weft.curation.train_classifier import train_classifier


def classifier(file: Path, bits: int = 10) -> str:
    good = [ExampleText(f"g{i}", f"g{i}", text) for i, text in enumerate(pages(12))]
    bad = [each._replace(text=f"$$$ {i} click now !!!") for i, each in enumerate(good)]
    save_classifier(
        train_classifier(good, bad, NgramSettings(bits=bits)).classifier, file, {}
    )
    return str(file)


def run(
    folder: Path, out: str, steps: list[dict[str, Any]], shards: int
) -> list[dict[str, Any]]:
    tree = {
        "sources": [{"kind": "jsonl", "path": str(folder / "data")}],
        "steps": steps,
        "shards": shards,
        "output": {"format": "jsonl"},
    }
    run_pipeline(build_pipeline(tree), folder / out, workers=0)
    files = sorted((folder / out / "documents").glob("*.jsonl"))
    return [
        json.loads(line) for file in files for line in file.read_text().splitlines()
    ]


@pytest.mark.slow(3)
def test_scores_through_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        file = tmp_path / f"data/{number}.jsonl"
        file.parent.mkdir(exist_ok=True)
        records = [
            {"text": text, "site": f"s{number}"} for text in pages(40)[number::4]
        ]
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    steps: list[dict[str, Any]] = [
        {"operator": "c4-lines"},
        {"operator": "gopher", "least_words": 20},
        {
            "operator": "classifier",
            "model": classifier(tmp_path / "q.safetensors"),
            "least": 0.0,
        },
        {"operator": "clusters", "clusters": 4, "share": 0.8},
        {
            "operator": "top",
            "column": "quality",
            "share": 0.5,
            "group": "site",
            "floor": 1,
        },
    ]
    rows = run(tmp_path, "out", steps, 1)
    assert rows == run(tmp_path, "several", steps, 3)
    assert {row["site"] for row in rows} == {"s0", "s1", "s2", "s3"}
    assert {"quality", "gopher_words", "cluster", "cluster_distance"} <= {*rows[0]}
    # another threshold, and no text is scored again
    calls = []
    score = NgramClassifier.probability
    monkeypatch.setattr(
        NgramClassifier, "probability", lambda *a: (calls.append(a), score(*a))[1]
    )
    steps[2]["least"] = sorted(row["quality"] for row in rows)[1]
    assert len(run(tmp_path, "out", steps, 1)) < len(rows) + 1 and not calls
    # the same name with other contents is another classifier
    classifier(tmp_path / "q.safetensors", bits=9)
    run(tmp_path, "out", steps, 1)
    assert calls
