"""Perplexity and a needle test of cache policies against the share of the keys that tokens attend to.

    nice -n 10 python bench/cache_policies.py [--model FOLDER] [--work FOLDER] [--quick] [--json FILE]

``alisa`` reads prompts whole and chooses keys for what is written, as its paper does: perplexity is then that of the
second half as a continuation of the first, and a needle's digits continue the question. ``alisa-query`` is
``alisa:SHARE:query``, ``alisa-drawn`` is ``alisa:SHARE:drawn``, ``alisa-prompts`` chooses for all tokens of the text,
as the other policies do.

Two models: SmolLM2-135M in ``--model`` (a Hugging Face folder), and a small one that Weft trains here on files of the
standard library (recipes/quickstart.toml on one rank, kept in ``--work``). Perplexity is that of the second half of
each text, where a policy leaves most out; texts are prose of Python's documentation for SmolLM2, and held-out files of
the library for the small model. ``--lengths`` are the tokens of a text; all policies are measured at the first length,
ALISA alone at the others. A needle is a name with five digits somewhere in such a text; the model is asked for
the digits at its end. ``recalled`` is how often all of them are the likeliest tokens, ``log_probability`` the mean of
theirs. All policies read the same texts. ``attended`` is no policy but a bound: ALISA's choice by the
weights of the present query, for which all keys are read.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from data_laws import run
from picture import FONT, INK, LINE, SOFT, text
from policy_readings import AttendedWindow, Readings, perplexity
from step import machine, write

from weft.checkpoint.model import open_model, tokenizer_of
from weft.data.tokenizer import Tokenizer
from weft.generate.cache_policy import CachePolicy, cache_policy_of
from weft.models.transformer import Transformer
from weft.recipe import load_recipe

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "cache_policies.json"
PLOT = ROOT / "docs" / "measured" / "cache-policies.svg"
SHARES = (0.125, 0.25, 0.5)
SINK = 16
WIDTH, HEIGHT = 300, 190
COLOURS = {
    "window": "#667085",
    "blocks": "#2563eb",
    "alisa": "#dc2626",
    "alisa-query": "#a21caf",
    "alisa-drawn": "#0891b2",
    "alisa-prompts": "#f59e0b",
    "attended": "#16a34a",
}


class Subject(NamedTuple):
    """A model and what it reads. ``prose``: long texts; ``lengths``: tokens that are read of each."""

    name: str
    model: Transformer
    tokenizer: Tokenizer
    prose: Sequence[str]
    lengths: Sequence[int]


def policies(length: int, shares: Sequence[float]) -> dict[str, str]:
    """Words by a policy's name and the share of its budget."""
    words = {"none 1": "none"}
    for share in shares:
        words[f"window {share}"] = f"window:{int(share * length) - SINK}"
        words[f"blocks {share}"] = f"blocks:{share}"
        words[f"alisa {share}"] = f"alisa:{share}"
        words[f"alisa-query {share}"] = f"alisa:{share}:query"
        words[f"alisa-drawn {share}"] = f"alisa:{share}:drawn"
    words["alisa-prompts 0.25"] = "alisa:0.25:prompts"
    words["alisa-int8 0.25"] = "alisa:0.25:int8"
    words["attended 0.25"] = "attended"
    return words


#: What is measured at further lengths.
LONG = {
    "none 1": "none",
    "window 0.25": "window",
    "alisa 0.25": "alisa:0.25",
    "alisa-query 0.25": "alisa:0.25:query",
    "alisa-drawn 0.25": "alisa:0.25:drawn",
    "attended 0.25": "attended",
}


def policy_of(word: str, length: int) -> CachePolicy | None:
    if word == "attended":
        policy = AttendedWindow(0.25)
        policy.word = word
        return policy
    return cache_policy_of(f"window:{length // 4 - SINK}" if word == "window" else word)


