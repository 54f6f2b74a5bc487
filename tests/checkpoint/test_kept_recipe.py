"""A run is resumed without its recipe's file: checkpoints keep the settings that the user has given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.checkpoint.format import seal
from weft.checkpoint.kept_recipe import kept_recipe
from weft.errors import UsageError
from weft.recipe import Recipe, build_recipe


def save(folder: Path, meta: dict[str, Any], step: int = 5) -> None:
    place = folder / f"checkpoints/step-{step:06d}"
    place.mkdir(parents=True)
    (place / "weft.json").write_bytes(seal(meta))


def recipe(path: str) -> Recipe:
    data = {"kind": "jsonl", "path": path, "field": "words"}
    tree = {"name": "own", "data": data, "layout": {"dp": 2}, "train": {"steps": 7}}
    return build_recipe(tree)


def test_options_change_the_recipe_that_a_run_keeps(tmp_path: Path) -> None:
    """An older checkpoint stands in for a newest one that is damaged, as it does when the run resumes."""
    given = recipe("a.jsonl")
    save(tmp_path, {"given": given.recorded(given=True)})
    save(tmp_path, {"given": {}}, step=6)
    (tmp_path / "checkpoints/step-000006/weft.json").write_text("{")
    assert kept_recipe(str(tmp_path)) == given
    changed = kept_recipe(
        str(tmp_path), ["train.steps=9", "data.path=b.jsonl"], "shard=2"
    )
    (source,) = changed.data.sources
    assert (source.kind, source.path, source.field) == ("jsonl", "b.jsonl", "words")
    assert (changed.train.steps, str(changed.layout)) == (9, "shard=2")


@pytest.mark.parametrize("meta", [
    {},
    {"given": recipe("s3://key:word@bucket/a.jsonl").recorded(given=True)},
])  # fmt: skip
def test_what_a_run_does_not_keep_is_asked_for(
    tmp_path: Path, meta: dict[str, Any]
) -> None:
    save(tmp_path, meta)
    with pytest.raises(UsageError, match=f"weft train RECIPE --resume {tmp_path}"):
        kept_recipe(str(tmp_path))
