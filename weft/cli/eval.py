"""``weft eval``: how many questions of some files a model answers right, and its loss on held-out texts."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from weft.cli.arguments import AsJson, Ema, ModelName
from weft.cli.console import print_table, warn
from weft.errors import UsageError

_files = "Files of questions: JSON Lines or TOML (docs/how-to/evaluation.md)."
_chat = "Treat prompts as a user's messages: apply the chat template."
_members = (
    "A further model, with the same tokenizer, of an ensemble that answers together; "
    "may be repeated."
)
_average = "With --with: what is averaged over the models, probabilities or logits."
_held_out = (
    "File, folder or glob of texts (or records with 'text') whose mean loss per token is "
    "wanted."
)


def eval_command(
    checkpoint: Annotated[str, ModelName],
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE...", help=_files)
    ] = None,
    members: Annotated[
        list[str] | None, typer.Option("--with", metavar="MODEL", help=_members)
    ] = None,
    average: Annotated[
        Literal["probabilities", "logits"], typer.Option(help=_average)
    ] = "probabilities",
    held_out: Annotated[
        str | None, typer.Option(metavar="PATH", help=_held_out)
    ] = None,
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
    """Ask a trained model, or an ensemble, questions with known answers, and count the right ones."""
    if not files and held_out is None:
        raise UsageError("give files of questions, or texts with --held-out")
    for file in files or ():
        if not file.is_file():
            raise UsageError(
                f"{file} is no file of questions; docs/how-to/evaluation.md says what is in one"
            )
    import torch

    from weft.data.tasks import open_tasks
    from weft.recipe import Task
    from weft.train.ensemble_members import open_members

    device = "cuda" if torch.cuda.is_available() else "cpu"
    asked = open_members([checkpoint, *(members or ())], device, warn, ema, average)
    tasks = [Task(path=str(file), chat=chat, limit=limit) for file in files or ()]
    opened = open_tasks(tasks, asked.tokenizer, checkpoint)
    answers = {task.name: asked.answered(task) for task in opened}
    loss = None if held_out is None else asked.held_out_loss(held_out)
    several = len(asked.models) > 1  # further ones, or the experts of a set
    names = [*(["ensemble"] if several else []), *asked.names]
    if as_json:
        shown: dict[str, Any] = {}
        for task, (first, *each) in answers.items():
            shown[task] = asdict(first) | {"accuracy": first.accuracy}
            if several:
                shown[task]["members"] = [
                    {"model": name, **asdict(a), "accuracy": a.accuracy}
                    for name, a in zip(asked.names, each, strict=True)
                ]
        if loss is not None:
            shown["held-out"] = {"loss": loss.joint, "labels": loss.labels}
            if several:
                shown["held-out"]["members"] = [
                    {"model": name, "loss": each}
                    for name, each in zip(asked.names, loss.members, strict=True)
                ]
        print(json.dumps(shown, indent=2))
        return 0
    if answers:
        rows = [
            (task, name, str(a.questions), str(a.right), f"{a.accuracy:.1%}", f"{a.loss:.3f}")
            for task, each in answers.items()
            for name, a in zip(names, each, strict=True)
        ]  # fmt: skip
        columns = ("task", "model", "questions", "right", "accuracy", "loss")
        if not several:
            columns, rows = columns[:1] + columns[2:], [r[:1] + r[2:] for r in rows]  # type: ignore[assignment, misc]
        print_table(columns, rows)
    if loss is not None:
        losses = (loss.joint, *loss.members) if several else (loss.joint,)
        print_table(
            ("held-out loss", "model"),
            [(f"{each:.4f}", name) for name, each in zip(names, losses, strict=True)],
        )
    return 0
