"""A run is resumed without its recipe's file: checkpoints keep the settings that the user has given."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.checkpoint.format import seal
from weft.checkpoint.kept_recipe import kept_recipe
from weft.checkpoint.run_state import Progress
from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.observe.run_metrics import FILE, resume_hint
from weft.recipe import Recipe, build_recipe
from weft.recipe.read import recipe_of_tree
from weft.train.setup import Job


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


@pytest.mark.parametrize(("meta", "why"), [
    ({}, "was not saved by weft train"),
    ({"given": recipe("s3://key:word@bucket/a.jsonl").recorded(given=True)}, "may be secret"),
])  # fmt: skip
def test_what_a_run_does_not_keep_is_asked_for(
    tmp_path: Path, meta: dict[str, Any], why: str
) -> None:
    save(tmp_path, meta)
    said = f"{why}.*weft train RECIPE --resume {tmp_path}"
    with pytest.raises(UsageError, match=said):
        kept_recipe(str(tmp_path))
    # nor is a command named that would be refused
    for given, words in ((meta.get("given"), "train RECIPE"), ({"name": "x"}, "train")):
        record = {"kind": "run", "step": 0, "given": given}
        (tmp_path / FILE).write_text(json.dumps(record) + "\n")
        assert resume_hint(tmp_path) == f"continue with: weft {words} --resume {tmp_path}"  # fmt: skip


PLANNED = {
    "train": {"steps": 7, "micro_batch": 2, "planned": ["layout", "train.micro_batch", "memory.moments"]},
    "layout": {"dp": 4}, "memory": {"moments": "host"},
}  # fmt: skip


@pytest.mark.parametrize(("options", "kept"), [
    ({}, PLANNED),
    ({"plans": True}, {"train": {"steps": 7}, "memory": {}}),
    ({"plans": True, "overrides": ["train.micro_batch=4"]}, {"train": {"steps": 7, "micro_batch": 4}, "memory": {}}),
    # the planner does not plan beside a layout that is given, and what it chose before stays
    ({"plans": True, "overrides": ["layout.tp=2"]}, {
        "train": {"steps": 7, "micro_batch": 2, "planned": ["train.micro_batch", "memory.moments"]},
        "layout": {"dp": 4, "tp": 2}, "memory": {"moments": "host"},
    }),
    ({"overrides": ["layout.tp=2", "train.micro_batch=4"]}, {
        "train": {"steps": 7, "micro_batch": 4, "planned": ["memory.moments"]},
        "layout": {"dp": 4, "tp": 2}, "memory": {"moments": "host"},
    }),
])  # fmt: skip
def test_what_the_planner_has_chosen_is_chosen_again(
    tmp_path: Path, options: Any, kept: dict[str, Any]
) -> None:
    """If it is asked to. What the user names is no longer the planner's."""
    save(tmp_path, {"given": build_recipe(PLANNED).recorded(given=True)})
    now = kept_recipe(str(tmp_path), **options)
    assert now.recorded(given=True) == build_recipe(kept).recorded(given=True)
    assert ("layout" in now.model_fields_set) == ("layout" in kept)


def test_a_public_query_is_kept(tmp_path: Path) -> None:
    given = recipe("https://host/a.jsonl?download=true")
    save(tmp_path, {"given": given.recorded(given=True)})
    assert kept_recipe(str(tmp_path)) == given


def test_steps_that_follow_from_epochs_are_not_kept() -> None:
    tree = {"data": {"path": "a.jsonl", "epochs": 2}, "train": {"batch": 4}}
    once = build_recipe(tree)
    assert once.train.steps == 0
    given = once.recorded(given=True)
    assert given["train"] == {"batch": 4}
    assert recipe_of_tree(given, "run", ["data.epochs=0"]).train.steps > 0


def test_a_run_keeps_the_recipe_from_before_ranks_were_lost() -> None:
    before = recipe("a.jsonl")
    now = before.model_copy(update={"layout": Layout(dp=1)})
    job: Any = SimpleNamespace(
        recipe=now, given=before, shape=before.model, steps=lambda progress: 7,
        corpus=SimpleNamespace(fingerprint=""),
    )  # fmt: skip
    facts = Job.facts(job, Progress())
    assert (facts["world"], facts["given"]["layout"]) == (1, {"dp": 2})
