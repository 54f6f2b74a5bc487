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
    """The curricula of those tasks that have one.

    A checkpoint may lie within a rollout phase, whose answers are then written again. Therefore the curricula before
    the phase are kept beside those after it.

    Attributes:
        ``kept``: JSON values that checkpoints keep, by the task's index as a text: the curriculum ``before`` the phase
            with the number ``phase``, and ``after`` it.
        ``levels``: number of levels of each task with a curriculum, by the task's index.
        ``now``: the curricula for the questions of the present phase, by the task's index.
    """

    kept: dict[str, Any]
    levels: dict[int, int]
    now: dict[int, Curriculum]

    @classmethod
    def of_job(cls, job: RlPhases, kept: dict[str, Any]) -> Self:
        """Return the curricula of a job, as the checkpoint from which it goes on has left them in ``kept``."""
        levels = {
            i: job.questions.tasks[i].levels
            for i, table in enumerate(job.rewarded)
            if table.own(RewardSettings).curriculum
        }
        return cls(kept, levels, {})

    def begin(self, phase: int) -> None:
        """Set :attr:`now` to the curricula before rollout phase ``phase``."""
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
        """Update the curricula by all answers of rollout phase ``phase``, given with their questions."""
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
