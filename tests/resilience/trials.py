"""One fault, or two, against one small run, drawn by a seed; what became of it, and what is wrong with that."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence
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
#: Replicas that are whole, whose groups and models are edited in place when one is lost or added; in the last the state
#: is elsewhere, and all is built anew.
WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("dp=4", {"model__dropout": 0.2}),
    ("dp=3,tp=2", {"model__dropout": 0.2}),
    ("dp=4", {"model__dropout": 0.1, "adapter__rank": 3, "adapter__dropout": 0.2}),
    ("dp=2,cp=2", {"adapter__rank": 3, "adapter__dropout": 0.2}),
    ("dp=3", {"memory__weights": "host", "model__dropout": 0.2}),
]
#: What may happen to whole replicas besides: one comes back once the others go on, a second one is lost while they edit
#: what they have, or at once when they have, and the one that comes back is lost.
OF_REPLICAS = ("return", "meanwhile", "after", "newcomer")
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
    out = folder / ("alone-" + "-".join(f"{name}-{more[name]}" for name in more))
    if not out.exists():
        train_job(
            prepare(job(corpus, "", checkpoint__every=0, **more)), Mesh.single(), out
        )
    return losses(out)


def trial(
    kind: str,
    seed: int,
    corpus: str,
    folder: Path,
    layouts: Sequence[tuple[str, dict[str, Any]]] = LAYOUTS,
) -> dict[str, Any]:
    """Let ``kind`` happen at a random instant of a run: the times that it took, and ``wrong``, if anything is."""
    draw = random.Random(f"{kind} {seed}")
    layout, more = draw.choice(layouts)
    given = Layout.parse(layout)
    alone, out = reference(corpus, folder, more), folder / f"{kind}-{seed}"
    victims = _victims(kind, given, draw)
    row: dict[str, Any] = {
        "kind": kind,
        "seed": seed,
        "layout": layout,
        "with": [*more],
        "victims": victims,
    }
    wished = job(corpus, layout, checkpoint__every=draw.choice([0, 3]), **more)
    with ranks(wished, out, (0.01 if kind in OF_REPLICAS else 0.0,)) as run:
        run.step(draw.randint(1, 20 if kind in OF_REPLICAS else 40))
        time.sleep(draw.uniform(0, 0.1))
        hit = time.time()
        try:
            _hit(kind, run, victims, given.world, draw)
            run.end(lost=victims)
            if kind == "thaw":  # it finds that it was left out, and comes back or ends
                run.processes[victims[0]].join(30)
        except AssertionError as error:
            return row | {"wrong": str(error)}
        row |= _times(run, hit)
        thawed = run.processes[victims[0]].exitcode
        row["edited"] = sum(bool(view.get("edited")) for view in run.records("view"))
    wrong = _what_is_wrong(out, alone)
    if kind == "thaw" and thawed is None:
        wrong.append("the thawed rank has not ended")
    return row | {"wrong": "; ".join(wrong)}


def _victims(kind: str, layout: Layout, draw: random.Random) -> list[int]:
    """The ranks that are lost, in this order; of whole replicas, for the kinds that are about these."""
    world, size = layout.world, layout.world // layout.dp
    if kind in OF_REPLICAS:
        replicas = draw.sample(range(layout.dp), 2 if layout.dp > 2 else 1)
        count = 2 if kind in ("meanwhile", "after") else 1
        return [
            replica * size + place
            for replica in replicas[:count]
            for place in range(size)
        ]
    first = 0 if kind == "leader" else draw.randrange(world)
    victims = [first]
    if kind in ("two", "neighbours") or (kind == "kill" and draw.random() < 0.3):
        beside = (first + 1) % world
        victims.append(
            beside
            if kind == "neighbours"
            else draw.choice([r for r in range(world) if r != first])
        )
    return victims


def _hit(
    kind: str, run: Ranks, victims: list[int], world: int, draw: random.Random
) -> None:
    """Do it, to the ``victims``, and wait until it is done."""
    if kind in OF_REPLICAS:
        return _hit_replicas(kind, run, victims, world, draw)
    apart = draw.uniform(0, 0.8) if kind == "kill" else 0.0
    for victim in victims:
        run.signal(
            victim, signal.SIGSTOP if kind in ("freeze", "thaw") else signal.SIGKILL
        )
        time.sleep(apart if victim == victims[0] else 0)
    if kind == "thaw":
        time.sleep(draw.uniform(0.3, 6))
        run.signal(victims[0], signal.SIGCONT)


def _hit_replicas(
    kind: str, run: Ranks, victims: list[int], world: int, draw: random.Random
) -> None:
    """Lose whole replicas one after another, or have one come back."""
    of_first = (
        victims[: max(1, len(victims) // 2)]
        if kind in ("meanwhile", "after")
        else victims
    )
    number = signal.SIGSTOP if draw.random() < 0.3 else signal.SIGKILL

    def views_of(ranks: int) -> int:
        return sum(view["ranks"] == ranks for view in run.records("view"))

    for victim in of_first:
        run.signal(victim, number)
    left = world - len(of_first)
    if kind == "meanwhile":
        time.sleep(draw.uniform(0, 1.5))
    else:
        run.wait_for(lambda: views_of(left) > 0)
    for victim in victims[len(of_first) :]:
        run.signal(victim, signal.SIGKILL)
    if kind in ("return", "newcomer"):
        run.start(len(of_first))
        if kind == "newcomer":  # it is lost as it comes, or when it is there
            time.sleep(draw.uniform(0, 4))
            came = range(world, world + len(of_first))
            victims += came
            for rank in came:
                run.signal(rank, signal.SIGKILL)
        else:
            run.wait_for(lambda: views_of(world) > 1)


def _what_is_wrong(out: Path, alone: dict[int, float]) -> list[str]:
    here = losses(out)
    most = max(map(abs, alone.values()))
    if here.keys() != alone.keys() or recorded_once(out) != sorted(alone):
        return ["steps are missing, or were recorded twice"]
    off = max(abs(here[step] - alone[step]) for step in alone) / most
    return [f"losses differ by {off:.1e}"] if off > TOLERANCE else []


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
