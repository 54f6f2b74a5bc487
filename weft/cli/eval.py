"""``weft eval``: how many questions of some files a model answers right."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.arguments import AsJson, Ema, ModelName
from weft.cli.console import print_table, warn
from weft.errors import UsageError

_files = "Files of questions: JSON Lines or TOML (docs/how-to/evaluation.md)."
_chat = "Treat prompts as a user's messages: apply the chat template."


def eval_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help=_files)],
    checkpoint: Annotated[str, ModelName],
    chat: Annotated[bool, typer.Option("--chat", help=_chat)] = False,
    limit: Annotated[
        int,
        typer.Option(
            min=0,
            help="Ask only this many questions from the start of each file; 0: all.",
        ),
    ] = 0,
    ema: Ema = False,
    as_json: AsJson = False,
) -> int:
    """Ask a trained model questions with known answers, and count the right ones."""
    for file in files:
        if not file.is_file():
            raise UsageError(
                f"{file} is no file of questions; docs/how-to/evaluation.md says what is in one"
            )
    import torch

    from weft.checkpoint.model import open_model, tokenizer_of
    from weft.data.tasks import open_tasks
    from weft.recipe import Task
    from weft.train.score import scores

    model, contents, _ = open_model(
        checkpoint, "cuda" if torch.cuda.is_available() else "cpu", warn, ema
    )
    tasks = [Task(path=str(file), chat=chat, limit=limit) for file in files]
    opened = open_tasks(tasks, tokenizer_of(contents, checkpoint), checkpoint)
    score = partial(scores, model, None, model.mesh)
    answers = {
        task.name: answered
        for task in opened
        if (answered := task.answered(score)) is not None
    }
    if as_json:
        print(
            json.dumps(
                {
                    name: asdict(result) | {"accuracy": result.accuracy}
                    for name, result in answers.items()
                },
                indent=2,
            )
        )
        return 0
    rows = [
        (name, str(a.questions), str(a.right), f"{a.accuracy:.1%}", f"{a.loss:.3f}")
        for name, a in answers.items()
    ]
    print_table(("task", "questions", "right", "accuracy", "loss"), rows)
    return 0
