"""Experts in a file: read before they are needed, when they are needed, and all in memory; one process, tokens in turn.

A mixture with random weights reads random tokens behind a long text, whose keys and values are drawn. The text is as
long as makes a token's compute take as long as the reads of what it misses, measured in the run; half of the experts
have room in memory. What is compared is the time of a token; the ways take turns.

    OMP_NUM_THREADS=1 python bench/resting.py [--folder /tmp] [--json bench/results/resting.json]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.generate.one_text import OneText
from weft.layout.dims import Box, Logical
from weft.layout.mesh import Mesh
from weft.memory.resting_experts import RestingExperts
from weft.models.init import initial_values
from weft.models.paged import KeyValuePages, Reading
from weft.models.spans import Span
from weft.models.transformer import Transformer
from weft.models.values import Values
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

T = torch.Tensor
SHAPE = {"vocab": 512, "layers": 4, "embed": 512, "heads": 8, "kv_heads": 8, "ffn": 512, "experts": 32,
         "experts_per_token": 6, "expert_ffn": 384}  # fmt: skip

#: Texts, in tokens, by which it is found how much longer a token takes behind a longer one.
SHORT, LONG = 512, 4096


class OnDemand(RestingExperts):
    """All of a layer's experts that are missing are read together when it needs them, and waited for."""

    def lift(self, model: Transformer, values: Values) -> None:
        self.ahead = False
        super().lift(model, values)
        using = self.slots.using

        def waiting(records: Sequence[int]) -> Iterator[list[tuple[int, T]]]:
            self.slots.choose(records)
            for record in records:
                self.slots._there[record].coming.wait()
            return using(records)

        self.slots.using = waiting  # type: ignore[method-assign]


@cache
def drawn(name: str, shape: tuple[int, ...]) -> T:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) * 0.02


def values(name: str, logical: Logical, box: Box) -> T:
    """Of experts, the same in every layer but in another order: to draw them all takes longer than to compare."""
    if logical.std is None or ".experts." not in name:
        return initial_values(name, logical, box, seed=0)
    layer = int(name.split(".")[1])
    return drawn(name.rsplit(".", 1)[1], logical.shape).roll(5 * layer + 1, 0)[
        slice(*box[0])
    ]


def built(early: bool, experts: RestingExperts | None) -> Transformer:
    shape = ModelShape(**SHAPE | {"router_early": early})
    lift = None if experts is None else partial(experts.lift, values=values)
    return parallelize(shape, Mesh.single(), Train(), values, lift=lift)[0]


def reader_behind(model: Transformer, past: int) -> OneText:
    """What reads tokens behind a text of so many."""
    reader = OneText(model)
    generator = torch.Generator().manual_seed(1)
    for pages in reader.reader.pages:
        assert isinstance(pages, KeyValuePages)
        shape = (1, past, SHAPE["kv_heads"], SHAPE["embed"] // SHAPE["heads"])
        pages.reading = Reading(
            [Span(0, past, 0, range(-(-past // pages.size)))], torch.arange(past)
        )
        pages.write(*(torch.randn(shape, generator=generator) for _ in range(2)))
    reader.ids = [0] * past
    return reader


def timed(reader: OneText, ids: Collection[int]) -> tuple[float, list[T]]:
    """Seconds for a token (the median), and all logits."""
    times, found = [], []
    for i in ids:
        begun = time.perf_counter()
        found.append(reader.read([i]))
        times.append(time.perf_counter() - begun)
    return statistics.median(times), found


def balanced(models: dict[str, Transformer], some: Callable[[], list[int]]) -> int:
    """How long a text has to be so that a token's compute takes as long as the reads of what it misses.

    Reads are what a token takes longer that waits for all of them than one that needs none, in turns.
    """
    readers = [
        reader_behind(models[name], past)
        for name, past in (
            ("on demand", SHORT),
            ("in memory", SHORT),
            ("in memory", LONG),
        )
    ]
    timed(readers[0], some())  # slots fill
    rounds = [[timed(reader, some())[0] for reader in readers] for _ in range(8)]
    waiting, short, long = map(statistics.median, zip(*rounds, strict=True))
    each = max(1e-7, (long - short) / (LONG - SHORT))
    return min(20_000, max(16, round(SHORT + (waiting - 2 * short) / each)))


@torch.inference_mode()
def compared(early: bool, folder: Path, turns: int, tokens: int) -> dict[str, Any]:
    ways: dict[str, RestingExperts | None] = {
        "ahead": RestingExperts(folder, 0.5), "on demand": OnDemand(folder, 0.5), "in memory": None
    }  # fmt: skip
    models = {name: built(early, way) for name, way in ways.items()}
    tokens_drawn = random.Random(0)

    def some() -> list[int]:
        return [tokens_drawn.randrange(SHAPE["vocab"]) for _ in range(tokens)]

    past = balanced(models, some)
    readers = {name: reader_behind(model, past) for name, model in models.items()}
    for way in ways.values():
        if way is not None:
            way.slots.counts.clear()
            way.file.bytes.clear()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        ids, logits = some(), {}
        for name, reader in readers.items():
            seconds, logits[name] = timed(reader, ids)
            times[name].append(seconds)
        for name in ways:
            assert all(
                torch.equal(a, b)
                for a, b in zip(logits[name], logits["in memory"], strict=True)
            ), name
    return summed_up(early, past, ways, times)


def summed_up(
    early: bool, past: int, ways: dict[str, Any], times: dict[str, list[float]]
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "router": "early" if early else "late",
        "past": past,
        "tokens": {},
    }
    for name, way in ways.items():
        one: dict[str, Any] = {"ms": 1e3 * statistics.median(times[name])}
        if way is not None:
            counts, size = way.slots.counts, way.slots.records.size
            assert way.file.bytes["read"] == counts["read"] * size
            one |= {name: counts[name] for name in ("used", "awaited", "read")} | {
                "bytes": counts["read"] * size
            }
        found["tokens"][name] = one
    ratios = sorted(
        b / a for a, b in zip(times["ahead"], times["on demand"], strict=True)
    )
    found["ratio"] = statistics.median(ratios)
    found["quartiles"] = [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]]
    ahead, waiting, resident = (one["ms"] for one in found["tokens"].values())
    found["reads over compute"] = (waiting - resident) / resident
    found["over the longer of both"] = ahead / max(resident, waiting - resident)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--router", choices=("early", "late"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = []
    for early in [True, False] if given.router is None else [given.router == "early"]:
        found.append(compared(early, given.folder, given.turns, given.tokens))
        print(json.dumps(found[-1], indent=1), flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
