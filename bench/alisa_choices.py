"""Variants of ALISA's choice of tokens, by default at a quarter of the keys: perplexity over that of all, text by text.

    python bench/alisa_choices.py [--model FOLDER] [--lengths 1024] [--shares 0.25] [--texts 11] [--skip 0]
        [--only NAME ...] [--json FILE]

The second half of each text is read as the continuation of the first, which is read whole. Settings are chosen by some
texts (``--texts``) and judged by others (``--skip``). What is counted as attended is said for each variant.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from cache_policies import documentation
from policy_readings import AttendedSelector, Readings
from step import machine, write

from weft.checkpoint.model import open_model, tokenizer_of
from weft.models.block_selector import BlockSelector
from weft.techniques.cache_policies.alisa import SparseWindow
from weft.techniques.cache_policies.alisa.alisa_selector import WeightSumSelector
from weft.techniques.cache_policies.alisa.query_selector import (
    DRAWN_EVENLY,
    QuerySelector,
)

RESULTS = Path(__file__).parent / "results" / "alisa_choices.json"


class Variant(SparseWindow):
    """A policy with selectors of the class ``kind``, whose attributes are changed to those of ``changed``. ``whole``:
    so many first layers see all but nothing, and the others less for it. ``share`` is set later.
    """

    def __init__(
        self,
        kind: Any = QuerySelector,
        whole: int = 0,
        layers: int = 30,
        **changed: Any,
    ) -> None:
        super().__init__(1.0)
        self.kind, self.whole, self.layers, self.changed = kind, whole, layers, changed
        self.layer, self.word = 0, "alisa"

    def selector(self, size: int) -> BlockSelector:
        share = self.share
        if self.whole:
            rest = (share * self.layers - self.whole) / (self.layers - self.whole)
            share = 0.9999 if self.layer < self.whole else rest
        selector = self.kind(share, size, False)
        for name, value in self.changed.items():
            setattr(selector, name, value)
        self.layer += 1
        return selector


def variants(layers: int) -> dict[str, Variant]:
    return {
        "sums": Variant(WeightSumSelector),
        "query": Variant(),
        "query near 0.5": Variant(near=0.5),
        "query near 0.25": Variant(near=0.25),
        "query of 1/4": Variant(elements=1 / 4),
        "query of 1/2": Variant(elements=1 / 2),
        "query, 8 sampled": Variant(samples=8),
        "query, 32 sampled": Variant(samples=32),
        "query, none drawn": Variant(drawn=0.0),
        "query, a quarter drawn": Variant(drawn=0.25),
        "query, half drawn": Variant(drawn=0.5),
        "query, each counts as many": Variant(level=None),
        "drawn": Variant(drawn=DRAWN_EVENLY, level=None),
        "query, drawn evenly": Variant(power=0.0),
        "query, drawn by weight": Variant(power=1.0),
        "attended": Variant(AttendedSelector),
        "2 whole, query": Variant(whole=2, layers=layers),
        "sums near 0.25": Variant(WeightSumSelector, near=0.25),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("/tmp/inside-smollm2"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25])
    parser.add_argument("--texts", type=int, default=11)
    parser.add_argument("--skip", type=int, default=0, help="texts that are left out")
    parser.add_argument("--only", nargs="+", help="names of variants")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, files, _ = open_model(str(given.model), "cpu", print)
    tokenizer = tokenizer_of(files, str(given.model))
    prose = documentation()[given.skip : given.skip + given.texts]
    rows: dict[str, Any] = {}
    for length in given.lengths:
        texts = [[*map(int, tokenizer.encode(each)[:length])] for each in prose]
        readings = Readings(model, texts, [length // 2] * len(texts))
        dense = [logs[1:].mean().item() for logs in readings.scores(None).logs]
        print(length, "perplexities", *(f"{math.exp(-x):.2f}" for x in dense), flush=True)  # fmt: skip
        for name, policy in variants(model.shape.layers).items():
            if given.only and name not in given.only:
                continue
            for share in given.shares:
                policy.share, policy.layer = share, 0
                began, scored = time.monotonic(), readings.scores(policy)
                means = [logs[1:].mean().item() for logs in scored.logs]
                ratios = [math.exp(a - b) for a, b in zip(dense, means, strict=True)]
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                row = {"mean": mean, "most": max(ratios), "attended": scored.share, "texts": ratios}  # fmt: skip
                rows[f"{name}, {share:g} of {length}"] = row
                said = " ".join(f"{r:.3f}" for r in ratios)
                took = f"share {scored.share:.3f}, {time.monotonic() - began:.0f} s"
                print(f"{length} {share:g} {name}: {mean:.4f} ({said}), {took}", flush=True)  # fmt: skip
    command = shlex.join(["python", "bench/alisa_choices.py", *sys.argv[1:]])
    write({"machine": machine(), "command": command, "skipped": given.skip, "rows": rows}, given.json)  # fmt: skip


if __name__ == "__main__":
    main()
