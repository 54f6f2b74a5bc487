"""Build the task that a recipe names as a reward: Weft's own, a plugin's or a function in a user's file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.errors import WeftError
from weft.registry import find
from weft.rl.function_task import FunctionTask
from weft.rl.reward_task import RewardTask

if TYPE_CHECKING:
    from weft.recipe import Task


def reward_task(settings: Task, seed: int = 0) -> RewardTask:
    """Build the task that ``settings``, a table ``[[tasks]]`` of a recipe, names as ``reward``.

    ``seed``: seed of its questions. Raises :class:`UsageError` if there is no task of this name, and :class:`WeftError`
    if a plugin has registered an object under it that is not a task.
    """
    if ".py:" in settings.reward:
        return FunctionTask(settings, seed)
    technique = find("task", settings.reward, "tasks.reward")
    task = technique.implementation(settings, seed)
    if not isinstance(task, RewardTask):
        raise WeftError(
            f"{technique} gives {type(task).__name__}; derive it from weft.rl.reward_task.RewardTask"
        )
    return task
