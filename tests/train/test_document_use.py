"""Which documents were trained on, and when: against the batches that the loader has really given."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.cases import recipe
from weft.cli.data import app
from weft.data.batch import Batch
from weft.data.loader import Loader
from weft.errors import UsageError, WeftError
from weft.layout.mesh import Mesh
from weft.train import document_use
from weft.train.document_use import RunDocuments
from weft.train.setup import prepare
from weft.train.training import train_job

#: Every document is a letter, repeated, so that a token tells which document it is of.
LETTERS = "abcdefghijklmnop"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of five steps, resumed for four with another batch, and the documents by step that its loader has given."""
    folder = tmp_path_factory.mktemp("who")
    first, second = folder / "first", folder / "second"
    first.mkdir()
    second.mkdir()
    lines = [
        json.dumps({"id": f"doc-{letter}", "text": letter * (3 + 5 * i)}) + "\n"
        for i, letter in enumerate(LETTERS[:10])
    ]
    (first / "a.jsonl").write_text("\n".join(["".join(lines[:4]), "".join(lines[4:])]))
    for letter in LETTERS[10:]:
        (second / f"{letter}.txt").write_text(letter * 30)
    sources = (
        {"kind": "jsonl", "path": str(first), "weight": 1.0},
        {"kind": "text", "path": str(second), "weight": 3.0},
    )
    seen: dict[int, set[str]] = defaultdict(set)
    real = Loader.step
    out = folder / "run"
    change = {
        "data__sources": sources,
        "data__validation": 0.2,
        "data__cache": folder / "cache",
    }
    with pytest.MonkeyPatch.context() as patch:
        for steps, batch, begun in ((5, 2, 0), (9, 3, 5)):
            number = begun

            def noted(loader: Loader, position: int) -> list[Batch] | None:
                nonlocal number
                batches = real(loader, position)
                if loader.order.total is None:  # of training
                    number += 1
                    for batch in batches or ():
                        ids = batch.tokens.unique().tolist()
                        seen[number] |= {chr(i) for i in ids if chr(i) in LETTERS}
                return batches

            patch.setattr(Loader, "step", noted)
            settings = recipe(
                "",
                **change,
                train__steps=steps,
                train__batch=batch,
                train__dtype="float32",
            )
            train_job(prepare(settings), Mesh.single(), out, "auto" if begun else None)
    return {"folder": out, "seen": dict(seen), "first": first, "second": second}


def name_of(run: dict[str, Any], letter: str) -> str:
    number = LETTERS.index(letter)
    if number >= 10:
        return f"{run['second']}/{letter}.txt"
    return f"{run['first']}/a.jsonl:{number + 1 + (number > 3)}"  # an empty line in between


@pytest.mark.slow(5)
def test_the_steps_of_every_document_are_those_that_had_it(run: dict[str, Any]) -> None:
    documents = RunDocuments(run["folder"])
    held = 0
    for letter in LETTERS:
        (used,) = documents.find(name_of(run, letter))
        assert used.name == name_of(run, letter)
        expected = sorted(
            step for step, letters in run["seen"].items() if letter in letters
        )
        assert sorted({use.step for use in used.uses}) == expected
        assert used.state == ("trained" if expected or used.uses else used.state)
        held += used.state == "held out"
        if used.state == "held out":
            assert not expected and "never trained on" in used.line()
    assert held and len(run["seen"]) == 9


def test_a_step_lists_its_documents(run: dict[str, Any]) -> None:
    documents = RunDocuments(run["folder"])
    for step, letters in run["seen"].items():
        listed = documents.of_step(step)
        assert {d.name for d in listed} == {name_of(run, letter) for letter in letters}
        assert {d.use.step for d in listed} == {step}
    with pytest.raises(UsageError, match="has taken 9 steps; step 10"):
        documents.of_step(10)


def test_the_second_attempt_may_have_another_layout(
    run: dict[str, Any], tmp_path: Path
) -> None:
    """The places of a step are those of the layout under which it was taken; its samples stay the same."""
    copy = tmp_path / "run"
    shutil.copytree(run["folder"], copy)
    file = copy / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "run"][-1]
    last["recipe"]["layout"]["dp"] = 3
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before, after = (
        {d.name: d.use for d in RunDocuments(f).of_step(8)}
        for f in (run["folder"], copy)
    )
    assert before.keys() == after.keys()
    assert {use.places for use in before.values()} == {1}
    samples = sorted({use.sample for use in after.values()})
    for use in after.values():
        place = samples.index(use.sample)
        assert (use.place, use.places, use.ranks) == (place, 3, (place,))
    assert {d.use.places for d in RunDocuments(copy).of_step(2)} == {1}


