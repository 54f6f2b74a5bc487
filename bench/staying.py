"""Generation over four hosts whose tokens stay with their experts, beside tokens that return home, by placement.

    sudo python bench/staying.py [--steps 250] [--rounds 5] [--rate 2mbit] [--quick] [--json FILE]

Two mixtures (6 layers of 16 experts; a token has one of them, or two) learn the recipe's text. From a half of unseen
text it is counted what tokens choose, and experts are placed on four ranks: in the order of training (``plain``), by
the search for few changes of the rank (``affinity``, ExFlow) and by integer programs (``programs``, MoETuner). With
each order 16 texts go on from prompts of the other half: greedily, in float32, on four ranks that are network
namespaces whose cables carry ``--rate``. ``home``: dispatch = per-rank. ``stay``: dispatch = stay. They take turns.

``attention bytes`` are queries, and answers to them, of tokens whose keys and values are on all ranks by position
(``home``); ``expert bytes`` contain the keys and values of all layers (``stay``). ``rows per layer`` are copies of
tokens and sums of results that go to another rank, per token and layer, in steps in which each text gets a token.
``with contexts`` adds one message per token and other rank, for the keys and values of all layers. ``two per layer`` is
what tokens that start on any rank would send with experts in the order of training: one row to each rank that has any
of their experts, and one back.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from step import machine, write

from weft.checkpoint.convert.routing import chosen_experts, with_experts
from weft.generate.engine import Engine
from weft.generate.leader import Leader, follow_leader, mesh_of_rank
from weft.generate.sampling import GREEDY
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.parallel import striped
from weft.parallel.build import parallelize
from weft.parallel.experts import affinity
from weft.parallel.experts.integer_placement import place_by_programs
from weft.recipe import ModelShape, Train, load_recipe
from weft.train.rule_optimizer import learning_rate
from weft.train.setup import build_for_training, prepare
from weft.train.step import train_step

RECIPE = Path(__file__).parents[1] / "recipes" / "experts.toml"
RESULTS = Path(__file__).parent / "results" / "staying.json"
RANKS, MOST_LOAD = 4, 1.1
ORDERS, WAYS = ("plain", "affinity", "programs"), ("per-rank", "stay")
#: Texts at once, tokens of a prompt, and new tokens of each.
TEXTS, PROMPT, NEW = 16, 16, 48
T = torch.Tensor


def trained(steps: int, k: int) -> tuple[ModelShape, dict[str, T], list[T], float]:
    """A mixture with ``k`` experts per token after ``steps`` steps: shape, weights, unseen rows of text, and loss."""
    changes = ["model.layers=6", "model.experts=16", "model.init_std=0.02", "model.balance_loss=0.01", "layout.shard=1",
               "model.embed=128", "model.kv_heads=1", "model.head_dim=16",
               "model.router_norm=false", f"model.experts_per_token={k}",
               f"train.steps={steps}"]  # fmt: skip
    settings = load_recipe(RECIPE, changes)
    job, mesh = prepare(settings), Mesh.single()
    model, state = build_for_training(job.shape, mesh, settings)
    loader, batch, loss = job.loader(job.corpus.train, mesh), settings.train.batch, 0.0
    for step in range(steps):
        lr = learning_rate(settings.optimizer, step, steps)
        rows = loader.step(step * batch) or []
        loss = train_step(model, state, rows, mesh, lr=lr, clip=1.0).loss
    unseen = job.loader(job.corpus.validation, mesh)
    rows = [
        each.tokens.flatten()
        for n in range(16)
        for each in unseen.step(n * batch) or []
    ]
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    values |= {held.name: held.local.clone() for held in state.held}
    return job.shape, values, rows, loss


def model_of(shape: ModelShape, values: dict[str, T], layout: str = "") -> Transformer:
    """The model with these weights, or this rank's part of it."""
    mesh = mesh_of_rank(Layout.parse(layout), "cpu")
    return parallelize(
        shape,
        mesh,
        Train(dtype="float32"),
        lambda name, logical, box: values[name][tuple(slice(*each) for each in box)],
        summed=False,
    )[0]


