"""Small jobs for tests that run on the pool's ranks, and pairwise covering sets of their settings."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from weft.data.loader import Loader
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.parallel.state import State
from weft.recipe import Recipe, build_recipe
from weft.train.setup import build_for_training, prepare

Case = dict[str, Any]


def write_corpus(folder: Path) -> str:
    """Documents of very unequal length, some shorter than a token row, some longer."""
    rng = random.Random(0)
    path = folder / "corpus.jsonl"
    with path.open("w") as file:
        for _ in range(60):
            length = rng.choice([1, 2, 3, 5, 8, 13, 21, 34, 55])
            file.write(
                json.dumps(
                    {"text": "".join(rng.choice("abcdefgh \n") for _ in range(length))}
                )
                + "\n"
            )
    return str(path)


def recipe(corpus: str, **change: Any) -> Recipe:
    """A tiny recipe: odd sequence length, batch that no rank count divides, vocabulary of 257."""
    tree: dict[str, Any] = {
        # init_std makes activations of this narrow model as large as they are in wide ones; at the usual 0.02 attention
        # has hardly a gradient, and float32 rounding alone moves Adam's direction.
        "model": {
            "layers": 2,
            "embed": 24,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 6,
            "ffn": 41,
            "init_std": 0.1,
        },
        "data": {
            "sources": [{"kind": "jsonl", "path": corpus}],
            "seq_len": 19,
            "validation": 0.1,
            "cache": str(Path(corpus).parent / "cache"),
        },
        "train": {"batch": 5, "dtype": "float64", "loss_chunk": 7, "steps": 6},
        "optimizer": {"lr": 3e-4, "warmup": 2},
        "validation": {"every": 0},
        "observe": {"split_every": 0, "trackers": []},
    }
    for key, value in change.items():
        section, _, name = key.partition("__")
        tree.setdefault(section, {})[name] = value
    return build_recipe(tree)


class Started(NamedTuple):
    """A job on this rank, as it is before its first step."""

    settings: Recipe
    mesh: Mesh
    model: Transformer
    state: State
    loader: Loader


def start(values: dict[str, Any]) -> Started:
    """Set up the recipe of this tree in the process group that there is."""
    settings = build_recipe(values)
    mesh, job = Mesh.create(settings.layout, "cpu"), prepare(settings)
    return Started(
        settings,
        mesh,
        *build_for_training(job.shape, mesh, settings),
        job.loader(job.corpus.train, mesh),
    )


def pairwise(**factors: list[Any]) -> Iterator[Case]:
    """Cases such that every pair of values of any two factors occurs together in at least one. Deterministic."""
    names = list(factors)
    missing = {
        ((a, va), (b, vb))
        for a, b in itertools.combinations(names, 2)
        for va in map(_key, factors[a])
        for vb in map(_key, factors[b])
    }
    rng = random.Random(1)
    while missing:
        seed = dict(min(missing))
        best: tuple[int, Case] | None = None
        for _ in range(40):
            case = {
                n: next(v for v in factors[n] if _key(v) == seed[n])
                if n in seed
                else rng.choice(factors[n])
                for n in names
            }
            gain = len(_pairs(case) & missing)
            if best is None or gain > best[0]:
                best = (gain, case)
        assert best is not None
        missing -= _pairs(best[1])
        yield best[1]


def _key(value: Any) -> str:
    return repr(value)


def _pairs(case: Case) -> set[Any]:
    return {
        ((a, _key(case[a])), (b, _key(case[b])))
        for a, b in itertools.combinations(case, 2)
    }
