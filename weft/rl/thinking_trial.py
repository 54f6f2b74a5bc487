"""Times how a model reasons here, and counts how often its texts are right."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from weft.data.tokenizer import Tokenizer
from weft.errors import UsageError
from weft.generate.cache_policy import CachePolicy, cache_policy_of
from weft.generate.engine import Engine
from weft.generate.request import check_generations
from weft.generate.sampling import Sampling
from weft.models.transformer import Transformer
from weft.planner.thinking_price import Thinking, TriedText
from weft.rl.reward_task import RewardTask
from weft.rl.rollout import RewardQuestion

#: Steps before the measured ones.
WARM = 2


def sparse_policy(share: float) -> CachePolicy | None:
    """Return the cache policy with which attention reads the given ``share`` of the cache's blocks; None for 1."""
    return cache_policy_of("none" if share == 1 else f"blocks:{share}")


def time_thinking(
    model: Transformer,
    how: Thinking,
    prompt: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Measure the seconds in which a model writes its texts.

    ``how``: number of texts, tokens of each text, and share of the keys that attention reads. ``prompt``: number of
    tokens of the prompt. The time to read the prompt is not included. ``clock``: returns the time in seconds. Raises
    :class:`weft.errors.WeftError` if a text could not go on.
    """
    engine = Engine(model, graphs=True, cache_policy=sparse_policy(how.share))
    ids = [(7 * i + 3) % model.shape.vocab for i in range(prompt)]
    sampling = Sampling(seed=1)
    texts = engine.submit(ids, how.tokens + WARM, sampling, n=how.texts)
    while min(len(text.written) for text in texts) < WARM:
        engine.step()
        check_generations(texts)
    begun = clock()
    engine.run()
    spent = clock() - begun
    check_generations(texts)
    return spent


def solved_before(task: RewardTask, count: int) -> str:
    """Return ``count`` solved questions of ``task``, a line each, to put before a question as examples (few-shot
    prompt).

    Returns "" if the task has no reference answers.
    """
    solved = [task.question(i) for i in range(count)]
    if not all(isinstance(each.prompt, str) and each.answer for each in solved):
        return ""
    return "".join(f"{each.prompt}{each.answer}\n" for each in solved)


def try_questions(
    model: Transformer, tokenizer: Tokenizer, task: RewardTask, questions: Sequence[RewardQuestion], texts: int,
    most: int, share: float, shots: str = "", temperature: float = 0.8,
) -> list[list[TriedText]]:  # fmt: skip
    """Let the model write ``texts`` texts for each question; return the length of each, and whether it is right.

    Arguments:
        ``task``: the task that scores the texts.
        ``most``: largest number of tokens of a text.
        ``share``: share of the keys that attention reads.
        ``shots``: text to put before each question, such as solved questions; a text then ends with its first line.
        ``temperature``: temperature of sampling.

    Raises :class:`UsageError` for questions that are not plain texts, and :class:`weft.errors.WeftError` if a text
    could not go on.
    """
    engine = Engine(model, graphs=True, cache_policy=sparse_policy(share))
    asked = []
    for number, question in enumerate(questions):
        if not isinstance(question.prompt, str):
            raise UsageError(
                "--task asks in messages, which a plan does not; give a task that asks in plain text"
            )
        ids = [*map(int, tokenizer.encode(shots + question.prompt))]
        how = Sampling(temperature, seed=number * texts)
        asked.append(engine.submit(ids, most, how, tokenizer.stops, n=texts))
    engine.run()
    check_generations(text for each in asked for text in each)
    tried = []
    for question, each in zip(questions, asked, strict=True):
        trials = []
        for text in each:
            answer = tokenizer.decode(text.written)
            tokens = len(text.written)
            if shots and "\n" in answer:
                answer = answer.split("\n")[0]
                tokens = min(tokens, len(tokenizer.encode(answer)) + 1)
            trials.append(TriedText(tokens, task.reward(question, answer) >= 1))
        tried.append(trials)
    return tried
