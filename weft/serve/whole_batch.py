"""Texts after many prompts of a file, written together for throughput, also with experts that move through memory."""

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import psutil
import torch

from weft.checkpoint.model import open_model, tokenizer_of
from weft.data.chat.encode import prompt_ids
from weft.data.tokenizer import Tokenizer
from weft.errors import UsageError
from weft.generate.engine import Engine
from weft.generate.sampling import Sampling
from weft.memory.heap import use_huge_pages
from weft.memory.streamed_experts import StreamedExperts
from weft.models.products import read_only
from weft.serve.batch_costs import measure_costs
from weft.serve.batch_plan import BatchPlan, plan_batch
from weft.serve.load_simulation import noting_work
from weft.serve.text_requests import TextRequest, finished_texts

#: The share of the free memory that the cache may fill.
SHARE = 0.4
#: Seconds between two lines about how many texts are finished.
PROGRESS_S = 10.0


class PromptFile(NamedTuple):
    """A file of prompts to continue as one batch, with the model and the settings for it.

    Attributes:
        ``file``: the file of prompts (:func:`prompts_of_file`).
        ``checkpoint``: name of the model.
        ``chat``: whether each prompt is a user's message.
        ``most``: largest number of tokens of a text.
        ``how``: settings of sampling; each text has a seed of its own.
        ``until``: strings that end a text.
        ``weights``: type of the weights.
        ``ema``: whether the averages of the parameters are loaded.
        ``attention``: name of the attention backend; "": the fastest one.
    """

    file: Path
    checkpoint: str
    chat: bool
    most: int
    how: Sampling
    until: Sequence[str] = ()
    weights: str = "float"
    ema: bool = False
    attention: str = ""


def write_prompt_file(
    asked: PromptFile,
    device: str,
    experts: StreamedExperts | None,
    warn: Callable[[str], None],
    write: Callable[[str], None],
) -> None:
    """Continue all prompts of ``asked``, and ``write`` a line of JSON for each, with the fields "prompt" and "text".
    The line of a text that could not go on has the field "error" too.

    Lines are in the order of the prompts. A line is written as soon as its text and those before it are finished.
    ``device``: where the model computes. ``experts``: where the model's experts rest; None: in memory. ``warn``: called
    with lines about the run.
    """
    prompts = prompts_of_file(asked.file)
    if experts and experts.file and experts.file.note:
        warn(experts.file.note)
    model, files, _ = open_model(
        asked.checkpoint,
        device,
        warn,
        asked.ema,
        lift=experts.lift if experts else None,
    )
    read_only(model, asked.weights)
    if device == "cpu":
        use_huge_pages()
    tokenizer = tokenizer_of(files, asked.checkpoint, warn)
    asks = [
        TextRequest(
            prompt_ids(tokenizer, prompt, asked.chat, asked.checkpoint),
            asked.most,
            replace(asked.how, seed=asked.how.seed + i),
            tokenizer.stops,
            asked.until,
        )
        for i, prompt in enumerate(prompts)
    ]
    finished = dict[int, dict[str, str]]()
    due = iter(range(len(prompts)))
    following = next(due)

    def write_in_order(number: int, text: str, failure: str) -> None:
        nonlocal following
        finished[number] = {"text": text} | ({"error": failure} if failure else {})
        while following in finished:
            line = {"prompt": prompts[following]} | finished.pop(following)
            write(json.dumps(line, ensure_ascii=False))
            following = next(due, -1)

    with closing(Engine(model, attention=asked.attention, graphs=True)) as engine:
        write_whole_batch(engine, tokenizer, asks, experts, warn, write_in_order)
    if experts is not None:
        warn(experts.report())


def prompts_of_file(file: Path) -> list[str]:
    """Return the prompts in ``file``. In a ``.jsonl`` file each line is a prompt: a JSON string, or an object with the
    field "prompt". In other files each line that is not empty is a prompt.

    Raises :class:`UsageError` for a file that cannot be read, a line without a prompt, and a file without prompts.
    """
    try:
        # not splitlines: a string of JSON may have other line separators in it
        lines = file.read_text().split("\n")
    except OSError as error:
        raise UsageError(f"--prompts {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--prompts {file} cannot be read: not text in UTF-8 (byte {error.start})"
        ) from None
    prompts = list[str]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt = line if file.suffix != ".jsonl" else _prompt_of(line)
        if not prompt:
            raise UsageError(
                f'--prompts {file}, line {number}: give a string, or an object with "prompt"'
            )
        prompts.append(prompt)
    if not prompts:
        raise UsageError(f"--prompts {file} has no prompt; give one per line")
    return prompts


def _prompt_of(line: str) -> str | None:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    prompt = said.get("prompt") if isinstance(said, dict) else said
    return prompt if isinstance(prompt, str) else None


def write_whole_batch(
    engine: Engine,
    tokenizer: Tokenizer,
    asks: Sequence[TextRequest],
    experts: StreamedExperts | None,
    say: Callable[[str], None],
    each: Callable[[int, str, str], None] = lambda number, text, failure: None,
) -> list[str]:
    """Write the texts that ``asks`` describe, and return a list of them in the same order. ``experts``: the experts of
    the engine's model, if they are read into memory layer by layer; None: all experts are in memory. With ``experts``
    the costs of a few passes are measured first. They decide how many texts are written at a time, and in which order.
    ``say``: called with a line of the predicted speed, now and then with a line of how many texts are finished, and at
    the end with a line of the measured speed. ``each``: called with every text as soon as it is finished: with its
    number among ``asks``, the text, and an error line if it could not go on.
    """
    _fit_cache(engine)
    plan = None if experts is None else _planned(engine, asks, experts)
    order: Sequence[int] = range(len(asks))
    if plan is not None:
        say(f"{len(asks):,} texts, {plan}")
        engine.scheduler.limit, engine.scheduler.budget = plan.limit, plan.budget
        order = plan.order
    texts, in_order = [""] * len(asks), (asks[i] for i in order)
    begun = said = perf_counter()
    with noting_work(engine) as work:
        done = enumerate(finished_texts(engine, tokenizer, in_order), 1)
        for count, (number, text, _, failure) in done:
            texts[order[number]] = text
            each(order[number], text, failure)
            if perf_counter() - said > PROGRESS_S and count < len(asks):
                said = perf_counter()
                say(f"{count:,} of {len(asks):,} texts are written")
    seconds = perf_counter() - begun
    if plan is not None:
        # of each step the rows of logits from which a token was sampled
        tokens = round(sum(step[3] for step in work))
        ended = f" of {plan.tokens:,}, as texts ended" if tokens < plan.tokens else ""
        say(
            f"{seconds:,.4g} s for {tokens:,} new tokens{ended}: {tokens / seconds:,.4g} a second, and predicted were "
            f"{plan.seconds:,.4g} s ({plan.seconds / seconds - 1:+.1%})"
        )
    return texts


def _planned(
    engine: Engine, asks: Sequence[TextRequest], experts: StreamedExperts
) -> BatchPlan:
    prompts, pool = [ask.ids for ask in asks], engine.scheduler.pool
    costs = measure_costs(engine, experts.ring, prompts)
    return plan_batch(costs, prompts, asks[0].most, pool.blocks, pool.size)


def _fit_cache(engine: Engine) -> None:
    device = engine.model.mesh.device
    free = psutil.virtual_memory().available
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    engine.fit(int(SHARE * free))
