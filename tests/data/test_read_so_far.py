"""What a run has read: counts of its report, its checkpoints and its exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cases import recipe
from weft.checkpoint import model_card
from weft.checkpoint.model import export_model
from weft.data.read_so_far import begin_reading, count_read, read_so_far
from weft.layout.mesh import Mesh
from weft.observe.run_metrics import read_metrics
from weft.observe.run_page import write_report
from weft.recipe import Source
from weft.train.setup import prepare
from weft.train.training import train_job


def sources_in(folder: Path) -> tuple[dict[str, Any], ...]:
    """Two folders, of which a data run has written the first, with what it has dropped."""
    documents = folder / "clean" / "documents"
    documents.mkdir(parents=True)
    (documents / "a.jsonl").write_text("".join(
        json.dumps({"id": f"{i}", "text": "word " * 5}) + "\n" for i in range(12)
    ))  # fmt: skip
    card = {
        "weft": "data run",
        "sources": [{
            "name": "raw", "read": 20, "documents": 12, "dropped": {"steps[0] (words)": 5, "steps[1] (minhash)": 3},
            "duplicates": 3, "contaminated": 0, "path": "/raw",
        }],
    }  # fmt: skip
    (folder / "clean" / "card.json").write_text(json.dumps(card))
    (folder / "more.txt").write_text("other text " * 40)
    return (
        {"kind": "jsonl", "path": str(documents), "weight": 1.0},
        {"kind": "text", "path": str(folder / "more.txt"), "weight": 2.0},
    )


@pytest.mark.slow(5)
def test_report_checkpoint_and_export_tell_what_was_read(tmp_path: Path) -> None:
    """A run of three steps, resumed for four with another batch, then for two with one source alone."""
    sources = sources_in(tmp_path)
    change = {
        "data__validation": 0.0, "data__cache": tmp_path / "cache", "train__dtype": "float32", "checkpoint__every": 2,
    }  # fmt: skip
    out, drawn, position = tmp_path / "run", np.zeros(2), 0
    epochs = np.zeros(2)
    for steps, batch, own in ((3, 2, sources), (7, 4, sources), (9, 2, sources[1:])):
        settings = recipe(
            "", **change, data__sources=own, train__steps=steps, train__batch=batch
        )
        job = prepare(settings)
        outcome = train_job(job, Mesh.single(), out, "auto" if position else None)
        order = job.corpus.train
        for sample in range(position, outcome.progress.position):
            stream = order.locate(sample)[0] + (len(own) == 1)
            drawn[stream] += 1
            epochs[stream] += 1 / order.streams[stream - (len(own) == 1)].rows
        position = outcome.progress.position
    told = read_so_far(outcome.progress.loader)
    assert [s["name"] for s in told] == [s["path"] for s in sources]
    assert [s["samples"] for s in told] == drawn.tolist() and position == 6 + 16 + 4
    assert np.allclose([s["epochs"] for s in told], epochs)
    assert told[0]["lines"][1] == (
        "from raw: 12 of 20 documents kept; dropped: 5 by steps[0] (words), 3 by steps[1] (minhash); 3 duplicates, "
        "0 contaminated"
    )
    assert read_metrics(out)["read"][-1]["sources"] == told
    page = write_report(out).read_text()
    assert "What was read" in page and "5 by steps[0] (words)" in page
    folder = export_model(str(out), tmp_path / "export", print)
    card = (folder / "README.md").read_text()
    assert f"| {sources[1]['path']} | 1 | 1 |" in card and "dropped: 5 by" in card
    facts = json.loads(card.partition("<!-- weft: ")[2].partition(" -->")[0])
    assert [s["samples"] for s in facts] == drawn.tolist()


def test_the_same_data_continue_their_entry(tmp_path: Path) -> None:
    job = prepare(
        recipe("", data__sources=sources_in(tmp_path), data__cache=tmp_path / "cache")
    )
    kept: dict[str, Any] = {}
    begin_reading(kept, job.corpus, 0)
    count_read(kept, job.corpus.train, range(0, 5))
    begin_reading(kept, job.corpus, 5)
    count_read(kept, job.corpus.train, range(5, 9))
    assert (
        len(kept["data"]) == 1
        and sum(s["samples"] for s in kept["data"][0]["sources"]) == 9
    )
    assert json.loads(json.dumps(kept)) == kept  # as a checkpoint keeps it


def test_sources_of_one_path_are_told_apart_and_show_no_secret() -> None:
    source = Source(kind="text", path="https://me:word@host/a@b.txt?sig=hidden")
    assert source.shown == "https://host/a@b.txt"
    about = {"name": source.shown, "rows": 4, "documents": 4, "tokens": 40, "trained_documents": 4}  # fmt: skip
    of = [about | {"samples": n, "trained_tokens": 40} for n in (2, 8)]
    kept = {"data": [{"sources": of}, {"sources": of[:1]}]}
    assert [each["epochs"] for each in read_so_far(kept)] == [1.0, 2.0]


def test_a_card_names_files_whose_names_are_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_card, "is_foreign", lambda where: False)
    monkeypatch.setattr(model_card, "load_newest", lambda *given: (None, None))
    monkeypatch.setattr(model_card, "model_card", lambda stored: "| a\udcff.txt |")
    model_card.write_model_card(str(tmp_path), tmp_path)
    assert (tmp_path / "README.md").read_text() == "| a?.txt |"