def placed(
    shape: ModelShape, values: dict[str, T], rows: Sequence[T]
) -> tuple[dict[str, dict[str, T]], dict[str, Any]]:
    """The weights in each order, and of each order on unseen text the transitions that stay and the largest load."""
    model, counts = model_of(shape, values), [*shape.mixtures.values()]
    known, unseen = (
        chosen_experts(model, torch.cat([*half]).tolist())
        for half in (rows[::2], rows[1::2])
    )
    steps, loads = (
        affinity.steps_between(known, counts),
        affinity.loads_of(known, counts),
    )
    after, loads_after = (
        affinity.steps_between(unseen, counts),
        affinity.loads_of(unseen, counts),
    )
    owners = {
        "plain": [np.repeat(np.arange(RANKS), n // RANKS) for n in counts],
        "affinity": affinity.place_experts(steps, loads, RANKS),
        "programs": place_by_programs(steps, loads, RANKS, MOST_LOAD).owners,
    }
    orders = {
        name: with_experts(values, dict(zip(shape.mixtures, affinity.experts_by_slot(each), strict=True)))
        for name, each in owners.items()
    }  # fmt: skip
    return orders, {
        name: {
            "stays": affinity.share_that_stays(after, each),
            "largest load": affinity.largest_load(loads_after, each),
        }
        for name, each in owners.items()
    }


def two_per_layer(model: Transformer, texts: Sequence[Sequence[int]]) -> float:
    """Rows per token and layer if each token has a home that is any rank: to the ranks of its experts, and back."""
    rows = count = 0
    for text in texts:
        for ids in chosen_experts(model, text):
            owners = ids // (model.shape.experts_of(0) // RANKS)
            rows += sum(len({*each}) for each in owners.tolist())
            count += len(ids)
    return 2 * rows / count * (RANKS - 1) / RANKS


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], new: int
) -> tuple[list[list[int]], float, float]:
    """The texts, the seconds of all, and those of the steps after the prompts."""
    begun = time.perf_counter()
    texts = [engine.submit(prompt, new, GREEDY)[0] for prompt in prompts]
    while any(not text.written for text in texts):
        engine.step()
    middle = time.perf_counter()
    engine.run()
    end = time.perf_counter()
    return [text.written for text in texts], end - begun, end - middle


