"""Tasks: files of questions, answered by a model while it is trained, under whatever layout that is, and afterwards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.data.chat.prompt import own_encoder
from weft.data.tasks import Answered, Question, counted, question_ids, read_questions
from weft.data.tokenizer import Tokenizer
from weft.errors import WeftError
from weft.recipe import Task
from weft.train.score import Score, Text


@dataclass(frozen=True)
class OpenTask:
    """A task with its questions, and their ids for every answer."""

    name: str
    every: int
    questions: tuple[Question, ...]
    texts: tuple[tuple[Text, ...], ...]

    def answered(self, scores: Callable[[Sequence[Text]], list[Score]]) -> Answered | None:
        """How a model did, whose ``scores`` these are; None if there are none."""
        scored = scores([text for texts in self.texts for text in texts])
        if not scored:
            return None
        found = iter(scored)
        each = [[next(found) for _ in texts] for texts in self.texts]
        tokens = sum(len(t[q.right].following) for q, t in zip(self.questions, self.texts, strict=True))
        return counted(self.questions, each, tokens)


def open_task(task: Task, tokenizer: Tokenizer, name: str) -> OpenTask:
    """Read the questions of a task; ``name`` says in errors whose model's tokenizer it is."""
    questions = read_questions(task.path, task.limit)
    encoder = own_encoder(tokenizer, name, "last") if task.chat else None
    texts = tuple(tuple(Text(*ids) for ids in question_ids(q, tokenizer, encoder)) for q in questions)
    return OpenTask(task.name or Path(task.path).stem, task.every, tuple(questions), texts)


def open_tasks(tasks: Sequence[Task], tokenizer: Tokenizer, name: str) -> tuple[OpenTask, ...]:
    """The tasks of a recipe; no two may have one name."""
    found = [open_task(task, tokenizer, name) for task in tasks]
    names = [task.name for task in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise WeftError(f"two tasks are called {twice[0]!r}; give one of them another name")
    return tuple(found)
