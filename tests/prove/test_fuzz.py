"""Random layouts and features against one device, and that a campaign would notice."""

from __future__ import annotations

import json
import random
import shlex
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.conftest import Command
from weft.prove import fuzz
from weft.prove.fuzz import Case, CaseResult, Fuzzer, command_of, command_options
from weft.prove.pool import WorkerDied
from weft.recipe import load_recipe
from weft.recipe.conflicts import every_rule
from weft.registry import names

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.toml"


@pytest.mark.slow
def test_random_cases_equal_one_device(pool: Any) -> None:
    fuzzer = Fuzzer(QUICKSTART, pool)
    found = list(fuzzer.campaign(6, seed=12, ranks=4, minutes=None))
    bad = [(c, v) for c, v in found if v.kind not in ("equal", "refused")]
    assert not bad, [
        command_of(QUICKSTART, c, fuzzer.dtype, fuzzer.steps) for c, _ in bad
    ]
    assert {v.why for _, v in found if v.kind == "refused"} <= {
        *(rule.name for rule in every_rule()),
        *(f"{a} with {b}" for a, b in permutations(names("phases"), 2)),
    }
    assert sum(v.kind == "equal" for _, v in found) >= 3


@pytest.mark.soak
def test_a_campaign(pool: Any) -> None:
    for path in sorted(QUICKSTART.parent.glob("*.toml")):
        # a campaign draws small models, and refuses these
        recipe = load_recipe(path)
        if recipe.model.origin or recipe.trains_no_language_model:
            continue
        found = list(Fuzzer(path, pool).campaign(100, seed=1, ranks=8, minutes=None))
        assert [(c, v) for c, v in found if v.kind not in ("equal", "refused")] == [], (
            path
        )


@pytest.mark.parametrize("layout", [{}, {"layout.shard": 2, "train.batch": 2}])
def test_pairs_of_answers_are_drawn_for_a_recipe_that_learns_from_them(
    pool: Any, layout: Case
) -> None:
    path = QUICKSTART.with_name("preference.toml")
    drawn = [
        fuzz.draw_case(load_recipe(path), random.Random(seed), 8) for seed in range(50)
    ]
    assert all(
        case.items()
        >= {k: v for k, v in fuzz.PAIRS.items() if k != "data.seq_len"}.items()
        for case in drawn
    )
    assert min(case["data.seq_len"] for case in drawn) == 40
    fuzz.write_corpus()
    found = Fuzzer(path, pool).verdict_of(fuzz.PAIRS | layout)
    assert found.kind == "equal", found


def test_images_are_drawn_for_a_recipe_that_learns_from_them(pool: Any) -> None:
    path = QUICKSTART.with_name("digits.toml")
    recipe = load_recipe(path)
    drawn = [fuzz.draw_case(recipe, random.Random(seed), 8) for seed in range(50)]
    assert all(case.items() >= fuzz.PICTURES.items() for case in drawn)
    assert not any({"data.seq_len", "model.mixer"} & case.keys() for case in drawn)
    fuzz.write_corpus()
    fuzz.write_pictures()
    lora: Case = {"adapter.kind": "lora", "adapter.targets": ["wq"]}
    result = Fuzzer(path, pool).verdict_of(fuzz.PICTURES | lora | {"layout.tp": 2})
    assert result.kind == "equal", result


class Judge(Fuzzer):
    """Says wrong of whatever recomputes on two tensor-parallel ranks."""

    def verdict_of(self, case: Case) -> CaseResult:
        bad = case.get("layout.tp") == 2 and "train.recompute" in case
        return CaseResult("wrong" if bad else "equal", "")


def test_a_failure_is_made_small() -> None:
    case = {
        "layout.dp": 2, "layout.tp": 2, "layout.order": "tp dp", "layout.zero": 1, "train.recompute": "full",
        "model.layers": 6, "data.seq_len": 7,
    }  # fmt: skip
    small, verdict = Judge(QUICKSTART, mock.Mock()).shrunk(case, "wrong")
    assert verdict.kind == "wrong"
    assert {key for key in small if key != "layout.order"} == {
        "layout.tp",
        "train.recompute",
    }


