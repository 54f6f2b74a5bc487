"""The questions of a run as token ids, in an order that depends on their numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from weft.data.batch import IGNORE
from weft.data.order import Row, hash_keys
from weft.data.tasks import Question, Text, question_texts
from weft.errors import UsageError
from weft.rl.episode import ChatTurns, PlainTurns
from weft.rl.rollout import GroupRequest, RewardQuestion

if TYPE_CHECKING:
    from weft.data.chat.encode import ChatEncoder
    from weft.data.tokenizer import Tokenizer
    from weft.rl.curriculum import Curriculum
    from weft.rl.episode import TurnEncoder
    from weft.rl.reward_task import RewardTask

#: First keys that keep the uses of random numbers apart: of answers, and of answers in evaluations.
_TRAINING, _EVALUATION = 101, 102
#: Characters of a question that an error shows.
SHOWN = 60


@dataclass(frozen=True)
class TaskQuestion:
    """A question with its number in the run and the task that scores it.

    ``number``: index of the question in the run. ``task``: index of the task among those of the recipe. ``question``:
    the question. ``text``: token ids of its prompt, and of the reference answer, which is empty if none is known.
    ``level``: level of difficulty that a curriculum has chosen; None: the level in the task's settings.
    """

    number: int
    task: int
    question: RewardQuestion
    text: Text
    level: int | None = None


@dataclass(frozen=True)
class QuestionStream:
    """Sequence of the training questions of all tasks, which take turns.

    Attributes:
        ``tasks``: the tasks; question ``n`` of the run comes from task ``n % len(tasks)``.
        ``tokenizer``: the model's tokenizer.
        ``encoder``: renders conversations; None for a model without a chat template, whose prompts are plain texts.
        ``seed``: seed from which the seeds of all answers follow.
        ``room``: largest number of tokens of prompt and answer together.
    """

    tasks: Sequence[RewardTask]
    tokenizer: Tokenizer
    encoder: ChatEncoder | None
    seed: int
    room: int

    def question(
        self, number: int, curricula: Mapping[int, Curriculum] = {}
    ) -> TaskQuestion:
        """Return training question ``number`` of the run.

        ``curricula``: for the index of a task, the curriculum that chooses the level of its questions.
        """
        index, task = divmod(number, len(self.tasks))
        chooser = curricula.get(task)
        level = None if chooser is None else chooser.level(index, self.seed)
        return self._opened(number, task, index, held_out=False, level=level)

    def held_out(self, task: int, index: int) -> TaskQuestion:
        """Return held-out question ``index`` of task number ``task``, for evaluation."""
        return self._opened(index, task, index, held_out=True)

    def request(self, asked: TaskQuestion, answers: int, most: int) -> GroupRequest:
        """Return the request for ``answers`` answers of up to ``most`` tokens to the training question ``asked``."""
        return self._request(asked, answers, most, _TRAINING)

    def evaluation_request(
        self, asked: TaskQuestion, answers: int, most: int
    ) -> GroupRequest:
        """Return the request for ``answers`` answers of up to ``most`` tokens to the held-out question ``asked``."""
        return self._request(asked, answers, most, _EVALUATION)

    @cached_property
    def turn_encoder(self) -> TurnEncoder:
        """Encoder of the messages with which environments answer the turns of the policy."""
        if self.encoder is None:
            return PlainTurns(self.tokenizer)
        return ChatTurns(self.encoder)

    def check(self, supervised: bool, most: int) -> None:
        """Ask each task for some questions, to find mistakes before training starts.

        ``supervised``: whether each question needs a reference answer. ``most``: largest number of tokens of an answer.
        Raises :class:`UsageError` if the model cannot read a question, if there is no room for one of the longest, or
        if an answer is missing.
        """
        for task, asked in enumerate(self.tasks):
            self.held_out(task, 0)
            first = self.question(task)
            if supervised:
                supervised_row(first)
            lengths = [
                (len(self._text(0, task, question).given), question)
                for question in asked.longest_questions()
            ]
            if long := [pair for pair in lengths if pair[0] + most > self.room]:
                length, question = max(long, key=itemgetter(0))
                others = (
                    f" (so it is with {len(long) - 1} more)" if len(long) > 1 else ""
                )
                shown = repr(str(question.prompt)[:SHOWN])
                raise self._no_room(shown, length, most, others)

    def _no_room(
        self, name: str, length: int, most: int, others: str = ""
    ) -> UsageError:
        """Return the error of a question with ``length`` tokens, beside which ``most`` tokens find no room."""
        return UsageError(
            f"question {name} has {length} tokens, and with rl.tokens = {most} for the answer this is more than "
            f"data.seq_len = {self.room}{others}; raise data.seq_len, lower rl.tokens, or leave such questions out"
        )

    def _request(
        self, asked: TaskQuestion, answers: int, most: int, use: int
    ) -> GroupRequest:
        prompt = tuple(asked.text.given)
        if len(prompt) + most > self.room:
            raise self._no_room(str(asked.number), len(prompt), most)
        seed = int(
            hash_keys(use, self.seed, asked.task, asked.number)[0] >> np.uint64(16)
        )
        return GroupRequest(asked.number, asked.question, prompt, answers, seed)

    def _opened(
        self,
        number: int,
        task: int,
        index: int,
        held_out: bool,
        level: int | None = None,
    ) -> TaskQuestion:
        question = self.tasks[task].question(index, held_out, level)
        text = self._text(number, task, question)
        return TaskQuestion(number, task, question, text, level)

    def _text(self, number: int, task: int, question: RewardQuestion) -> Text:
        """Return the token ids of ``question``, with the number ``number`` in the run, and of its reference answer."""
        if self.encoder is None and not isinstance(question.prompt, str):
            raise UsageError(
                f"task {task + 1} asks in messages, and the model's tokenizer has no chat template; set "
                "data.chat.template"
            )
        given = Question(
            f"question {number}", question.prompt, (question.answer or "-",)
        )
        (text,) = question_texts(given, self.tokenizer, self.encoder)
        if not question.answer:
            return Text(text.given, ())
        if text.following[-1] not in self.stops:
            return Text(text.given, [*text.following, self.tokenizer.closing])
        return text

    @property
    def stops(self) -> tuple[int, ...]:
        """Ids of the tokens that end an answer, from the model's tokenizer."""
        return self.tokenizer.stops

    def answer_text(self, ids: Sequence[int]) -> str:
        """Return the text of the answer with the token ids ``ids``, without the token that ends it."""
        return self.tokenizer.decode([i for i in ids if i not in self.stops])


def supervised_row(asked: TaskQuestion) -> Row:
    """Return a row to train on the reference answer of a question. Raises :class:`UsageError` if no answer is known."""
    given, following = asked.text
    if not following:
        raise UsageError(
            f"rl.start.steps needs right answers, and question {asked.number} has none; set rl.start.steps = 0"
        )
    ids = np.array([*given, *following], np.int64)
    labels = ids[1:].copy()
    labels[: len(given) - 1] = IGNORE
    return Row(ids[:-1], labels, np.zeros(1, np.int64))
