"""Runs of islands of which one is lost and comes back, and what one process simulates of the same."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.cases import recipe
from tests.resilience.survivors import Ranks, ranks
from weft.checkpoint.store import committed_checkpoints, open_checkpoint
from weft.errors import WeftError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.layout.parts import TORCH_DTYPES, Part
from weft.models.transformer import Transformer
from weft.observe.run_metrics import Record, read_metrics
from weft.parallel.state import State
from weft.prove.equality import walk
from weft.prove.simulated import agree
from weft.recipe import Recipe, build_recipe
from weft.run.rank_processes import LEFT_OUT
from weft.train.setup import prepare

#: The steps of a run, and the one that islands go no further than before a lost one has been let in again.
STEPS, GATE = 36, 24


def job(corpus: str, layout: str, sync: dict[str, Any], **change: Any) -> Recipe:
    settings = {
        "train__steps": STEPS, "train__timeout": 60, "train__batch": 6, "train__threads": 1, "optimizer__warmup": 0,
        "optimizer__schedule": "constant", "checkpoint__every": 0,
    }  # fmt: skip
    values = recipe(corpus, **(settings | change)).model_dump(mode="json")
    return build_recipe(
        values
        | {
            "layout": Layout.parse(layout).model_dump(mode="json"),
            "sync": {"order": "numbered"} | sync,
        }
    )


def folder_of(run: Path, island: int) -> Path:
    return run / f"island-{island}" if island else run


def losses(run: Path, island: int) -> dict[int, float]:
    return {
        record["step"]: record["loss"]
        for record in read_metrics(folder_of(run, island))["train"]
    }


def members_of(records: list[Record], islands: int) -> Any:
    """Who took part in an exchange, as an island's records say."""

    def found(number: int) -> list[int]:
        since = [record["members"] for record in records if record["number"] <= number]
        return since[-1] if since else list(range(islands))

    return found


def simulated(
    asked: Recipe, run: Path, present: Collection[int]
) -> dict[int, dict[int, float]]:
    """The losses, by step, of the islands that are there at the end, if one process has them all, by who took part."""
    job, how, count = prepare(asked), asked.sync, asked.layout.island
    told = {island: read_metrics(folder_of(run, island)) for island in range(count)}
    came = {
        i: (record["step"], record["giver"])
        for i in present
        for record in told[i].get("came", [])
    }
    agreed = {i: members_of(told[i].get("agreed", []), count) for i in told}
    stayed = next(i for i in present if i not in came)
    gossips = how.partnership != "all"

    def members(number: int, island: int) -> Collection[int]:
        return agreed[island if gossips else stayed](number)

    alone = replace(Mesh.single(), islands=count)
    walks = {
        i: walk(job, replace(alone, island=i), asked.train.steps) for i in range(count)
    }
    states: dict[int, State] = {}
    traces: dict[int, Any] = {}
    past: dict[str, Any] = {}
    for step in range(1, asked.train.steps + 1):
        for i, one_walk in walks.items():
            states[i], traces[i] = next(one_walk)
        agree(states, step, how, past, members)
        for i, (since, giver) in came.items():
            if since == step:
                values = [
                    (
                        h.local.clone(),
                        {
                            n: h.slots[n].values.clone()
                            for n in ("anchor", "outer", "own")
                            if n in h.slots
                        },
                    )
                    for h in states[giver].learning
                ]

                def take(
                    model: Transformer, state: State, values: Any = values
                ) -> None:
                    for mine, (local, slots) in zip(
                        state.learning, values, strict=True
                    ):
                        mine.local.copy_(local)
                        for name, kept in slots.items():
                            mine.slots[name].values.copy_(kept)

                with torch.no_grad():
                    walks[i] = walk(
                        job,
                        replace(alone, island=i),
                        asked.train.steps,
                        take,
                        begun=step,
                    )
    for one_walk in walks.values():
        next(one_walk, None)
    first = {i: came[i][0] if i in came else 0 for i in present}
    return {
        i: {first[i] + k: loss for k, loss in enumerate(traces[i].losses, 1)}
        for i in present
    }


def shared_state(asked: Recipe, run: Path, island: int) -> dict[str, torch.Tensor]:
    """What all islands have alike, as in an island's last checkpoint."""
    checkpoint = open_checkpoint(
        committed_checkpoints(folder_of(run, island) / "checkpoints")[-1]
    )
    names = [f"optimizer.{slot}." for slot in asked.sync.method.shared]
    if not asked.sync.delay and not asked.sync.method.late:
        names.append("model.")
    about = {
        name: tensor
        for name, tensor in checkpoint.tensors.items()
        if name.startswith(tuple(names))
    }
    found = {
        name: torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
        for name, tensor in about.items()
    }
    checkpoint.load(
        {
            name: Part(x, tuple((0, n) for n in x.shape), about[name])
            for name, x in found.items()
        }
    )
    return found


