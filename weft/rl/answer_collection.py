"""The answers to questions with their rewards, of which each rank collects its share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from weft.errors import WeftError
from weft.layout.mesh import from_all
from weft.rl.episode_groups import written_groups
from weft.rl.local_rollouts import LocalRollouts, RolloutInterrupted
from weft.rl.reward_workers import Scored
from weft.rl.scored_answers import ScoredGroup, check_unscored

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.rl.generation_turns import GenerationTurns
    from weft.rl.questions import TaskQuestion
    from weft.rl.reward_workers import RewardWorkers
    from weft.rl.rl_phases import RlPhases
    from weft.rl.rollout import AnswerGroup, GroupRequest, RolloutSource


class OwnScores(NamedTuple):
    """Scored answers that one rank has collected: its ``groups``, whether it is asked to end the run (``interrupted``),
    and the error line because of which it has none (``problem``; "" if it has them).
    """

    groups: list[ScoredGroup]
    interrupted: bool
    problem: str = ""


@dataclass
class AnswerCollection:
    """Collects answers to questions and has them scored. :meth:`written` is collective.

    Attributes:
        ``job``: the checked recipe with its tasks.
        ``mesh``: this rank's position among the ranks of the run.
        ``turns``: the model that generates, and this rank's part in generation.
        ``local``: source of answers that generates them with that model; of any other source only the first rank asks.
        ``rewards``: scores answers, for each task.
        ``interrupted``: function that returns whether this rank is asked to end the run.
    """

    job: RlPhases
    mesh: Mesh
    turns: GenerationTurns
    local: LocalRollouts
    rewards: Sequence[RewardWorkers]
    interrupted: Callable[[], bool]

    @property
    def writes_all(self) -> bool:
        """Whether this rank is the first, which alone asks engines in other processes for answers."""
        group = self.mesh.step_group
        return group is None or group.rank() == 0

    def requests(self, questions: Sequence[TaskQuestion]) -> list[GroupRequest]:
        """Return the requests for the answers to ``questions``."""
        rl = self.job.rl
        return [
            self.job.questions.request(question, rl.group, rl.tokens)
            for question in questions
        ]

    def written(
        self,
        source: RolloutSource,
        questions: Sequence[TaskQuestion],
        requests: Sequence[GroupRequest],
        begun: bool = False,
    ) -> list[ScoredGroup]:
        """Return the answers of ``source`` to ``questions`` with their rewards.

        ``begun``: whether ``source`` was asked for them already. If they cannot be written or scored on one rank, all
        ranks raise :class:`WeftError`, so that none waits for the others. Scoring ends as soon as more answers have no
        reward than may be, as a reward that hangs takes its limit of time for each.
        """
        own, unscored = [*range(len(questions))], list[str]()
        # not those of questions drawn again alone, of which a few may fail
        asked = max(self.job.answers, sum(request.answers for request in requests))
        if source is self.local:
            own = self.turns.own(own)
        elif not self.writes_all:
            own = []
        scored, interrupted = list[ScoredGroup](), False
        failed: WeftError | None = None
        turn = self.turns.writing() if source is self.local else nullcontext()
        with turn:
            try:
                chosen = [questions[i] for i in own], [requests[i] for i in own]
                groups = self._groups(source, *chosen, begun) if own else ()
                for i, group in zip(own, groups, strict=True):
                    given = self._scores(group, self.rewards[questions[i].task])
                    rewards = tuple(
                        float("nan") if each.value is None else each.value
                        for each in given
                    )
                    whys = tuple(each.why for each in given)
                    scored.append(ScoredGroup(group, rewards, whys))
                    unscored += filter(None, whys)
                    check_unscored(unscored, asked, self.job.rl.most_unscored)
            except RolloutInterrupted:
                interrupted = True
            except WeftError as error:
                failed = error
        own_share = OwnScores(scored, interrupted, str(failed or ""))
        shares = from_all(own_share, self.mesh.step_group)
        if failed is not None:
            raise failed
        if problem := next((share.problem for share in shares if share.problem), ""):
            passed_on = WeftError(problem)
            passed_on.secondary = True
            raise passed_on
        if any(share.interrupted for share in shares):
            raise RolloutInterrupted
        everyone = {group.number: group for share in shares for group in share.groups}
        return [everyone[request.number] for request in requests]

    def _scores(self, group: AnswerGroup, workers: RewardWorkers) -> list[Scored]:
        """Return the rewards of a group: those that environments have given, and those of the task for the others."""
        given = [Scored(answer.reward, answer.failed) for answer in group.answers]
        waiting = [
            i for i, score in enumerate(given) if score.value is None and not score.why
        ]
        texts = [self.job.questions.answer_text(group.answers[i].ids) for i in waiting]
        asked = [group.request.question] * len(texts)
        scored = workers.scores(asked, texts, self._heed)
        for i, score in zip(waiting, scored, strict=True):
            given[i] = score
        return given

    def _heed(self) -> None:
        """Raise :class:`RolloutInterrupted` if this rank is asked to end the run."""
        if self.interrupted():
            raise RolloutInterrupted

    def _groups(
        self,
        source: RolloutSource,
        questions: Sequence[TaskQuestion],
        requests: Sequence[GroupRequest],
        begun: bool,
    ) -> Iterator[AnswerGroup]:
        """Yield the answers of ``source`` to ``questions``; those of other processes as each is written, while others
        are, unless they have several turns.
        """
        if begun or (source is not self.local and self.job.answers_at_once):
            if not begun:
                source.request(requests)
            for _ in requests:
                yield from source.finished(1)
            return
        yield from written_groups(
            source,
            requests,
            [self.job.questions.tasks[each.task].environment for each in questions],
            self.job.questions.turn_encoder,
            [self.job.turn_limits(each.task) for each in questions],
        )
