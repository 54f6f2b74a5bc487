"""Perplexity and a needle test of cache policies against the share of the keys that tokens attend to.

    nice -n 10 python bench/cache_policies.py [--model FOLDER] [--work FOLDER] [--quick] [--json FILE]

``alisa`` reads prompts whole and chooses keys for what is written, as its paper does: perplexity is then that of the
second half as a continuation of the first, and a needle's digits continue the question. ``alisa-prompts`` chooses for
all tokens of the text, as the other policies do.

Two models: SmolLM2-135M in ``--model`` (a Hugging Face folder), and a small one that Weft trains here on files of the
standard library (recipes/quickstart.toml on one rank, kept in ``--work``). Perplexity is that of the second half of
each text, where a policy leaves most out; texts are prose of Python's documentation for SmolLM2, and held-out files of
the library for the small model. A needle is a name with five digits somewhere in such a text; the model is asked for
the digits at its end. ``recalled`` is how often all of them are the likeliest tokens, ``log_probability`` the mean of
theirs. All policies read the same texts, in turn. ``attended`` is no policy but a bound: ALISA's choice by the
weights of the present queries, for which all keys are read.
"""

from __future__ import annotations

import argparse
import math
import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from data_laws import run
from picture import FONT, INK, LINE, SOFT, text
from step import machine, write

from weft.checkpoint.model import open_model, tokenizer_of
from weft.data.tokenizer import Tokenizer
from weft.generate.cache_policy import cache_policy_of
from weft.generate.engine import Engine
from weft.generate.sampling import GREEDY
from weft.models.block_selector import BlockSelector, SelectedPages
from weft.models.spans import Span
from weft.models.transformer import Transformer
from weft.recipe import load_recipe
from weft.techniques.cache_policies.alisa import SparseWindow
from weft.techniques.cache_policies.alisa.alisa_selector import LEAST, WeightSumSelector

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
    "alisa-prompts": "#f59e0b",
    "attended": "#16a34a",
}


class Subject(NamedTuple):
    """A model and what it reads. ``prose``: long texts; ``length``: tokens that are read of each."""

    name: str
    model: Transformer
    tokenizer: Tokenizer
    prose: Sequence[str]
    length: int


def policies(length: int, shares: Sequence[float]) -> dict[str, str]:
    """Words by a policy's name and the share of its budget."""
    words = {"none 1": "none"}
    for share in shares:
        words[f"window {share}"] = f"window:{int(share * length) - SINK}"
        words[f"blocks {share}"] = f"blocks:{share}"
        words[f"alisa {share}"] = f"continued:{share}"
        words[f"alisa-prompts {share}"] = f"alisa:{share}:prompts"
    words["alisa-int8 0.25"] = "continued:0.25:int8"
    words["attended 0.25"] = "attended:0.25"
    return words


class ContinuedSelector(WeightSumSelector):
    """ALISA's choice for the tokens from number ``prompt`` on, as if they had been written behind a prompt."""

    prompt = 0

    def dense_until(self, span: Span) -> int:
        return self.prompt

    def count(self, every: int, chosen: int, read: int) -> None:
        """Count what is written alone: the pass behind the prompt, which is a pass of its own."""
        self.passes = getattr(self, "passes", 0) + 1
        if self.passes > 1:
            super().count(every, chosen, read)


class ContinuedWindow(SparseWindow):
    """Cache policy of :class:`ContinuedSelector`."""

    prompt = 0
    kind = ContinuedSelector

    def selector(self, size: int) -> BlockSelector:
        selector = self.kind(self.share, size, self.rounded)
        selector.prompt = self.prompt
        return selector


