"""``weft plan MODELS --think SECONDS``: which model should reason, in how many tokens and texts, and how sparsely."""

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from weft.cli.console import grid, plain_console, warn
from weft.errors import UsageError

if TYPE_CHECKING:
    from weft.planner.thinking_price import (
        RankedThinking,
        StepRates,
        ThinkingModel,
        TriedText,
    )
    from weft.rl.reward_task import RewardTask

#: Questions of a task, texts for each, and solved questions that stand before each.
QUESTIONS, TRIED, SHOTS = 12, 8, 16
#: Settings that are timed: tokens, texts, shares, and tokens of the prompt.
TOKENS, TIMED_TEXTS, TIMED_SHARES, CONTEXTS = 6, (1, 6), (1.0, 0.25), (64, 1024)


class ThinkQuestion(NamedTuple):
    """Requirements of ``weft plan --think``.

    ``budget``: seconds for each question. ``task``: name of the task with its settings, or "". ``prompt``: number of
    tokens of a prompt. ``most``: largest number of tokens of a text.
    """

    budget: float
    task: str
    prompt: int
    most: int


def plan_thinking(
    words: str, cluster: str | None, asked: ThinkQuestion, as_json: bool
) -> int:
    """Print the ways to reason within a time budget, best first. Returns the exit code.

    ``words``: names of models, separated by commas. ``cluster``: a cluster file or preset; the times of steps are
    estimated from the data sheet of one of its devices. None: steps are timed on this machine. ``asked``: the
    requirements. ``as_json``: print JSON instead of a table.
    """
    from weft.planner.thinking_price import rank_thinking

    names = [name for name in words.split(",") if name]
    task = task_of_word(asked.task) if asked.task else None
    if len({*names}) < len(names):
        raise UsageError(f"{words} names a model twice; give each once")
    with Console(stderr=True, quiet=as_json).status("reading models"):
        opened = [_opened(name) for name in names] if task or cluster is None else []
    models, rates, where = (
        _timed(names, opened) if cluster is None else _priced(names, cluster)
    )
    if task is None:
        return _show_rooms(models, rates, where, asked, as_json)
    trials = {}
    for model, each in zip(models, opened, strict=True):
        for share in model.shares:
            trials[model.name, share] = _tried(each, task, share, asked.most)
    ranked = rank_thinking(
        models, rates, _prompt_tokens(opened[0], task), asked.budget, trials, asked.most
    )
    if not ranked:
        raise UsageError(
            f"none of these writes a token within {asked.budget:g} s on {where}; give a larger budget"
        )
    return _show_ranked(ranked, where, asked, as_json)


def task_of_word(word: str) -> "RewardTask":
    """Return the task that ``word`` names, such as ``addition`` or ``addition:digits=3``.

    Raises :class:`UsageError` if there is no such task.
    """
    from weft.recipe import build_recipe
    from weft.rl.build_task import reward_task

    name, *settings = word.split(":")
    table: dict[str, Any] = {"reward": name}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(
                f"--task {word}: {setting!r} is no setting; give NAME:key=value, such as addition:digits=3"
            )
        try:
            table[key] = json.loads(value)
        except ValueError:
            table[key] = value
    return reward_task(build_recipe({"rl": {}, "tasks": [table]}).tasks[0])


def _opened(name: str) -> Any:
    import torch

    from weft.checkpoint.model import open_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, files, _ = open_model(name, device, warn)
    return model, files, name


def _timed(
    names: Sequence[str], opened: Sequence[Any]
) -> "tuple[list[ThinkingModel], StepRates, str]":
    """Return the models, and rates that are fitted to a few timed settings of all of them."""
    from weft.planner.thinking_price import (
        Thinking,
        fit_rates,
        thinking_model,
        thinking_work,
    )
    from weft.rl.thinking_trial import time_thinking
    from weft.shapes.shape import shape_of

    models, works, measured = [], [], []
    for name, (model, _, _) in zip(names, opened, strict=True):
        width = next(model.parameters()).element_size()
        models.append(thinking_model(name, shape_of(model.shape), width))
        for context in CONTEXTS:
            for texts in TIMED_TEXTS:
                for share in sorted({*TIMED_SHARES} & {*models[-1].shares}):
                    how = Thinking(name, TOKENS, texts, share)
                    works.append(thinking_work(models[-1], context, how))
                    measured.append(time_thinking(model, how, context))
    return models, fit_rates(works, measured), "this machine, which was timed"


