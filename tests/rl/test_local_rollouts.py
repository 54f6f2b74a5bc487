"""Answers that this process writes: a policy that has diverged ends the run, on all ranks and with one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.generate.test_many import build
from weft.errors import WeftError
from weft.generate.engine import Engine
from weft.generate.sampling import Sampling
from weft.rl import answer_collection
from weft.rl.answer_collection import AnswerCollection, OwnScores
from weft.rl.local_rollouts import LocalRollouts
from weft.rl.rollout import GroupRequest, RewardQuestion


def test_a_policy_that_has_diverged_is_not_learned_from() -> None:
    """One of two prompts has the token whose embedding is NaN; the answers to the other end with it."""
    model = build("softmax", torch.float64)
    model.embedding.table.data[3] = torch.nan
    engine = Engine(model, size=4)
    rollouts = LocalRollouts(engine, Sampling(), 12, ())
    rollouts.take_weights(7)
    asked = [((1, 2), 0), ((4, 3), 9)]
    rollouts.request([GroupRequest(n, RewardQuestion(""), ids, 2, n) for ids, n in asked])  # fmt: skip
    with pytest.raises(WeftError, match=r"not finite after 7 updates.*optimizer\.lr"):
        rollouts.finished(2)
    scheduler = engine.scheduler
    assert not (scheduler.running or scheduler.waiting or scheduler.pool.owners)


@pytest.mark.parametrize("here", [True, False])
def test_all_ranks_end_when_one_has_no_answers(
    here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank says so to the others, who would wait for its answers, and each raises the line."""
    shares: list[OwnScores] = []

    def gathered(own: OwnScores, group: object) -> list[OwnScores]:
        shares.append(own)
        return [own, OwnScores([], False, "" if here else "it has diverged")]

    def groups(*asked: object) -> list[Any]:
        raise WeftError("it has diverged")

    monkeypatch.setattr(answer_collection, "from_all", gathered)
    rank: Any = SimpleNamespace(
        local=None, writes_all=here, mesh=SimpleNamespace(step_group=None), _groups=groups,
        job=SimpleNamespace(answers=1),
    )  # fmt: skip
    source: Any = object()
    asked: Any = [SimpleNamespace(answers=1)]
    with pytest.raises(WeftError, match="it has diverged") as caught:
        AnswerCollection.written(rank, source, asked, asked)
    assert [each.problem for each in shares] == ["it has diverged" if here else ""]
    # the launcher shows the line of the rank itself
    assert caught.value.secondary != here
