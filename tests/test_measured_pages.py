"""The pages of results say what bench/results say, and every result is on one of them."""

import json
import shutil
from pathlib import Path

import pytest

from bench import measured_pages


def test_pages_say_what_their_results_say() -> None:
    assert not list(measured_pages.wrong())


def test_a_changed_or_forgotten_result_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "results"
    shutil.copytree(measured_pages.RESULTS, copy)
    monkeypatch.setattr(measured_pages, "RESULTS", copy)
    result = json.loads((copy / "minhash.json").read_text())
    result["rows"]["weft"]["documents/s"] *= 2
    (copy / "minhash.json").write_text(json.dumps(result))
    (copy / "forgotten.json").write_text("{}")
    said = list(measured_pages.wrong())
    assert len(said) == 3
    assert "forgotten.json is on no page" in said[0]
    assert "results/data.md is not what" in said[1] and "data.svg" in said[2]
    assert all("--mend" in line for line in said)
