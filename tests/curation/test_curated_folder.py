"""A recipe that names the folder of a data run reads what the run has written; the page shows what it did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.curation.data_run import run_pipeline
from weft.curation.documents import Documents
from weft.curation.read_pipeline import build_pipeline, load_pipeline, shipped_pipelines
from weft.curation.statistic_plot import plot_statistic, rounded_number
from weft.curation.step_counts import bin_value, count_step
from weft.data.corpora import read_documents
from weft.data.tokens import open_source
from weft.errors import WeftError
from weft.recipe import Recipe, load_recipe
from weft.train.setup import recipe_tokenizer


def make(folder: Path, tokenizer: str, form: str = "parquet") -> Path:
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    (texts / "long.txt").write_text("a text of some words " * 20)
    (texts / "short.txt").write_text("<b>short</b>")
    tree = {
        "sources": [{"kind": "text", "path": str(texts)}],
        "steps": [{"operator": "words", "least": 5}],
        "output": {"tokenizer": tokenizer, "format": form},
    }
    return run_pipeline(build_pipeline(tree), folder / "out", 0).out


def recipe_of(folder: Path, out: Path, data: str = "", *more: str) -> Recipe:
    file = folder / "recipe.toml"
    file.write_text(f"[data]\n{data}\n")
    return load_recipe(file, [f"data.path={out}", *more])


def test_recipe_reads_tokens_of_its_tokenizer(tmp_path: Path) -> None:
    out = make(tmp_path, "train:300")
    for data in ("", 'tokenizer = "train:300"', 'kind = "text"'):
        recipe = recipe_of(tmp_path, out, data)
        (source,) = recipe.data.sources
        assert (source.kind, source.path) == ("tokens", str(out / "tokens"))
        tokens = open_source(source, recipe_tokenizer(recipe))
        assert len(tokens.offsets) == 2
    card = json.loads((out / "card.json").read_text())
    assert card["tokens"] == len(tokens.ids) == card["sources"][0]["tokens"]


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_recipe_with_another_tokenizer_reads_documents(
    tmp_path: Path, form: str
) -> None:
    out = make(tmp_path, "", form)
    recipe = recipe_of(tmp_path, out, 'tokenizer = "bytes"')
    (source,) = recipe.data.sources
    assert list(read_documents(source)) == ["a text of some words " * 20]
    make(tmp_path, "train:300", form)
    (source,) = recipe_of(tmp_path, out, 'tokenizer = "bytes"').data.sources
    assert source.kind == form
    # a kind of the user's own
    (source,) = recipe_of(tmp_path, out, "", "data.kind=text").data.sources
    assert source.path == str(out)


def test_folder_of_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    out = make(tmp_path, "")
    (out / "manifest.json").unlink()
    with pytest.raises(WeftError, match="has not ended; run the same command again"):
        recipe_of(tmp_path, out)


def test_page_shows_what_was_dropped(tmp_path: Path) -> None:
    page = (make(tmp_path, "bytes") / "report.html").read_text()
    assert "1 of 2 documents are kept, from 1 source in 1 shard" in page
    assert "fewer than 5 words" in page and "texts:short.txt" in page
    assert "&lt;b&gt;short&lt;/b&gt;" in page and "<b>short</b>" not in page
    assert "least = 5" in page
    assert "http://" not in page and "https://" not in page


def test_histogram_has_all_documents() -> None:
    values = [0, 1, 2, 3, 50, 51, 0.5, -4]
    reasons = ["few"] * 3 + [""] * 5
    documents = Documents([f"a:{n}" for n in range(8)], ["x"] * 8)
    counts = count_step(documents, [bytes(16)] * 8, reasons, {"n": values})
    bins = counts.histograms["n"]
    assert sum(map(sum, bins.values())) == 8
    for value in values:
        assert any(abs(bin_value(int(b)) - value) <= 0.01 * abs(value) for b in bins)
    plot = plot_statistic("n", bins, {"least": 2.5, "most": 1e9})
    assert plot is not None and [m.text for m in plot.thresholds] == ["least = 2.5"]
    assert [rounded_number(v) for v in (0.12345, 12, 999.6, 34567, 2.5e6)] == [
        "0.123", "12", "1000", "34.6k", "2.5M",
    ]  # fmt: skip


def test_shipped_pipelines_can_be_built() -> None:
    for name in shipped_pipelines():
        for step in load_pipeline(name).steps:
            step.build()
