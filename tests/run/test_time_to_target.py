"""Time to a target: what the rules count, by records that are written by hand, and one comparison that is run."""

import json
import math
from pathlib import Path

import pytest

from weft.cli.target import target_command
from weft.errors import UsageError
from weft.run.time_to_target import (
    PROFILE,
    Entrant,
    performance_profile,
    reached_at,
    read_entrants,
    record_of,
    standings,
    target_runs,
)


def written(folder: Path, losses: dict[int, float], seconds: float) -> None:
    """Write the records of a run: a step takes ``seconds``, and ``losses`` are those of validations by step."""
    folder.mkdir(parents=True)
    lines = []
    for step in range(1, max(losses) + 1):
        lines.append({"kind": "train", "step": step, "time": 0, "loss": 1, "step_s": seconds})  # fmt: skip
        if step in losses:
            lines.append({"kind": "validation", "step": step, "time": 0, "loss": losses[step]})  # fmt: skip
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


def test_the_first_validation_at_the_target_counts(tmp_path: Path) -> None:
    written(tmp_path / "a", {2: 3.0, 4: 2.0, 6: 2.5, 8: 1.0}, 0.5)
    assert reached_at(tmp_path / "a", 2.0) == (4, 2.0)
    assert reached_at(tmp_path / "a", 0.5) == (math.inf, math.inf)
    assert reached_at(tmp_path / "none", 2.0) == (math.inf, math.inf)


def test_a_study_counts_its_best_candidate_and_an_entrant_its_median(tmp_path: Path) -> None:  # fmt: skip
    fast = Entrant("fast", ("a.b=1",), (("c=1",), ("c=2",)))
    slow, never = Entrant("slow"), Entrant("never")
    attempts = target_runs(["w"], [slow, fast, never], [0, 1, 2], tmp_path)
    assert len(attempts) == 12 and attempts[1].overrides == ["a.b=1", "c=1", "train.seed=0"]  # fmt: skip
    for attempt in attempts:
        first = attempt.candidate == ("c=1",)
        at = {"slow": 8, "fast": 6 if first else 2 + 2 * attempt.seed, "never": 8}
        loss = 9.0 if attempt.entrant is never else 1.0
        written(attempt.folder, {at[attempt.entrant.name]: loss}, 0.1)
    table = standings(attempts, {"w": 1.0})
    assert [(row.entrant, row.rank, row.steps, row.reached) for row in table] == [
        ("fast", 1, 4, 3), ("slow", 2, 8, 3), ("never", 3, math.inf, 0),
    ]  # fmt: skip
    assert [study.candidate for study in table[0].studies][:2] == [("c=2",)] * 2
    assert record_of(table[2])["seconds"] is None
    shares = performance_profile(table)
    assert shares["fast"][0] == 1 and shares["never"] == [0] * len(PROFILE)
    assert shares["slow"][18] == 0 and shares["slow"][-1] == 1


def test_declared_entrants(tmp_path: Path) -> None:
    file = tmp_path / "entrants.toml"
    file.write_text('[a]\nset = ["x.y=1"]\ntune = { "p.q" = [1, 2], "r.s" = ["t"] }\n[b]\n')  # fmt: skip
    assert read_entrants(file) == [
        Entrant("a", ("x.y=1",), (("p.q=1", 'r.s="t"'), ("p.q=2", 'r.s="t"'))),
        Entrant("b"),
    ]
    for text, named in [
        ("", "no entrant"), ("a = 1", "no table"), ("[a]\nsets = []", "'sets'"), ("[a]\nset = [1]", "set is a list"),
        ("[a]\ntune = { x = [] }", "tune is a table"),
        ('["../a"]', "part of its folders' names"), ('[".."]', "part of its folders' names"),
    ]:  # fmt: skip
        file.write_text(text)
        with pytest.raises(UsageError, match=named):
            read_entrants(file)


@pytest.mark.parametrize(
    ("entrant", "words", "named"),
    [
        (
            'set = ["train.seed=3"]',
            [],
            r"few.toml: entrant \[a\]: train.seed cannot be set here, as --seeds",
        ),
        (
            'set = ["train={seed=3}"]',
            [],
            r"entrant \[a\]: the table train cannot be set",
        ),
        ("", ["validation={until=1}"], "^the table validation cannot be set"),
        ('tune = { "observe.every" = [5] }', [], "as every step is timed"),
        ("", ["validation.until=1"], "as --until gives the loss"),
        ('set = ["data.seq_len=64"]', [], "entrants of .*: a, b differ in .data."),
        ('set = ["validation.every=7"]', [], "differ in .validation."),
    ],
)
def test_what_makes_no_fair_comparison_is_refused(
    tmp_path: Path, entrant: str, words: list[str], named: str
) -> None:
    (tmp_path / "few.toml").write_text(f"[a]\n{entrant}\n[b]\n")
    with pytest.raises(UsageError, match=named):
        target_command(
            ["quickstart"], ["loss=2"], tmp_path / "few.toml", overrides=words, out=tmp_path / "out",
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_a_run_ends_at_the_loss_that_was_asked_for(tmp_path: Path) -> None:
    from weft.checkpoint.best import Best
    from weft.recipe.validation_section import Validation
    from weft.train.lowest_loss import LowestLoss

    lowest = LowestLoss(Validation(every=5, until=2.0), Best())
    lowest.take(5, 2.1)
    assert not lowest.why_enough(5)
    lowest.take(10, 2.0)
    assert "has reached 2" in lowest.why_enough(10)
    # rewards have losses below 0, and no target
    plain = LowestLoss(Validation(every=5), Best())
    plain.take(5, -0.5)
    assert not plain.why_enough(5)
    with pytest.raises(ValueError, match="until waits for validations"):
        Validation(every=0, until=2.0)
