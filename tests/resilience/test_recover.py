"""The state comes back from memory after any rank's loss, to the bit, under any other layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.cases import recipe, start, write_corpus
from tests.resilience.rejoin import Groups, fill, said, wrong
from weft.checkpoint.boxes import volume
from weft.checkpoint.run_state import Progress
from weft.layout.layout import Layout
from weft.layout.mesh import from_all
from weft.net.endpoint import process_endpoint
from weft.resilience.recover import newest_recovery, restore
from weft.resilience.snapshots import Snapshots

#: Layout before, who is lost, and the layout of the survivors, in their order, and newcomers after them.
CASES: list[tuple[str, tuple[int, ...], str]] = [
    ("dp=4", (1,), "dp=3"),
    ("dp=4", (1, 2), "shard=2"),
    ("shard=4", (2,), "shard=3"),
    ("shard=4", (0,), "shard=4"),
    ("dp=2,shard=2", (3,), "shard=3"),
    ("dp=2,tp=2", (0,), "dp=3"),
    ("tp=4", (1,), "tp=3"),
    ("tp=2,shard=2", (0, 2), "dp=2"),
    ("cp=2,tp=2", (2,), "cp=3"),
    ("cp=4", (1, 3), "tp=2"),
    ("pp=4", (0,), "pp=3"),
    ("pp=2,dp=2", (2,), "pp=3"),
    ("pp=2,tp=2", (1, 3), "shard=2"),
    ("pp=4", (3,), "pp=2,shard=2"),
    ("shard=2", (1,), "dp=1"),
    ("dp=1", (), "tp=2,cp=2"),
    ("tp=2", (), "shard=4"),
]
MIXTURES: list[tuple[str, tuple[int, ...], str]] = [
    ("shard=4,ep=4", (1,), "shard=3,ep=3"),
    ("dp=4,ep=2", (0,), "shard=3"),
    ("dp=2,shard=2,ep=4", (2,), "tp=3"),
    ("pp=2,shard=2,ep=2", (3,), "pp=3"),
]
MIXTURE = {
    "model__experts": 6,
    "model__expert_ffn": 9,
    "model__router": "sigmoid",
    "model__shared_experts": 1,
}
#: Optimizers and models that keep other things than plain AdamW does.
KINDS: list[dict[str, Any]] = [
    {"optimizer__kind": "muon", "optimizer__ema": 0.9},
    {"optimizer__state": "8bit", "optimizer__block": 16, "train__dtype": "float32"},
    {"adapter": {"kind": "lora", "rank": 2}},
    {"train__freeze": ["embedding.*", "blocks.1.*"], "train__dtype": "bfloat16"},
]


def tree(corpus: str, layout: str, **change: Any) -> dict[str, Any]:
    adapter = {"adapter": change.pop("adapter")} if "adapter" in change else {}
    values = recipe(corpus, model__layers=4, **change).model_dump(mode="json") | adapter
    return values | {"layout": Layout.parse(layout).model_dump()}


def go_through(
    cases: list[tuple[dict[str, Any], tuple[int, ...], dict[str, Any]]],
) -> list[dict[str, Any] | None]:
    """Every case on the ranks of the call: what each did in it, None if it was lost.

    All copy the state after steps 1 and 2 and have changed it since when the lost ones go. Raises if one bit of what
    comes back is another than it was after step 2.
    """
    groups, found = Groups(), list[dict[str, Any] | None]()
    for before, lost, after in cases:
        olds, news = (Layout(**one["layout"]).world for one in (before, after))
        kept, fixed, unique = list[Snapshots](), frozenset[str](), dict[Any, int]()
        if groups.meet(list(range(olds))):
            state = start(before).state
            fixed = frozenset(
                f"model.{h.name}"
                for h in state.held
                if not h.learns and not h.logical.everywhere
            )
            fixed = fixed.union(*from_all(fixed))
            kept.append(
                Snapshots(
                    state,
                    ["here"] * olds,
                    process_endpoint("127.0.0.1"),
                    "token",
                    epoch=3,
                )
            )
            for step in (1, 2):
                fill(state.tensors(), step, fixed)
                kept[0].begin(Progress(step=step, position=step * 5, updates=step))
                kept[0].complete()
            fill(state.tensors(), 3, fixed)
            everyones = from_all(
                {
                    (n, p.box): volume(p.box) * p.tensor.itemsize
                    for n, p in state.tensors().items()
                }
            )
            left = {
                key
                for rank, theirs in enumerate(everyones)
                if rank not in lost
                for key in theirs
            }
            unique = {
                key: size
                for rank in lost
                for key, size in everyones[rank].items()
                if key not in left
            }
        facts = json.loads(json.dumps(said(kept)))
        survivors = [rank for rank in range(olds) if rank not in lost]
        newcomers = list(range(olds, olds + news - len(survivors)))
        if not groups.meet(survivors + newcomers):
            found.append(None)
            continue
        recovery, rank = newest_recovery(from_all(facts)), dist.get_rank()
        assert (
            recovery is not None
            and recovery.progress == Progress(2, 10, 0, 2)
            and not recovery.differing
        )
        state = start(after).state
        sent = restore(recovery, kept, state)
        names = frozenset(name for names in from_all(fixed) for name in names)
        assert not wrong(state.tensors(), 2, names), (
            before["layout"],
            lost,
            after["layout"],
        )
        assert state.updates == 2 or not state.learning
        came = sum(
            volume(part.box) * part.tensor.itemsize
            for owner, number in recovery.gives[rank]
            if kept and owner != kept[0].rank
            for _, part in kept[0].parts(2, owner, number)
        )
        found.append(
            {
                "sent": sent,
                "came": came,
                "lost": sum(unique.values()),
                "text": str(recovery),
            }
        )
    return found


def check(
    pool: Any, corpus: str, cases: list[tuple[str, tuple[int, ...], str]], **change: Any
) -> None:
    trees = [
        (tree(corpus, old, **change), lost, tree(corpus, new, **change))
        for old, lost, new in cases
    ]
    ranks = pool.run(5, go_through, trees, timeout=300)
    for case, of_ranks in zip(cases, zip(*ranks, strict=True), strict=True):
        done = [one for one in of_ranks if one is not None]
        # What the lost ranks alone had came out of others' memory, each byte once, and nothing else did.
        assert sum(one["came"] for one in done) == max(one["lost"] for one in done), (
            case
        )
        assert len({one["text"] for one in done}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [CASES[1::2], pytest.param(CASES, marks=pytest.mark.soak)],
    ids=["some", "all"],
)
def test_every_pair_of_layouts(
    pool: Any, tmp_path: Path, cases: list[tuple[str, tuple[int, ...], str]]
) -> None:
    check(pool, write_corpus(tmp_path), cases)


def leave(
    before: dict[str, Any], leaving: tuple[int, ...], after: dict[str, Any]
) -> int:
    """Ranks that go on purpose, neighbours too, hand what they have to those that stay; the bytes that this one got."""
    groups, state = Groups(), start(before).state
    world = Layout(**before["layout"]).world
    usual = Snapshots(
        state, ["here"] * world, process_endpoint("127.0.0.1"), "token", epoch=1
    )
    fill(state.tensors(), 1)
    usual.begin(Progress(step=1))
    usual.complete()
    fill(state.tensors(), 2)
    last = Snapshots(
        state,
        ["here"] * world,
        process_endpoint("127.0.0.1"),
        "token",
        epoch=2,
        leaving=leaving,
    )
    last.begin(Progress(step=2))
    last.complete()
    from_all(None)
    got = last.nbytes - sum(copy.memory.nbytes for copy in last._own)
    facts = said([usual, last])
    if groups.meet([rank for rank in range(world) if rank not in leaving]):
        recovery = newest_recovery(from_all(facts))
        assert recovery is not None and (recovery.epoch, recovery.progress.step) == (
            2,
            2,
        )
        state = start(after).state
        restore(recovery, [usual, last], state)
        assert not wrong(state.tensors(), 2)
    return got


def test_ranks_that_leave_on_purpose(pool: Any, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    for before, leaving, after in (
        ("shard=4", (2, 3), "tp=2"),
        ("pp=2,tp=2", (0, 1, 2), "dp=1"),
    ):
        got = pool.run(4, leave, tree(corpus, before), leaving, tree(corpus, after))
        assert all(
            (got[rank] > 0) == (rank == (3 if 0 in leaving else 0)) for rank in range(4)
        ), got


@pytest.mark.slow
def test_experts(pool: Any, tmp_path: Path) -> None:
    check(pool, write_corpus(tmp_path), MIXTURES, **MIXTURE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: next(iter(kind)))
def test_whatever_is_kept_with_a_parameter(
    pool: Any, tmp_path: Path, kind: dict[str, Any]
) -> None:
    check(
        pool,
        write_corpus(tmp_path),
        [("shard=2,tp=2", (1,), "shard=3"), ("pp=2,dp=2", (0,), "dp=3")],
        **kind,
    )