def be_rank(rank: int, address: str, folder: Path) -> None:
    """Take turns with all sides of all models, and on the first rank write what was measured."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0",
                   "MASTER_ADDR": address, "MASTER_PORT": "29571"}  # fmt: skip
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:29571", rank=rank, world_size=RANKS
    )
    job = torch.load(folder / "job.pt", weights_only=False)
    told: dict[str, Any] = {}
    exchanged, queries = striped.exchanged_rows, [0]

    def counted(
        x: T, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Any:
        queries[0] += (sum(sent) - sent[group.rank()]) * x[:1].nbytes
        return exchanged(x, sent, received, group)

    striped.exchanged_rows = counted
    for k, (shape, orders) in job["models"].items():
        sides = [(order, way) for order in ORDERS for way in WAYS]
        models = {
            side: model_of(shape, orders[side[0]], f"cp={RANKS},ep={RANKS},dispatch={side[1]}")
            for side in sides
        }  # fmt: skip
        rows: dict[Any, dict[str, Any]] = {
            side: {"s": [], "decode s": []} for side in sides
        }
        for _ in range(job["rounds"] + 1):
            for side in sides:
                model = models[side]
                assert model.loads is not None
                model.loads.sent.clear()
                queries[0] = 0
                dist.barrier()
                if rank:
                    follow_leader(model)
                else:
                    engine = Engine(model, ranks=True, limit=TEXTS)
                    texts, seconds, decode = generate(
                        engine, job["prompts"], job["new"]
                    )
                    assert isinstance(engine.reader, Leader)
                    if engine.reader.decode is not None:
                        rows[side]["travelled"] = dict(engine.reader.decode.travelled)
                    engine.close()
                    rows[side]["texts"] = texts
                    rows[side]["s"].append(seconds)
                    rows[side]["decode s"].append(decode)
                sent = torch.tensor([model.loads.sent["tokens"], *queries])
                dist.all_reduce(sent)
                rows[side]["bytes"] = sent.tolist()
        told[k] = rows
    if not rank:
        torch.save(told, folder / "told.pt")
    dist.barrier()
    dist.destroy_process_group()


def on_hosts(folder: Path, rate: str) -> dict[str, Any]:
    """Run the ranks on four hosts, and return what the first of them has measured."""
    from hosts import hosts

    with hosts(RANKS, f"weft-staying-{os.getpid()}", rate) as places:
        words = [sys.executable, __file__, "--rank"]
        running = [
            subprocess.Popen(host.command([*words, str(rank), places[0].address, str(folder)]))
            for rank, host in enumerate(places)
        ]  # fmt: skip
        try:
            for process in running:
                if process.wait(1500):
                    raise SystemExit("a rank failed")
        finally:
            for process in running:
                process.kill()
    told: dict[str, Any] = torch.load(folder / "told.pt", weights_only=False)
    return told


def summed_up(told: dict[Any, Any], bound: float) -> dict[str, Any]:
    """The table of a model: of each side the median seconds, rows per layer and bytes."""
    table: dict[str, Any] = {"two per layer": bound}
    texts = {str(row["texts"]) for row in told.values()}
    table["distinct answers"] = len(texts)
    for (order, way), row in told.items():
        side = f"{order}, {'home' if way == 'per-rank' else way}"
        table[side] = {
            "s": statistics.median(row["s"][1:]),
            "decode s": statistics.median(row["decode s"][1:]),
            **dict(zip(("expert bytes", "attention bytes"), row["bytes"], strict=True)),
        }
        if way == "stay":
            sent = Counter(row["travelled"])
            rows = (sent["moved"] + sent["results"]) / sent["layers"]
            table[side] |= {
                "rows per layer": rows,
                "with contexts": rows + sent["contexts"] / sent["layers"],
                "fewer": bound / rows,
                "fewer with contexts": bound
                / (rows + sent["contexts"] / sent["layers"]),
            }
    plain = told["plain", "stay"]["decode s"][1:]
    for order in ORDERS[1:]:
        ratios = [
            a / b
            for a, b in zip(plain, told[order, "stay"]["decode s"][1:], strict=True)
        ]
        table[f"{order} faster"] = statistics.median(ratios)
        table[f"{order} faster, each round"] = ratios
    home = told["plain", "per-rank"]["decode s"][1:]
    ratios = [a / b for a, b in zip(home, plain, strict=True)]
    table["stay faster than home"] = statistics.median(ratios)
    return table


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--steps", type=int, default=250, help="of training")
    parser.add_argument("--rounds", type=int, default=5, help="turns of all sides")
    parser.add_argument("--rate", default="2mbit", help="of the cables")
    parser.add_argument("--quick", action="store_true", help="few steps: that it runs")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank, address, folder = options.rank
        be_rank(int(rank), address, Path(folder))
        return
    torch.set_num_threads(1)
    steps, rounds, new = (
        (8, 1, 6) if options.quick else (options.steps, options.rounds, NEW)
    )
    results: dict[str, Any] = {"machine": machine(), "rate": options.rate, "steps": steps, "rounds": rounds,
                               "texts": TEXTS, "new": new, "most load": MOST_LOAD}  # fmt: skip
    models, bounds, prompts = {}, {}, []
    for k in (1, 2):
        begun = time.perf_counter()
        shape, values, rows, loss = trained(steps, k)
        orders, placement = placed(shape, values, rows)
        models[k] = shape, orders
        prompts = [row[:PROMPT].tolist() for row in rows[1::2]][:TEXTS]
        results[f"{k} per token"] = {"loss": loss, "placement": placement}
        bounds[k] = two_per_layer(
            model_of(shape, values), [row.tolist() for row in rows[1:9:2]]
        )
        print(
            f"k={k}: loss {loss:.3f}, {placement}, {time.perf_counter() - begun:.0f} s",
            flush=True,
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = {"models": models, "prompts": prompts, "rounds": rounds, "new": new}
        torch.save(job, folder / "job.pt")
        told = on_hosts(folder, options.rate)
    for k, rows in told.items():
        results[f"{k} per token"] |= summed_up(rows, bounds[k])
        # the texts of the single device
        shape, orders = models[k]
        engine = Engine(model_of(shape, orders["plain"]), limit=TEXTS)
        alone, *_ = generate(engine, prompts, new)
        results[f"{k} per token"]["same tokens"] = {
            f"{order}, {way}": sum(a == b for a, b in zip(row["texts"], alone, strict=True)) / len(alone)
            for (order, way), row in rows.items()
        }  # fmt: skip
    print(json.dumps(results, indent=1))
    write(results, options.json)


if __name__ == "__main__":
    main()