def test_what_is_not_in_the_table_is_no_refusal() -> None:
    def fails(error: Exception) -> str:
        pool = mock.Mock()
        pool.run.side_effect = error
        return Fuzzer(QUICKSTART, pool).verdict_of({}).kind

    fuzz.write_corpus()
    assert fails(TimeoutError("rank 1 did not answer")) == "hung"
    assert (
        fails(fuzz.UsageError("no"))
        == fails(ValueError("what"))
        == fails(WorkerDied("rank 0"))
        == "crashed"
    )
    assert fails(fuzz.Conflict("no", "experts")) == "refused"


def test_no_case_leaves_all_layers_dense() -> None:
    recipe = load_recipe(QUICKSTART.with_name("experts.toml"))
    cases = [fuzz.draw_case(recipe, random.Random(seed), 8) for seed in range(300)]
    dense = [
        one for one in cases if one.keys() & {"model.first_dense", "model.moe_every"}
    ]
    assert {one.get("model.layers", 4) for one in dense} == {3, 4, 6} and len(
        dense
    ) > 50


def test_the_command_repeats_the_case(pool: Any) -> None:
    case = {
        "layout.shard": 2,
        "layout.cp": 2,
        "layout.order": "cp shard",
        "model.qkv_bias": True,
    }
    layout, sets = command_options(case)
    given = shlex.split(command_of(QUICKSTART, case, "float64", 2))
    assert given[given.index("--layout") + 1] == layout
    assert [given[i + 1] for i, word in enumerate(given) if word == "--set"] == sets
    fuzz.write_corpus()
    assert Fuzzer(QUICKSTART, pool).verdict_of(case).kind == "equal"


def test_what_the_command_line_sets_holds_in_every_case() -> None:
    pool = mock.Mock()
    pool.run.return_value = [{"ok": True}]
    fixed = ["memory.tiles=2", "memory.weights='host'", "train.batch=4"]
    fuzzer = Fuzzer(QUICKSTART, pool, fixed=fixed)
    for case, _ in fuzzer.campaign(5, seed=1, ranks=2, minutes=None):
        command = shlex.split(command_of(QUICKSTART, case, "float64", 2, fixed))
        for text in fixed:
            name = text.partition("=")[0]
            assert [w for w in command if w.partition("=")[0] == name] == [text]
    recipes = [call.args[2] for call in pool.run.call_args_list]
    assert len(recipes) == 5  # what cannot be with tiles is not drawn
    assert {(r.memory.tiles, r.memory.weights, r.train.batch) for r in recipes} == {
        (2, "host", 4)
    }
    assert {r.layout.world for r in recipes} != {1}


def test_what_a_draw_leaves_without_use_is_not_said(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The command has said it of the recipe, and cases draw techniques that have no use for their settings."""
    fixed = ["optimizer.refresh=7"]
    load_recipe(QUICKSTART, fixed)
    assert "refresh" in capfd.readouterr().err
    for _ in Judge(QUICKSTART, mock.Mock(), fixed=fixed).campaign(2, 5, 2, None):
        pass
    assert not capfd.readouterr().err


def test_a_campaign_goes_on_where_another_ended() -> None:
    def cases(count: int, first: int) -> list[Case]:
        return [
            case
            for case, _ in Judge(QUICKSTART, mock.Mock()).campaign(
                count, 5, 8, None, first
            )
        ]

    assert cases(20, 0) == cases(12, 0) + cases(8, 12)


def test_json_of_a_campaign(command: Command) -> None:
    code, out, _ = command("verify", QUICKSTART, "--random", 2, "--seed", 3, "--json")
    said = json.loads(out)
    assert code == 0 and said["tried"] == 2 == said["equal"] + said["refused"]
    assert (said["wrong"], said["crashed"], said["hung"], said["cases"]) == (
        0,
        0,
        0,
        [],
    )
