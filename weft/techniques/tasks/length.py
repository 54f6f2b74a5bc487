"""Length: write exactly so many letters."""

from __future__ import annotations

from random import Random

from pydantic import Field

from weft.registry import register
from weft.rl.reward_task import RewardTask
from weft.rl.rollout import RewardQuestion
from weft.section import Section

#: How much longer the longest answer of a level is than that of the level below.
STEP = 8


class LengthSettings(Section):
    """Settings of the task of writing an answer of a given length."""

    longest: int = Field(
        32,
        ge=2,
        le=4096,
        description="Largest number of letters that a question asks the model to write.",
    )


@register("task", "length", settings=LengthSettings, title="Answers of a given length")
class Length(RewardTask):
    """Asks for n letters a, "a*5=", and rewards the answer with exactly n of them, "aaaaa", by 1, and any other by 0.
    Right answers of very different lengths show how a loss weighs short and long ones.
    """

    @property
    def levels(self) -> int:  # type: ignore[override]
        return -(-self.settings.own(LengthSettings).longest // STEP)

    def question(
        self, index: int, held_out: bool = False, level: int | None = None
    ) -> RewardQuestion:
        longest = self.settings.own(LengthSettings).longest
        longest = longest if level is None else min(longest, (level + 1) * STEP)

        def make(random: Random) -> RewardQuestion:
            count = random.randint(1, longest)
            return RewardQuestion(f"a*{count}=", "a" * count)

        return self.draw(index, held_out, make)

    def score(self, question: RewardQuestion, answer: str) -> float:
        return float(answer.strip() == question.answer)
