"""Regex: answers of a given form."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from weft.registry import register
from weft.rl.prompt_task import PromptTask
from weft.rl.rollout import RewardQuestion
from weft.section import Section


class RegexSettings(Section):
    """Settings of the task of answering in the form of a regular expression."""

    pattern: str = Field(
        "",
        description=(
            "Regular expression that must match the whole answer for the reward 1. Blanks at both ends of the "
            "answer are removed first, and '.' also matches line ends."
        ),
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"it is no regular expression: {error}") from None
        return pattern


@register("task", "regex", settings=RegexSettings, title="Answers of a given form")
class Regex(PromptTask):
    """Asks the prompts of a file, and rewards an answer that a regular expression matches by 1, and any other by 0."""

    def score(self, question: RewardQuestion, answer: str) -> float:
        pattern = self.settings.own(RegexSettings).pattern
        return float(bool(re.fullmatch(pattern, answer.strip(), re.DOTALL)))