def needles(subject: Subject, count: int, length: int) -> list[tuple[list[int], int]]:
    """Texts with a needle and its question, and how many tokens at the end are the answer."""
    drawn, asked = random.Random(3), []

    def encode(words: str) -> list[int]:
        return [*map(int, subject.tokenizer.encode(words))]

    for number in range(count):
        name, key = f"pass_{number:02d}", str(drawn.randrange(10_000, 99_999))
        answer = encode(f"{key}")
        needle = encode(f"\n\nThe secret number of {name} is {key}.\n\n")
        question = encode(f"\n\nThe secret number of {name} is ")
        if subject.name == "SmolLM2-135M":
            question = encode(f"\n\nThe secret number of {name} is")
            answer = encode(f" {key}")
        hay = encode(subject.prose[number % len(subject.prose)])
        room = length - len(needle) - len(question) - len(answer)
        depth = int(room * (0.1 + 0.7 * number / max(1, count - 1)))
        ids = [*hay[:depth], *needle, *hay[depth:room], *question, *answer]
        asked.append((ids, len(answer)))
    return asked


def measure(
    subject: Subject, length: int, texts: int, count: int, words: dict[str, str]
) -> dict[str, Any]:
    prose = [
        [*map(int, subject.tokenizer.encode(each)[:length])]
        for each in subject.prose[:texts]
    ]
    assert all(len(ids) == length for ids in prose)
    texts_read = Readings(subject.model, prose, [length // 2] * texts)
    asked = needles(subject, count, length) if count else []
    needles_read = asked and Readings(
        subject.model, [ids for ids, _ in asked], [len(ids) - n for ids, n in asked]
    )
    rows: dict[str, Any] = {}
    for name, word in words.items():
        began, policy = time.monotonic(), policy_of(word, length)
        scored = texts_read.scores(policy)
        rows[name] = {
            "word": word,
            "share": scored.share,
            "perplexity": perplexity(scored),
        }
        rows[name]["over_none"] = (
            rows[name]["perplexity"] / rows["none 1"]["perplexity"]
        )
        if needles_read:
            answers = needles_read.scores(policy)
            right = [bool((best == torch.tensor(ids[-n:])).all())
                     for best, (ids, n) in zip(answers.likeliest, asked, strict=True)]  # fmt: skip
            rows[name]["recalled"] = sum(right) / count
            rows[name]["log_probability"] = torch.cat(answers.logs).mean().item()
        seconds = f"{time.monotonic() - began:.0f} s"
        print(subject.name, length, name, rows[name], seconds, flush=True)
    return {"texts": texts, "length": length, "needles": count, "policies": rows}


def documentation() -> list[str]:
    """Prose of Python's documentation, in long pieces."""
    from pydoc_data.topics import topics

    whole = "\n\n".join(topics[name] for name in sorted(topics))
    return [
        whole[at : at + 12_000] for at in range(20_000, len(whole) - 12_000, 40_000)
    ]


def library(folder: Path, size: int) -> list[str]:
    """Write a folder of files to learn from, and return held-out ones."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(0).shuffle(files)
    texts = [file.read_text(errors="ignore") for file in files]
    held = [t for t in texts[:60] if len(t) > 12_000]
    learn = "\n\n".join(texts[60:])[:size]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "learn.txt").write_text(learn)
    return [t[2_000:12_000] for t in held]


def small_model(work: Path, lengths: Sequence[int], quick: bool) -> Subject:
    held = library(work / "texts", 60_000 if quick else 3_000_000)
    length = 256 if quick else max(lengths)
    words = [
        f"data.sources=[{{ kind = 'text', path = '{work}/texts' }}]", f"data.seq_len={length}", "layout.shard=1",
        "layout.tp=1", f"train.batch={max(1, 2048 // length)}",
        f"train.steps={4 if quick else 400}", f"optimizer.decay={1 if quick else 120}",
        f"optimizer.warmup={1 if quick else 30}", f"data.cache='{work}/cache'", "train.threads=1",
        "validation.every=0",
    ]  # fmt: skip
    recipe = load_recipe(ROOT / "recipes" / "quickstart.toml", words)
    folder = run(work / "small", recipe)
    model, files, _ = open_model(folder, "cpu", print)
    tokenizer = tokenizer_of(files, str(folder))
    return Subject("small", model, tokenizer, held, [length] if quick else lengths)


def panel(every: dict[str, Any], key: str, title: str, x0: int, y0: int) -> str:
    """One plot as SVG: ``key`` of each policy's rows against the share of the keys that tokens attend to."""
    values = [row[key] for row in every.values()]
    room = 0.05 * (max(values) - min(values)) + 1e-9
    low, high = min(values) - room, max(values) + room
    soft, middle = f'fill="{SOFT}"', f'fill="{SOFT}" text-anchor="middle"'

    def at(row: dict[str, Any]) -> tuple[float, float]:
        return x0 + row["share"] * WIDTH, y0 + HEIGHT * (high - row[key]) / (high - low)

    frame = f'x="{x0}" y="{y0}" width="{WIDTH}" height="{HEIGHT}"'
    parts = [f'<rect {frame} fill="none" stroke="{LINE}"/>']
    parts.append(text(x0, y0 - 12, title, 13, f'fill="{INK}"'))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(text(x0 + share * WIDTH, y0 + HEIGHT + 16, f"{share:g}", 10, middle))  # fmt: skip
    for value in (low, (low + high) / 2, high):
        y = y0 + HEIGHT * (high - value) / (high - low) + 4
        parts.append(text(x0 - 6, y, f"{value:.3g}", 10, f'{soft} text-anchor="end"'))
    for place, (policy, colour) in enumerate(COLOURS.items()):
        rows = [row for word, row in every.items() if word.split()[0] == policy]
        points = [*sorted(map(at, rows)), at(every["none 1"])]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')  # fmt: skip
        for x, y in points:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        parts.append(text(x0 + WIDTH + 10, y0 + 18 + 15 * place, policy, 11, f'fill="{colour}"'))  # fmt: skip
    below = "share of the keys that are attended to"
    parts.append(text(x0 + WIDTH / 2, y0 + HEIGHT + 32, below, 10, middle))
    return "\n".join(parts)


def plot(rows: dict[str, Any], path: Path) -> None:
    """Perplexity over that of no policy, and how likely the digits of needles are."""
    kinds = {"over_none": "perplexity over none", "log_probability": "log-probability of a needle"}  # fmt: skip
    rows = {name: row for name, row in rows.items() if row["needles"]}
    panels = [
        panel(rows[name]["policies"], key, f"{name}: {what}", 60 + column * (WIDTH + 160), 50 + line * (HEIGHT + 80))
        for line, name in enumerate(rows)
        for column, (key, what) in enumerate(kinds.items())
    ]  # fmt: skip
    size = f'width="{2 * WIDTH + 320}" height="{50 + len(rows) * (HEIGHT + 80)}"'
    body = "\n".join(panels)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}">'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("/tmp/inside-smollm2"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/weft-cache-policies"))
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--needles", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=(1024, 2048))
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--quick", action="store_true", help="tiny: whether it runs")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    before = machine()
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    work = given.work / "quick" if given.quick else given.work
    subjects = [small_model(work, given.lengths, given.quick)]
    if given.model.is_dir() and not given.quick:
        model, files, _ = open_model(str(given.model), "cpu", print)
        tokenizer = tokenizer_of(files, str(given.model))
        subjects.append(Subject("SmolLM2-135M", model, tokenizer, documentation(), given.lengths))  # fmt: skip
    path = given.json.with_suffix(".quick.json") if given.quick else given.json

    def keep() -> None:
        plot(rows, path.with_suffix(".svg") if given.quick else PLOT)
        write({"machine": before, **rows}, path)

    for subject in subjects:
        texts, count = (1, 2) if given.quick else (given.texts, given.needles)
        first, *others = subject.lengths
        words = policies(first, given.shares)
        rows[subject.name] = measure(subject, first, texts, count, words)
        keep()
        for length in others:
            rows[f"{subject.name} at {length}"] = measure(subject, length, texts, 0, LONG)  # fmt: skip
            keep()


if __name__ == "__main__":
    main()