def test_names_ids_and_what_is_unknown(run: dict[str, Any]) -> None:
    documents = RunDocuments(run["folder"])
    whole = documents.find(name_of(run, "c"))
    for name in (
        "a.jsonl:3",
        "first/a.jsonl#3",
        "doc-c",
        str(run["first"] / "a.jsonl") + ":3",
    ):
        assert documents.find(name) == whole
    assert len(documents.find("a.jsonl")) == 10
    with pytest.raises(UsageError, match=r"has a document 'b\.jsonl:3'.*a\.jsonl"):
        documents.find("b.jsonl:3")
    with pytest.raises(UsageError, match=r"document 'a\.jsonl:99'"):
        documents.find("a.jsonl:99")


def test_an_older_cache_gets_its_names(run: dict[str, Any], tmp_path: Path) -> None:
    documents = RunDocuments(run["folder"])
    expected = [d.name for d in documents.find("a.jsonl")]
    cache = run["folder"].parent / "cache"
    kept = [
        f for f in cache.glob("tokens-*/*") if f.name in ("files.json", "lines.npy")
    ]
    for file in kept:
        shutil.move(file, tmp_path / f"{file.parent.name}-{file.name}")
    try:
        again = RunDocuments(run["folder"])
        assert [d.name for d in again.find("a.jsonl")] == expected
        for folder in cache.glob("names-*"):
            shutil.rmtree(folder)
    finally:
        for file in kept:
            shutil.move(tmp_path / f"{file.parent.name}-{file.name}", file)


def test_data_that_has_changed_is_refused(run: dict[str, Any], tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run["folder"], copy)
    text = (copy / "metrics.jsonl").read_text()
    heads = [json.loads(line) for line in text.splitlines() if '"kind": "run"' in line]
    (copy / "metrics.jsonl").write_text(text.replace(heads[0]["data"], "0" * 24))
    with pytest.raises(WeftError, match="have changed since step 0"):
        RunDocuments(copy).find("a.jsonl:1")


def test_an_address_gets_its_secret_from_a_recipe(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, full = tmp_path / "run", "https://me:word@h/x.txt?sig=hidden"
    shutil.copytree(run["folder"], copy)
    text = (copy / "metrics.jsonl").read_text()
    (copy / "metrics.jsonl").write_text(text.replace(str(run["second"]), "https://h/x.txt"))  # fmt: skip
    source = {"kind": "text", "path": full}
    known = RunDocuments(copy, recipe("", data__sources=(source,)))
    assert [a.recipe.data.sources[1].path for a in known.attempts] == [full, full]
    assert known.attempts[0].recipe.data.sources[0].path == str(run["first"])
    monkeypatch.setattr(document_use, "open_data", mock.Mock(side_effect=WeftError("401")))  # fmt: skip
    with pytest.raises(WeftError, match=r"401 \(https://h/x\.txt is .*--recipe FILE\)"):
        RunDocuments(copy).find("a.jsonl:1")


def test_the_command(run: dict[str, Any]) -> None:
    folder = str(run["folder"])
    letter = next(iter(run["seen"][1]))
    name = name_of(run, letter)
    shown = CliRunner().invoke(app, ["who", name, folder])
    assert shown.exit_code == 0 and shown.stdout.startswith(f"{name} of data source")
    assert "trained on in" in shown.stdout and "0 of 1" in shown.stdout
    listed = CliRunner().invoke(app, ["who", name, folder, "--json"])
    (document,) = json.loads(listed.stdout)
    assert {use["step"] for use in document["uses"]} == {
        step for step, letters in run["seen"].items() if letter in letters
    }
    step = CliRunner().invoke(app, ["who", folder, "--step", "1", "--most", "1"])
    assert step.exit_code == 0 and step.stdout.startswith("sample 0, place 0 of 1: ")
    wrong = CliRunner().invoke(app, ["who", folder])
    assert isinstance(wrong.exception, UsageError) and "--step N" in str(
        wrong.exception
    )


def test_epochs_add_up(run: dict[str, Any]) -> None:
    """All tokens of a document are used once in an epoch, but for the very last one of all."""
    documents = RunDocuments(run["folder"])
    for letter in LETTERS:
        (used,) = documents.find(name_of(run, letter))
        by_epoch: dict[int, list[int]] = defaultdict(list)
        for use in used.uses:
            by_epoch[use.epoch] += range(use.first, use.last)
        whole = sorted(by_epoch)[:-1]
        for epoch in whole[1:]:
            tokens = by_epoch[epoch]
            assert len(tokens) == len(set(tokens)) and used.tokens - len(tokens) <= 1
            assert np.all(np.diff(sorted(tokens)) == 1)
