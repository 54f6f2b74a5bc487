"""Answers with their rewards, from all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.errors import WeftError

if TYPE_CHECKING:
    from weft.rl.rollout import AnswerGroup

#: Reasons of failed rewards that are named.
NAMED = 3


@dataclass(frozen=True)
class ScoredGroup:
    """All answers to one question with their rewards.

    ``group``: the answers. ``rewards``: the reward of each answer; NaN: the task failed on it. ``whys``: for each
    answer, why it has no reward; "" if it has one.
    """

    group: AnswerGroup
    rewards: tuple[float, ...]
    whys: tuple[str, ...]

    @property
    def number(self) -> int:
        """Index, in the run, of the question that the group answers."""
        return self.group.request.number

    @property
    def scored(self) -> list[float]:
        """The rewards of all answers in the group that have one, in the order of the answers."""
        return [reward for reward in self.rewards if not math.isnan(reward)]

    @property
    def teaches(self) -> bool:
        """Whether some rewards in the group differ, so that there is something to learn from it."""
        return len(set(self.scored)) > 1


def check_scored(groups: Sequence[ScoredGroup], most: float) -> str:
    """Return a line about the answers in ``groups`` that have no reward; "" if all have one.

    Raises :class:`WeftError` as :func:`check_unscored` does.
    """
    whys = [why for group in groups for why in group.whys if why]
    return check_unscored(whys, sum(len(group.rewards) for group in groups), most)


def check_unscored(whys: Sequence[str], answers: int, most: float) -> str:
    """Return a line about answers that have no reward; "" if there are none.

    ``whys``: why each of them has none. ``answers``: number of all answers, also of those that are not scored yet.
    Raises :class:`WeftError` if the share without a reward is more than ``most`` (0 to 1), or if no answer has one.
    """
    if not whys:
        return ""
    said = "; ".join(list(dict.fromkeys(whys))[:NAMED])
    line = f"{len(whys)} of {answers} answers have no reward and are left out: {said}"
    if len(whys) > most * answers or len(whys) == answers:
        raise WeftError(
            f"{line}; that is more than rl.most_unscored = {most:g} allows: mend the task, or raise it"
        )
    return line


def pass_at(k: int, right: int, answers: int) -> float:
    """Return the probability that at least one of ``k`` answers is right, if ``right`` of ``answers`` answers are.

    The estimate is unbiased (Chen et al. 2021): ``1 - C(answers - right, k) / C(answers, k)``.
    """
    if answers - right < k:
        return 1.0
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)


def phase_figures(groups: Sequence[ScoredGroup], version: int) -> dict[str, Any]:
    """Return the metrics of a rollout phase with the answers ``groups``, as numbers by name.

    ``version``: number of updates of the weights that are going to learn from the answers. The lag of an answer is the
    number of updates between the weights that began it and ``version``.
    """
    rewards = [reward for group in groups for reward in group.scored]
    answers = [answer for group in groups for answer in group.group.answers]
    lengths = [len(answer.ids) for answer in answers]
    lags = [version - answer.versions[0].version for answer in answers]
    mean = _mean(rewards)
    figures = {
        "reward": mean,
        "reward_std": math.sqrt(_mean((reward - mean) ** 2 for reward in rewards)),
        "length": _mean(lengths),
        "length_most": max(lengths, default=0),
        "stopped": _mean(answer.finished == "stop" for answer in answers),
        "teaching": _mean(group.teaches for group in groups),
        "unscored": sum(bool(why) for group in groups for why in group.whys),
        "lags": {str(lag): lags.count(lag) for lag in sorted(set(lags))},
    }
    size = min((len(group.rewards) for group in groups), default=1)
    rights = [sum(reward >= 1 for reward in group.scored) for group in groups]
    for k, name in ((1, "pass@1"), (size, "pass@all")):
        figures[name] = _mean(
            pass_at(k, right, len(group.scored))
            for right, group in zip(rights, groups, strict=True)
            if len(group.scored) >= k
        )
    return figures


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0
