"""The batches of reinforcement learning: answers that the policy has written, with what a policy loss needs of each.

A run is a sequence of rollout phases. In each phase the newest weights write several answers to every question, tasks
reward the answers, and some updates learn from them. All of it follows from the position in the run, the seed and the
weights, under every layout.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from weft.data.order import permutation
from weft.data.policy_rows import PolicySample, policy_rows
from weft.data.tasks import Answered
from weft.errors import WeftError
from weft.layout.mesh import from_all
from weft.models.policy_loss import PolicyObjective
from weft.rl.answer_collection import AnswerCollection
from weft.rl.local_rollouts import LocalRollouts, RolloutInterrupted
from weft.rl.phase_records import (
    keep_examples,
    log_policy,
    reward_figures,
    sent_figures,
)
from weft.rl.phase_samples import phase_samples
from weft.rl.product_use import ProductUse
from weft.rl.questions import TaskQuestion, supervised_row
from weft.rl.recorded_loader import row_batches
from weft.rl.role_starts import complete_reference, start_roles
from weft.rl.rollout import SentWeights
from weft.rl.scored_answers import ScoredGroup, check_scored, phase_figures
from weft.train.reference_layout import reference_beside
from weft.train.step_loader import AskedQuestions

if TYPE_CHECKING:
    from weft.data.batch import Batch
    from weft.layout.mesh import Mesh
    from weft.parallel.build import Built
    from weft.rl.critic_processes import CriticProcesses
    from weft.rl.generation_turns import GenerationTurns
    from weft.rl.phase_curricula import PhaseCurricula
    from weft.rl.reference_processes import ReferenceProcesses
    from weft.rl.reward_workers import RewardWorkers
    from weft.rl.rl_phases import RlPhases
    from weft.rl.rollout import RolloutSource
    from weft.train.step_loader import RunRecords


class QuestionsAnswered(NamedTuple):
    """The answers of a rollout phase: of all questions (``answered``), and those from which updates learn
    (``groups``).
    """

    answered: list[tuple[TaskQuestion, ScoredGroup]]
    groups: list[ScoredGroup]


@dataclass
class RlLoader:
    """Loader whose batches are answers of the policy. All methods but :meth:`island_samples` are collective.

    Attributes:
        ``job``: the checked recipe with its tasks.
        ``mesh``: this rank's position among the ranks of the run.
        ``built``: the model that is trained, and its state.
        ``recorder``: writes the run's records, and prints.
        ``turns``: the model that generates, and this rank's part in generation.
        ``local``: source of answers that generates them with that model.
        ``rollouts``: source of the answers to learn from: ``local``, or engines in other processes, which only the
            first rank asks.
        ``rewards``: scores answers, for each task.
        ``interrupted``: function that returns whether this rank is asked to end the run.
        ``updates``: function that returns how many updates the weights have had.
        ``curricula``: choose the levels of questions.
        ``lines``: lines to print that engines in other processes have sent since the last phase.
        ``reference``: the reference model in other processes; None: it is beside the policy, or the loss needs none.
        ``critic``: the critic in other processes; None: it is on these ranks, or the loss needs none.
    """

    job: RlPhases
    mesh: Mesh
    built: Built
    recorder: RunRecords
    turns: GenerationTurns
    local: LocalRollouts
    rollouts: RolloutSource
    rewards: Sequence[RewardWorkers]
    interrupted: Callable[[], bool]
    updates: Callable[[], int]
    curricula: PhaseCurricula
    lines: deque[str] = field(default_factory=deque)
    reference: ReferenceProcesses | None = None
    critic: CriticProcesses | None = None
    phase: int = -1
    #: The first rollout phase whose answers were not asked for yet, where engines in other processes write.
    unasked: int = 0
    samples: list[PolicySample] = field(default_factory=list)
    #: The number of updates of the weights that write at present.
    written_by: int = -1
    #: The same, of the weights with which this rank writes.
    local_by: int = -1
    #: What this rank had sent of the weights when the last rollout phase was complete.
    sent: SentWeights = field(default_factory=SentWeights)
    #: When the last rollout phase was complete, in seconds.
    ended_at: float = 0.0
    #: Bytes of weights that this rank has got for a reference model with a layout of its own since the last figures;
    #: -1: those that do not learn may be missing.
    reference_bytes: int = -1

    def __post_init__(self) -> None:
        self.rl, self.batch = self.job.rl, self.job.recipe.train.batch
        self.rows, self.passes = self.job.recipe.rows_per_pass(self.mesh.layout)
        self.collection = AnswerCollection(
            self.job, self.mesh, self.turns, self.local, self.rewards, self.interrupted
        )
        self.products = ProductUse(
            self.job, self.mesh, self.built, self.recorder, self.turns
        )

    # --- what the training loop calls ---

    def island_samples(self, position: int) -> range:
        """Return the numbers of the samples of this rank's island (here all ranks) in the step that starts at
        ``position``.
        """
        return range(position, position + self.batch)

    @property
    def over(self) -> str:
        """Why samples have ended early: always an empty text, because new answers can always be written."""
        return ""

    def is_ready(self, position: int) -> bool:
        """Return whether the answers for the step that starts at sample ``position`` are written already."""
        return (
            position < self.job.supervised
            or self.job.place(position).phase == self.phase
        )

    def make_ready(self, position: int) -> bool:
        """Let the policy write and score the answers of the rollout phase of the step that starts at sample
        ``position``.

        Returns False if a rank is asked to end the run meanwhile.
        """
        if position == self.job.supervised:
            self.reference_bytes = start_roles(self.job, self.built.state, self.mesh)
        try:
            self._begin(self.job.place(position).phase)
        except RolloutInterrupted:
            return False
        return True

    def step(self, position: int) -> list[Batch]:
        """Return the batches of this rank, one per pass, of the step that starts at sample ``position``.

        The answers must be written: :meth:`make_ready` has been called for this step, or :meth:`is_ready` returns True.
        """
        if position < self.job.supervised:
            questions = map(
                self.job.questions.question, range(position, position + self.batch)
            )
            return row_batches(
                self.job, self.mesh, [*map(supervised_row, questions)], position
            )
        place = self.job.place(position)
        assert place.phase == self.phase, "make_ready comes first"
        count = self.job.answers
        epoch, first = divmod(place.first, count)
        order = permutation(count, self.job.recipe.train.seed, place.phase, epoch)
        own = order[first : first + self.batch]
        if self.critic is not None:
            step = position // self.batch
            number = step - self.rl.start.steps
            self.critic.begin_step(own.tolist(), number, step)
        chosen = [self.samples[i] for i in own]
        rows = [
            policy_rows([sample], len(sample.ids), self.job.loss).rows[0]
            for sample in chosen
        ]
        batches = row_batches(self.job, self.mesh, rows, position)
        self.products.give(batches[0], chosen, self.phase)
        return batches

    # --- rollouts ---

    def _begin(self, phase: int) -> None:
        """Collect the answers of rollout phase ``phase``, and what the loss needs of them."""
        begun = time.perf_counter()
        if self.critic is None:
            self._log_policy()
        else:  # whose steps may not be over
            self.critic.check()
        self._refresh()
        moved = time.perf_counter()
        self.curricula.begin(phase)
        answered, groups = self._kept_groups(phase)
        written = time.perf_counter()
        while self.lines:
            self.recorder.event(self.lines.popleft())
        if note := check_scored(groups, self.rl.most_unscored):
            self.recorder.event(note)
        passes = dict[str, float]()
        if self.reference_bytes < 0:
            self.reference_bytes = complete_reference(self.built.state, self.mesh)
        self.samples = phase_samples(
            groups, self.job, self.built, self.mesh, self.reference, passes, self.critic
        )
        if self.critic is not None:
            self._log_policy()
            for line in self.critic.skipped.news():
                self.recorder.event(line)
        self.phase = phase
        self.curricula.end(phase, answered)
        for task in self.curricula.levels:
            rates = self.curricula.rates(task)
            title = self.job.rewarded[task].title
            self.recorder.log("levels", phase=phase, task=title, rates=[*rates])
        ended = time.perf_counter()
        tokens = sum(
            len(answer.ids) for group in groups for answer in group.group.answers
        )
        figures = phase_figures(groups, self.updates()) | {
            "rollout_s": written - moved,
            "rollout_tokens_per_s": tokens / (written - moved),
            "weights_s": moved - begun,
            "prepare_s": ended - written,
            **passes,
        }
        if self.ended_at:
            figures["train_s"] = begun - self.ended_at
        figures |= self._role_figures(passes)
        self.ended_at = ended
        self.recorder.reinforcement(phase, figures)
        first = self.collection.writes_all
        keep_examples(self.recorder, self.job, phase, groups, first)

    def _role_figures(self, passes: Mapping[str, float]) -> dict[str, float]:
        """Return what has travelled between processes since the last phase, and how long the critic and other roles
        have computed, by the names of a phase's records. Collective.

        ``passes``: seconds of the passes that have prepared this phase, by the same names.
        """
        figures = dict[str, float]()
        if self.remote:
            before, self.sent = self.sent, self.rollouts.sent_weights()
            figures |= sent_figures(before, self.sent, self.mesh)
        if self.reference is not None:
            figures |= self.reference.take_figures()
        if self.critic is not None:
            figures |= self.critic.take_figures()
        elif "values_s" in passes:
            objective = self.built.model.hooks.objective
            assert isinstance(objective, PolicyObjective)
            stepped, objective.figures.seconds = objective.figures.seconds, 0.0
            figures["critic_s"] = passes["values_s"] + stepped
        if reference_beside(self.built.state) is not None:
            moved = sum(from_all(self.reference_bytes, self.mesh.step_group))
            figures["reference_moved_bytes"], self.reference_bytes = moved, 0
        if self.job.roles.reward.ranks:
            figures |= reward_figures(self.rewards, self.mesh)
        return figures

    def _kept_groups(self, phase: int) -> QuestionsAnswered:
        """Return the answers of rollout phase ``phase``, and keep what the passes that write them compute, if an update
        can use it.
        """
        questions = self.job.phase_questions(phase, self.curricula.now)
        # drawn only as far as they are asked
        spare = iter(self.job.spare_questions(phase, self.curricula.now))
        self.products.keep(lambda: self.collection.requests(questions))
        complete = False
        try:
            answers = self._answered(phase, questions, spare)
            complete = True
        finally:
            self.products.end_phase(complete)
        return answers

    def _answered(
        self,
        phase: int,
        questions: Sequence[TaskQuestion],
        spare: Iterator[TaskQuestion],
    ) -> QuestionsAnswered:
        """Return the answers to ``questions``, of which those that teach nothing are replaced by some of ``spare``."""
        groups = self._collected(questions, asked=self._ask_ahead(phase))
        answered = [*zip(questions, groups, strict=True)]
        for _ in range(self.rl.redraw):
            poor = [i for i, group in enumerate(groups) if not group.teaches]
            # in this order, as the first to end has taken one of the others
            drawn = [question for _, question in zip(poor, spare, strict=False)]
            if not drawn:
                break
            more = self._collected(drawn)
            answered += zip(drawn, more, strict=True)
            for i, group in zip(poor, more, strict=False):
                if group.teaches:
                    groups[i] = group
        return QuestionsAnswered(answered, groups)

    def _log_policy(self) -> None:
        more = self.products.multiplied
        if log_policy(self.recorder, self.built, self.mesh, more):
            self.products.multiplied = {}

    def _refresh(self) -> None:
        """Let the newest weights write from now on."""
        version = self.updates()
        if not self.remote:
            self._refresh_local()
        elif version != self.written_by:
            self.rollouts.take_weights(version)
        self.written_by = version

    def _refresh_local(self) -> None:
        """Let this rank write with the newest weights from now on."""
        version = self.updates()
        if version != self.local_by:
            self.turns.generation.refresh(version)
            self.local.take_weights(version)
            self.local_by = version

    @property
    def remote(self) -> bool:
        """Whether engines in other processes write the answers that are learned from."""
        return self.rollouts is not self.local

    def _ask_ahead(self, phase: int) -> bool:
        """Ask engines in other processes for the answers of ``phase``, and of those phases after it that may be begun
        before its updates. Returns whether they write.
        """
        if not self.remote or not self.job.answers_at_once:
            return False
        last = self.job.place((self.job.recipe.train.steps - 1) * self.batch).phase
        first = max(phase, self.unasked)
        for each in range(first, max(phase, min(phase + self.rl.staleness, last)) + 1):
            requests = self.collection.requests(
                self.job.phase_questions(each, self.curricula.now)
            )
            if self.collection.writes_all:
                self.rollouts.request(requests)
            self.unasked = each + 1
        return True

    def _collected(
        self, questions: Sequence[TaskQuestion], asked: bool = False
    ) -> list[ScoredGroup]:
        """Return the answers to ``questions`` with their rewards, in order. This rank writes its share of them.

        ``asked``: whether they were asked for already.
        """
        requests = self.collection.requests(questions)
        return self.collection.written(self.rollouts, questions, requests, asked)

    # --- evaluation ---

    def questions(self) -> dict[str, AskedQuestions]:
        """Return a function for each task that gives rewards, by the task's title. The function evaluates the model on
        the task's held-out questions and returns the result.
        """
        return {
            settings.title: AskedQuestions(settings.every, partial(self.ask, task))
            for task, settings in enumerate(self.job.rewarded)
        }

    def ask(self, task: int) -> Answered | None:
        """Evaluate the newest weights on the held-out questions of task number ``task``, and return the result.

        Returns None if a rank is asked to end the run meanwhile.
        """
        self._refresh_local()
        settings = self.job.rewarded[task]
        questions = [
            self.job.questions.held_out(task, index)
            for index in range(settings.limit or 100)
        ]
        requests = [
            self.job.questions.evaluation_request(question, 1, self.rl.tokens)
            for question in questions
        ]
        try:
            groups = self.collection.written(self.local, questions, requests)
        except RolloutInterrupted:
            return None
        scored = [reward for group in groups for reward in group.scored]
        if not scored:
            why = next(why for group in groups for why in group.whys if why)
            raise WeftError(
                f"task {settings.title}: no answer could be scored; the first one {why}"
            )
        if note := check_scored(groups, 1.0):
            self.recorder.event(f"task {settings.title}: {note}")
        return Answered(len(questions), sum(reward >= 1 for reward in scored), None)
