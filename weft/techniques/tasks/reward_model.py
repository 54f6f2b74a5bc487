"""Reward model: a trained model that scores answers."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from weft.errors import UsageError
from weft.registry import register
from weft.rl.prompt_task import PromptTask
from weft.rl.rollout import RewardQuestion
from weft.section import Section

if TYPE_CHECKING:
    from weft.generate.best_answer import Verifier


class RewardModelSettings(Section):
    """Settings of answers that a reward model scores."""

    model: str = Field(
        "",
        description=(
            "The reward model: folder of a run or a checkpoint of loss.kind = 'reward'."
        ),
    )
    device: str = Field(
        "cpu", description="Where the reward model computes: 'cpu' or 'cuda'."
    )
    scale: Literal["none", "logistic"] = Field(
        "none",
        description=(
            "'none': the reward is the model's score; 'logistic': the score's logistic function, from 0 to 1."
        ),
    )


@register(
    "task", "reward-model", settings=RewardModelSettings, title="Answers that a reward model scores"
)  # fmt: skip
class RewardModel(PromptTask):
    """Asks the prompts of a file, and rewards an answer by the score that a reward model gives the conversation."""

    _verifier: Verifier | None = None

    def prepare(self) -> None:
        from weft.checkpoint.model import open_model, tokenizer_of
        from weft.generate.best_answer import Verifier

        settings = self.settings.own(RewardModelSettings)
        if not settings.model:
            raise UsageError(
                "tasks.reward = 'reward-model' needs tasks.model, the folder of a reward model"
            )

        def warn(line: str) -> None:
            print(f"tasks.model: {line}", file=sys.stderr)

        model, files, _ = open_model(settings.model, settings.device, warn)
        tokenizer = tokenizer_of(files, settings.model)
        self._verifier = Verifier(model, tokenizer, settings.model, [])

    def score(self, question: RewardQuestion, answer: str) -> float:
        from weft.data.chat.conversation import as_messages

        if self._verifier is None:
            self.prepare()
            assert self._verifier is not None
        self._verifier.talk = as_messages(question.prompt)
        score = self._verifier(answer)
        if self.settings.own(RewardModelSettings).scale == "none":
            return score
        return 1 / (1 + math.exp(-score)) if score > 0 else 1 - 1 / (1 + math.exp(score))  # fmt: skip
