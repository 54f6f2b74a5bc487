"""Calculator: sums of products that are too large for a small model, with a calculator to ask."""

from __future__ import annotations

from fractions import Fraction
from random import Random
from typing import TYPE_CHECKING

from pydantic import Field

from weft.registry import register
from weft.rl.answer_scorers import last_number
from weft.rl.arithmetic import arithmetic_value, parsed_arithmetic
from weft.rl.reward_task import RewardTask
from weft.rl.rollout import RewardQuestion
from weft.section import Section

if TYPE_CHECKING:
    from weft.rl.environment import Environment


class CalculatorSettings(Section):
    """Settings of the task of using a calculator."""

    digits: int = Field(
        3,
        ge=1,
        le=9,
        description=(
            "Largest number of digits of the three numbers in a question a * b + c. The model may use a "
            "calculator to answer."
        ),
    )


#: The calculator as chat templates show it to the model.
SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an expression of numbers, + - * / and brackets.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def calculate(expression: str) -> str:
    """Return the value of an expression as a text: a whole number, or a fraction such as "7/2"."""
    value: Fraction = arithmetic_value(parsed_arithmetic(expression))
    return str(value)


@register("task", "calculator", settings=CalculatorSettings, title="Questions with a calculator")  # fmt: skip
class Calculator(RewardTask):
    """Asks for a product and a sum, "123*456+789=", in turns in which the model can ask a calculator. The answer is
    rewarded by 1 if its last number is right. The calculator parses arithmetic expressions and accepts nothing else.
    """

    def question(
        self, index: int, held_out: bool = False, level: int | None = None
    ) -> RewardQuestion:
        limit = 10 ** self.settings.own(CalculatorSettings).digits

        def make(random: Random) -> RewardQuestion:
            first, second, third = (random.randrange(limit) for _ in range(3))
            return RewardQuestion(
                f"{first}*{second}+{third}=", str(first * second + third)
            )

        return self.draw(index, held_out, make)

    def score(self, question: RewardQuestion, answer: str) -> float:
        number = last_number(answer)
        return float(number is not None and number == int(question.answer))

    def environment(self) -> Environment:
        from weft.rl.tool_environment import AgentTool, ToolEnvironment

        return ToolEnvironment([AgentTool(SCHEMA, calculate)], self.reward)