def wait_for_record(
    run: Ranks, folder: Path, kind: str, what: Any = lambda record: True
) -> Record:
    found: list[Record] = []

    def there() -> bool:
        try:
            found[:] = [
                record for record in read_metrics(folder).get(kind, []) if what(record)
            ]
        except (OSError, ValueError, WeftError):
            return False
        return bool(found)

    run.wait_for(there)
    return found[-1]


def trial(
    kind: str, seed: int, corpus: str, folder: Path, layout: str, sync: dict[str, Any], victim: int | None = None,
    one_rank: bool = False, **change: Any,
) -> dict[str, Any]:  # fmt: skip
    """An island is lost by ``kind``: "kill", "freeze", or, and then comes back, "return" or "thaw"; what was wrong."""
    draw, asked = random.Random(f"{kind} {seed}"), job(corpus, layout, sync, **change)
    count, each = asked.layout.island, asked.layout.inside.world
    victim = draw.randrange(count) if victim is None else victim
    folder.mkdir(exist_ok=True)
    out, there = folder / f"{kind}-{seed}", [i for i in range(count) if i != victim]
    victims = list(range(victim * each, (victim + 1) * each))
    hit = [draw.choice(victims)] if one_rank else victims
    since = draw.randint(2, STEPS // 3)
    frozen = kind in ("freeze", "thaw")
    returns = kind in ("return", "thaw")
    with ranks(asked, out, (0.01,), GATE if returns else None) as run:
        wait_for_record(
            run, folder_of(out, there[0]), "train", lambda r: r["step"] >= since
        )
        time.sleep(draw.uniform(0, 0.3))
        begun = time.time()
        for rank in hit:
            run.signal(rank, signal.SIGSTOP if frozen else signal.SIGKILL)
        events = [
            wait_for_record(run, folder_of(out, i), "islands", lambda r: r["lost"])
            for i in there
        ]
        if kind == "thaw":
            time.sleep(draw.uniform(0, 0.5))
            for rank in hit:
                run.signal(rank, signal.SIGCONT)
        if returns:
            for rank in victims:
                run.processes[rank].join(60)
            codes = [run.processes[rank].exitcode for rank in victims]
            assert set(codes) <= {LEFT_OUT, -signal.SIGKILL}, codes
            run.start(each, folder=folder_of(out, victim))
            run.wait_for(
                lambda: all(
                    Path(f"{folder_of(out, victim)}+.{i}.in").exists()
                    for i in range(each)
                )
            )
            run.open()
        run.end(lost=victims)
        words = run.words()
        concluded = [
            *out.parent.glob(f"{out.name}*.concludes"),
            *out.glob("*.concludes"),
        ]
    row = {
        "kind": kind,
        "seed": seed,
        "seconds": [event["agreed"] - begun for event in events],
        "wrong": [],
    }
    if len(concluded) != 1:
        row["wrong"].append(
            f"the run was concluded by {[str(one) for one in concluded]}"
        )
    present = sorted({*there, victim}) if returns else there
    told = [read_metrics(folder_of(out, i)) for i in there]
    if asked.sync.partnership == "all":
        said = [
            [(r["number"], r["members"]) for r in one.get("agreed", [])] for one in told
        ]
        if any(one != said[0] for one in said):
            row["wrong"].append(f"islands do not agree on who took part: {said}")
    if victim in present:
        row["came"] = read_metrics(folder_of(out, victim)).get("came", [])
    # what a message leaves out is up to who is there
    lossy = asked.sync.compress not in ("none", "topk:1")
    wanted = {} if lossy else simulated(asked, out, present)
    for island in wanted:
        mine = losses(out, island)
        off = {
            s: (mine.get(s), w)
            for s, w in wanted[island].items()
            if abs(mine.get(s, 9e9) - w) > 1e-9 * abs(w)
        }
        if off:
            row["wrong"].append(
                f"island {island} is not what one process simulates: {list(off.items())[:3]}"
            )
    states = [shared_state(asked, out, island) for island in present]
    if asked.sync.method.shared and not all(
        states[0]
        and one.keys() == states[0].keys()
        and all(torch.equal(one[k], states[0][k]) for k in one)
        for one in states
    ):
        row["wrong"].append("islands have not ended with the same bits")
    if row["wrong"]:
        row["words"] = words
    return row
