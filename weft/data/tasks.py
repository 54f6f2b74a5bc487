"""Questions with known answers, from a file: what a model is asked while it is trained, and by ``weft eval``.

A line of JSON (or, in TOML, a table ``[[questions]]``) holds a ``prompt`` (or ``messages``) and an ``answer``; with
``choices`` the answer is one of these, or its number from 0. docs/evaluation.md says how they are counted.
"""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.chat.conversation import conversation
from weft.data.chat.encode import ChatEncoder
from weft.data.chat.prompt import Messages, as_messages
from weft.data.corpora import reading, records
from weft.data.tokenizer import Tokenizer
from weft.errors import WeftError

#: The keys of a question.
KEYS = {"prompt", "messages", "answer", "choices"}


@dataclass(frozen=True)
class Question:
    """``answers``: the choices, of which number ``right`` is right; one alone is to be written by the model itself.

    ``place``: file and line, for errors.
    """

    place: str
    prompt: str | Messages
    answers: tuple[str, ...]
    right: int = 0


def read_questions(path: str | Path, limit: int = 0) -> list[Question]:
    """The questions of a file, the first ``limit`` of them if that is above 0.

    Raises :class:`WeftError` in one line, with the line of the first question that is none.
    """
    file, found = Path(path).expanduser(), []
    with reading(file, "a file of questions"):
        for number, record in _toml(file) if file.suffix == ".toml" else records(file):
            found.append(_question(record, f"{file}:{number}"))
    if not found:
        raise WeftError(f"{file} has no question in it; a line is an object with 'prompt' and 'answer'")
    return found[:limit] if limit else found


def _toml(file: Path) -> Iterator[tuple[int, Any]]:
    try:
        tree = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise WeftError(f"{file} is not valid TOML: {error}") from None
    found = tree.get("questions")
    if not isinstance(found, list):
        raise WeftError(f"{file} has no question in it; write them as tables [[questions]]")
    yield from enumerate(found, 1)


def _question(record: Any, place: str) -> Question:
    def refuse(why: str) -> WeftError:
        return WeftError(f"{place}: {why}")

    if not isinstance(record, dict):
        raise refuse("a question is an object with 'prompt' and 'answer'")
    if unknown := sorted(record.keys() - KEYS):
        raise refuse(f"unknown key {unknown[0]!r}; a question has {', '.join(sorted(KEYS))}")
    if ("prompt" in record) == ("messages" in record):
        raise refuse("give either 'prompt' or 'messages'")
    prompt, answer, choices = record.get("prompt", record.get("messages")), record.get("answer"), record.get("choices")
    if not (isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(m, dict) for m in prompt))):
        raise refuse("'prompt' is a text, and 'messages' a list of objects with 'role' and 'content'")
    if choices is None:
        if not isinstance(answer, str) or not answer:
            raise refuse("'answer' is the text that the model is to write")
        return Question(place, prompt, (answer,))
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise refuse("'choices' is a list of two texts or more")
    if isinstance(answer, str) and answer in choices:
        return Question(place, prompt, tuple(choices), choices.index(answer))
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return Question(place, prompt, tuple(choices), answer)
    raise refuse(f"'answer' is one of the choices, or its number from 0 to {len(choices) - 1}")


def question_ids(
    question: Question, tokenizer: Tokenizer, encoder: ChatEncoder | None
) -> list[tuple[list[int], list[int]]]:
    """For every answer the ids that are given, and those of the answer.

    With ``encoder``, which learns the last turn, the prompt is what the user says, and the answer a turn of the
    assistant's up to the token that ends it.
    """
    try:
        made = [
            text_ids(question.prompt, answer, tokenizer) if encoder is None else _turn_ids(question, answer, encoder)
            for answer in question.answers
        ]
    except WeftError as error:
        raise WeftError(f"{question.place}: {error}") from None
    if not all(following for _, following in made):
        raise WeftError(f"{question.place}: the answer has no token of its own after this prompt")
    return made


def text_ids(prompt: str | Messages, answer: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids of a text, and those of what follows it, as they are when both stand together.

    Blanks at the end of the prompt are the answer's, whose first word they are a part of to a tokenizer.
    """
    if not isinstance(prompt, str):
        raise WeftError("'messages' are for a model that chats; set chat = true, or give a 'prompt'")
    stem = prompt.rstrip(" ")
    given = tokenizer.prompt_ids(stem)
    return given, tokenizer.prompt_ids(prompt + answer)[len(given) :]


def _turn_ids(question: Question, answer: str, encoder: ChatEncoder) -> tuple[list[int], list[int]]:
    turn = {"role": "assistant", "content": answer}
    encoded = encoder.encode(conversation([*as_messages(question.prompt), turn]))
    learned = np.flatnonzero(encoded.weights)
    first, last = int(learned[0]), int(learned[-1]) + 1
    following = encoded.ids[first:last].tolist()
    ends = [at + 1 for at, i in enumerate(following) if i in encoder.template.tokenizer.stops]
    return encoded.ids[:first].tolist(), following[: ends[0]] if ends else following


@dataclass(frozen=True)
class Answered:
    """How a model did: the share of ``questions`` that it has right, and its mean loss per token of right answers."""

    questions: int
    right: int
    loss: float

    @property
    def accuracy(self) -> float:
        return self.right / self.questions


def counted(questions: Sequence[Question], scores: Sequence[Sequence[tuple[float, bool]]], tokens: int) -> Answered:
    """Count the answers by their ``scores``: log-probability, and whether greedy decoding writes it.

    Of several choices the likeliest counts; one answer alone must be what the model would write. ``tokens``: those of
    all right answers.
    """
    right, loss = 0, 0.0
    for question, found in zip(questions, scores, strict=True):
        best = max(range(len(found)), key=lambda i: found[i][0])
        right += best == question.right if len(found) > 1 else found[0][1]
        loss -= found[question.right][0]
    return Answered(len(questions), right, loss / tokens)
