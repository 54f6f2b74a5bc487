"""What reasoning costs and how often it is right: which model, how many tokens, how many texts, and how sparse.

Long reasoning is bound by memory: each new token of each text reads the keys and values of its text, while the weights
are read once for all texts of a step. A cost of parameters alone therefore favours small models with long texts where
larger ones with fewer tokens, or texts that read a share of their keys, are better (Kinetics, Sadhukhan et al. 2025,
2506.05333). The seconds of a step are a sum of what it computes and what it reads, each divided by a rate of the
device. The rates come from a data sheet, or are fitted to measured steps.

How often one of several texts is right follows from how often single texts were right (pass@k, Chen et al. 2021,
2107.03374).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import NamedTuple

import numpy as np

from weft.errors import UsageError
from weft.shapes.shape import Shape

#: Shares of the keys, and numbers of texts, among which a plan chooses.
SHARES, TEXTS = (1.0, 0.5, 0.25, 0.125), (1, 2, 4, 8, 16, 32, 64)

#: Tokens of a cache block, and blocks that a token reads at least (policy ``blocks``).
BLOCK, LEAST = 16, 4


@dataclass(frozen=True)
class ThinkingModel:
    """Sizes of a model that determine the cost of reasoning with it.

    ``name``: name of the model. ``parameters``: number of parameters with which each token is multiplied; ``width``:
    bytes of a parameter. ``layers``: number of layers; ``keys``: bytes of a token's keys and values in all layers;
    ``queries``: number of elements of a token's queries in all layers. ``shares``: for attention that reads only some
    of the earlier keys, the shares of keys among which the planner may choose; 1: all keys.
    """

    name: str
    parameters: float
    width: float
    layers: int
    keys: float
    queries: float
    shares: Sequence[float] = SHARES


def thinking_model(name: str, shape: Shape, width: int) -> ThinkingModel:
    """Return the sizes of a model of ``shape``, called ``name``, whose weights and keys have ``width`` bytes per
    element.
    """
    products = shape.layers * shape.active_weights + shape.table
    queries = shape.layers * shape.heads * shape.head_dim
    keys = shape.cache_bytes * width / 2
    # layers of linear and of latent attention have no keys to choose from
    shares = SHARES[:1] if shape.linear or shape.cached else SHARES
    return ThinkingModel(
        name, float(products), width, int(shape.layers), float(keys), float(queries), shares,
    )  # fmt: skip


class Thinking(NamedTuple):
    """A way to answer a question by reasoning: how many texts of which length a model writes.

    ``model``: name of the model. ``texts``: number of texts; ``tokens``: tokens of each. ``share``: share of the
    earlier keys that attention reads for each token; 1: all.
    """

    model: str
    tokens: int
    texts: int
    share: float

    def __str__(self) -> str:
        sparse = "" if self.share == 1 else f", --cache-policy blocks:{self.share:g}"
        return f"{self.model}: {self.texts:,} x {self.tokens:,} tokens{sparse}"


@dataclass(frozen=True)
class StepRates:
    """Seconds that a device takes for one unit of each kind of work in a generation step.

    Attributes:
        ``product``: seconds per multiplication with an addition.
        ``weight``: seconds per byte of the weights, which are read once a step.
        ``key``: seconds per byte of keys and values, if all are read; ``chosen``: the same if attention reads only
            chosen blocks of them.
        ``layer``: seconds per layer of a step; ``choice``: seconds per layer to choose blocks, times the square root of
            the number of texts.
    """

    product: float
    weight: float
    key: float
    chosen: float
    layer: float = 0.0
    choice: float = 0.0


def rates_of_device(flops: float, bandwidth: float) -> StepRates:
    """Return the rates of a device from its data sheet: ``flops`` per second, and memory ``bandwidth`` in bytes per
    second.
    """
    return StepRates(2 / flops, 1 / bandwidth, 1 / bandwidth, 1 / bandwidth)


def keys_read(share: float, context: np.ndarray) -> np.ndarray:
    """Return the number of keys that attention reads for a token, for each number of tokens in ``context``.

    ``share``: share of the keys that is read. However small it is, at least :data:`LEAST` blocks of :data:`BLOCK` keys
    are read, or all keys of a shorter text. ``context``: tokens of the text so far, the token itself included.
    """
    return np.minimum(context, np.maximum(LEAST * BLOCK, share * context))


def thinking_work(model: ThinkingModel, prompt: int, how: Thinking) -> np.ndarray:
    """Return how much work of each kind it takes to answer one question in the way ``how``.

    The result has an amount for each field of :class:`StepRates`, in the order of these fields. ``prompt``: tokens of
    the question's prompt. Work on the prompt itself does not count, because all texts share it.
    """
    context = prompt + np.arange(1, how.tokens + 1)
    keys = float(keys_read(how.share, context).sum()) * how.texts
    sparse = how.share < 1
    # the means of blocks are read, too, of keys alone
    means = float(context.sum()) * how.texts / BLOCK / 2 if sparse else 0.0
    products = model.parameters * how.tokens * how.texts + 2 * model.queries * keys
    layers = model.layers * how.tokens
    read = model.keys * (keys + means)
    return np.array([
        products, model.parameters * model.width * how.tokens, 0.0 if sparse else read, read if sparse else 0.0,
        layers, layers * (how.texts**0.5 if sparse else 0.0),
    ])  # fmt: skip


def seconds(
    model: ThinkingModel, rates: StepRates, prompt: int, how: Thinking
) -> float:
    """Return the predicted seconds to answer a question of ``prompt`` tokens in the way ``how``.

    ``rates``: seconds per unit of work on the device.
    """
    each = np.array([getattr(rates, field.name) for field in fields(rates)])
    return float(thinking_work(model, prompt, how) @ each)


def fit_rates(works: Sequence[np.ndarray], measured: Sequence[float]) -> StepRates:
    """Fit the rates of a device to measured seconds, by the least squares of relative errors; no rate is below zero.

    ``works``: amounts of work, as :func:`thinking_work` returns them. ``measured``: the seconds that each took.
    """
    rows = np.stack([w / s for w, s in zip(works, measured, strict=True)])
    scale = np.maximum(rows.max(0), 1e-30)
    # by turns: each rate by the errors that the others leave, which ends at the least squares of rates above zero
    each, rows = np.zeros(len(scale)), rows / scale
    for _ in range(2000):
        for at in range(len(each)):
            column = rows[:, at]
            square = float(column @ column)
            if square:
                rest = 1 - rows @ each + column * each[at]
                each[at] = max(0.0, float(column @ rest) / square)
    return StepRates(*map(float, each / scale))


def tokens_within(
    model: ThinkingModel, rates: StepRates, prompt: int, texts: int, share: float, budget: float, most: int,
) -> int:  # fmt: skip
    """Return the largest number of tokens per text such that ``texts`` texts take at most ``budget`` seconds.

    ``prompt``: tokens of the prompt. ``share``: share of earlier keys that attention reads. ``most``: upper limit of
    the result; the result is 0 if not even one token fits. ``rates``: seconds per unit of work on the device.
    """
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        how = Thinking(model.name, middle, texts, share)
        if seconds(model, rates, prompt, how) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


class TriedText(NamedTuple):
    """A text that a model wrote as a trial, to measure how often it is right.

    ``tokens``: number of tokens of the text. ``right``: whether its answer was right.
    """

    tokens: int
    right: bool


#: TriedTexts by model and share: for each question, those of its texts.
TriedTexts = Mapping[tuple[str, float], Sequence[Sequence[TriedText]]]


def coverage(trials: Sequence[Sequence[TriedText]], tokens: int, texts: int) -> float:
    """Return the expected share of questions that at least one of ``texts`` texts answers rightly.

    ``trials``: for each question, the texts that were tried. ``tokens``: limit of a text's length; longer texts count
    as wrong.
    """
    missed = 0.0
    for each in trials:
        right = sum(trial.right and trial.tokens <= tokens for trial in each)
        tried, wrong = len(each), len(each) - right
        if texts <= tried:  # of those tried, so many are drawn without return
            factors = [(wrong - i) / (tried - i) for i in range(texts)]
            missed += float(np.prod([max(0.0, f) for f in factors]))
        else:
            missed += (wrong / tried) ** texts
    return 1 - missed / len(trials)


class RankedThinking(NamedTuple):
    """A way to reason with its predictions.

    ``how``: the way. ``seconds``: predicted time per question. ``solved``: predicted share of questions with a right
    answer, from 0 to 1.
    """

    how: Thinking
    seconds: float
    solved: float


def rank_thinking(
    models: Sequence[ThinkingModel], rates: StepRates, prompt: int, budget: float, trials: TriedTexts, most: int,
) -> list[RankedThinking]:  # fmt: skip
    """Return the ways to reason that fit in ``budget`` seconds, the way that solves most questions first.

    Of ways that solve equally many, the fastest comes first. ``rates``: the device's rates; ``prompt``: tokens of a
    question; ``trials``: trial texts by model and share of keys; ways without trials are left out. ``most``: the
    largest number of tokens of a text. ``models``: the models to choose from.
    """
    return sorted(
        _within(models, rates, prompt, budget, trials, most),
        key=lambda each: (-round(each.solved, 6), each.seconds),
    )


def _within(
    models: Sequence[ThinkingModel], rates: StepRates, prompt: int, budget: float, trials: TriedTexts, most: int,
) -> Iterator[RankedThinking]:  # fmt: skip
    settings = ((m, s, n) for m, n in product(models, TEXTS) for s in m.shares)
    for model, share, texts in settings:
        tried = trials.get((model.name, share))
        room = tokens_within(model, rates, prompt, texts, share, budget, most)
        if not tried or not room:
            continue
        # longer texts than any that was right answer nothing more
        right = [t.tokens for each in tried for t in each if t.right and t.tokens <= room]  # fmt: skip
        how = Thinking(model.name, max(right, default=room), texts, share)
        yield RankedThinking(
            how, seconds(model, rates, prompt, how), coverage(tried, how.tokens, texts)
        )


def check_budget(word: str) -> float:
    """Return the number of seconds in ``word``, the argument of ``--think``.

    Raises :class:`UsageError` if ``word`` is not a finite number above zero.
    """
    try:
        budget = float(word)
    except ValueError:
        budget = 0.0
    if not 0 < budget < float("inf"):
        raise UsageError(
            f"--think {word} is no budget; give seconds for each question, such as 20"
        )
    return budget
