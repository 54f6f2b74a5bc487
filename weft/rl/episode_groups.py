"""Groups of answers to questions, of which some are written in several turns with an environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weft.data.sample_ledger import VersionSpan
from weft.rl.episode import Episode, TurnEncoder, write_episodes
from weft.rl.rollout import AnswerGroup, GroupRequest, WrittenAnswer

if TYPE_CHECKING:
    from weft.data.chat.trajectory import Trajectory
    from weft.rl.environment import Environment
    from weft.rl.rollout import RolloutSource

#: Makes the environment of one answer; None: the answer is written in a single turn.
EnvironmentMaker = Callable[[], "Environment | None"]


@dataclass(frozen=True)
class TurnLimits:
    """Limits of answers in several turns.

    ``turns``: largest number of turns. ``room``: largest number of tokens before a turn. ``seconds``: most seconds that
    the environment may take for a turn; 0: no limit.
    """

    turns: int
    room: int
    seconds: float = 0.0


def written_groups(
    source: RolloutSource,
    requests: Sequence[GroupRequest],
    makers: Sequence[EnvironmentMaker],
    encoder: TurnEncoder,
    limits: Sequence[TurnLimits],
) -> list[AnswerGroup]:
    """Let a policy write all answers to ``requests``, and return the groups in the order of the requests.

    Arguments:
        ``source``: generates the policy's tokens.
        ``makers``: for each request, a function that creates an environment for one answer, or returns None if answers
            have a single turn.
        ``encoder``: encodes messages of environments.
        ``limits``: for each request, the limits of its answers.
    """
    several = {i: made_for for i in range(len(requests)) if (made_for := makers[i]())}
    plain = [i for i in range(len(requests)) if i not in several]
    source.request([requests[i] for i in plain])
    groups = dict(zip(plain, source.finished(len(plain)), strict=True))
    episodes: dict[int, list[Episode]] = {}
    for i, first in several.items():
        environments = [first]
        while len(environments) < requests[i].answers:
            another = makers[i]()
            assert another is not None
            environments.append(another)
        episodes[i] = [
            Episode(
                environment, requests[i].question, encoder, limits[i].turns, limits[i].room,
                f"question {requests[i].number}, answer {n}", requests[i].seed + n, limits[i].seconds,
            )
            for n, environment in enumerate(environments)
        ]  # fmt: skip
    starts = {i: tuple(each[0].ids) for i, each in episodes.items()}
    write_episodes([e for each in episodes.values() for e in each], source)
    for i, each in episodes.items():
        answers = tuple(episode_answer(episode, len(starts[i])) for episode in each)
        groups[i] = AnswerGroup(replace(requests[i], prompt=starts[i]), answers)
        for episode in each:
            episode.close()
    return [groups[i] for i in range(len(requests))]


def episode_answer(episode: Episode, start: int) -> WrittenAnswer:
    """Return all tokens of an episode after the first ``start`` as one answer, with its reward."""
    trajectory = episode.trajectory
    text = trajectory.sequence()
    failed = episode.why if trajectory.turns[-1].reward is None else ""
    return WrittenAnswer(
        tuple(text.ids[start:]),
        tuple(text.log_probabilities[start:]),
        _spans(trajectory, start),
        "length" if episode.why else "stop",
        tuple(text.learns[start:]),
        None if failed else trajectory.reward,
        failed,
        trajectory.without_tokens(),
    )


def _spans(trajectory: Trajectory, start: int) -> tuple[VersionSpan, ...]:
    """Return which weights have written which tokens behind the first ``start``; what is read counts with the turn
    before.
    """
    spans = list[VersionSpan]()
    for turn in trajectory.turns:
        if turn.tokens is None:
            continue
        first = len(turn.tokens.prompt) - start
        for index, version in turn.tokens.versions:
            if not spans or spans[-1].version != version:
                spans.append(VersionSpan(first + index, version))
    return tuple(spans)
