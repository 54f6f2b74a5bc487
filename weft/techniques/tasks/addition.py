"""Addition: sums of two numbers, in plain characters."""

from __future__ import annotations

from random import Random

from pydantic import Field

from weft.registry import register
from weft.rl.reward_task import RewardTask
from weft.rl.rollout import RewardQuestion
from weft.section import Section


class AdditionSettings(Section):
    """Settings of the task of adding two numbers: how many digits the numbers have, and how they are written."""

    digits: int = Field(
        2,
        ge=1,
        le=18,
        description="Largest number of digits of the two numbers that are added.",
    )
    reversed: bool = Field(
        False,
        description="Write the right answer with its digits from right to left. Small models learn this faster.",
    )
    padded: bool = Field(
        False,
        description=(
            "Write the numbers and their sum with leading zeros, so that each always has the same length. Small "
            "models learn this faster."
        ),
    )


@register("task", "addition", settings=AdditionSettings, title="Sums of two numbers")
class Addition(RewardTask):
    """Asks for the sum of two numbers, "12+34=", and rewards the answer "46" by 1, and any other by 0.

    Level n of difficulty has numbers of at most n + 1 digits.
    """

    @property
    def levels(self) -> int:  # type: ignore[override]
        return self.settings.own(AdditionSettings).digits

    def question(
        self, index: int, held_out: bool = False, level: int | None = None
    ) -> RewardQuestion:
        settings = self.settings.own(AdditionSettings)
        limit = 10 ** (settings.digits if level is None else level + 1)

        def make(random: Random) -> RewardQuestion:
            first, second = random.randrange(limit), random.randrange(limit)
            width = settings.digits if settings.padded else 1
            total = f"{first + second:0{width + settings.padded}}"
            answer = total[::-1] if settings.reversed else total
            return RewardQuestion(f"{first:0{width}}+{second:0{width}}=", answer)

        return self.draw(index, held_out, make)

    def score(self, question: RewardQuestion, answer: str) -> float:
        return float(answer.strip() == question.answer)
