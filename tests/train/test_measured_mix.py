"""Mixtures that follow measured losses: DoReMi and online, under other layouts and through resumes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.train.test_mix_run import asked, losses
from weft.checkpoint.run_state import Progress
from weft.data.mix_plan import MixFacts, describe_mix, mixture_of
from weft.data.order_inverse import samples_drawn
from weft.errors import UsageError
from weft.layout.mesh import Mesh
from weft.recipe import Data
from weft.train.document_use import RunDocuments
from weft.train.mix_run import continued_mix, kept_mix
from weft.train.setup import prepare
from weft.train.training import train_job

ONLINE = {"mix": "online", "mix_every": 2, "mix_rows": 3, "mix_targets": {"small": 5.0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, draw = tmp_path_factory.mktemp("measured"), random.Random(3)
    for name, count, letters in ("large", 60, "abcdefgh "), ("small", 12, "xyz"):
        rows = ["".join(draw.choices(letters, k=18)) for _ in range(count)]
        lines = "".join(json.dumps({"text": row}) + "\n" for row in rows)
        (path / f"{name}.jsonl").write_text(lines)
    return path


def trained(
    folder: str,
    mix: dict[str, Any],
    change: dict[str, Any],
    out: str,
    resume: str | None = None,
) -> tuple[dict[str, Any], list[float]]:
    """Train, and return what the mixture has decided, and the losses of the steps."""
    settings = asked(
        Path(folder),
        mix,
        **{"train__steps": 6, "checkpoint__every": 2, "checkpoint__keep": 9} | change,
    )
    mesh = Mesh.create(settings.layout, "cpu")
    outcome = train_job(prepare(settings), mesh, Path(out), resume)
    return outcome.progress.loader["mix"]["decided"], losses(
        Path(out)
    ) if mesh.is_main else []


@pytest.fixture(scope="module")
def reference(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with one step of training, which is not the proxy's first state."""
    out = tmp_path_factory.mktemp("reference") / "run"
    settings = asked(folder, {}, train__steps=3, train__seed=5)
    train_job(prepare(settings), Mesh.single(), out)
    return str(out)


#: Layouts, and whether they go on from a checkpoint of one device.
LAYOUTS = {"dp": False, "tp": True, "pp": False, "cp": True, "shard": True}


@pytest.mark.slow(8)
@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("online", ("tp",)),
        pytest.param("online", tuple(LAYOUTS), marks=pytest.mark.soak),
        pytest.param("doremi", tuple(LAYOUTS), marks=pytest.mark.soak),
    ],
)
def test_all_layouts_decide_alike_and_resume(
    pool: Any,
    folder: Path,
    reference: str,
    tmp_path: Path,
    kind: str,
    axes: tuple[str, ...],
) -> None:
    """Decisions and losses of two ranks, from the beginning or from one device's checkpoint, equal one device's."""
    mix = ONLINE if kind == "online" else {"mix": "doremi", "mix_reference": reference}
    key = "shares" if kind == "online" else "w"
    alone = pool.run(1, trained, str(folder), mix, {}, str(tmp_path / "one"))[0]
    stored = str(tmp_path / "one/checkpoints/step-000002")
    for axis in axes:
        change, resume = {f"layout__{axis}": 2}, stored if LAYOUTS[axis] else None
        out = str(tmp_path / axis)
        ranks = pool.run(2, trained, str(folder), mix, change, out, resume)
        decided, steps = ranks[0]
        assert steps == pytest.approx(alone[1][-len(steps) :], rel=1e-10), axis
        for ours, theirs in zip(decided[key], alone[0][key], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-10), axis
    if kind == "online":
        assert len(alone[0][key]) == 3 and alone[0][key][0] == [0.5, 0.5]
        assert alone[0][key][2][0] > 0.9  # the source that is above its target
    else:
        assert alone[0]["steps"] == 6 and alone[0]["w"] != [0.5, 0.5]


