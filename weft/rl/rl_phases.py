"""The rollout phases of a run of reinforcement learning: its questions, and where a step stands among phases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Self

from weft.recipe.reward_settings import RewardSettings
from weft.recipe.roles_section import Roles
from weft.rl.episode_groups import TurnLimits
from weft.rl.questions import QuestionStream, TaskQuestion
from weft.rl.reward_task import RewardTask
from weft.train.own_critic import named_model
from weft.train.rule_optimizer import learning_rate
from weft.train.setup import Job

if TYPE_CHECKING:
    from weft.checkpoint.weights import Pretrained
    from weft.recipe import Task
    from weft.recipe.policy_loss_section import PolicyLoss
    from weft.recipe.rl_section import Reinforcement
    from weft.rl.curriculum import Curriculum


class PhasePlace(NamedTuple):
    """Position of a step among rollout phases.

    ``phase``: number of the rollout phase. ``first``: index of the step's first sample among all samples that the phase
    trains on; an answer counts once for each epoch.
    """

    phase: int
    first: int


@dataclass(frozen=True)
class RlPhases(Job):
    """A checked recipe of reinforcement learning with its tasks opened, divided into rollout phases.

    In each phase the policy writes answers, and then learns from them.

    Attributes:
        ``rewarded``: the tables ``[[tasks]]`` with a reward.
        ``questions``: the questions of these tasks.
    """

    rewarded: tuple[Task, ...] = ()
    questions: QuestionStream = field(default=None, repr=False)  # type: ignore[assignment]

    def with_questions(
        self, rewarded: tuple[Task, ...], questions: QuestionStream
    ) -> Self:
        """Return this job with the tables ``[[tasks]]`` that have a reward, and their questions."""
        return replace(self, rewarded=rewarded, questions=questions)

    @property
    def rl(self) -> Reinforcement:
        """The recipe's section ``[rl]``, with the settings of reinforcement learning."""
        assert self.recipe.rl is not None
        return self.recipe.rl

    @property
    def roles(self) -> Roles:
        """The recipe's section ``[roles]``, with its defaults if the recipe has none."""
        return self.recipe.roles or Roles()

    @cached_property
    def named_reference(self) -> Pretrained | None:
        """The model that ``roles.reference.model`` names; None if the recipe names none."""
        return named_model("roles.reference.model", self.roles.reference.model)

    @property
    def loss(self) -> PolicyLoss:
        """The settings of the policy loss, such as its clipping, that the recipe's section ``[rl]`` gives."""
        return self.rl.policy_loss

    @property
    def supervised(self) -> int:
        """Number of samples of the supervised start, which trains on reference answers before the first phase."""
        return self.rl.start.steps * self.recipe.train.batch

    @property
    def asked(self) -> int:
        """Number of questions that the policy is asked in one rollout phase."""
        return self.rl.batch or self.recipe.train.batch // self.rl.group

    @property
    def answers(self) -> int:
        """Number of answers of a rollout phase, over all its questions."""
        return self.asked * self.rl.group

    @property
    def updates_per_phase(self) -> int:
        """Number of updates that learn from the answers of one rollout phase."""
        return self.answers * self.rl.epochs // self.recipe.train.batch

    def place(self, position: int) -> PhasePlace:
        """Return the rollout phase of the step that starts at sample ``position``, and the step's place in it.

        The step must come after the supervised start.
        """
        return PhasePlace(
            *divmod(position - self.supervised, self.answers * self.rl.epochs)
        )

    @property
    def answers_at_once(self) -> bool:
        """Whether every answer is written in a single turn, because no task has an environment that answers."""
        return all(
            type(task).environment is RewardTask.environment
            for task in self.questions.tasks
        )

    def turn_limits(self, task: int) -> TurnLimits:
        """Return the limits of a conversation of several turns in the task with index ``task`` (from 0): number of
        turns, tokens, and seconds of the environment.
        """
        own = self.rewarded[task].own(RewardSettings)
        room = self.recipe.data.seq_len - self.rl.tokens
        return TurnLimits(own.turns, room, own.seconds)

    def phase_questions(
        self, phase: int, curricula: Mapping[int, Curriculum] = {}
    ) -> list[TaskQuestion]:
        """Return the questions of rollout phase ``phase``.

        ``curricula``: for the index of a task, the curriculum that chooses the level of its questions.
        """
        first = self._first_of(phase)
        numbers = range(first, first + self.asked)
        return [self.questions.question(number, curricula) for number in numbers]

    def spare_questions(
        self, phase: int, curricula: Mapping[int, Curriculum] = {}
    ) -> Iterable[TaskQuestion]:
        """Yield further questions for rollout phase ``phase``, to replace questions whose answers all have the same
        reward.

        ``curricula``: for the index of a task, the curriculum that chooses the level of its questions.
        """
        first = self._first_of(phase) + self.asked
        return (
            self.questions.question(first + i, curricula)
            for i in range(self.asked * self.rl.redraw)
        )

    def _first_of(self, phase: int) -> int:
        return self.supervised + phase * self.asked * (1 + self.rl.redraw)

    def judged(self, values: Mapping[str, float]) -> float | None:
        """Return the share of held-out questions that are answered wrong, as the mean over tasks.

        ``values``: the share of right answers by the name of the task. Returns None if a task is missing in it.
        """
        shares = [values.get(task.title) for task in self.rewarded]
        known = [share for share in shares if share is not None]
        return 1 - sum(known) / len(known) if len(known) == len(shares) else None

    def learning_rate(self, step: int, steps: int) -> float:
        """Return the learning rate of step ``step`` of ``steps``.

        In the supervised start it rises to ``rl.start.lr``, and then falls to a tenth of that.
        """
        start = self.rl.start
        if step < start.steps:
            # down again, so that what comes of rewards is not the effect of a lower rate
            risen = (step + 1) / max(1, start.steps // 10)
            left = 1 - 0.9 * step / start.steps
            return start.lr * min(risen, left)
        return learning_rate(
            self.recipe.optimizer, step - start.steps, steps - start.steps
        )
