"""Prompts of a data set, with the right answer of each."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weft.registry import register
from weft.rl.answer_scorers import SCORERS
from weft.rl.prompt_task import PromptTask
from weft.rl.rollout import RewardQuestion
from weft.section import Section


class DatasetSettings(Section):
    """Settings of the task of giving the right answers to prompts of a file."""

    scorer: Literal["exact", "contains", "number", "regex"] = Field(
        "exact",
        description=(
            "How an answer is compared with the right one. Blanks at the ends are ignored. 'exact': it is the same "
            "text; 'contains': it contains the right answer; 'number': the last number in both is the same; "
            "'regex': the right answer is a regular expression that must match the whole answer."
        ),
    )


@register("task", "dataset", settings=DatasetSettings, title="Prompts of a data set")
class Dataset(PromptTask):
    """Asks the prompts of a file. An answer that agrees with the right answer is rewarded by 1, any other by 0."""

    def score(self, question: RewardQuestion, answer: str) -> float:
        compare = SCORERS[self.settings.own(DatasetSettings).scorer]
        return compare(answer, question.answer)
