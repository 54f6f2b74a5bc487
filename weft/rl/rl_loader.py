"""The batches of reinforcement learning: answers that the policy has written, with what a policy loss needs of each.

A run is a sequence of rollout phases. In each phase the newest weights write several answers to every question, tasks
reward the answers, and some updates learn from them. All of it follows from the position in the run, the seed and the
weights, under every layout.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.data.order import permutation
from weft.data.policy_rows import PolicySample, policy_rows
from weft.data.tasks import Answered
from weft.errors import WeftError
from weft.generate.written_passes import WrittenPasses
from weft.layout.mesh import from_all
from weft.models.policy_loss import PolicyObjective
from weft.rl.episode_groups import written_groups
from weft.rl.kept_phases import keep_phase
from weft.rl.known_products import (
    COMPARED,
    give_known_products,
    kept_rows,
    most_mismatch,
    sampler_mismatch,
    take_back_products,
    takes_known_products,
)
from weft.rl.local_rollouts import LocalRollouts, RolloutInterrupted
from weft.rl.phase_samples import phase_samples
from weft.rl.questions import TaskQuestion, supervised_row
from weft.rl.recorded_loader import row_batches
from weft.rl.reward_workers import Scored
from weft.rl.role_starts import complete_reference, start_roles
from weft.rl.rollout import SentWeights
from weft.rl.scored_answers import (
    ScoredGroup,
    check_scored,
    check_unscored,
    phase_figures,
)
from weft.train.own_critic import critic_of
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
    from weft.rl.rollout import AnswerGroup, GroupRequest, RolloutSource, WrittenAnswer
    from weft.train.step_loader import RunRecords


class OwnScores(NamedTuple):
    """Scored answers that one rank has collected: its ``groups``, whether it is asked to end the run (``interrupted``),
    and the error line because of which it has none (``problem``; "" if it has them).
    """

    groups: list[ScoredGroup]
    interrupted: bool
    problem: str = ""


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
    #: What the passes that wrote these samples have computed, for the update that learns from them.
    written: WrittenPasses | None = None
    #: Whether known products were compared with passes that multiply again, and whether they agree.
    compared: bool = False
    trusted: bool = True
    #: Difference of log-probabilities of the sampler to such passes, for the next record of the policy.
    multiplied: dict[str, float] = field(default_factory=dict)
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
        if (written := self.written) is not None:
            self.written = None
            self._give_products(written, batches[0], chosen)
        return batches

    def _give_products(
        self, written: WrittenPasses, batch: Batch, samples: Sequence[PolicySample]
    ) -> None:
        """Let the update over ``batch``, of ``samples``, take its products from ``written``, and record whether it
        does.

        The first time in a process some answers are computed again, and no products are taken from then on if
        log-probabilities differ by more than roundings.
        """
        known = kept_rows(written, batch) is not None
        if known and not self.compared:
            self.compared = True
            apart = sampler_mismatch(
                self.built, self.mesh, samples[:COMPARED], self.rl.temperature
            )
            limit = most_mismatch(next(self.built.model.parameters()).dtype)
            self.multiplied = {"mismatch": apart.mean, "mismatch_max": apart.most}
            if not apart.most <= limit:
                self.trusted = False
                self.multiplied = {}  # which the update measures
                self.recorder.event(
                    f"the passes that write answers differ from those that learn by up to {apart.most:.2g} in "
                    f"log-probabilities, roundings by {limit:g}: updates compute all products again from now on"
                )
        taken = self.trusted and give_known_products(self.built.model, written, batch)
        why = written.lost or ("a token is missing" if self.trusted else "mismatch")
        self.recorder.log(
            "products", phase=self.phase, taken=taken, why="" if taken else why
        )

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
        if self.remote:
            figures |= self._sent_figures()
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
            figures |= self._reward_figures()
        self.ended_at = ended
        self.recorder.reinforcement(phase, figures)
        self._keep_examples(phase, groups)

    def _kept_groups(self, phase: int) -> QuestionsAnswered:
        """Return the answers of rollout phase ``phase``, and keep what the passes that write them compute, if an update
        can use it.
        """
        questions = self.job.phase_questions(phase, self.curricula.now)
        # drawn only as far as they are asked
        spare = iter(self.job.spare_questions(phase, self.curricula.now))
        self.written = None
        self._keep_passes(questions)
        try:
            return self._answered(phase, questions, spare)
        except BaseException:
            self.written = None
            raise
        finally:
            self.turns.passes = None

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

    def _keep_passes(self, questions: Sequence[TaskQuestion]) -> None:
        """Keep what passes compute from now on, if the update that learns from answers to ``questions`` can use it."""
        if not self.trusted or not takes_known_products(
            self.job, self.built, self.turns.generation
        ):
            return
        take_back_products(self.built.model)  # of a step that was not taken
        self.turns.passes = self.written = WrittenPasses(self._most_tokens(questions))

    def _most_tokens(self, questions: Sequence[TaskQuestion]) -> int:
        """Return how many tokens the passes that write answers to ``questions``, and to those that replace some
        of them, compute at most.
        """
        if not self.job.answers_at_once:
            answers = self.job.answers * (1 + self.rl.redraw)
            return answers * (self.job.recipe.data.seq_len + 1)
        prompts = [len(request.prompt) for request in self._requests(questions)]
        spare = len(prompts) * self.rl.redraw
        most = sum(prompts) + spare * self.job.recipe.data.seq_len
        return most + (len(prompts) + spare) * self.rl.group * self.rl.tokens

    def _reward_figures(self) -> dict[str, int]:
        """Return the bytes of requests to servers of reward models, and of their replies, since the last phase."""
        own = [workers.travelled for workers in self.rewards]
        for workers in self.rewards:
            workers.travelled = (0, 0)
        pairs = [
            pair for of_rank in from_all(own, self.mesh.step_group) for pair in of_rank
        ]
        return {
            "reward_sent_bytes": sum(sent for sent, _ in pairs),
            "reward_received_bytes": sum(received for _, received in pairs),
        }

    def _sent_figures(self) -> dict[str, int]:
        """Return the bytes of weights that all ranks have sent to engines since the last phase, and have not sent as
        they had not changed.
        """
        now = self.rollouts.sent_weights()
        before, self.sent = self.sent, now
        own = (now.sent - before.sent, now.spared - before.spared)
        shares = from_all(own, self.mesh.step_group)
        return {
            "weights_bytes": sum(sent for sent, _ in shares),
            "weights_spared_bytes": sum(spared for _, spared in shares),
        }

    def _log_policy(self) -> None:
        """Record what people watch of the policy loss since the last phase, such as entropy."""
        objective = self.built.model.hooks.objective
        assert isinstance(objective, PolicyObjective)
        if (critic := critic_of(self.built.state)) is not None:
            of_values = critic.model.hooks.objective
            assert isinstance(of_values, PolicyObjective)
            objective.figures.take_values(of_values.figures)
        figures = objective.figures.take(self.mesh)
        if figures["policy.tokens"]:
            named = {
                name.removeprefix("policy."): value for name, value in figures.items()
            }
            self.recorder.log("policy", **named | self.multiplied)
            self.multiplied = {}

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
            requests = self._requests(
                self.job.phase_questions(each, self.curricula.now)
            )
            if self.writes_all:
                self.rollouts.request(requests)
            self.unasked = each + 1
        return True

    @property
    def writes_all(self) -> bool:
        """Whether this rank is the first, which alone asks engines in other processes for answers."""
        group = self.mesh.step_group
        return group is None or group.rank() == 0

    def _requests(self, questions: Sequence[TaskQuestion]) -> list[GroupRequest]:
        return [
            self.job.questions.request(question, self.rl.group, self.rl.tokens)
            for question in questions
        ]

    def _collected(
        self, questions: Sequence[TaskQuestion], asked: bool = False
    ) -> list[ScoredGroup]:
        """Return the answers to ``questions`` with their rewards, in order. This rank writes its share of them.

        ``asked``: whether they were asked for already.
        """
        return self._written(self.rollouts, questions, self._requests(questions), asked)

    def _written(
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
                    check_unscored(unscored, asked, self.rl.most_unscored)
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

    def _keep_examples(self, phase: int, groups: Sequence[ScoredGroup]) -> None:
        """Record a few answers with their rewards, for the browser of samples in the report."""
        shown = [
            {
                "question": str(group.group.request.question.prompt),
                "answers": [
                    self._example(answer, reward)
                    for answer, reward in zip(
                        group.group.answers, group.rewards, strict=True
                    )
                ],
            }
            for group in groups[:2]
        ]
        self.recorder.log("answers", phase=phase, groups=shown)
        if self.rl.keep and self.writes_all:
            text_of = self.job.questions.answer_text
            keep_phase(self.recorder.folder, phase, groups, text_of, self.rl.keep)

    def _example(self, answer: WrittenAnswer, reward: float) -> dict[str, Any]:
        """Return an answer as the report shows it, with the reward of each turn if it has several."""
        text = self.job.questions.answer_text(answer.ids)
        shown: dict[str, Any] = {"text": text, "reward": reward}
        if answer.trajectory is not None:
            shown["turns"] = [
                {
                    "text": turn.message,
                    "reward": turn.reward,
                    "seen": "\n".join(seen.content for seen in turn.observations),
                }
                for turn in answer.trajectory.turns
                if turn.source == "agent"
            ]
        return shown

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
            groups = self._written(self.local, questions, requests)
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
