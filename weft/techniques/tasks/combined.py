"""Combined: several rewards of one answer, as their weighted sum or product."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, PositiveFloat, ValidationError, field_validator

from weft.errors import UsageError
from weft.recipe import Task
from weft.registry import register
from weft.rl.build_task import reward_task
from weft.rl.reward_task import RewardTask
from weft.rl.rollout import RewardQuestion
from weft.section import Section


class CombinedSettings(Section):
    """Settings of a task that combines several rewards of one answer."""

    parts: tuple[dict[str, Any], ...] = Field(
        (),
        description=(
            "The rewards that are combined: tables with the settings of [[tasks]], each with a 'reward', its "
            "settings and a 'weight' (1 if not given). The questions are those of the first one."
        ),
    )
    how: Literal["sum", "product"] = Field(
        "sum",
        description=(
            "How rewards are combined. 'sum': each is multiplied by its weight, and they are added; 'product': each "
            "is raised to the power of its weight, and they are multiplied, so that a reward of 0 makes the result "
            "0."
        ),
    )
    scale: PositiveFloat = Field(
        1.0,
        description=(
            "Number by which the combined reward is divided. The sum of the weights, for example, turns a sum into "
            "a mean."
        ),
    )

    @field_validator("parts")
    @classmethod
    def _can_be_built(cls, parts: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:  # fmt: skip
        for part in parts:
            weight = part.get("weight", 1.0)
            if not isinstance(weight, int | float) or not math.isfinite(weight):
                raise ValueError(f"weight = {weight!r} is no number")
            if not _table(part).reward:
                raise ValueError("each part has a reward; a file of questions has none")
        return parts


def _table(part: dict[str, Any]) -> Task:
    """Return a part as the table of its own task."""
    values = {key: value for key, value in part.items() if key != "weight"}
    try:
        return Task(**values)
    except ValidationError as error:
        raise ValueError(str(error)) from None


@register("task", "combined", settings=CombinedSettings, title="Several rewards of one answer")  # fmt: skip
class Combined(RewardTask):
    """Asks the questions of the first task in ``parts``. The reward of an answer is the weighted sum or product of the
    rewards that all tasks in ``parts`` give it, divided by ``scale``.
    """

    def __init__(self, settings: Task, seed: int = 0) -> None:
        super().__init__(settings, seed)
        parts = settings.own(CombinedSettings).parts
        if not parts:
            raise UsageError(
                "tasks.reward = 'combined' has no parts; write [[tasks.parts]] tables, each with a reward"
            )
        self._parts = [reward_task(_table(part), seed) for part in parts]
        self._weights = [float(part.get("weight", 1.0)) for part in parts]

    @property
    def levels(self) -> int:  # type: ignore[override]
        return self._parts[0].levels

    def question(
        self, index: int, held_out: bool = False, level: int | None = None
    ) -> RewardQuestion:
        return self.asked(self._parts[0].question(index, held_out, level))

    def prepare(self) -> None:
        for part in self._parts:
            part.prepare()

    def score(self, question: RewardQuestion, answer: str) -> float:
        settings = self.settings.own(CombinedSettings)
        rewards = [part.reward(question, answer) for part in self._parts]
        pairs = list(zip(rewards, self._weights, strict=True))
        if settings.how == "sum":
            return sum(reward * weight for reward, weight in pairs) / settings.scale
        return math.prod(reward**weight for reward, weight in pairs) / settings.scale

    def close(self) -> None:
        for part in self._parts:
            part.close()
