"""Curricula of a run: the level of each question follows from the pass rates of all rollout phases before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from weft.recipe.reward_settings import RewardSettings
from weft.rl.curriculum import Curriculum, LevelResult

if TYPE_CHECKING:
    from weft.rl.questions import TaskQuestion
    from weft.rl.rl_phases import RlPhases
    from weft.rl.scored_answers import ScoredGroup


@dataclass
class PhaseCurricula:
    """The curricula of all tasks that have one, over the rollout phases of a run.

    A checkpoint may lie within a rollout phase, whose answers are then written again. Therefore the curricula before
    the phase are kept beside those after it.

    Attributes:
        ``kept``: JSON values that checkpoints keep, by the task's index as a text. Each holds the number of a
            ``phase``, and the curriculum ``before`` and ``after`` it.
        ``levels``: number of levels of each task with a curriculum, by the task's index.
        ``now``: the curricula for the questions of the present phase, by the task's index.
    """

    kept: dict[str, Any]
    levels: dict[int, int]
    now: dict[int, Curriculum]

    @classmethod
    def of_job(cls, job: RlPhases, kept: dict[str, Any]) -> Self:
        """Return the curricula of a job.

        ``kept``: JSON values of a checkpoint, empty for a new run; they are updated in place.
        """
        levels = {
            i: job.questions.tasks[i].levels
            for i, table in enumerate(job.rewarded)
            if table.own(RewardSettings).curriculum
        }
        return cls(kept, levels, {})

    def begin(self, phase: int) -> None:
        """Set :attr:`now` to the curricula with which rollout phase ``phase`` chooses its questions."""
        for task, levels in self.levels.items():
            saved = self.kept.get(str(task))
            if saved is None:
                self.now[task] = Curriculum.of_levels(levels)
                continue
            which = "before" if saved["phase"] == phase else "after"
            self.now[task] = Curriculum.from_json(saved[which], levels)

    def end(
        self, phase: int, answered: Iterable[tuple[TaskQuestion, ScoredGroup]]
    ) -> None:
        """Update the curricula with the answers of rollout phase ``phase``.

        ``answered``: pairs of a question, and its answers with their rewards.
        """
        results: dict[int, list[LevelResult]] = {task: [] for task in self.levels}
        for question, group in answered:
            if question.level is not None:
                right = sum(min(1.0, max(0.0, reward)) for reward in group.scored)
                result = LevelResult(question.level, right, len(group.scored))
                results[question.task].append(result)
        for task, before in self.now.items():
            self.kept[str(task)] = {
                "phase": phase,
                "before": before.to_json(),
                "after": before.after(results[task]).to_json(),
            }

    def rates(self, task: int) -> Sequence[float]:
        """Return the pass rates of a task by level, after the present phase."""
        saved = self.kept[str(task)]["after"]
        return Curriculum.from_json(saved, self.levels[task]).rates
