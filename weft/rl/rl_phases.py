"""The rollout phases of a run of reinforcement learning: its questions, and where a step stands among phases."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Self

from weft.errors import UsageError
from weft.models.invariant import TILE
from weft.parallel.build import check_fits
from weft.recipe.reward_settings import RewardSettings
from weft.recipe.roles_section import OF_THE_POLICY, Roles
from weft.rl.episode_groups import TurnLimits
from weft.rl.questions import QuestionStream, TaskQuestion
from weft.rl.reward_task import RewardTask
from weft.train.own_critic import critic_optimizer, critic_shape, named_critic
from weft.train.rule_optimizer import learning_rate
from weft.train.setup import Job

if TYPE_CHECKING:
    from weft.recipe import Recipe, Task
    from weft.recipe.policy_loss_section import PolicyLoss
    from weft.recipe.rl_section import Reinforcement
    from weft.recipe.roles_section import RolloutRole
    from weft.rl.curriculum import Curriculum


#: Advantages that compare an answer with the others of its group.
WITHIN_GROUPS = ("group", "batch", "none", "leave-one-out")


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


def check_alike(recipe: Recipe, role: RolloutRole) -> None:
    """Check that generation and training can compute the same bits, as ``roles.rollout.invariant`` asks.

    ``role``: the recipe's section ``[roles.rollout]``. Raises :class:`UsageError` if the recipe's layout, type or
    sequence length does not allow it.
    """
    layout = recipe.layout
    cut = layout.size("tp", "cp", "pp") > 1 or role.layout.world > 1 or role.elsewhere
    if cut or recipe.train.dtype == "bfloat16" or recipe.data.seq_len % TILE:
        raise UsageError(
            "roles.rollout.invariant needs a model that is whole on every rank of training, in float32, with a "
            f"data.seq_len that {TILE} divides, and these ranks writing; leave it out"
        )


def check_rl(job: RlPhases) -> None:
    """Check that settings of ``[rl]``, ``[train]``, ``[[tasks]]`` and ``[roles]`` fit together.

    Raises :class:`UsageError` for the first contradiction, such as a batch that is not a multiple of the group size.
    """
    recipe, rl = job.recipe, job.rl
    batch = recipe.train.batch
    if rl.group == 1 and job.loss.advantage in WITHIN_GROUPS:
        raise UsageError(
            f"rl.group = 1 leaves nothing to compare an answer with, and rl.method = {rl.method!r} compares it with "
            "others of its group; use at least 2"
        )
    if not rl.batch and batch % rl.group:
        raise UsageError(
            f"train.batch = {batch} answers are no whole groups of rl.group = {rl.group}; make the batch a multiple "
            "of it"
        )
    role = job.roles.rollout
    if role.invariant:
        check_alike(recipe, role)
    if rl.staleness and not role.elsewhere:
        raise UsageError(
            f"rl.staleness = {rl.staleness} lets answers be written while others are learned from, and the ranks of "
            "training do both in turn; set roles.rollout.ranks, or leave it out"
        )
    if rl.staleness and rl.redraw:
        raise UsageError(
            "rl.redraw asks for other questions within a phase, and with rl.staleness those of later phases are asked "
            "already; leave one of them out"
        )
    if rl.staleness and not job.answers_at_once:
        raise UsageError(
            "a task has answers of several turns, which are not written ahead; leave rl.staleness out"
        )
    if role.elsewhere and role.layout.world > 1:
        raise UsageError(
            f"roles.rollout.layout = {role.layout} is about the ranks of training, and with roles.rollout.ranks or "
            "listen other processes write; leave one of them out"
        )
    if role.address and role.address[1] > 65535:
        raise UsageError(
            f"roles.rollout.listen = {role.listen!r} has no port below 65536; give HOST:PORT"
        )
    if role.listen and not os.environ.get("WEFT_SECRET"):
        raise UsageError(
            f"roles.rollout.listen = {role.listen!r} lets engines of other hosts join that know the run's secret; set "
            "WEFT_SECRET here and there"
        )
    _check_critic(job)
    if job.answers * rl.epochs % batch:
        raise UsageError(
            f"a rollout phase has rl.batch x rl.group = {job.answers} answers, which {rl.epochs} epochs do not divide "
            f"into updates of train.batch = {batch}; change one of them"
        )
    for table, task in zip(job.rewarded, job.questions.tasks, strict=True):
        chooses = table.own(RewardSettings).curriculum
        if chooses and rl.staleness:
            raise UsageError(
                "tasks.curriculum = true waits for the answers of each rollout phase, and with rl.staleness = "
                f"{rl.staleness} the next questions are asked before; set it to 0, or leave curriculum out"
            )
        if chooses and task.levels < 2:
            raise UsageError(
                f"tasks.curriculum = true, and {table.reward!r} has a single level; raise its settings or leave "
                "curriculum out"
            )


def _check_critic(job: RlPhases) -> None:
    """Check the settings of a critic with layers of its own, if there is one.

    Raises :class:`UsageError` if its optimizer or its model does not fit the policy's.
    """
    role, tokenizer = job.roles.critic, job.corpus.tokenizer
    if not role.is_apart:
        return
    if unfit := sorted(role.optimizer.keys() & OF_THE_POLICY.keys() - {"groups"}):
        raise UsageError(
            f"roles.critic.optimizer.{unfit[0]} is about how steps of the policy are taken; leave it out"
        )
    critic_optimizer(job.recipe)
    named = named_critic(job.recipe)
    own = named and named.tokenizer()
    if named is not None and (
        named.shape.vocab != job.shape.vocab or not own or not own.has_ids_of(tokenizer)
    ):
        raise UsageError(
            f"roles.critic.model = {role.model!r} has other tokens than this run; name a model with the same tokenizer"
        )
    check_fits(critic_shape(job.shape, job.recipe), job.recipe.layout, job.recipe.train)
