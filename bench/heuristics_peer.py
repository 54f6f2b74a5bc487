"""Decisions of datatrove's filters of Gopher, C4 and FineWeb beside those of Weft's operators.

datatrove, with spacy and nltk, stands in a venv of its own:

    VENV/bin/python -P bench/heuristics_peer.py decide TEXTS.json DECISIONS.json
    python bench/heuristics_peer.py record VENV/bin/python

``decide`` writes for every text each filter's reason, "" where it keeps the text. ``record`` asks it about the pages of
`tests/curation/web_pages.py`, which become the table of `tests/curation/test_heuristics.py`, and about the standard
library, and prints how often Weft decides the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results/heuristics_peer.json"
TABLE = ROOT / "tests/curation/datatrove_decisions.json"
#: Filters of datatrove by the name of Weft's operator.
FILTERS = ("gopher", "repetition", "c4", "fineweb")
PAGES = 240


def decide(texts: list[str]) -> dict[str, Any]:
    """Return datatrove's reasons by filter, the texts that C4's filter leaves, and seconds."""
    from datatrove.data import Document
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )

    filters = {
        "gopher": GopherQualityFilter(),
        "repetition": GopherRepetitionFilter(),
        "c4": C4QualityFilter(),
        "fineweb": FineWebQualityFilter(),
    }
    for each in filters.values():  # models are loaded with the first text
        each.filter(Document("This is a text. It has words.", id="warm"))
    answer: dict[str, Any] = {}
    for name, each in filters.items():
        began = time.perf_counter()
        documents = [Document(text, id=str(i)) for i, text in enumerate(texts)]
        decisions = [each.filter(document) for document in documents]
        answer[name] = [
            "" if d is True else d[1] if isinstance(d, tuple) else "dropped"
            for d in decisions
        ]
        answer[f"{name}_seconds"] = time.perf_counter() - began
        if name == "c4":
            answer["c4_texts"] = [document.text for document in documents]
    return answer


def own_reasons(texts: list[str]) -> dict[str, Any]:
    """Return Weft's reasons by operator, the texts that ``c4-lines`` leaves, and seconds."""
    from weft.curation.data_pipeline import DataStep
    from weft.curation.documents import Documents

    documents = Documents([str(i) for i in range(len(texts))], texts)
    answer: dict[str, Any] = {}
    for name in FILTERS:
        began = time.perf_counter()
        here = documents
        if name == "c4":
            here = DataStep(operator="c4-lines").build().map(documents)  # type: ignore[union-attr]
            answer["c4_texts"] = here.texts
        step: Any = DataStep(operator=name).build()
        answer[name] = step.reasons(step.statistics(here))
        answer[f"{name}_seconds"] = time.perf_counter() - began
    return answer


def asked(python: str, texts: list[str]) -> dict[str, Any]:
    """Return what datatrove, in the venv of ``python``, decides."""
    with tempfile.TemporaryDirectory() as folder:
        given, answer = Path(folder, "texts.json"), Path(folder, "decisions.json")
        given.write_text(json.dumps(texts))
        subprocess.run(
            # -P: scripts beside this file have names of its packages
            [python, "-P", __file__, "decide", str(given), str(answer)],
            check=True,
        )
        return dict(json.loads(answer.read_text()))


def same(ours: list[str], theirs: list[str]) -> list[int]:
    """Return the indices of the texts about which both decide differently."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return [i for i, (own, their) in pairs if bool(own) != bool(their)]


def compare(python: str, texts: list[str], names: list[str]) -> dict[str, Any]:
    """Return by operator how many texts both drop, how many decisions differ, and seconds of both."""
    theirs, ours = asked(python, texts), own_reasons(texts)
    figures = {}
    for name in FILTERS:
        differ = same(ours[name], theirs[name])
        for i in differ[:8]:
            print(
                f"{name}: {names[i]}: {ours[name][i]!r}, datatrove {theirs[name][i]!r}"
            )
        figures[name] = {
            "texts": len(texts),
            "dropped": sum(map(bool, theirs[name])),
            "differ": len(differ),
            "seconds": round(ours[f"{name}_seconds"], 3),
            "datatrove_seconds": round(theirs[f"{name}_seconds"], 3),
        }
        print(name, figures[name])
    return {"figures": figures, "theirs": theirs, "ours": ours}


def record(python: str) -> None:
    sys.path.insert(0, str(ROOT))
    from step import machine

    from tests.curation.web_pages import pages

    drawn = compare(python, pages(PAGES), [f"page {i}" for i in range(PAGES)])
    table = {name: drawn["theirs"][name] for name in FILTERS}
    kept = [i for i, reason in enumerate(table["c4"]) if not reason]
    texts = [
        i
        for i in kept
        if drawn["ours"]["c4_texts"][i] != drawn["theirs"]["c4_texts"][i]
    ]
    print("texts of C4 that differ:", texts)
    TABLE.write_text(json.dumps(table, indent=0) + "\n")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(stdlib.glob("*.py"))
    code = compare(
        python,
        [f.read_text(errors="replace")[:50_000] for f in files],
        [f.name for f in files],
    )
    RESULTS.write_text(
        json.dumps(
            {
                "machine": machine(),
                "pages": drawn["figures"],
                "stdlib": code["figures"],
            },
            indent=2,
        )
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("decide", "record"))
    parser.add_argument("words", nargs="+")
    args = parser.parse_args()
    if args.what == "record":
        record(*args.words)
    else:
        given, answer = map(Path, args.words)
        answer.write_text(json.dumps(decide(json.loads(given.read_text()))))


if __name__ == "__main__":
    main()
