"""One fault, or two, against one small run, drawn by a seed; what became of it, and what is wrong with that."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

from campaign import STAGES

from tests.cases import recipe
from tests.resilience.survivors import Ranks, losses, ranks, recorded_once
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.recipe import Recipe
from weft.train.setup import prepare
from weft.train.training import train_job

STEPS = 60
#: Losses beside those of one device, over the largest of them.
TOLERANCE = 1e-10
#: Layouts of the trials, with what their recipe needs besides.
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("dp=4", {}), ("shard=4", {}), ("shard=2,tp=2", {}), ("dp=2,pp=2", {}), ("shard=2,cp=2", {}), ("tp=2,pp=2", {}),
    ("shard=4,ep=2", {"model__experts": 4, "model__experts_per_token": 2, "model__expert_ffn": 16}),
    ("dp=2,shard=2,tp=2", {}), ("dp=2,shard=2,pp=2", {}), ("shard=2,cp=2,tp=2", {}),
]  # fmt: skip
#: What may happen: to one rank, or, within 0.8 s and so in each other's recovery, to a second one as well.
KINDS = ("kill", "freeze", "thaw", "leader", "two", "neighbours")


def job(corpus: str, layout: str, **change: Any) -> Recipe:
    settings = {
        "train__steps": STEPS,
        "train__timeout": 60,
        "validation__every": 0,
    } | change
    return recipe(corpus, **settings).model_copy(
        update={"layout": Layout.parse(layout)}
    )


def reference(corpus: str, folder: Path, more: dict[str, Any]) -> dict[int, float]:
    """The losses of one device, which are made once."""
    out = folder / ("alone-" + "-".join(more))
    if not out.exists():
        train_job(
            prepare(job(corpus, "", checkpoint__every=0, **more)), Mesh.single(), out
        )
    return losses(out)


def trial(kind: str, seed: int, corpus: str, folder: Path) -> dict[str, Any]:
    """Let ``kind`` happen at a random instant of a run: the times that it took, and ``wrong``, if anything is."""
    draw = random.Random(f"{kind} {seed}")
    layout, more = draw.choice(LAYOUTS)
    world = Layout.parse(layout).world
    alone, out = reference(corpus, folder, more), folder / f"{kind}-{seed}"
    first = 0 if kind == "leader" else draw.randrange(world)
    victims = [first]
    if kind in ("two", "neighbours") or (kind == "kill" and draw.random() < 0.3):
        beside = (first + 1) % world
        victims.append(
            beside
            if kind == "neighbours"
            else draw.choice([r for r in range(world) if r != first])
        )
    apart = draw.uniform(0, 0.8) if kind == "kill" else 0.0
    row: dict[str, Any] = {
        "kind": kind,
        "seed": seed,
        "layout": layout,
        "victims": victims,
    }
    with ranks(
        job(corpus, layout, checkpoint__every=draw.choice([0, 3]), **more), out
    ) as run:
        run.step(draw.randint(1, 40))
        time.sleep(draw.uniform(0, 0.1))
        hit = time.time()
        for victim in victims:
            run.signal(
                victim, signal.SIGSTOP if kind in ("freeze", "thaw") else signal.SIGKILL
            )
            time.sleep(apart if victim == first else 0)
        if kind == "thaw":
            time.sleep(draw.uniform(0.3, 6))
            run.signal(first, signal.SIGCONT)
        try:
            run.end(lost=victims)
            if kind == "thaw":  # it finds that it was left out, and comes back or ends
                run.processes[first].join(30)
        except AssertionError as error:
            return row | {"wrong": str(error)}
        row |= _times(run, hit)
        thawed = run.processes[first].exitcode
    here = losses(out)
    most = max(map(abs, alone.values()))
    wrong = []
    if here.keys() != alone.keys() or recorded_once(out) != sorted(alone):
        wrong.append("steps are missing, or were recorded twice")
    elif (
        off := max(abs(here[step] - alone[step]) for step in alone) / most
    ) > TOLERANCE:
        wrong.append(f"losses differ by {off:.1e}")
    if kind == "thaw" and thawed is None:
        wrong.append("the thawed rank has not ended")
    return row | {"wrong": "; ".join(wrong)}


def _times(run: Ranks, hit: float) -> dict[str, Any]:
    """How long what took from the fault at ``hit`` to the next step, of the first view that came after it."""
    views = [v for v in run.records("view") if v["epoch"] > 1 and v["time"] > hit]
    if not views:
        return {"views": 0}
    view = views[0]
    found = {name: round(view.get(name, 0.0), 3) for name in STAGES}
    after = [r for r in run.records() if r["time"] > views[-1]["time"]]
    before = max((r["step"] for r in run.records() if r["time"] <= hit), default=0)
    found["detect_s"] = round(max(0.0, view["time"] - sum(found.values()) - hit), 3)
    if after:
        found |= {"recompute_s": round(after[0]["time"] - views[-1]["time"], 3)}
        found |= {"stall_s": round(after[0]["time"] - hit, 3)}
    return {"views": len(views), "again": max(0, before - view["step"]), **found}
