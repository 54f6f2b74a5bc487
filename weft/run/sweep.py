"""A sweep: one run after the other for every combination of some settings, in one folder, with a common page.

An interrupted sweep continues when it is started again: finished runs are not repeated, and the interrupted run resumes
from its last checkpoint.
"""

import gc
import itertools
import json
import math
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from weft.api import start
from weft.cache import digest
from weft.checkpoint.store import committed_checkpoints
from weft.errors import UsageError, WeftError, why_unwritten
from weft.observe.chart_lines import RUNS as COLOURS
from weft.observe.run_metrics import FILE as METRICS
from weft.observe.run_metrics import read_metrics
from weft.observe.run_page import write_report
from weft.recipe import Recipe
from weft.recipe.masked import masked_text
from weft.run.signals import requests

#: In a sweep's folder: which of its runs have begun and which are done, by their names, with digests of their recipes.
FILE = "sweep.json"
#: What the results of a run follow from, but for how long it trains and where it computes.
COMPARED = ("model", "adapter", "data", "loss", "optimizer", "sync", "validation")
COMPARED_OF_TRAIN = {"batch", "dtype", "freeze", "seed"}
#: Combinations of a sweep at most: more are surely a mistake.
MOST = 1000


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    ``settings``: values of the varied settings by name, as ``--set`` takes them, in the order of the sweep; ``folder``:
    the run's folder.
    """

    settings: dict[str, str]
    folder: Path

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.settings.items()]

    @property
    def shown(self) -> list[str]:
        """The values of :attr:`settings` for lines and files: addresses without parts that may be secret, and with some
        digits that tell them apart.
        """
        return [masked_text(value) + _mark(value) for value in self.settings.values()]


@dataclass(frozen=True)
class TrialResult:
    """State of one run of a sweep.

    Attributes:
        ``trial``: the run's settings and folder.
        ``steps``: number of steps that were trained.
        ``loss``: loss of the last trained step; None if there is none.
        ``validation``: lowest validation loss of the run; None if it was never measured.
        ``step``: step after which this lowest validation loss was measured; None if there is none.
        ``tokens_per_s``: median speed in tokens per second; None if it is not known.
        ``problem``: why the run failed; "" if it did not.
    """

    trial: Trial
    steps: int = 0
    loss: float | None = None
    validation: float | None = None
    step: int | None = None
    tokens_per_s: float | None = None
    problem: str = ""

    @property
    def rank(self) -> float:
        """Key by which the results of a sweep are sorted: the lowest validation loss.

        Without validation it is the loss of the last step; without any loss it is infinite.
        """
        value = self.loss if self.validation is None else self.validation
        return math.inf if value is None or math.isnan(value) else value


def trials_of(asked: Sequence[str], folder: Path) -> list[Trial]:
    """Return a trial for every combination of the values in ``asked``. The values of the last setting change fastest.

    ``asked``: texts such as ``section.key=a,b``, which name a setting and its values; ``folder``: folder of the sweep,
    in which every trial has a folder. Raises :class:`UsageError` for texts of another form, for a setting or a value
    that occurs twice, and for more than :data:`MOST` trials.
    """
    values: dict[str, list[str]] = {}
    for text in asked:
        key, equals, listed = (part.strip() for part in text.partition("="))
        each = split_values(listed)
        if not (key and equals and all(each)):
            raise UsageError(
                f"--sweep {masked_text(text)!r} is not of the form section.key=VALUE,VALUE"
            )
        if key in values:
            raise UsageError(
                f"--sweep {key} is there twice; list all of its values in one"
            )
        if twice := next((value for value in each if each.count(value) > 1), None):
            raise UsageError(
                f"--sweep {key} has {masked_text(twice)} twice; leave one of them out"
            )
        values[key] = each
    if (count := math.prod(map(len, values.values()))) > MOST:
        raise UsageError(
            f"--sweep asks for {count:,} runs, and {MOST:,} is the most; give fewer values"
        )
    last = [key.rpartition(".")[2] for key in values]
    short = last if len(set(last)) == len(last) else list(values)
    trials, names = [], set[str]()
    for chosen in itertools.product(*values.values()):
        name = ",".join(
            f"{key}={masked_text(value)}"
            for key, value in zip(short, chosen, strict=True)
        )
        # the marks come last, where a name that is cut keeps them
        name = re.sub(r"[^\w.=+,-]", "_", name)[:80] + "".join(map(_mark, chosen))
        name = name if name not in names else f"{name}-{len(names) + 1}"
        names.add(name)
        trials.append(Trial(dict(zip(values, chosen, strict=True)), folder / name))
    return trials


def _mark(value: str) -> str:
    """Return digits that tell ``value`` from others that differ from it in secret parts alone; "" if it has none."""
    return f"-{digest(value)[:6]}" if masked_text(value) != value else ""


def split_values(text: str) -> list[str]:
    """Split ``text`` at commas that are outside quotes and brackets."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if letter == "," and not depth and not quote:
            parts.append("")
            continue
        parts[-1] += letter
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
    return [part.strip() for part in parts]