def test_what_a_run_has_read_follows_its_decisions(
    folder: Path, tmp_path: Path
) -> None:
    """``weft data who`` asks the run's records, which say what was decided in each attempt."""
    out = str(tmp_path / "run")
    whole, _ = trained(str(folder), ONLINE, {}, out)
    longer = {"train__steps": 8}
    again, _ = trained(str(folder), ONLINE, longer, out, out)
    assert len(whole["shares"]) == 3 and len(again["shares"]) == 4
    run = RunDocuments(Path(out))
    assert [a.steps for a in run.attempts] == [range(6), range(6, 8)]
    for attempt, shares in zip(
        run.attempts, (whole["shares"], again["shares"]), strict=True
    ):
        order = run.corpus(attempt).train
        assert order.legs[-1].plan.mixture.decided == shares  # type: ignore[union-attr]
        # nearly all are of the source above its target
        assert [order.locate(s)[0] for s in range(16, 24)].count(0) >= 6


def test_a_proxy_that_is_its_reference_keeps_weights_alike(
    folder: Path, reference: str, tmp_path: Path
) -> None:
    mix = {"mix": "doremi", "mix_reference": reference}
    same = {"model__from": reference, "optimizer__lr": 1e-14, "optimizer__warmup": 0}
    decided, _ = trained(str(folder), mix, same, str(tmp_path / "same"))
    assert decided["w"] == pytest.approx([0.5, 0.5], abs=1e-9)
    assert decided["steps"] == 6
    decided, _ = trained(
        str(folder), mix | {"mix_rate": 0.0}, {}, str(tmp_path / "still")
    )
    assert decided["w"] == [0.5, 0.5] and any(decided["scores"])


def test_doremi_follows_its_algorithm() -> None:
    """A source that a step lacks keeps its score; the answer is the mean of the weights over all steps."""
    data = Data(
        sources=[{"kind": "text", "path": p} for p in "abc"],
        mix="doremi",
        mix_reference="x",
        mix_floor=0.1,
    )
    facts = MixFacts(["a", "b", "c"], [1.0, 1.0, 1.0], [9, 9, 9], [3, 3, 3], 4, 10)
    mixture: Any = mixture_of(describe_mix(data, facts))
    seen = []
    for step, excess in enumerate(([1.0, 0.0, 0.5], [None, 0.0, 0.0])):
        mixture.decide(4 * step, excess)
        seen.append([*mixture.shares(0, 1)])
    import numpy as np

    w = np.ones(3) / 3
    for number, score in enumerate(([1.0, 0.0, 0.5], [1.0, 0.0, 0.0])):
        w = w * np.exp(score)
        w = 0.9 * w / w.sum() + 0.1 / 3
        assert seen[number] == pytest.approx(w)
    assert mixture.average == pytest.approx(np.mean(seen, 0))


def test_what_cannot_be_measured(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"set data\.mix_reference"):
        prepare(asked(folder, {"mix": "doremi"}))
    with pytest.raises(UsageError, match=r"leave layout\.island out"):
        prepare(asked(folder, ONLINE, layout__island=2))
    with pytest.raises(UsageError, match=r"leave data\.epochs out"):
        prepare(asked(folder, ONLINE, data__epochs=1))
    with pytest.raises(UsageError, match="called 'smal'"):
        prepare(asked(folder, ONLINE | {"mix_targets": {"smal": 1.0}}))


def test_what_online_has_given_is_counted_and_told(
    folder: Path, tmp_path: Path
) -> None:
    """Counts, 'weft data who' and another mix know the samples that the decided shares have given."""
    mix = ONLINE | {"mix_rate": 5.0}
    change = {"train__steps": 6, "train__batch": 8, "checkpoint__every": 6}
    job = prepare(asked(folder, mix, **change))
    outcome = train_job(job, Mesh.single(), tmp_path / "run")
    loader = outcome.progress.loader
    read = [source["samples"] for source in loader["data"][-1]["sources"]]
    assert sum(read) == 48 and read[0] > 2 * read[1]
    known = RunDocuments(tmp_path / "run")
    (attempt,) = known.attempts
    assert attempt.mix["decided"] == loader["mix"]["decided"]
    assert samples_drawn(known.corpus(attempt).train, 48) == read
    progress = Progress(6, 48, 0, 6, json.loads(json.dumps(loader)))
    again = prepare(asked(folder, {}, **change))
    corpus, _ = continued_mix(again.corpus, again.recipe, progress)
    assert [*corpus.train.legs[1].given] == read
    assert samples_drawn(corpus.train, 48) == read
    reopened = kept_mix(again.corpus, json.loads(json.dumps(progress.loader["mix"])))
    assert samples_drawn(reopened.train, 32) == samples_drawn(
        known.corpus(attempt).train, 32
    )
