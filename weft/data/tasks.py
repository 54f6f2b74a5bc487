"""Questions with known answers that a model answers during training and in ``weft eval``.

A line of JSON (or, in TOML, a table ``[[questions]]``) holds a ``prompt`` (or ``messages``) and an ``answer``; with
``choices`` the answer is one of these, or its number from 0. docs/how-to/evaluation.md says how they are counted.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.data.chat.chat_turns import from_text
from weft.data.chat.conversation import as_messages, conversation
from weft.data.chat.encode import ChatEncoder, Messages, own_encoder
from weft.data.files import read_records
from weft.data.reading import reading
from weft.data.tokenizer import Tokenizer
from weft.errors import WeftError
from weft.paths import home_path
from weft.recipe import Task
from weft.recipe.toml import read_toml

#: The keys of a question.
KEYS = {"prompt", "messages", "answer", "choices"}
#: Those that are lists, which tables hold as text.
LISTS = {"messages", "choices"}


class Text(NamedTuple):
    """Token ids of a prompt (``given``, at least one token), and of the continuation whose probability a model is to
    score (``following``).
    """

    given: Sequence[int]
    following: Sequence[int]


class Score(NamedTuple):
    """Score that a model gives a continuation.

    ``log_probability``: sum of the log-probabilities of its tokens. ``greedy``: whether greedy decoding would write the
    continuation.
    """

    log_probability: float
    greedy: bool


@dataclass(frozen=True)
class Question:
    """A question of a task, with possible ``answers``; ``right`` is the index of the right answer.

    A question with a single answer is open: the model has to write the answer itself. ``prompt``: a text, or a list of
    messages. ``place``: file and line, for errors.
    """

    place: str
    prompt: str | Messages
    answers: tuple[str, ...]
    right: int = 0


def read_questions(path: str | Path, limit: int = 0) -> list[Question]:
    """Read the questions of the file ``path``. If ``limit`` is above 0, at most ``limit`` questions are read.

    Raises :class:`WeftError`, which names the line of the first malformed question.
    """
    file, questions = home_path(path), []
    with reading(file, "a file of questions"):
        for number, record in (
            _toml(file) if file.suffix == ".toml" else read_records(file)
        ):
            questions.append(_question(record, f"{file}:{number}"))
    if not questions:
        raise WeftError(
            f"{file} has no question in it; a line is an object with 'prompt' and 'answer'"
        )
    return questions[:limit] if limit else questions


def _toml(file: Path) -> Iterator[tuple[int, Any]]:
    questions = read_toml(file).get("questions")
    if not isinstance(questions, list):
        raise WeftError(
            f"{file} has no question in it; write them as tables [[questions]]"
        )
    yield from enumerate(questions, 1)


def _question(record: Any, place: str) -> Question:
    def refuse(why: str) -> WeftError:
        return WeftError(f"{place}: {why}")

    if not isinstance(record, dict):
        raise refuse("a question is an object with 'prompt' and 'answer'")
    record = {
        key: from_text(value) if key in LISTS else value
        for key, value in record.items()
        if value is not None
    }
    if unknown := sorted(record.keys() - KEYS):
        raise refuse(
            f"unknown key {unknown[0]!r}; a question has {', '.join(sorted(KEYS))}"
        )
    if ("prompt" in record) == ("messages" in record):
        raise refuse("give either 'prompt' or 'messages'")
    prompt, answer, choices = (
        record.get("prompt", record.get("messages")),
        record.get("answer"),
        record.get("choices"),
    )
    if not (
        isinstance(prompt, str)
        or (isinstance(prompt, list) and all(isinstance(m, dict) for m in prompt))
    ):
        raise refuse(
            "'prompt' is a text, and 'messages' a list of objects with 'role' and 'content'"
        )
    if choices is None:
        if not isinstance(answer, str) or not answer:
            raise refuse("'answer' is the text that the model is to write")
        return Question(place, prompt, (answer,))
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(c, str) and c for c in choices)
    ):
        raise refuse("'choices' is a list of two texts or more")
    if isinstance(answer, str) and answer in choices:
        return Question(place, prompt, tuple(choices), choices.index(answer))
    # of a table, where numbers are texts
    if isinstance(answer, str) and answer.isdecimal():
        answer = int(answer)
    if (
        isinstance(answer, int)
        and not isinstance(answer, bool)
        and 0 <= answer < len(choices)
    ):
        return Question(place, prompt, tuple(choices), answer)
    raise refuse(
        f"'answer' is one of the choices, or its number from 0 to {len(choices) - 1}"
    )


def question_texts(
    question: Question, tokenizer: Tokenizer, encoder: ChatEncoder | None
) -> tuple[Text, ...]:
    """Return the token ids of the question's prompt with each of its answers.

    Without ``encoder`` they are tokenized as plain text. With ``encoder`` the prompt is a turn of the user, and each
    answer a turn of the assistant up to the token that ends it. The encoder must have been built with ``learn="last"``.
    Raises :class:`WeftError`, which names the question, if an answer has no token of its own.
    """
    try:
        texts = tuple(
            plain_text(question.prompt, answer, tokenizer)
            if encoder is None
            else _turn(question, answer, encoder)
            for answer in question.answers
        )
    except WeftError as error:
        raise WeftError(f"{question.place}: {error}") from None
    if not all(text.following for text in texts):
        raise WeftError(
            f"{question.place}: the answer has no token of its own after this prompt"
        )
    return texts


def plain_text(prompt: str | Messages, answer: str, tokenizer: Tokenizer) -> Text:
    """Tokenize prompt and answer as one text, and return the ids of each.

    Trailing blanks of the prompt belong to the answer, as tokenizers join them to the answer's first word.
    """
    if not isinstance(prompt, str):
        raise WeftError(
            "'messages' are for a model that chats; set chat = true, or give a 'prompt'"
        )
    stem = prompt.rstrip(" ")
    given = tokenizer.prompt_ids(stem)
    return Text(given, tokenizer.prompt_ids(prompt + answer)[len(given) :])


def _turn(question: Question, answer: str, encoder: ChatEncoder) -> Text:
    turn = {"role": "assistant", "content": answer}
    encoded = encoder.encode(conversation([*as_messages(question.prompt), turn]))
    learned = np.flatnonzero(encoded.weights)
    first, last = int(learned[0]), int(learned[-1]) + 1
    following = encoded.ids[first:last].tolist()
    ends = [
        at + 1
        for at, i in enumerate(following)
        if i in encoder.template.tokenizer.stops
    ]
    return Text(
        encoded.ids[:first].tolist(), following[: ends[0]] if ends else following
    )


@dataclass(frozen=True)
class Answered:
    """Result of a model on a task of questions.

    ``questions``: number of questions; ``right``: number of questions that were answered right. ``loss``: mean
    cross-entropy per token of the right answers; None: the model has written answers of its own, which have none.
    """

    questions: int
    right: int
    loss: float | None

    @property
    def accuracy(self) -> float:
        """Fraction of the questions that are answered right, from 0 to 1."""
        return self.right / self.questions


@dataclass(frozen=True)
class OpenTask:
    """Task whose questions are read and tokenized.

    ``name``: the task's name in metrics. ``every``: number of steps between evaluations, as in the recipe.
    ``questions``: the questions as they were read. ``texts``: for each question, the token ids of the prompt with each
    answer.
    """

    name: str
    every: int
    questions: tuple[Question, ...]
    texts: tuple[tuple[Text, ...], ...]

    def answered(
        self, scores: Callable[[Sequence[Text]], list[Score]]
    ) -> Answered | None:
        """Return the result of a model that scores the task's texts by ``scores``.

        Returns None on ranks where ``scores`` returns an empty list, because another rank has the result. For a
        question with choices, the model's answer is the most probable choice. A single answer counts as right if greedy
        decoding writes it.
        """
        scored = scores([text for texts in self.texts for text in texts])
        if not scored:
            return None
        results, right, loss, tokens = iter(scored), 0, 0.0, 0
        for question, texts in zip(self.questions, self.texts, strict=True):
            each = [next(results) for _ in texts]
            best = max(range(len(each)), key=lambda i: each[i].log_probability)
            right += best == question.right if len(each) > 1 else each[0].greedy
            loss -= each[question.right].log_probability
            tokens += len(texts[question.right].following)
        return Answered(len(self.questions), right, loss / tokens)


def open_task(task: Task, tokenizer: Tokenizer, name: str) -> OpenTask:
    """Read and tokenize the questions of a task. ``name``: name of the tokenizer's model in errors."""
    questions = read_questions(task.path, task.limit)
    encoder = own_encoder(tokenizer, name, "last") if task.chat else None
    texts = tuple(question_texts(q, tokenizer, encoder) for q in questions)
    return OpenTask(task.title, task.every, tuple(questions), texts)


def open_tasks(
    tasks: Sequence[Task], tokenizer: Tokenizer, name: str
) -> tuple[OpenTask, ...]:
    """Read and tokenize the questions of the tasks of a recipe. ``name``: name of the tokenizer's model in errors.

    Raises :class:`WeftError` if two tasks share a name.
    """
    opened = [open_task(task, tokenizer, name) for task in tasks]
    names = [task.name for task in opened]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise WeftError(
            f"two tasks are called {twice[0]!r}; give one of them another name"
        )
    return tuple(opened)