def check_folder(folder: Path) -> None:
    """Raise :class:`UsageError` unless ``folder`` is missing, empty, or the folder of a sweep, which then continues."""
    try:
        misplaced = folder.exists() and not folder.is_dir()
    except OSError as error:
        raise UsageError(
            f"cannot write --out {folder}: {why_unwritten(error, 'choose another folder')}"
        ) from None
    if misplaced:
        raise UsageError(f"--out {folder} is not a folder; choose another")
    if folder.is_dir() and not (folder / FILE).is_file() and any(folder.iterdir()):
        raise UsageError(
            f"{folder} already holds something that is no sweep; choose another --out"
        )


def run_sweep(
    recipes: Sequence[tuple[Trial, Recipe]], folder: Path, say: Callable[[str], object]
) -> tuple[list[TrialResult], int]:
    """Train all trials of a sweep that are not finished, one after the other.

    ``recipes``: each trial with its recipe; ``folder``: folder of the sweep; ``say``: called with each line of
    progress. Returns the state of all trials, and the number of the signal that stopped the sweep (0 if none did). A
    trial that fails does not stop the others. Raises :class:`UsageError` if a run in the folder was trained with
    another recipe, as its results say nothing about this one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    begun, done = _read(folder)
    for trial, recipe in recipes:
        if begun.get(
            trial.folder.name, same := _compared(recipe)
        ) != same and committed_checkpoints(trial.folder / "checkpoints"):
            raise UsageError(
                f"{trial.folder} was trained with another recipe, and its results are not those of this one; choose "
                "another --out, or remove that folder"
            )
    problems, interrupted = dict[Path, str](), 0
    for number, (trial, recipe) in enumerate(recipes, 1):
        key = digest(recipe.model_dump(mode="json"))
        words = " ".join(map("=".join, zip(trial.settings, trial.shown, strict=True)))
        if done.get(trial.folder.name) == key:
            say(
                f"run {number} of {len(recipes)}: {words}: done before, in {trial.folder}"
            )
            continue
        say(f"run {number} of {len(recipes)}: {words}")
        begun[trial.folder.name] = _compared(recipe)
        _write(folder, begun, done)
        try:
            outcome = start(recipe, trial.folder, "auto")
        except WeftError as error:
            problems[trial.folder] = str(error)
            say(f"run {number} of {len(recipes)} has failed: {error}")
            continue
        except (
            KeyboardInterrupt
        ) as error:  # while nothing was being trained, or at once
            interrupted = requests.asked or signal.SIGINT
            say(str(error) or "stopped between two steps")
            break
        finally:
            gc.collect()
        if outcome.interrupted:
            interrupted = outcome.interrupted
            break
        done[trial.folder.name] = key
        _write(folder, begun, done)
    return [
        trial_result(trial, problems.get(trial.folder, "")) for trial, _ in recipes
    ], interrupted


def trial_result(trial: Trial, problem: str = "") -> TrialResult:
    """Return the state of ``trial``, read from the records of its run.

    ``problem``: why the run failed; "" if it did not.
    """
    if not (trial.folder / METRICS).is_file():
        return TrialResult(trial, problem=problem)
    try:
        records = read_metrics(trial.folder)
    except WeftError as error:
        return TrialResult(trial, problem=problem or str(error))
    steps = records.get("train", [])
    measured = [
        (r["loss"], r["step"])
        for r in records.get("validation", [])
        if r["loss"] is not None and r["step"]
    ]
    lowest, step = min(measured, default=(None, None))
    rates = [r["tokens_per_s"] for r in steps if r.get("tokens_per_s")]
    last: dict[str, Any] = steps[-1] if steps else {"step": 0, "loss": None}
    return TrialResult(
        trial, last["step"], last["loss"], lowest, step, median(rates) if rates else None, problem
    )  # fmt: skip


def sweep_report(results: Sequence[TrialResult], folder: Path) -> Path | None:
    """Write a page about the best runs of a sweep into ``folder``, and return its path.

    ``results``: state of all runs. Returns None, and writes nothing, if no run has any steps.
    """
    shown = [r.trial.folder for r in sorted(results, key=lambda r: r.rank) if r.steps][
        : len(COLOURS)
    ]
    return write_report(*shown, out=folder / "report.html") if shown else None


def _compared(recipe: Recipe) -> str:
    """Return a digest of the settings that determine the results of a run; not of secrets, which may be renewed."""
    tree = recipe.recorded()
    data = {
        key: value
        for key, value in tree["data"].items()
        if key not in ("epochs", "cache")
    }
    train = {key: tree["train"][key] for key in sorted(COMPARED_OF_TRAIN)}
    return digest(
        [tree[section] for section in COMPARED if section != "data"], data, train
    )


def _read(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    try:
        content = json.loads((folder / FILE).read_text())
        begun, done = dict(content.get("begun", {})), dict(content["done"])
    except FileNotFoundError:
        return {}, {}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise WeftError(
            f"{folder / FILE} is damaged; remove it, and the sweep runs all again"
        ) from None
    return begun, done


def _write(folder: Path, begun: dict[str, str], done: dict[str, str]) -> None:
    draft = folder / f".{FILE}"
    draft.write_text(json.dumps({"begun": begun, "done": done}, indent=1) + "\n")
    draft.replace(folder / FILE)
