"""A classifier of texts: trained in one command, judged on packages that it has not seen, stored without pickle."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import Command
from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.curation.example_texts import ExampleText, read_examples
from weft.curation.hashed_ngrams import NgramSettings, ngram_vector
from weft.curation.ngram_classifier import load_classifier
from weft.curation.ranking import area_under_curve, ranking_quality
from weft.curation.train_classifier import held_out_groups, train_classifier
from weft.errors import UsageError, WeftError

SMALL = NgramSettings(bits=16, characters=3)


@cache
def stdlib() -> list[ExampleText]:
    """The beginnings of some modules of the standard library."""
    every = [example for example in read_examples("stdlib") if len(example.text) > 1500]
    drawn = random.Random(0).sample(every, 120)
    # not the head, where licences are
    return [each._replace(text=each.text[500:1300]) for each in drawn]


def shuffled(text: str, rng: random.Random) -> str:
    """A copy of which 30 % of the characters are shuffled."""
    letters = list(text)
    places = [i for i in range(len(letters)) if rng.random() < 0.3]
    values = [letters[i] for i in places]
    rng.shuffle(values)
    for i, letter in zip(places, values, strict=True):
        letters[i] = letter
    return "".join(letters)


def minified(text: str, _: random.Random) -> str:
    lines = re.sub(r"#.*", "", text).splitlines()
    return "\n".join(line.strip() for line in lines if line.strip())


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    "spoil", [shuffled, pytest.param(minified, marks=pytest.mark.soak)]
)
def test_spoilt_copies_of_packages_that_it_does_not_know(spoil: Any) -> None:
    good, rng = stdlib(), random.Random(1)
    bad = [each._replace(text=spoil(each.text, rng)) for each in good]
    report = train_classifier(good, bad, SMALL, share=0.3).report
    assert report.auc >= 0.95 and report.auc_low >= 0.9, report
    assert report.judged_positive == report.judged_negative >= 20
    known = {each.group for each in good} - {*report.held_out}
    assert len(known) == report.trained_groups
    # scores say nothing where there is nothing to learn
    blind = train_classifier(good, [e._replace(name=e.name + "~") for e in good], SMALL)
    assert blind.report.auc == pytest.approx(0.5, abs=0.01)


def test_groups_are_held_out_as_a_whole() -> None:
    groups = np.array([f"g{i // 3}" for i in range(30)])
    labels = np.arange(30) % 3 > 0
    held = held_out_groups(groups, labels, 0.3, 0)
    assert len(held) == 3 and held == held_out_groups(
        groups[::-1], labels[::-1], 0.3, 0
    )
    assert held != held_out_groups(groups, labels, 0.3, 1)
    # classes with folders of their own are both judged
    apart = held_out_groups(
        np.array(["a", "b", "c", "d"]), np.array([True, True, False, False]), 0.25, 0
    )
    assert len({*apart} & {"a", "b"}) == len({*apart} & {"c", "d"}) == 1
    with pytest.raises(
        UsageError,
        match=r"2 groups \(1 of the class that has fewer\) cannot be divided",
    ):
        held_out_groups(np.array(["a", "b"]), np.array([True, False]), 0.5, 0)


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 3)),
        min_size=2,
        max_size=12,
    )
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_area_is_the_share_of_pairs_in_order(
    examples: list[tuple[int, bool, int]],
) -> None:
    scores = np.array([score for score, _, _ in examples], float)
    labels = np.array([label for _, label, _ in examples])
    weights = np.array([weight for _, _, weight in examples], float)
    area = area_under_curve(scores, labels, weights)
    pairs = [
        (p, n)
        for p in range(len(scores))
        for n in range(len(scores))
        if labels[p] and not labels[n]
    ]
    total = sum(weights[p] * weights[n] for p, n in pairs)
    if not total:
        assert np.isnan(area)
        return
    right = sum(
        weights[p]
        * weights[n]
        * ((scores[p] > scores[n]) + (scores[p] == scores[n]) / 2)
        for p, n in pairs
    )
    assert area == pytest.approx(right / total)


def test_interval_is_wider_where_groups_are_alike() -> None:
    rng = np.random.default_rng(0)
    labels = np.tile([True, False], 60)
    shift = np.repeat(rng.normal(0, 1, 12), 10)
    scores = labels * 0.5 + rng.normal(0, 1, 120) + shift * labels
    alone = ranking_quality(scores, labels, np.arange(120).astype(str))
    alike = ranking_quality(scores, labels, np.repeat(np.arange(12), 10).astype(str))
    assert alone.area == alike.area and alone.low < alone.area < alone.high
    assert alike.high - alike.low > alone.high - alone.low


@given(st.text(), st.integers(0, 5), st.integers(1, 3))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_vectors_of_any_text(text: str, characters: int, words: int) -> None:
    shape = NgramSettings(characters=characters, words=words, bits=12)
    vector = ngram_vector(text, shape)
    assert (np.diff(vector.indices) > 0).all() and (vector.indices < 1 << 12).all()
    length = float((vector.values**2).sum())
    assert length == pytest.approx(1.0, abs=1e-5) if len(vector.values) else length == 0


def write(folder: Path, texts: dict[str, str]) -> str:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return str(folder)


def test_from_the_command_to_the_filter(tmp_path: Path, command: Command) -> None:
    good = {
        f"p{i}/a{k}.txt": f"the river {i} runs to the sea {k} and sleeps"
        for i in range(6)
        for k in (0, 1)
    }
    bad = {f"q{i}.txt": f"BUY n0w {i} $$$ click here !!! free" for i in range(6)}
    positive, negative = write(tmp_path / "good", good), write(tmp_path / "bad", bad)
    out = tmp_path / "new/quality.safetensors"
    words = [
        "data",
        "classify",
        "--positive",
        positive,
        "--negative",
        negative,
        "--out",
        str(out),
        "--bits",
        "12",
    ]
    code, said, _ = command(*words, "--held-out", "0.3")
    assert code == 0
    assert "held-out groups the interval says little" in said
    assert "AUC 1.0000 (95 % interval" in said and f"wrote {out} and {out}.json" in said
    report = json.loads(Path(f"{out}.json").read_text())
    assert report["auc"] == 1 and report["positive"] == [positive]
    # a package is trained on or judged, and never both
    assert report["judged_positive"] % 2 == 0
    assert {name[0] for name in report["held_out"]} == {"p", "q"}

    step: Any = DataStep(operator="classifier", model=str(out), least=0.5).build()
    documents = Documents(
        ["1", "2"], ["the sea and the river sleep", "click here for FREE $$$"]
    )
    columns = step.statistics(documents)
    assert step.reasons(columns) == ["", "quality below 0.5"]
    assert (
        step.late == ("least",) and columns["quality"][0] > 0.5 > columns["quality"][1]
    )
    # of one document alone the same number
    assert step.statistics(documents.select([1]))["quality"] == columns["quality"][1:]
    assert load_classifier(out).settings.bits == 12

    before = step.fingerprint()
    assert command(*words, "--seed", "1")[0] == 0
    assert (
        DataStep(operator="classifier", model=str(out)).build().fingerprint() != before
    )  # type: ignore[union-attr]


def test_records_and_what_is_wrong_with_them(tmp_path: Path, command: Command) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.csv"
    good.write_text(
        "".join(
            json.dumps({"text": f"good words {i}", "site": f"s{i % 4}"}) + "\n"
            for i in range(8)
        )
    )
    bad.write_text(
        "text,site\n" + "".join(f"poor things {i},s{i % 4}\n" for i in range(8))
    )
    out = str(tmp_path / "c.safetensors")
    words = [
        "data",
        "classify",
        "--positive",
        str(good),
        "--negative",
        str(bad),
        "--out",
        out,
        "--bits",
        "10",
    ]
    code, said, _ = command(*words, "--group", "site", "--json")
    assert code == 0
    report = json.loads(said)
    assert (
        len(report["held_out"]) == 1
        and report["judged_positive"] == report["judged_negative"] == 2
    )
    for more, said in (
        (["--field", "texts"], "no field 'texts'; set --field, did you mean 'text'"),
        (["--group", "sit"], "no field 'sit'; set --group"),
        (["--positive", str(tmp_path / "none")], "there is no such file or folder"),
        (["--out", str(good / "c")], "cannot write --out"),
        (["--words", "0", "--characters", "1"], "leave no n-gram; raise one of them"),
    ):
        code, _, error = command(*words, *more)
        assert code in (1, 2) and said in error, error
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/a.txt").write_text(" \n")
    code, _, error = command(*words[:3], tmp_path / "empty", *words[4:])
    assert code == 1 and "there is no text at" in error


def test_other_files_are_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    file = tmp_path / "x.safetensors"
    with pytest.raises(WeftError, match="cannot be read"):
        load_classifier(file)
    file.write_text("{}")
    with pytest.raises(WeftError, match="cannot be read"):
        load_classifier(file)
    save_file({"weights": np.zeros(2)}, file)
    with pytest.raises(WeftError, match="is no classifier of texts"):
        load_classifier(file)
    with pytest.raises(UsageError, match="model"):
        DataStep(operator="classifier")
