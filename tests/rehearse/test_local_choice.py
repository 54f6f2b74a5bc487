"""Plans for a machine that weft probe has measured: rehearsed layouts, by the clock of the measured curves."""

import json
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.rehearse.test_machine_probe import calibration
from weft.layout.layout import Layout
from weft.planner.cost import Cost, Plan
from weft.planner.finalists import Final
from weft.recipe import Data, Memory, ModelShape, Recipe, Train, load_recipe
from weft.recipe.toml import write_toml
from weft.rehearse.clock import axis_of, predict_step
from weft.rehearse.curves import ProbedMachine
from weft.rehearse.local_choice import correct_by_measured, place_ranks, to_try
from weft.rehearse.rehearsed_step import (
    Rehearsal,
    every_rank,
    plain_batches,
    reference,
    rehearse,
)
from weft.rehearse.worker_links import WorkerLinks

MODEL = ModelShape(layers=2, embed=32, heads=4, kv_heads=2, ffn=64, vocab=128)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def recipe_of(layout: str, seq: int = 32) -> Recipe:
    return Recipe(
        model=MODEL,
        layout=Layout.parse(layout),
        data=Data(seq_len=seq),
        train=Train(batch=4),
    )


def seen_of(layout: str, seq: int) -> Any:
    recipe = recipe_of(layout, seq)
    return every_rank(recipe, MODEL, plain_batches(recipe, MODEL))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "layout", ["dp=2,tp=2", "pp=2,shard=2", "cp=2,tp=2", "pp=2,tp=2", "shard=2,cp=2"]
)
def test_one_rank_stands_for_those_that_do_the_same(layout: str) -> None:
    recipe = recipe_of(layout)
    batches = plain_batches(recipe, MODEL)
    for rank, moved in enumerate(every_rank(recipe, MODEL, batches)):
        own = rehearse(recipe, MODEL, batches, rank)
        talk = [
            [(e.kind, e.name, e.ranks, e.bytes) for e in s.events if e.kind != "work"]
            for s in (moved, own)
        ]
        assert talk[0] == talk[1], f"rank {rank} of {layout}"
        assert abs(moved.peak / own.peak - 1) < 0.02


def test_what_rests_in_files_takes_no_memory_but_buffers(tmp_path: Path) -> None:
    """Of six layers' moments as much is in memory as is in use and on its way."""
    model = MODEL.model_copy(update={"layers": 6, "vocab": 16})
    plain = recipe_of("dp=2").model_copy(update={"model": model})
    filed = plain.model_copy(
        update={"memory": Memory(moments="file", folder=str(tmp_path))}
    )
    near, far = (rehearse(r, model, plain_batches(r, model), 0) for r in (plain, filed))
    moments = 2 / 3 * near.state
    assert 0.2 * moments < near.state - far.state < 0.8 * moments
    assert near.peak - far.peak == near.state - far.state


def test_groups_belong_to_axes() -> None:
    layout = Layout(pp=2, dp=2, tp=2)
    assert [axis_of(layout, ranks) for ranks in ([0, 1], [0, 2], [0, 4], range(8))] == [
        "tp",
        "dp",
        "pp",
        "other",
    ]
    assert axis_of(Layout(shard=2, cp=2), [0, 1, 2, 3]) == "dp"


def test_a_slow_link_costs_what_crosses_it_and_the_order_avoids_it() -> None:
    """Workers 0, 2 and 1, 3 stand together: in rank order tensor parallelism would cross."""
    near = np.arange(4)[:, None] % 2 == np.arange(4) % 2
    links = WorkerLinks(np.where(near, 1e-5, 1e-3), np.where(near, 1e9, 1e6))
    setting = calibration()["settings"]["2"] | {"ranks": 4, "threads": 1}
    table = {"latency": links.latency.tolist(), "bandwidth": links.bandwidth.tolist()}
    local = ProbedMachine.of({"cores": 4, "settings": {"4": setting}, "links": table})
    layout, seen = Layout(dp=2, tp=2), seen_of("dp=2,tp=2", 512)
    order, workers = place_ranks(layout, seen, local.uneven(4))
    assert order == "tp dp" and workers == [0, 2, 1, 3]
    naive, planned = (
        predict_step(local, seen, layout),
        predict_step(local, seen, layout, workers),
    )
    assert naive.seconds > 1.5 * planned.seconds
    assert naive.parts["tp"] > 2 * planned.parts["tp"]
    assert place_ranks(layout, seen, None) == ("", [])


def final_of(seconds: float, world: int) -> Final:
    cost = Cost(*[seconds, *[0.0] * (len(fields(Cost)) - 1)])
    return Final(None, None, Plan(dp=world), cost, (), seconds)  # type: ignore[arg-type]


