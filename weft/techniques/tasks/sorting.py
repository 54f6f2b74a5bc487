"""Sorting: the letters of a word in the order of the alphabet."""

from __future__ import annotations

from random import Random
from string import ascii_lowercase

from pydantic import Field

from weft.registry import register
from weft.rl.reward_task import RewardTask
from weft.rl.rollout import RewardQuestion
from weft.section import Section


class SortingSettings(Section):
    """Settings of the task of sorting letters."""

    letters: int = Field(
        5,
        ge=2,
        le=26,
        description="How many letters each question gives. The answer has to list them in alphabetical order.",
    )


@register("task", "sorting", settings=SortingSettings, title="Letters to sort")
class Sorting(RewardTask):
    """Asks to sort letters, "dbca>", and rewards the answer "abcd" by 1, and any other by 0.

    Level n of difficulty has n + 2 letters.
    """

    @property
    def levels(self) -> int:  # type: ignore[override]
        return self.settings.own(SortingSettings).letters - 1

    def question(
        self, index: int, held_out: bool = False, level: int | None = None
    ) -> RewardQuestion:
        count = self.settings.own(SortingSettings).letters
        count = count if level is None else level + 2

        def make(random: Random) -> RewardQuestion:
            letters = [random.choice(ascii_lowercase) for _ in range(count)]
            return RewardQuestion(f"{''.join(letters)}>", "".join(sorted(letters)))

        return self.draw(index, held_out, make)

    def score(self, question: RewardQuestion, answer: str) -> float:
        return float(answer.strip() == question.answer)
