"""A mixture trains with its experts in files: all brought, those that tokens choose, and these without foresight.

The three take the same steps in turns, in one process, and have the same losses. What is compared is the time of a
step, the bytes that it reads, and the seconds that it waits for experts.

    python bench/chosen_experts.py --frozen [--folder /tmp] [--quick] [--json bench/results/chosen_experts.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cases import recipe, start, write_corpus
from weft.parallel.experts.chosen import ChosenExperts
from weft.train.step import train_step

LARGE = {"layers": 4, "embed": 256, "heads": 4, "kv_heads": 4, "head_dim": 64, "ffn": 512, "experts": 32,
         "experts_per_token": 1, "expert_ffn": 512, "balance_loss": 0.01}  # fmt: skip
SMALL = LARGE | {"embed": 64, "head_dim": 16, "experts": 16, "expert_ffn": 64}  # fmt: skip


def built(
    corpus: str, model: dict[str, Any], folder: str, experts: str, frozen: bool
) -> Any:
    values = recipe(corpus).model_dump(mode="json")
    values["model"] |= model
    values["train"] |= {"batch": 1, "micro_batch": None, "dtype": "float32"}
    values["train"]["freeze"] = ["blocks.*.ffn.experts.*"] if frozen else []
    values["data"]["seq_len"] = 32
    values["memory"] = {"weights": "file", "folder": folder, "experts": experts}
    return start(values)


def forget(units: list[ChosenExperts]) -> None:
    """Foresee nothing in forward."""
    for unit in units:
        unit.used, unit.before = {}, {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--frozen", action="store_true", help="experts do not learn")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    model, steps = (SMALL, 3) if given.quick else (LARGE, given.steps)
    dist.init_process_group(
        "gloo", init_method="tcp://127.0.0.1:29791", rank=0, world_size=1
    )
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder))
        ways = {
            name: built(corpus, model, given.folder, name.split()[0], given.frozen)
            for name in ("all", "chosen", "chosen without foresight")
        }
        rows: dict[str, dict[str, list[float]]] = {
            name: {"seconds": [], "read": [], "waited": [], "loss": []} for name in ways
        }
        for step in range(steps + 1):
            for name, (_, mesh, net, state, loader) in ways.items():
                units = [u for u in state.units if isinstance(u, ChosenExperts)]
                if "without" in name:
                    forget(units)
                read = state.tiers.bytes.get("read", 0)
                waited = sum(u.waited for u in units)
                begun = perf_counter()
                result = train_step(
                    net, state, loader.step(step) or [], mesh, lr=1e-3, clip=1.0
                )
                row = rows[name]
                row["loss"].append(result.loss)
                if step:  # the first step is slow
                    row["seconds"].append(perf_counter() - begun)
                    row["read"].append(state.tiers.bytes["read"] - read)
                    row["waited"].append(sum(u.waited for u in units) - waited)
    assert len({tuple(row["loss"]) for row in rows.values()}) == 1
    result = {
        name: {
            part: statistics.median(row[part]) for part in ("seconds", "read", "waited")
        }
        for name, row in rows.items()
    }
    units = [u for u in ways["chosen"][3].units if isinstance(u, ChosenExperts)]
    counts = {
        key: sum(u.counts[key] for u in units) for key in ("used", "hits", "idle")
    }
    every = result["all"]
    result["chosen"] |= {
        "foreseen": counts["hits"] / counts["used"],
        "idle": counts["idle"],
        "of the seconds": result["chosen"]["seconds"] / every["seconds"],
        "of the bytes": result["chosen"]["read"] / every["read"],
    }
    print(json.dumps(result, indent=1))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
