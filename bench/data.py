"""A whole funnel by ``weft data run`` and by datatrove: documents a second, what is left, and memory.

    nice -n 5 python bench/data.py --peer VENV/bin/python [--documents 20000] [--workers 2] [--rounds 3] [--json FILE]

Both read JSON lines, apply the rules of Gopher (quality, repetition), C4 and FineWeb with the same limits, drop
near-duplicates by 14 buckets of 8 hashes, tokenise with the same tokenizer, and write Parquet and token ids. Documents
are drawn pages (``tests/curation/web_pages.py``), a part of them repeated with some words replaced. The peer stands in
a venv of its own (``pip install datatrove spacy nltk orjson pyarrow tokenizers``). Seconds are from the start of a
process to its end, with imports; in every round one runs after the other. Memory is that of the largest process, of the
corpus and of one four times as large with shards of the same size.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from step import machine, write

from weft.data.tokenizer import load_tokenizer
from weft.recipe import Source

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results/data.json"
FILES = 8
#: Share of the documents that are copies, and share of their words that are replaced.
COPIES, CHANGED = 0.2, 0.02
STEPS = ("repetition", "gopher", "c4-lines", "c4", "fineweb", "minhash")


class Measured(NamedTuple):
    """``megabytes``: memory of the largest process."""

    seconds: float
    processor: float
    megabytes: float


def corpus(folder: Path, documents: int) -> None:
    """Write ``documents`` pages as JSON lines."""
    sys.path.insert(0, str(ROOT))
    from tests.curation.web_pages import page

    draw = random.Random(0)
    folder.mkdir(parents=True)
    texts: list[str] = []
    for number in range(documents):
        if texts and draw.random() < COPIES:
            words = draw.choice(texts).split(" ")
            texts.append(
                " ".join(w if draw.random() > CHANGED else "changed" for w in words)
            )
        else:
            texts.append("\n".join(page(8 * number + part) for part in range(8)))
    for file in range(FILES):
        own = texts[file::FILES]
        lines = (json.dumps({"text": text}) + "\n" for text in own)
        (folder / f"{file}.jsonl").write_text("".join(lines))


def measured(command: list[str]) -> Measured:
    """Run a command to its end."""
    report = tempfile.NamedTemporaryFile(suffix=".json", delete=False)  # noqa: SIM115
    wrapper = (
        "import json, resource, subprocess, sys; done = subprocess.run(sys.argv[2:], stdout=subprocess.DEVNULL); "
        "use = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "json.dump([use.ru_utime + use.ru_stime, use.ru_maxrss], open(sys.argv[1], 'w')); sys.exit(done.returncode)"
    )
    began = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-c", wrapper, report.name, *command],
        check=True,
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    seconds = time.perf_counter() - began
    processor, kilobytes = json.loads(Path(report.name).read_text())
    Path(report.name).unlink()
    return Measured(seconds, processor, kilobytes / 1024)


def pipeline(file: Path, data: Path, tokenizer: Path, shards: int) -> None:
    """Write the file of Weft's pipeline."""
    steps = "".join(f'[[steps]]\noperator = "{name}"\n' for name in STEPS)
    file.write_text(
        f'shards = {shards}\nsources = [{{ kind = "jsonl", path = "{data}" }}]\n{steps}'
        f'[output]\ntokenizer = "{tokenizer}"\n'
    )


class Funnel(NamedTuple):
    """What both systems read. ``data``, ``tokenizer``: the files; ``out``: folder for what they write."""

    data: Path
    tokenizer: Path
    out: Path


def run_weft(funnel: Funnel, workers: int, shards: int) -> tuple[Measured, int]:
    """Run Weft's funnel; return what it took, and how many documents are left."""
    shutil.rmtree(funnel.out, ignore_errors=True)
    file = funnel.out.with_suffix(".toml")
    pipeline(file, funnel.data, funnel.tokenizer, shards)
    words = ["data", "run", str(file), "--out", str(funnel.out)]
    took = measured([sys.executable, "-m", "weft", *words, "--workers", str(workers)])
    return took, json.loads((funnel.out / "card.json").read_text())["documents"]


def run_peer(funnel: Funnel, workers: int, python: str) -> tuple[Measured, int]:
    """Run datatrove's funnel; return what it took, and how many documents are left."""
    shutil.rmtree(funnel.out, ignore_errors=True)
    script = str(ROOT / "bench/data_peer.py")
    words = [str(funnel.data), str(funnel.out), str(funnel.tokenizer), str(workers)]
    took = measured([python, "-P", script, *words])
    return took, json.loads((funnel.out / "left.json").read_text())


def row(runs: list[Measured], documents: int, left: int) -> dict[str, Any]:
    """Return the figures of a system; rates are those of its fastest round."""
    return {
        "documents/s": documents / min(run.seconds for run in runs),
        "documents/s of processors": documents / min(run.processor for run in runs),
        "seconds": [run.seconds for run in runs],
        "processor seconds": [run.processor for run in runs],
        "left": left,
        "megabytes": max(run.megabytes for run in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", help="Python of the venv with datatrove")
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    facts = machine()
    rounds: dict[str, list[Measured]] = {}
    left: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus(folder / "data", options.documents)
        source = Source(kind="jsonl", path=str(folder / "data"))
        load_tokenizer("train:4096", [source], folder / "cache").save(folder / "own")
        tokenizer = folder / "own" / "tokenizer.json"
        systems: dict[str, Callable[[Funnel], tuple[Measured, int]]] = {
            "weft": lambda funnel: run_weft(funnel, options.workers, FILES)
        }
        if options.peer:
            systems["datatrove"] = lambda funnel: run_peer(
                funnel, options.workers, options.peer
            )
        for number in range(options.rounds):
            for system, run in systems.items():
                funnel = Funnel(folder / "data", tokenizer, folder / system)
                took, left[system] = run(funnel)
                rounds.setdefault(system, []).append(took)
                print(
                    f"round {number + 1}: {system}: {took.seconds:.1f} s, {took.processor:.1f} s of processors, "
                    f"{left[system]} left, {took.megabytes:.0f} MB",
                    flush=True,
                )
        corpus(folder / "large", 4 * options.documents)
        large, _ = run_weft(
            Funnel(folder / "large", tokenizer, folder / "more"),
            options.workers,
            4 * FILES,
        )
    rows = {
        system: row(runs, options.documents, left[system])
        for system, runs in rounds.items()
    }
    results: dict[str, Any] = {
        "machine": facts,
        "documents": options.documents,
        "workers": options.workers,
        "rows": rows,
        "megabytes of four times the corpus": large.megabytes,
    }
    if options.peer:
        for measure in ("documents/s", "documents/s of processors"):
            ratio = rows["weft"][measure] / rows["datatrove"][measure]
            results[f"ours / theirs, {measure}"] = ratio
            print(f"ours / theirs, {measure}: {ratio:.2f}")
    print(f"memory of four times the corpus: {large.megabytes:.0f} MB")
    write(results, options.json)


if __name__ == "__main__":
    main()
