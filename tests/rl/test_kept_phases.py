"""Answers of the newest rollout phases, in files of a run's folder."""

from __future__ import annotations

from pathlib import Path

from weft.rl.kept_phases import keep_phase


def test_only_files_of_other_phases_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "answers"
    folder.mkdir()
    for name in ("000001", "000002", "000009", "notes", "7b"):
        (folder / f"{name}.jsonl").write_text("")
    keep_phase(tmp_path, 3, [], str, 2)
    names = sorted(file.stem for file in folder.iterdir())
    assert names == ["000002", "000003", "7b", "notes"]
