"""What speculation, workers and adapters gain, each beside the same engine without; one process, in turn.

``editing``: a text is written again with a small change, with guesses from the text; ``random text``: drawn at a
temperature at which nothing repeats, where guesses can only cost. ``workers``: four Hogwild workers beside one.
``adapters``: requests with sixteen adapters of two ranks together, beside one after the other. ``move``: how long a
request stands still that moves to another engine in rounds, beside one whose blocks are all sent at its stop. float32,
one thread. The same tokens are written either way, which is checked; of drawn texts and of workers, as many.

    OMP_NUM_THREADS=1 python bench/generate.py --model FOLDER [--json bench/results/generate.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from weft.checkpoint.model import open_model, tokenizer_of
from weft.data.tokenizer import Tokenizer
from weft.generate.engine import Engine
from weft.generate.joined_texts import hogwild
from weft.generate.lookup import Lookup
from weft.generate.migration import Arrival, Departure
from weft.generate.sampling import GREEDY, Sampling
from weft.models.products import read_only
from weft.models.row_adapters import Factors, HostAdapter, layer_modules
from weft.models.transformer import Transformer

CODE = """def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def variance(values):
    center = mean(values)
    total = 0.0
    for value in values:
        total += (value - center) ** 2
    return total / len(values)


def deviation(values):
    return variance(values) ** 0.5
"""

#: What writes tokens, and how many, by name: ours first, then what it is compared with.
Case = tuple[Callable[[], object], Callable[[], object]]

#: What does that and says how many seconds of it count.
Timed = Callable[[], tuple[float, object]]


def write(
    engine: Engine,
    prompts: list[list[int]],
    count: int,
    how: Sampling,
    names: list[str] | None = None,
) -> object:
    asked = zip(prompts, names or [""] * len(prompts), strict=True)
    found = [
        engine.submit(prompt, count, how, adapter=name)[0] for prompt, name in asked
    ]
    engine.run()
    return [one.written for one in found]


def speculation(
    model: Transformer, prompt: list[int], count: int, how: Sampling
) -> Case:
    def written(drafter: Lookup | None) -> object:
        found = write(Engine(model, drafter=drafter), [prompt], count, how)
        # one of many tokens at random may fall otherwise by rounding
        return count if how.temperature else found

    return lambda: written(Lookup()), lambda: written(None)


def workers(model: Transformer, tokenizer: Tokenizer) -> Case:
    """Tokens a second: four workers write 24 tokens each, one writes 96."""
    prompt = tokenizer.prompt_ids(
        "Four friends write down everything that they know about the sea.\n"
    )
    openings = [
        tokenizer.prompt_ids(f"\n{name}:") for name in ("Ada", "Ben", "Cleo", "Dan")
    ]

    def written(names: int, count: int) -> object:
        return sum(
            len(one.written)
            for one in hogwild(Engine(model), prompt, openings[:names], count, GREEDY)
        )

    return lambda: written(4, 24), lambda: written(1, 96)


def adapters(model: Transformer) -> Case:
    drawn, known = torch.Generator().manual_seed(0), dict[str, HostAdapter]()
    for number in range(16):
        forms, values = [], []
        for modules in layer_modules(model):
            form, at = [], 0
            for module, projections in modules.items():
                for name in ("wq", "wv"):
                    if name in projections.logical:
                        (out, into), rank = (
                            projections.logical[name].shape,
                            8 + 8 * (number % 2),
                        )
                        form.append(Factors(module, name, rank, into, out, at))
                        at += rank * (into + out)
            forms.append(tuple(form))
            values.append(torch.randn(at, generator=drawn) * 0.02)
        known[f"a{number}"] = HostAdapter(tuple(forms), tuple(values))
    prompts = [[(7 * i + n) % 40_000 for i in range(12)] for n in range(16)]

    def engine() -> Engine:
        made = Engine(model)
        for name, adapter in known.items():
            made.add_adapter(name, adapter)
        return made

    together, single = engine(), engine()
    return (
        lambda: write(together, prompts, 16, GREEDY, list(known)),
        lambda: [
            write(single, [p], 16, GREEDY, [a])[0]
            for p, a in zip(prompts, known, strict=True)
        ],  # type: ignore[index]
    )


def standstill(model: Transformer, length: int, rounds: bool) -> tuple[float, object]:
    """Seconds for which nobody writes a request of so many tokens that moves, and what it writes in all."""
    here, there = Engine(model), Engine(model)
    (request,) = here.submit([(7 * i) % 40_000 for i in range(length)], 24, GREEDY)
    while len(request.written) < 4:
        here.step()
    departure, arrival = Departure(here, request), Arrival(there)
    while rounds and (frame := departure.round()):
        arrival.take(frame)
        here.step()
    begun = time.thread_time()
    moved = arrival.take(departure.leave())
    stood = time.thread_time() - begun
    there.run()
    assert moved is not None
    return stood, moved.written


def timed(run: Callable[[], object]) -> Timed:
    def measured() -> tuple[float, object]:
        begun = time.thread_time()
        found = run()
        return time.thread_time() - begun, found

    return measured


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, files, _ = open_model(given.model, "cpu", print)
    tokenizer = tokenizer_of(files, given.model)
    edit = tokenizer.prompt_ids(
        f"Original:\n{CODE}\nThe same with the name values changed to numbers:\n{CODE[:120]}"
    )
    read_only(model)
    cases = {
        "editing": speculation(model, edit, 120, GREEDY),
        "random text": speculation(model, edit[:20], 100, Sampling(1.5, seed=3)),
        "workers": workers(model, tokenizer),
        "adapters": adapters(model),
    }
    sides: dict[str, list[Timed]] = {
        name: [timed(run) for run in case] for name, case in cases.items()
    }
    for length in (500, 4_000):
        sides[f"move of {length:,}"] = [
            partial(standstill, model, length, rounds) for rounds in (True, False)
        ]
    rows = {}
    for name, (ours, other) in sides.items():
        if given.only not in name:
            continue
        assert ours()[1] == other()[1], f"{name}: not the same tokens"
        times = [(ours()[0], other()[0]) for _ in range(given.turns)]
        a, b = (statistics.median(each) for each in zip(*times, strict=True))
        ratios = sorted(y / x for x, y in times)
        rows[name] = {
            "with_s": a,
            "without_s": b,
            "ratio": statistics.median(ratios),
            "ratios": ratios,
        }
        print(
            f"{name:16} {a:8.4f} s with, {b:8.4f} s without: {statistics.median(ratios):.2f} times as fast",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
