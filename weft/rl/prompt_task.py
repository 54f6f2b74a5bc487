"""Tasks whose questions stand in a file of prompts, as data sets of Hugging Face have them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.errors import UsageError, WeftError
from weft.rl.reward_task import HELD_OUT, RewardTask, is_held_out
from weft.rl.rollout import RewardQuestion

if TYPE_CHECKING:
    from weft.recipe import Task

#: Columns of a prompt, a text or messages, and of a right answer; the first that a record has counts.
PROMPTS = ("prompt", "messages", "question", "problem")
ANSWERS = ("answer", "solution", "completion")

#: Prompts whose tokens are counted before a run: the longest by characters, as a file may have millions.
LONGEST = 500


class SplitQuestions(NamedTuple):
    """Questions of a task's file, divided into those for ``training`` and those for evaluation (``held_out``)."""

    training: list[RewardQuestion]
    held_out: list[RewardQuestion]


class PromptTask(RewardTask):
    """Base class of tasks that take their questions from the file ``path`` of the recipe.

    Training goes through all questions again and again, each time in a new random order. Questions for evaluation come
    from the file ``held_out``; without that, a hash of the prompt chooses an eighth of all questions.
    """

    def __init__(self, settings: Task, seed: int = 0) -> None:
        super().__init__(settings, seed)
        self._order: tuple[int, list[int]] = (-1, [])

    @cached_property
    def prompts(self) -> SplitQuestions:
        """The task's questions, read from its files.

        Raises :class:`WeftError` if they cannot be read, or if there are none for training.
        """
        path, held_out = self.settings.path, self.common.held_out
        if not path:
            raise UsageError(
                f"tasks.reward = {self.settings.reward!r} has no questions of its own; set tasks.path to a "
                "file of prompts"
            )
        every = read_prompts(path)
        if held_out:
            apart = read_prompts(held_out)
            known = {str(question.prompt) for question in apart}
            training = [q for q in every if str(q.prompt) not in known]
        else:
            training = [q for q in every if not is_held_out(q.prompt)]
            apart = [q for q in every if is_held_out(q.prompt)]
        if not training:
            raise WeftError(
                f"{path}: all of its prompts are held out for evaluation; add more"
            )
        return SplitQuestions(training, apart)

    def question(
        self, index: int, held_out: bool = False, level: int | None = None
    ) -> RewardQuestion:
        if held_out:
            apart = self.prompts.held_out
            if not apart:
                raise WeftError(
                    f"{self.settings.path}: none of its prompts is held out for evaluation (1 of {HELD_OUT} is, by its "
                    "text); add more, or set tasks.held_out to a file"
                )
            return self.asked(apart[index % len(apart)])
        training = self.prompts.training
        epoch, place = divmod(index, len(training))
        if self._order[0] != epoch:
            order = list(range(len(training)))
            Random(f"{self.seed}/{epoch}").shuffle(order)
            self._order = epoch, order
        return self.asked(training[self._order[1][place]])

    def longest_questions(self) -> list[RewardQuestion]:
        """Return the questions of the file with the longest prompts, counted in characters."""
        every = [*self.prompts.training, *self.prompts.held_out]
        every.sort(key=lambda question: len(str(question.prompt)), reverse=True)
        return [self.asked(question) for question in every[:LONGEST]]


def read_prompts(path: str) -> list[RewardQuestion]:
    """Read the questions of a file, a folder or a glob of JSON lines, JSON, CSV, Parquet or Arrow.

    A record has a prompt, as a text or as messages, and, if the reward needs it, an answer (:data:`PROMPTS`,
    :data:`ANSWERS`). If its messages end with a turn of the assistant, this turn is the answer. All other columns are
    facts of the question. Raises :class:`WeftError`, which names file and line, for a record that is no question.
    """
    from weft.data.files import read_records, source_files
    from weft.data.reading import reading
    from weft.recipe import Source

    questions = list[RewardQuestion]()
    for file in source_files(Source(kind="chat", path=path)):
        with reading(file, "a file of prompts"):
            for number, record in read_records(file):
                questions.append(_question(record, f"{file}:{number}"))
    if not questions:
        raise WeftError(
            f"{path} has no prompt in it; a line is an object with 'prompt'"
        )
    return questions


def _question(record: Any, place: str) -> RewardQuestion:
    from weft.data.chat.chat_turns import ConversationError
    from weft.data.chat.conversation import check_messages

    if not isinstance(record, Mapping):
        raise WeftError(f"{place}: a question is an object with 'prompt'")
    asked = next((key for key in PROMPTS if record.get(key)), None)
    if asked is None:
        raise WeftError(
            f"{place}: it has no prompt; name it {' or '.join(map(repr, PROMPTS))}"
        )
    given = next((key for key in ANSWERS if record.get(key) is not None), None)
    prompt, answer = record[asked], record[given] if given else ""
    if isinstance(prompt, list):
        try:
            prompt = check_messages(prompt)
        except ConversationError as error:
            raise WeftError(f"{place}: {error}") from None
        if prompt[-1]["role"] == "assistant":
            answer = answer or prompt[-1].get("content") or ""
            prompt = prompt[:-1]
    if not isinstance(prompt, str | list) or not prompt:
        raise WeftError(f"{place}: {asked!r} is a text, or a list of messages")
    facts = {k: v for k, v in record.items() if k not in (asked, given)}
    return RewardQuestion(prompt, str(answer), facts)
