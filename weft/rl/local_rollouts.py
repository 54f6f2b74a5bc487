"""Answers that the ranks of training write themselves, in turn with training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from weft.data.sample_ledger import VersionSpan
from weft.errors import WeftError
from weft.generate.sampling import Sampling
from weft.rl.generation_turns import FollowingEngine
from weft.rl.rollout import AnswerGroup, GroupRequest, SentWeights, WrittenAnswer

if TYPE_CHECKING:
    from weft.generate.engine import Engine
    from weft.generate.request import Generation


#: Error line of a policy that cannot write answers any more, by the number of its updates.
DIVERGED = (
    "the policy's logits are not finite after {} updates: it has diverged; lower optimizer.lr, or go on from an "
    "earlier checkpoint"
)


class RolloutInterrupted(Exception):
    """Raised when this rank is asked to end the run while it writes answers."""


@dataclass
class LocalRollouts:
    """Source of answers that writes them with an engine in this process (:class:`weft.rl.rollout.RolloutSource`).

    Attributes:
        ``engine``: the engine.
        ``sampling``: settings of sampling, without the seed, which each request brings.
        ``most``: largest number of tokens of an answer.
        ``stops``: token ids that end an answer.
        ``interrupted``: function that returns whether this rank is asked to end the run.
    """

    engine: Engine | FollowingEngine
    sampling: Sampling
    most: int
    stops: Sequence[int]
    interrupted: Callable[[], bool] = lambda: False
    waiting: list[GroupRequest] = field(default_factory=list)

    def request(self, groups: Sequence[GroupRequest]) -> None:
        """Ask for the answers of ``groups``; they are written when :meth:`finished` is called."""
        self.waiting += groups

    def finished(self, count: int) -> list[AnswerGroup]:
        """Write the answers of the ``count`` groups that were asked for first, and return them.

        Raises :class:`RolloutInterrupted` if this rank is asked to end the run meanwhile, and :class:`WeftError` if the
        policy has diverged, so that an answer could not go on. All texts are then cancelled.
        """
        groups, self.waiting = self.waiting[:count], self.waiting[count:]
        assert not isinstance(self.engine, FollowingEngine), "others write for it"
        texts = [self._submit(group) for group in groups]
        scheduler = self.engine.scheduler
        while (written := self.engine.step()) or scheduler.running or scheduler.waiting:
            failed = any(each.request.failure for each in written)
            if failed or self.interrupted():
                for generation in (each for answers in texts for each in answers):
                    self.engine.cancel(generation)
                if not failed:
                    raise RolloutInterrupted
                raise WeftError(DIVERGED.format(scheduler.version))
        return [
            AnswerGroup(group, tuple(self._answer(each) for each in answers))
            for group, answers in zip(groups, texts, strict=True)
        ]

    def _submit(self, group: GroupRequest) -> list[Generation]:
        how = replace(self.sampling, seed=group.seed)
        assert not isinstance(self.engine, FollowingEngine)
        return self.engine.submit(
            group.prompt, self.most, how, self.stops, group.answers, top=0
        )

    def _answer(self, generation: Generation) -> WrittenAnswer:
        ids = generation.written
        chances = [chance for chance, _ in generation.log_probabilities]
        if (
            generation.stopped is not None
            and generation.stop_log_probability is not None
        ):
            ids, chances = (
                [*ids, generation.stopped],
                [*chances, generation.stop_log_probability],
            )
        spans = tuple(VersionSpan(*span) for span in generation.versions)
        return WrittenAnswer(tuple(ids), tuple(chances), spans, generation.finished)

    def take_weights(self, version: int) -> None:
        """Tell the engine that its weights have changed, and are version ``version`` now."""
        self.engine.weights_changed(version)

    def sent_weights(self) -> SentWeights:
        """Return zeros: no weights are sent to other processes, because the engine is in this process."""
        return SentWeights()

    def close(self) -> None:
        """End the engine, with all requests that it has."""
        self.engine.close()
