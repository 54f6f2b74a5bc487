"""Weights in tiles: the numbers of one device, every byte counted, and checkpoints that know nothing of tiles."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.cases import Case, recipe, start, write_corpus
from tests.checkpoint.test_resume import go, state_of
from tests.checkpoint.test_resume import tree as save_tree
from tests.prove.test_equality import difference, name, tree
from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.memory.tier_file import PAGE
from weft.parallel.tiles import TiledWeight
from weft.train.build_step import build_step
from weft.train.step import StepContext

FILES = {"weights": "file"}
#: A page has 16 rows of float64, so that weights have several tiles and none an even number of them.
WIDE = {"embed": 32, "ffn": 70, "head_dim": 8}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("case", [
    {"layout": {"shard": 2}, "memory": FILES},
    pytest.param({"layout": {"dp": 2}, "memory": {"weights": "host"}, "micro_batch": 1}, marks=pytest.mark.slow(2)),
    *(pytest.param(case, marks=pytest.mark.soak) for case in (
        {"layout": {"shard": 2, "tp": 2}, "memory": {"weights": "host"}, "micro_batch": 1},
        {"layout": {"shard": 3}, "memory": {"weights": "file", "moments": "host", "gradients": "host"},
         "recompute": "full"},
        {"layout": {"dp": 2, "tp": 2}, "memory": FILES, "micro_batch": 1, "tied": True, "kv_heads": 1},
        {"layout": {"cp": 2, "shard": 2}, "memory": FILES | {"read_ahead": False}, "recompute": "full"},
        {"layout": {"pp": 2, "shard": 2, "schedule": "zb-h1"}, "memory": FILES, "micro_batch": 1},
        {"layout": {"pp": 2, "dp": 2}, "memory": {"weights": "host"}, "micro_batch": 1,
         "freeze": ["blocks.0.*", "blocks.1.ffn.*"]},
        {"layout": {"shard": 2}, "memory": FILES | {"activations": "file"}, "micro_batch": 2, "freeze": ["embed*"]},
    )),
], ids=lambda case: name(case).replace("/", "_"))  # fmt: skip
def test_equal_to_one_device(pool: Any, corpus: str, case: Case) -> None:
    """Loss, every gradient, the norm, and parameters and moments after three steps."""
    values = tree(corpus, case | {"model": WIDE})
    folder = str(Path(corpus).parent)
    values |= {"memory": {"folder": folder, "tiles": 3, **case["memory"]}}
    values["train"]["batch"] = 5
    result = pool.run(Layout(**case["layout"]).world, difference, values)[0]
    assert result.ok, result


def counted(values: dict[str, Any]) -> dict[str, Any]:
    """Bytes of the third of three steps, those by the formula, and the most that buffers have taken.

    ``together``: by size, the most buffers that were in use at a time.
    """
    settings, mesh, model, state, loader = start(values)
    stepper = build_step(StepContext(model, state, mesh), settings)
    before: dict[str, int] = {}
    pool, in_use, together = state.tiers.pool, Counter[int](), Counter[int]()
    take, give = pool.take, pool.give

    def taken(size: int) -> torch.Tensor:
        buffer = take(size)
        in_use[buffer.numel()] += 1
        together[buffer.numel()] = max(together[buffer.numel()], in_use[buffer.numel()])
        return buffer

    def given(buffer: torch.Tensor) -> None:
        in_use[buffer.numel()] -= 1
        give(buffer)

    with mock.patch.multiple(pool, take=taken, give=given):
        for step in range(3):
            before = state.tiers.bytes
            batches = loader.step(step * settings.train.batch) or []
            stepper.take(batches, 1e-3)
    moved = {way: n - before[way] for way, n in state.tiers.bytes.items()}
    formula, largest, most = {"read": 0, "written": 0}, 0, 0
    passes, groups = len(batches), state.tiers.groups
    order = [unit for unit in state.units if not isinstance(unit, TiledWeight)]
    for unit in order:  # of the last two stages weights stay from forward to backward
        size = {kind: group.region.size for kind, group in groups[unit].items()}
        kept = unit in order[-2:]
        formula["read"] += sum(size.values()) + (not kept) * size["weights"]
        formula["written"] += sum(size.values())
        most = max(most, sum(size.values()))
    for weight in state.units:
        for tile in weight.tiles if isinstance(weight, TiledWeight) else ():
            each = groups[tile]["weights"].region.size
            formula["read"] += (3 * passes + 2) * each
            formula["written"] += (passes + 3) * each
            largest = max(largest, each)
    return {
        "moved": moved,
        "formula": formula,
        "pool": pool.most,
        "together": together,
        "tile": largest,
        "unit": most,
        "names": {n for n, _ in model.named_parameters()},
    }


@pytest.mark.parametrize(
    "ahead", [pytest.param(True, marks=pytest.mark.slow(1)), False]
)
def test_bytes_and_memory_are_those_of_the_formula(
    pool: Any, corpus: str, tmp_path: Path, ahead: bool
) -> None:
    """Tiles come twice in every pass; one or two have room in buffers, whatever the size of their weight."""
    values = tree(corpus, {"layout": {"shard": 1}, "micro_batch": 2, "model": WIDE})
    values["model"] |= {"ffn": 16 * 8}
    values["memory"] = {
        "folder": str(tmp_path),
        "weights": "file",
        "tiles": 4,
        "read_ahead": ahead,
    }
    values["train"]["batch"] = 4
    result = pool.run(1, counted, values)[0]
    assert result["moved"] == result["formula"]
    assert result["tile"] == 2 * PAGE
    assert "blocks.0.ffn.gate" not in result["names"], "whole in memory"
    # weights, gradient and two moments of a tile and the next, and of what is not tiled
    assert result["pool"] <= 8 * result["tile"] + 3 * result["unit"]
    assert result["together"][result["tile"]] == (8 if ahead else 4)


@pytest.mark.slow(3)
def test_checkpoints_know_nothing_of_tiles(
    pool: Any, corpus: str, tmp_path: Path
) -> None:
    """Three steps in tiles, and three without or in others: the same state as six steps in memory."""

    def values(memory: dict[str, Any], steps: int) -> dict[str, Any]:
        constant = {"optimizer__schedule": "constant", "train__steps": steps}
        tree = save_tree(corpus, {"shard": 2}, **constant)
        tree["model"] |= WIDE
        return tree | {"memory": {"folder": str(tmp_path), **memory}}

    def final(folder: str, *runs: tuple[dict[str, Any], int]) -> dict[str, Any]:
        out = tmp_path / folder
        for i, (memory, steps) in enumerate(runs):
            pool.run(2, go, values(memory, steps), str(out), str(out) if i else None)
        return state_of(out / "checkpoints" / "step-000006", values({}, 6))

    whole = final("whole", ({}, 6))
    two, three = FILES | {"tiles": 2}, {"weights": "host", "tiles": 3}
    for folder, runs in {"on": ((two, 3), ({}, 6)), "other": ((two, 3), (three, 6))}.items():  # fmt: skip
        mixed = final(folder, *runs)
        assert mixed.keys() == whole.keys()
        assert all(torch.allclose(mixed[k], whole[k], rtol=0, atol=1e-10) for k in whole)  # fmt: skip


@pytest.mark.parametrize(("change", "line"), [
    ({"memory__weights": "device"}, "rest elsewhere, and memory.weights"),
    ({"optimizer__kind": "muon"}, "needs the whole of it"),
    ({"optimizer__state": "8bit"}, "needs the whole of it"),
    ({"memory__speculate": "all"}, "have other times for that"),
    ({"adapter__kind": "lora"}, "read their weights whole"),
    ({"train__compile": True}, "read their weights whole"),
    ({"train__recompute": "selective"}, "counting its operators"),
], ids=str)  # fmt: skip
def test_what_cannot_be_tiled_is_refused(
    corpus: str, change: dict[str, Any], line: str
) -> None:
    given = {"memory__weights": "file", "memory__tiles": 4} | change
    with pytest.raises(UsageError, match=line):
        recipe(corpus, **given)
