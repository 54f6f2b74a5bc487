"""Reward model: a trained model that scores answers."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from pydantic import Field

from weft.data.reading import reading
from weft.errors import UsageError, WeftError
from weft.paths import home_path
from weft.registry import register
from weft.rl.prompt_task import PromptTask
from weft.rl.rollout import RewardQuestion
from weft.section import Section

if TYPE_CHECKING:
    from weft.data.chat.encode import Messages
    from weft.generate.best_answer import Verifier


class RewardModelSettings(Section):
    """Settings of the task of answering prompts of a file so that a reward model gives high scores."""

    model: str = Field(
        "",
        description=(
            "The reward model that scores answers: the folder of a run or checkpoint that was trained with "
            "loss.kind = 'reward', or the address http://HOST:PORT of a server of such a model, which 'weft serve' "
            "starts."
        ),
    )
    key: str = Field(
        "",
        description="Path of a file with the API key of the reward model's server. Empty: the server needs no key.",
    )
    device: str = Field(
        "cpu",
        description="Device on which the reward model computes: 'cpu' or 'cuda'. A server chooses its own.",
    )
    scale: Literal["none", "logistic"] = Field(
        "none",
        description=(
            "How the reward model's score becomes the reward. 'none': it is the reward; 'logistic': the reward is 1 "
            "/ (1 + exp(-score)), between 0 and 1."
        ),
    )


@register(
    "task", "reward-model", settings=RewardModelSettings, title="Answers that a reward model scores"
)  # fmt: skip
class RewardModel(PromptTask):
    """Asks the prompts of a file, and rewards an answer by the score that a reward model gives the conversation."""

    _verifier: Verifier | None = None
    _key = ""

    def prepare(self) -> None:
        from weft.checkpoint.model import open_model, tokenizer_of
        from weft.generate.best_answer import Verifier

        settings = self.settings.own(RewardModelSettings)
        if not settings.model:
            raise UsageError(
                "tasks.reward = 'reward-model' needs tasks.model, the folder of a reward model"
            )

        if _is_address(settings.model):
            if settings.key:
                with reading(Path(settings.key), "a file with an API key"):
                    self._key = home_path(settings.key).read_text().strip()
            return

        def warn(line: str) -> None:
            print(f"tasks.model: {line}", file=sys.stderr)

        model, files, _ = open_model(settings.model, settings.device, warn)
        tokenizer = tokenizer_of(files, settings.model)
        self._verifier = Verifier(model, tokenizer, settings.model, [])

    def score(self, question: RewardQuestion, answer: str) -> float:
        from weft.data.chat.conversation import as_messages

        settings = self.settings.own(RewardModelSettings)
        talk = as_messages(question.prompt)
        if _is_address(settings.model):
            score = self._asked_score([*talk, {"role": "assistant", "content": answer}])
        else:
            if self._verifier is None:
                self.prepare()
                assert self._verifier is not None
            self._verifier.talk = talk
            score = self._verifier(answer)
        if settings.scale == "none":
            return score
        return 1 / (1 + math.exp(-score)) if score > 0 else 1 - 1 / (1 + math.exp(score))  # fmt: skip

    def _asked_score(self, talk: Messages) -> float:
        """Ask the server for the score of a conversation."""
        self.travelled = (0, 0)
        where = self.settings.own(RewardModelSettings).model.rstrip("/")
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        body = json.dumps({"messages": talk}).encode()
        url = f"{where.removesuffix('/v1')}/v1/score"
        asking = Request(url, body, headers, method="POST")
        try:
            with urlopen(asking, timeout=self.common.seconds) as reply:
                said = reply.read()
            score: float = json.loads(said)["score"]
        except HTTPError as error:
            why = error.read(2000).decode(errors="replace")
            raise WeftError(f"{url} answers {error.code}: {why}") from None
        except (OSError, ValueError, KeyError) as error:
            raise WeftError(f"{url} gives no score: {error}") from None
        self.travelled = (len(body), len(said))
        return score


def _is_address(model: str) -> bool:
    return model.startswith(("http://", "https://"))