def test_what_ran_moves_those_of_as_many_ranks() -> None:
    one, two, other, four = (
        final_of(1.0, 1),
        final_of(1.1, 2),
        final_of(1.2, 2),
        final_of(1.4, 4),
    )
    finals = [one, two, other, four]
    assert to_try(finals, 2) == [one, two] and to_try(finals, 4) == [
        one,
        two,
        four,
        other,
    ]
    moved = correct_by_measured(finals, [(one, 2.0), (two, 1.0)])
    assert (
        [f.plan.dp for f in moved] == [2, 2, 4, 1]
        and moved[0].seconds == 1.0
        and moved[-1].seconds == 2.0
    )
    assert moved[1].seconds == pytest.approx(1.2 / 1.1)  # as the other one of two ranks
    # as all, in the middle
    assert moved[2].seconds == pytest.approx(1.4 * (2.0 / 1.1) ** 0.5)
    assert correct_by_measured(finals, [])[0].seconds == 1.0


@pytest.mark.soak
def test_plan_of_a_probed_machine(
    tmp_path: Path,
    command: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All numbers of ranks are compared, the recipe that comes out trains, and demands are kept."""
    # of a step that is quicker than that of probes, as none has measured the file below
    paces = list[Rehearsal]()

    def pace(layout: str, size: str) -> Rehearsal:
        paces.append(reference(layout, "tiny"))
        return paces[-1]

    monkeypatch.setattr("weft.rehearse.local_choice.reference", pace)
    settings = {}
    for n in (1, 2):
        setting = calibration()["settings"]["2"] | {"ranks": n}
        settings[str(n)] = setting
    probe = tmp_path / "probe.toml"
    known = {"cores": 2, "settings": settings}
    probe.write_text(
        write_toml({"device": "CPU", "count": 2, "bf16": 0.1, "calibration": known})
    )
    recipe = tmp_path / "small.toml"
    recipe.write_text(
        "[model]\nlayers = 2\nembed = 32\nheads = 4\nkv_heads = 2\nvocab = 512\n[data]\n"
        'sources = [{ kind = "stdlib" }]\ntokenizer = "bytes"\nseq_len = 64\n[train]\nsteps = 2\nbatch = 4\n'
    )
    out = tmp_path / "planned.toml"
    code, told, _ = command(
        "plan",
        recipe,
        "--cluster",
        probe,
        "--json",
        "--top",
        30,
        "--recipe",
        out,
        "--html",
        tmp_path / "p.html",
    )
    assert code == 0
    found = json.loads(told)
    assert len(found["layouts"]) < len(paces) < 2 * len(found["layouts"]), (
        "what follows one goes before the next"
    )
    worlds = {layout["layout"]["tp"] * layout["layout"]["dp"] * layout["layout"]["shard"] * layout["layout"]["pp"]
              for layout in found["layouts"]}  # fmt: skip
    assert worlds == {1, 2} and "rehearsed" in found["calibration"]
    assert [x["seconds"] for x in found["layouts"]] == sorted(
        x["seconds"] for x in found["layouts"]
    )
    assert load_recipe(out, [], None).layout.world in (
        1,
        2,
    ) and "layout" in tomllib.loads(out.read_text())
    page = (tmp_path / "p.html").read_text()
    assert "were rehearsed" in page and "schedule simulator" not in page
    _, told, _ = command(
        "plan", recipe, "--cluster", probe, "--json", "--gpus", 2, "--pin", "tp=2"
    )
    assert {x["layout"]["tp"] for x in json.loads(told)["layouts"]} == {2}
    _, told, _ = command(
        "plan", recipe, "--cluster", probe, "--json", "--top", 30, "--probe", 2
    )
    found = json.loads(told)
    tried = found["probes"]
    assert 2 <= len(tried) <= 4 and all(
        t["seconds"] > 0 and t["memory"] > 10**8 for t in tried
    )
    # the first has run
    assert found["layouts"][0]["seconds"] == pytest.approx(
        min(t["seconds"] for t in tried)
    )
    # Without a probe the same trials stand beside presets.
    code, told, _ = command(
        "plan", recipe, "--cluster", "cpu", "--gpus", 1, "--json", "--probe", 1
    )
    found = json.loads(told)
    assert (
        code == 0
        and found["calibration"].startswith("no published run on CPU")
        and len(found["probes"]) >= 1
    )
    assert "run here" in found["calibration"]
    code, _, why = command(
        "plan", "llama3-8b", "--cluster", probe, "--batch", 4, "--seq", 64
    )
    assert code == 2 and "too many to rehearse" in why
