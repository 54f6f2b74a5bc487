"""Countdown: reach a number from given numbers with the four basic operations."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from random import Random

from pydantic import Field

from weft.registry import register
from weft.rl.arithmetic import arithmetic_value, combined, numbers_in, parsed_arithmetic
from weft.rl.reward_task import RewardTask
from weft.rl.rollout import RewardQuestion
from weft.section import Section


class CountdownSettings(Section):
    """Settings of the task of writing an arithmetic expression of given numbers that has a given value."""

    numbers: int = Field(
        3,
        ge=2,
        le=6,
        description=(
            "How many numbers a question gives. The answer has to combine all of them by + - * / to reach a given "
            "target."
        ),
    )
    largest: int = Field(
        20,
        ge=2,
        le=1000,
        description="Largest number that a question can give. Numbers are whole and at least 1.",
    )


@register("task", "countdown", settings=CountdownSettings, title="Countdown")
class Countdown(RewardTask):
    """Asks for an arithmetic expression that makes a number of given ones, "3 5 7 -> 22:", and rewards a right one such
    as "3*5+7" by 1. Each given number is to be used exactly once. Every question has a solution. Answers are parsed
    into a tree whose nodes are checked, and never evaluated by Python. Level n of difficulty gives n + 2 numbers.
    """

    @property
    def levels(self) -> int:  # type: ignore[override]
        return self.settings.own(CountdownSettings).numbers - 1

    def question(
        self, index: int, held_out: bool = False, level: int | None = None
    ) -> RewardQuestion:
        settings = self.settings.own(CountdownSettings)
        count = settings.numbers if level is None else level + 2

        def make(random: Random) -> RewardQuestion:
            while True:
                numbers = [random.randint(1, settings.largest) for _ in range(count)]
                total, answer = Fraction(numbers[0]), str(numbers[0])
                for number in numbers[1:]:
                    sign = random.choice("+-*/")
                    total = combined(sign, total, Fraction(number))
                    answer = f"({answer}{sign}{number})"
                if total.denominator == 1 and 0 < total <= 10 * settings.largest:
                    break
            given = sorted(numbers)
            prompt = f"{' '.join(map(str, given))} -> {total}:"
            return RewardQuestion(
                prompt, answer[1:-1], {"numbers": given, "target": int(total)}
            )

        return self.draw(index, held_out, make)

    def score(self, question: RewardQuestion, answer: str) -> float:
        try:
            tree = parsed_arithmetic(answer)
            value = arithmetic_value(tree, signed=False)
        except (ValueError, ZeroDivisionError):
            return 0.0
        used = Counter(numbers_in(tree))
        given = Counter(question.facts["numbers"])
        return float(value == question.facts["target"] and used == given)