class AttendedSelector(ContinuedSelector):
    """ALISA's choice with the weights of the queries themselves in place of sums over earlier queries.

    All keys are read for it, so it saves nothing: it shows how much of the loss is the fault of the sums.
    """

    def attend(self, pages: SelectedPages, q: torch.Tensor, out: torch.Tensor, window: int) -> None:  # fmt: skip
        self.queries, self.keys = q, pages.store[0]
        super().attend(pages, q, out, window)

    def _choose(self, span: Span) -> torch.Tensor:
        if span.past < self.prompt:
            return super()._choose(span)
        heads, before = self.keys.shape[2], span.past // self.size * self.size
        count = max(LEAST * self.size, math.ceil(self.share * (before + self.size)))
        count -= self.size
        last = before if count >= before else count - count // 2
        end = span.past + span.last - span.first
        near = torch.arange(before - last, end).expand(heads, -1)
        if last == before:
            return near
        keys = self.keys[list(span.table[: before // self.size])].flatten(0, 1)
        # [tokens, kv_heads, group, width]
        queries = self.queries[span.first : span.last].unflatten(1, (heads, -1))
        scores = torch.einsum("thgw,khw->htgk", queries, keys) * keys.shape[-1] ** -0.5
        weights = scores.softmax(-1).sum((1, 2))[:, : before - last]
        return torch.cat([weights.topk(count // 2, -1).indices, near], 1)


class AttendedWindow(ContinuedWindow):
    """Cache policy of :class:`AttendedSelector`."""

    kind = AttendedSelector


class Scores(NamedTuple):
    """Log-probabilities of the tokens of each text from the second one on, those of the likeliest beside them, and the
    share of the keys that were attended to.
    """

    texts: list[list[tuple[float, dict[int, float]]]]
    share: float


def scores(
    subject: Subject, word: str, texts: Sequence[Sequence[int]], prompt: int
) -> Scores:
    """Score texts, of which the first ``prompt`` tokens are the prompt."""
    name, _, argument = word.partition(":")
    bench = {"attended": AttendedWindow, "continued": ContinuedWindow}
    policy: Any = (
        bench[name].of_argument(argument) if name in bench else cache_policy_of(word)
    )
    if name in bench:
        policy.prompt = prompt
    engine = Engine(subject.model, cache_policy=policy, budget=prompt)
    said = []
    for ids in texts:
        for layer in engine.reader.pages:
            if isinstance(
                selector := getattr(layer, "selector", None), ContinuedSelector
            ):
                selector.passes = 0
        asked = engine.submit(ids, 1, GREEDY, top=1, scored=True)[0]
        engine.run()
        said.append(asked.prompt_scores)
    selectors = [getattr(pages, "selector", None) for pages in engine.reader.pages]
    reads = [each.reads for each in selectors if each is not None]
    share = sum(r.chosen for r in reads) / sum(r.all for r in reads) if reads else 1.0
    return Scores(said, share)


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
    subject: Subject, texts: int, count: int, shares: Sequence[float]
) -> dict[str, Any]:
    length = subject.length
    prose = [
        [*map(int, subject.tokenizer.encode(each)[:length])]
        for each in subject.prose[:texts]
    ]
    assert all(len(ids) == length for ids in prose)
    asked = needles(subject, count, length)
    rows: dict[str, Any] = {}
    for name, word in policies(length, shares).items():
        said, share = scores(subject, word, prose, length // 2)
        # the token behind the prompt is the first whose own keys are chosen
        losses = [-p for each in said for p, _ in each[length // 2 :]]
        right, logs = 0, []
        for ids, answer in asked:
            tail = scores(subject, word, [ids], len(ids) - answer).texts[0][-answer:]
            logs += [p for p, _ in tail]
            best = [max(top, key=top.__getitem__) for _, top in tail]
            right += best == ids[-answer:]
        rows[name] = {
            "word": word, "share": share, "perplexity": math.exp(sum(losses) / len(losses)),
            "recalled": right / count, "log_probability": sum(logs) / len(logs),
        }  # fmt: skip
        rows[name]["over_none"] = (
            rows[name]["perplexity"] / rows["none 1"]["perplexity"]
        )
        print(subject.name, name, rows[name], flush=True)
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


def small_model(work: Path, quick: bool) -> Subject:
    held = library(work / "texts", 60_000 if quick else 3_000_000)
    length = 256 if quick else 512
    words = [
        f"data.sources=[{{ kind = 'text', path = '{work}/texts' }}]", f"data.seq_len={length}", "layout.shard=1",
        "layout.tp=1", "train.batch=4", f"train.steps={4 if quick else 400}", f"optimizer.decay={1 if quick else 120}",
        f"optimizer.warmup={1 if quick else 30}", f"data.cache='{work}/cache'", "train.threads=1",
        "validation.every=0",
    ]  # fmt: skip
    recipe = load_recipe(ROOT / "recipes" / "quickstart.toml", words)
    folder = run(work / "small", recipe)
    model, files, _ = open_model(folder, "cpu", print)
    return Subject("small", model, tokenizer_of(files, str(folder)), held, length)


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
        parts.append(text(x0 + WIDTH - 60, y0 + 18 + 15 * place, policy, 11, f'fill="{colour}"'))  # fmt: skip
    below = "share of the keys that are attended to"
    parts.append(text(x0 + WIDTH / 2, y0 + HEIGHT + 32, below, 10, middle))
    return "\n".join(parts)


def plot(rows: dict[str, Any], path: Path) -> None:
    """Perplexity over that of no policy, and how likely the digits of needles are."""
    kinds = {"over_none": "perplexity over none", "log_probability": "log-probability of a needle"}  # fmt: skip
    panels = [
        panel(rows[name]["policies"], key, f"{name}: {what}", 60 + column * (WIDTH + 80), 50 + line * (HEIGHT + 80))
        for line, name in enumerate(rows)
        for column, (key, what) in enumerate(kinds.items())
    ]  # fmt: skip
    size = f'width="{2 * WIDTH + 160}" height="{50 + len(rows) * (HEIGHT + 80)}"'
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
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--needles", type=int, default=6)
    parser.add_argument("--length", type=int, default=1024, help="tokens of SmolLM2")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--quick", action="store_true", help="tiny: whether it runs")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    before = machine()
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    work = given.work / "quick" if given.quick else given.work
    subjects = [small_model(work, given.quick)]
    if given.model.is_dir() and not given.quick:
        model, files, _ = open_model(str(given.model), "cpu", print)
        tokenizer = tokenizer_of(files, str(given.model))
        subjects.append(Subject("SmolLM2-135M", model, tokenizer, documentation(), given.length))  # fmt: skip
    for subject in subjects:
        texts, count = (1, 2) if given.quick else (given.texts, given.needles)
        rows[subject.name] = measure(subject, texts, count, given.shares)
    path = given.json.with_suffix(".quick.json") if given.quick else given.json
    plot(rows, path.with_suffix(".svg") if given.quick else PLOT)
    write({"machine": before, **rows}, path)


if __name__ == "__main__":
    main()
