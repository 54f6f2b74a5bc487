"""The base of tasks whose answers get a reward."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING

from weft.errors import UsageError
from weft.recipe.reward_settings import RewardSettings
from weft.rl.rollout import RewardQuestion

if TYPE_CHECKING:
    from weft.data.chat.encode import Messages
    from weft.recipe import Task
    from weft.rl.environment import Environment

#: Every so-manieth different question is held out: training never asks it.
HELD_OUT = 8
#: Questions whose lengths are looked at before a run.
LOOKED_AT = 16
#: Questions that are drawn for one that is held out, or one that is not, before a task counts as too small.
TRIES = 2000


class RewardTask:
    """Base class of tasks whose answers get a reward.

    ``settings``: the table ``[[tasks]]`` of the recipe, with the settings of this task. ``seed``: seed of the
    questions. ``levels``: number of levels of difficulty, counted from 0; a curriculum chooses among them.
    ``travelled``: bytes that scoring the last answer has sent to a server, and received from it.
    """

    levels = 1
    travelled = (0, 0)

    def __init__(self, settings: Task, seed: int = 0) -> None:
        self.settings, self.seed = settings, seed

    def question(
        self, index: int, held_out: bool = False, level: int | None = None
    ) -> RewardQuestion:
        """Return question number ``index``, which depends on the seed and these arguments alone.

        ``held_out``: whether to return a question for evaluation. Such a question is never one for training.
        ``level``: level of difficulty; None: as the settings say.
        """
        raise NotImplementedError

    def longest_questions(self) -> list[RewardQuestion]:
        """Return some questions that are likely the longest, so that a run can check before it starts that they fit.

        Here these are the first ones, as questions that are drawn differ little in length.
        """
        return [self.question(index) for index in range(LOOKED_AT)]

    def score(self, question: RewardQuestion, answer: str) -> float:
        """Return the reward of the text ``answer`` as an answer to ``question``, usually from 0 to 1. Text of the
        answer is never executed in this process.
        """
        raise NotImplementedError

    @property
    def common(self) -> RewardSettings:
        """The settings that every task with a reward has, such as limits of time and memory, apart from the settings of
        this task.
        """
        return self.settings.own(RewardSettings)

    def prepare(self) -> None:
        """Load whatever :meth:`score` needs, such as a model. Called once, in the process that scores."""

    def reward(self, question: RewardQuestion, text: str) -> float:
        """Return the reward of a text that answers ``question``.

        If the recipe's table sets ``tag``, only the text inside the last ``<tag>`` is scored, and a text without the
        tag gets 0.
        """
        answer = tagged(text, self.common.tag) if self.common.tag else text
        return 0.0 if answer is None else self.score(question, answer)

    def environment(self) -> Environment | None:
        """Return a new environment for an answer of several turns; None if answers to this task have a single turn."""
        return None

    def close(self) -> None:
        """Free the task's resources, such as a loaded model."""

    def asked(self, question: RewardQuestion) -> RewardQuestion:
        """Return ``question`` with its prompt put into the text ``ask`` of the recipe's table, if the table has one."""
        if not self.common.ask or not isinstance(question.prompt, str):
            return question
        prompt = self.common.ask.replace("{question}", question.prompt)
        return replace(question, prompt=prompt)

    def draw(
        self, index: int, held_out: bool, make: Callable[[Random], RewardQuestion]
    ) -> RewardQuestion:
        """Return a random question from ``make``, for training or, with ``held_out``, for evaluation.

        ``index``: number of the question, which determines the random numbers together with the seed. Whether a
        question is held out depends on its text only, and so is the same under every seed. Raises :class:`UsageError`
        if the task has too few different questions.
        """
        random = Random(f"{self.seed}/{index}/{held_out}")
        for _ in range(TRIES):
            question = make(random)
            if is_held_out(question.prompt) == held_out:
                return self.asked(question)
        raise UsageError(
            f"tasks.reward = {self.settings.reward!r}: its settings give too few different questions to hold some out; "
            "make them more"
        )


def tagged(text: str, tag: str) -> str | None:
    """Return the text between the last ``<tag>`` and the ``</tag>`` after it; None if there is no such pair."""
    _, opening, rest = text.rpartition(f"<{tag}>")
    answer, closing, _ = rest.partition(f"</{tag}>")
    return answer if opening and closing else None


def is_held_out(prompt: str | Messages) -> bool:
    """Return whether a question is for evaluation only, which a hash of its prompt decides."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    digest = blake2b(text.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT == 0
