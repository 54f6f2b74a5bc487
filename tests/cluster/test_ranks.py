"""Engines over several ranks in a cluster: their router sees one engine, and answers move in and out of it."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
import torch.distributed as dist

from tests.cluster.inprocess import Cluster, asked, until, written_by
from tests.cluster.test_moves import move_one
from tests.generate.test_leader import model_under
from weft.generate.backend import AnswerRequest, TokenEvent
from weft.generate.engine import Engine
from weft.generate.leader import follow_leader
from weft.generate.sampling import GREEDY, Sampling
from weft.layout.layout import Layout

SIZE = 12


def requests() -> list[AnswerRequest]:
    draw = Random(3)
    return [
        asked([draw.randrange(31) for _ in range(5 + 9 * i)], 40, Sampling(1.0, seed=i) if i % 2 else GREEDY)
        for i in range(4)
    ]  # fmt: skip


def served(layout: str, mixer: str) -> Any:
    """On every rank of one engine: on the first also its router, and an engine of one rank beside it."""
    model = model_under(Layout.parse(layout), mixer)
    if dist.get_rank():
        follow_leader(model)
        return None
    draw = Random(5)
    with Cluster(0, router={"balances": False}) as cluster:
        ranks = cluster.add("ranks", model=model, size=SIZE, ranks=True)
        alone = cluster.add("alone", model=model_under(Layout(), mixer), size=SIZE, slow=0.002)  # fmt: skip
        cluster.engines += [ranks, alone]
        until(lambda: len(cluster.router.links) == 2)

        def seen(event: TokenEvent) -> None:
            if event.token is not None and draw.random() < 0.2:
                move_one(cluster, draw)

        tokens = asyncio.run(written_by(cluster.router, requests(), seen))
        until(ranks.empty)
        written = [engine.member.thread.load().tokens for engine in cluster.engines]
        counts = cluster.router.counts()
    ranks.engine.close()
    return tokens, written, counts["answers_moved"], counts["answers_continued"]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mixer", "layout"),
    [("softmax", "tp=2"), ("softmax", "pp=2"), ("experts", "cp=2,ep=2"), ("softmax", "tp=2,pp=2")],
)  # fmt: skip
def test_answers_move_between_an_engine_of_ranks_and_another(
    pool: Any, mixer: str, layout: str
) -> None:
    model = model_under(Layout(), mixer)
    expected = []
    for request in requests():
        engine = Engine(model, size=SIZE)
        (generation,) = engine.submit(*request)
        engine.run()
        expected.append(generation.written)
    world = Layout.parse(layout).world
    (tokens, written, moved, continued), *_ = pool.run(world, served, layout, mixer, timeout=100)  # fmt: skip
    assert tokens == expected
    assert moved > 3 and not continued and all(written)