def _priced(
    names: Sequence[str], cluster: str
) -> "tuple[list[ThinkingModel], StepRates, str]":
    from weft.checkpoint.weights import shape_named
    from weft.planner.machine import load_cluster
    from weft.planner.planned_model import load_model
    from weft.planner.thinking_price import rates_of_device, thinking_model
    from weft.recipe.shipped import find_recipe

    machines = load_cluster(cluster, 1)
    machine = machines.machine()
    models = []
    for name in names:
        shape = load_model(str(find_recipe(name) or name), shape_named).shape
        models.append(thinking_model(name, shape, 2))
    rates = rates_of_device(float(machine.peak16 * machine.clock), float(machine.hbm))
    return models, rates, f"one {machines.device} by its data sheet, in bfloat16"


def _tried(
    opened: Any, task: "RewardTask", share: float, most: int
) -> "list[list[TriedText]]":
    """Let a model try held-out questions, reading ``share`` of the keys. ``most``: most tokens of a text."""
    from weft.checkpoint.model import tokenizer_of
    from weft.rl.thinking_trial import solved_before, try_questions

    model, files, name = opened
    tokenizer = tokenizer_of(files, name, warn)
    questions = [task.question(i, held_out=True) for i in range(QUESTIONS)]
    shots = solved_before(task, SHOTS)
    return try_questions(model, tokenizer, task, questions, TRIED, most, share, shots)


def _prompt_tokens(opened: Any, task: "RewardTask") -> int:
    """Return how many tokens a question of ``task`` has, with the solved ones before it."""
    from weft.checkpoint.model import tokenizer_of
    from weft.rl.thinking_trial import solved_before

    _, files, name = opened
    text = f"{solved_before(task, SHOTS)}{task.question(0, held_out=True).prompt}"
    return len(tokenizer_of(files, name).encode(text))


def _show_rooms(
    models: "Sequence[ThinkingModel]",
    rates: "StepRates",
    where: str,
    asked: ThinkQuestion,
    as_json: bool,
) -> int:
    """Print how many tokens of reasoning fit into the budget, as nothing is known of answers."""
    from weft.planner.thinking_price import TEXTS, tokens_within

    rows = [
        {
            "model": model.name,
            "share": share,
            "texts": texts,
            "tokens": tokens_within(
                model, rates, asked.prompt, texts, share, asked.budget, asked.most
            ),
        }
        for model in models
        for share in model.shares
        for texts in TEXTS
    ]
    if as_json:
        print(json.dumps({"where": where, "rows": rows}))
        return 0
    say = partial(plain_console(160).print, markup=False)
    say(
        f"most tokens of each text within {asked.budget:g} s after {asked.prompt:,} tokens, on {where}\n"
    )
    table = grid(
        ("model", "cache policy", *(f"{n} texts" for n in TEXTS)),
        ("model", "cache policy"),
    )
    for model in models:
        for share in model.shares:
            cells = [
                f"{row['tokens']:,}"
                for row in rows
                if row["model"] == model.name and row["share"] == share
            ]
            table.add_row(
                model.name, "none" if share == 1 else f"blocks:{share:g}", *cells
            )
    plain_console(160).print(table)
    say(
        "\nwhich of them answers best depends on the questions; give --task NAME to try some"
    )
    return 0


def _show_ranked(
    ranked: "Sequence[RankedThinking]", where: str, asked: ThinkQuestion, as_json: bool
) -> int:
    if as_json:
        rows = [
            each.how._asdict() | {"seconds": each.seconds, "solved": each.solved}
            for each in ranked
        ]
        print(json.dumps({"where": where, "rows": rows}))
        return 0
    say = partial(plain_console(160).print, markup=False)
    say(f"{asked.task}, {asked.budget:g} s for each question, on {where}\n")
    table = grid(
        ("model", "tokens", "texts", "cache policy", "seconds", "solved"),
        ("model", "cache policy"),
    )
    for how, seconds, solved in ranked[:8]:
        policy = "none" if how.share == 1 else f"blocks:{how.share:g}"
        table.add_row(
            how.model,
            f"{how.tokens:,}",
            f"{how.texts:,}",
            policy,
            f"{seconds:.3g}",
            f"{solved:.0%}",
        )
    plain_console(160).print(table)
    say(
        f"\nsolved: at least one text is right, by {QUESTIONS} held-out questions with {TRIED} texts each"
    )
    return 0
