"""Does the cost law of reasoning know the better of two settings that it has not seen?

    nice -n 10 python bench/thinking.py [--model FOLDER] [--work FOLDER] [--only quality] [--quick] [--json FILE]

Cost: rates are fitted to a few settings of each model (as ``weft plan --think`` does), then pairs of other settings
are drawn, whose models, prompts, tokens, texts and shares of keys all may differ. The law says which of both takes
less processor time, and both are measured, alone and in turn. As the plain alternative, the products of the parameters
alone choose, as scaling laws do that count no memory.

Quality: two small models of different size, which Weft trains here to sort letters (kept in ``--work``; of each the
checkpoint counts that solves nearest to half of some questions), try questions of the task ``sorting``, with 16 solved
ones before each. Pairs of (model, share, budget) are drawn; the law says from some questions which setting answers more
of others within the budget. Better is who answers more of held-back questions, which are in no training text either,
with as many texts as measured times permit. Pairs whose difference on these is within twice its standard error count
for neither, as it is not known which is better.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from data_laws import run
from step import machine, write

from weft.checkpoint.model import open_model, tokenizer_of
from weft.cli.think_plan import (
    CONTEXTS,
    TIMED_SHARES,
    TIMED_TEXTS,
    TOKENS,
    task_of_word,
)
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.planner.thinking_price import (
    SHARES,
    StepRates,
    Thinking,
    ThinkingModel,
    TriedText,
    coverage,
    fit_rates,
    seconds,
    thinking_model,
    thinking_work,
)
from weft.recipe import ModelShape, Train, load_recipe
from weft.rl.thinking_trial import solved_before, time_thinking, try_questions
from weft.shapes.shape import shape_of

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "thinking.json"
#: Random models: depth, width and heads differ.
SHAPES: dict[str, dict[str, int]] = {
    "deep": {"layers": 16, "embed": 192, "heads": 6, "kv_heads": 6, "ffn": 512},
    "wide": {"layers": 4, "embed": 768, "heads": 12, "kv_heads": 4, "ffn": 2048},
    "narrow": {"layers": 4, "embed": 128, "heads": 4, "kv_heads": 4, "ffn": 256},
}
PAIRS = 10
TEXTS = (1, 2, 4, 8, 16, 32)
#: The task, and models of it: layers, width, steps; and steps from one checkpoint to the next.
TASK = "sorting:letters=3"
SORTERS = {"sorter": (2, 64, 1200), "larger sorter": (3, 96, 500)}
EVERY = 100
#: Questions and texts of each that are tried; and the number of questions by which a checkpoint is chosen.
QUESTIONS, TRIED, CHOOSING = 48, 16, 24


def priced(name: str, model: Transformer) -> ThinkingModel:
    width = next(model.parameters()).element_size()
    return thinking_model(name, shape_of(model.shape), width)


def random_models(few: bool) -> dict[str, Transformer]:
    built = {}
    for name, sizes in SHAPES.items():
        smaller = {"layers": 2, "embed": 64, "heads": 4, "kv_heads": 2, "ffn": 64}
        shape = ModelShape(vocab=4096, tied=True, **(smaller if few else sizes))
        built[name] = parallelize(shape, Mesh.single(), Train(seed=1))[0]
    return built


def measured(model: Transformer, how: Thinking, prompt: int, rounds: int) -> float:
    """Processor seconds, the least of some rounds, as the machine may be busy."""
    return min(
        time_thinking(model, how, prompt, time.process_time) for _ in range(rounds)
    )


def fitted(models: dict[str, Transformer], rounds: int) -> StepRates:
    works, spent = [], []
    for name, model in models.items():
        for context in CONTEXTS:
            for texts in TIMED_TEXTS:
                for share in TIMED_SHARES:
                    how = Thinking(name, TOKENS, texts, share)
                    works.append(thinking_work(priced(name, model), context, how))
                    spent.append(measured(model, how, context, rounds))
    return fit_rates(works, spent)


def cost_pairs(
    models: dict[str, Transformer], rates: StepRates, quick: bool, rounds: int
) -> list[dict[str, Any]]:
    drawn, pairs = random.Random(5), []
    for _ in range(3 if quick else PAIRS):
        both = []
        for _ in range(2):
            name = drawn.choice([*models])
            tokens, texts = drawn.choice([4, 8, 16]), drawn.choice([2, 3, 8, 12])
            how = Thinking(name, tokens, texts, drawn.choice([1.0, 0.5, 0.125]))
            prompt = drawn.choice([32, 128] if quick else [32, 256, 512, 2048])
            model = models[name]
            both.append({
                "setting": str(how), "prompt": prompt, "predicted": seconds(priced(name, model), rates, prompt, how),
                "measured": measured(model, how, prompt, rounds),
                "parameters_alone": priced(name, model).parameters * how.tokens * how.texts,
            })  # fmt: skip
        a, b = both
        less = a["measured"] < b["measured"]
        pairs.append({
            "settings": both, "right": (a["predicted"] < b["predicted"]) == less,
            "parameters_right": (a["parameters_alone"] < b["parameters_alone"]) == less,
        })  # fmt: skip
        print(pairs[-1], flush=True)
    return pairs


def sorter(work_folder: Path, name: str, quick: bool) -> Path:
    """Train a small model on solved questions, none of which is held out."""
    folder, (layers, width, steps) = work_folder / "solved", SORTERS[name]
    folder.mkdir(parents=True, exist_ok=True)
    task, first = task_of_word(TASK), 10_000
    learned = [task.question(first + i) for i in range(2_000 if quick else 60_000)]
    lines = [f"{each.prompt}{each.answer}\n" for each in learned]
    (folder / "solved.txt").write_text("".join(lines))
    words = [
        f"data.sources=[{{ kind = 'text', path = '{folder}' }}]", "data.tokenizer='bytes'", "data.seq_len=192",
        "layout.shard=1", "layout.tp=1", f"model.layers={layers}", f"model.embed={width}", "train.batch=8",
        f"train.steps={4 if quick else steps}", "optimizer.decay=0", "optimizer.warmup=10", "optimizer.lr=3e-3",
        f"checkpoint.every={2 if quick else EVERY}", "checkpoint.keep=100",
        f"data.cache='{work_folder}/cache'", "train.threads=1", "validation.every=0",
    ]  # fmt: skip
    recipe = load_recipe(ROOT / "recipes" / "quickstart.toml", words)
    return run(work_folder / name.replace(" ", "-"), recipe)


def half_trained(folder: Path) -> Any:
    """Open the checkpoint of a run that solves nearest to half of some questions."""
    task = task_of_word(TASK)
    asked = [task.question(500 + i) for i in range(CHOOSING)]
    best, kept = 2.0, None
    for checkpoint in sorted((folder / "checkpoints").glob("step-*")):
        model, files, _ = open_model(str(checkpoint), "cpu", print)
        tokenizer = tokenizer_of(files, str(folder))
        tried = try_questions(model, tokenizer, task, asked, 4, 6, 1.0, solved_before(task, 16))  # fmt: skip
        solved = coverage(tried, 6, 1)
        print(folder.name, checkpoint.name, f"solves {solved:.3f}", flush=True)
        if abs(solved - 0.5) < best:
            best, kept = abs(solved - 0.5), (model, files)
    return kept


def solved_each(trials: Sequence[Sequence[TriedText]], texts: int) -> list[float]:
    """How likely each question is solved by one of ``texts`` texts."""
    return [coverage([each], 6, texts) if texts else 0.0 for each in trials]


def differ(some: Sequence[float], others: Sequence[float]) -> bool:
    """Whether two settings differ on the same questions by more than twice the standard error."""
    each = [a - b for a, b in zip(some, others, strict=True)]
    error = statistics.stdev(each) / len(each) ** 0.5
    return abs(statistics.mean(each)) > 2 * error


def quality_pairs(opened: dict[str, Any], rates: StepRates, quick: bool) -> dict[str, Any]:  # fmt: skip
    """Pairs of settings within a budget, and what was tried of each."""
    task, count, texts = (
        task_of_word(TASK),
        3 if quick else QUESTIONS,
        2 if quick else TRIED,
    )
    shots = solved_before(task, 16)
    known = [task.question(100 + i) for i in range(count)]
    held = [task.question(i, held_out=True) for i in range(count)]
    trials, later, spent, prompts = {}, {}, {}, {}
    for name, (model, files) in opened.items():
        tokenizer = tokenizer_of(files, name)
        prompts[name] = len(tokenizer.encode(shots)) + 6
        for share in SHARES[: 2 if quick else 3]:
            key = name, share
            trials[key] = try_questions(model, tokenizer, task, known, texts, 6, share, shots)  # fmt: skip
            later[key] = try_questions(model, tokenizer, task, held, texts, 6, share, shots)  # fmt: skip
            spent[key] = {
                n: measured(
                    model, Thinking(name, 6, n, share), prompts[name], 1 if quick else 6
                )
                for n in TEXTS
            }
            print(key, coverage(trials[key], 6, 1), coverage(later[key], 6, 1), spent[key], flush=True)  # fmt: skip
    drawn, pairs = random.Random(7), list[dict[str, Any]]()
    # every setting answers at least once
    least = max(min(each.values()) for each in spent.values())
    most = max(max(each.values()) for each in spent.values())
    tries = 0
    while len(pairs) < (2 if quick else PAIRS) and tries < 200:
        tries += 1
        budget = least * (most / least) ** drawn.random()
        both = []
        for key in drawn.sample([*trials], 2):
            model = priced(key[0], opened[key[0]][0])
            rooms = [
                n
                for n in TEXTS
                if seconds(
                    model, rates, prompts[key[0]], Thinking(key[0], 6, n, key[1])
                )
                <= budget
            ]
            real = [n for n, s in spent[key].items() if s <= budget]
            both.append({
                "solved": solved_each(later[key], max(real, default=0)),
                "model": key[0], "share": key[1], "texts": max(rooms, default=0),
                "predicted": coverage(trials[key], 6, max(rooms)) if rooms else 0.0,
                "measured": coverage(later[key], 6, max(real)) if real else 0.0,
            })  # fmt: skip
        a, b = both
        solved = [each.pop("solved") for each in both]
        if not quick and not differ(*solved):
            continue
        # who predicts the same of both has not said which is better
        right = (a["predicted"] - b["predicted"]) * (a["measured"] - b["measured"]) > 0
        pairs.append({"budget": budget, "settings": both, "right": right})
    singles = {
        f"{name} {share}": {
            "known": coverage(trials[name, share], 6, 1),
            "held_back": coverage(later[name, share], 6, 1),
        }
        for name, share in trials
    }
    right = sum(pair["right"] for pair in pairs)
    return {"questions": count, "texts": texts, "single": singles, "pairs": pairs, "right": right}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("/tmp/inside-smollm2"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/weft-thinking"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--only", choices=["quality"], help="keep the cost pairs of FILE"
    )
    parser.add_argument("--quick", action="store_true", help="tiny: whether it runs")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    before = machine()
    torch.set_num_threads(1)
    work_folder = given.work / "quick" if given.quick else given.work
    opened = {
        name: half_trained(sorter(work_folder, name, given.quick)) for name in SORTERS
    }
    sorters = {name: model for name, (model, _) in opened.items()}
    rounds, path = 1 if given.quick else given.rounds, given.json
    path = path.with_suffix(".quick.json") if given.quick else path
    rows: dict[str, Any] = {"machine": before}
    if given.only:
        rows = json.loads(path.read_text())
        rows |= {"quality_machine": before}
        rates = fitted(sorters, 3 * rounds)
    else:
        models = random_models(given.quick) | sorters
        if given.model.is_dir() and not given.quick:
            models["SmolLM2-135M"] = open_model(str(given.model), "cpu", print)[0]
        rates = fitted(models, rounds)
        print(rates, flush=True)
        pairs = cost_pairs(models, rates, given.quick, rounds)
        rows |= {
            "rates": rates.__dict__, "cost_pairs": pairs, "cost_right": sum(p["right"] for p in pairs),
            "parameters_right": sum(p["parameters_right"] for p in pairs),
        }  # fmt: skip
    rows["quality"] = quality = quality_pairs(opened, rates, given.quick)
    print({key: rows[key] for key in ("cost_right", "parameters_right")}, quality["right"])  # fmt: skip
    write(rows, path)


if __name__ == "__main__":
    main()
