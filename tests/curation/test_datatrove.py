"""Datatrove's steps in pipelines of Weft's, and the other way round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.curation.data_run import run_pipeline
from weft.curation.read_pipeline import build_pipeline
from weft.errors import UsageError, WeftError

datatrove = pytest.importorskip("datatrove", reason="extra curation")

WORDS = ["a short one", "the text of many words that is kept, and be with it " * 8]


def tree(folder: Path, *steps: dict[str, Any]) -> dict[str, Any]:
    (folder / "data").mkdir(exist_ok=True)
    lines = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in WORDS)
    (folder / "data/a.jsonl").write_text(lines)
    source = {"kind": "jsonl", "path": str(folder / "data")}
    return {"sources": [source], "steps": list(steps), "output": {"format": "jsonl"}}


def block(name: str, **more: Any) -> dict[str, Any]:
    return {"operator": "datatrove", "block": f"datatrove.pipeline.{name}"} | more


def test_filter_of_datatrove_is_an_operator(tmp_path: Path) -> None:
    step = block("filters.RegexFilter", arguments={"regex_exp": "short"})
    steps = step, block("formatters.PIIFormatter")
    result = run_pipeline(build_pipeline(tree(tmp_path, *steps)), tmp_path / "out", 0)
    assert result.steps[0].counts.reasons == {"dropped by the filter": 1}
    (line,) = (tmp_path / "out/documents/00000.jsonl").read_text().splitlines()
    assert json.loads(line)["n"] == 1


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datatrove.pipeline import filters

    class Changing(filters.RegexFilter):
        """As datatrove's filter of C4's pages does, for which spacy must be there."""

        def __init__(self) -> None:
            super().__init__("x")

        def filter(self, doc: Any) -> bool:
            doc.text = "other"
            return True

    monkeypatch.setattr(filters, "Changing", Changing, raising=False)
    for step, why in (
        (block("filters.NoSuchFilter"), "NoSuchFilter"),
        (block("filters.GopherQualityFilter", arguments={"x": 1}), "argument 'x'"),
        (block("readers.ParquetReader", arguments={"data_folder": "x"}), "reads; name"),
        (block("filters.Changing"), "set changes = true"),
    ):
        with pytest.raises(UsageError, match=why):
            run_pipeline(build_pipeline(tree(tmp_path, step)), tmp_path / "out", 0)


@pytest.mark.slow(20)
@pytest.mark.parametrize("engine", ["datatrove", "ray"])
def test_engine_gives_the_same_manifest(tmp_path: Path, engine: str) -> None:
    pytest.importorskip(engine)
    steps = {"operator": "words", "least": 5}, {"operator": "exact"}
    pipeline = build_pipeline(tree(tmp_path, *steps) | {"shards": 2})
    run_pipeline(pipeline, tmp_path / "local", 0)
    run_pipeline(pipeline, tmp_path / engine, 2, engine)
    first, second = ((tmp_path / p / "manifest.json").read_bytes() for p in ("local", engine))  # fmt: skip
    assert first == second
    broken = build_pipeline(tree(tmp_path, block("filters.No")))
    with pytest.raises(WeftError, match="No"):
        run_pipeline(broken, tmp_path / "other", 2, engine)


def test_steps_of_weft_in_a_pipeline_of_datatrove() -> None:
    from datatrove.data import Document

    from weft.curation.datatrove_block import WeftSteps

    steps = WeftSteps([{"operator": "words", "least": 5}], batch=1)
    stream = (Document(text, f"{n}", metadata={"n": n}) for n, text in enumerate(WORDS))
    (kept,) = steps.run(stream)
    assert kept.id == "1" and kept.metadata == {"n": 1, "words": 96}
    assert steps.stats["dropped_fewer than 5 words"].total == 1
    with pytest.raises(UsageError, match="must see all documents"):
        WeftSteps([{"operator": "exact"}])
