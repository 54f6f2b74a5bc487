"""Fully sharded experts beside static ones under skewed routing, on ranks that sleep as long as experts would compute.

The tokens choose as those of a real training run did, step by step: a mixture of as many experts is trained first, with
and without a balance loss (``balanced`` and ``trained``), and the choices of its last steps are replayed, so that loads
drift as they do in training.
Beside them a fixed skew: Zipf's law (power 1.2), the same in every step. For each row of an expert a rank sleeps a
fixed time forward and twice that backward; for each expert that it borrows or gives back, as long as the link would
take. So the ranks of this machine do not take each other's cores, and everything but the sleep is Weft's real step.
The defaults are Qwen3-30B-A3B's experts (2048 x 768, 8 of 128 chosen) at 400 TFLOP/s and 50 GB/s, 65,536 rows on each
rank, in slow motion.

    python bench/placement.py [--rounds 6] [--trained 160] [--only trained balanced zipf] [--json FILE]

``prediction error``: which share of a step's rows went elsewhere than the steps before it said (half the sum of the
absolute differences of an expert's shares), the mean over layers and replayed steps. ``drift``: the same between two
steps of which one is ten steps after the other.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from step import TOLERANCE, Job, machine, on_ranks, race, weft_step, write

from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.experts import Experts
from weft.models.router import Router
from weft.parallel.experts.copies import Copies
from weft.recipe import ModelShape, load_recipe
from weft.train.rule_optimizer import learning_rate
from weft.train.setup import build_for_training, prepare
from weft.train.step import train_step

RESULTS = Path(__file__).parent / "results" / "placement.json"
T = torch.Tensor
JOB = Job(
    ModelShape(vocab=64, layers=2, embed=16, heads=2, kv_heads=2, experts=32, experts_per_token=2, expert_ffn=16),
    16, 256,
)  # fmt: skip
ROWS = 65_536  # of experts that a rank has in each layer
ROW_S = 6 * 2048 * 768 / 400e12  # forward
EXPERT_S = 3 * 2048 * 768 * 2 / 50e9  # over a link, in bfloat16


class _Asleep(torch.autograd.Function):
    """Rows as they are; sleeps forward, and backward for ``factor`` times as long."""

    @staticmethod
    def forward(ctx: Any, x: T, seconds: float, factor: float) -> T:
        ctx.seconds = factor * seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: T) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None, None


def zipf_choices(experts: int, k: int, tokens: int, rank: int, layer: int) -> T:
    """``k`` different experts for each token, ``[tokens, k]``; which are hot is the same on all ranks."""
    odds = torch.arange(1, experts + 1).double() ** -1.2
    odds = odds[torch.randperm(experts, generator=torch.Generator().manual_seed(layer))]
    return torch.multinomial(
        odds.expand(tokens, -1),
        k,
        generator=torch.Generator().manual_seed(99 * rank + layer),
    )


class Choices(NamedTuple):
    """What all tokens of some steps choose: int64 ``[steps, layers, tokens, k]``, and how well they can be foreseen."""

    ids: T
    prediction_error: float = 0.0
    drift: float = 0.0


def zipf(ranks: int) -> Choices:
    """One step whose tokens choose by Zipf's law."""
    shape, tokens = JOB.shape, JOB.rows * JOB.length // ranks
    layers = [
        torch.cat(
            [
                zipf_choices(shape.experts, shape.experts_per_token, tokens, r, layer)
                for r in range(ranks)
            ]
        )
        for layer in range(shape.layers)
    ]
    return Choices(torch.stack(layers)[None])


def recorded(steps: int, kept: int, balance_loss: float) -> Choices:
    """The choices of the last ``kept`` of so many steps in which a mixture learns Python's sources."""
    shape, tokens = JOB.shape, JOB.rows * JOB.length
    settings = [
        f"model.experts={shape.experts}",
        f"model.balance_loss={balance_loss}",
        f"train.steps={steps}",
    ]
    settings += [
        f"data.seq_len={JOB.length}",
        f"train.batch={JOB.rows}",
        "optimizer.warmup=20",
    ]
    recipe = load_recipe("experts", settings, "")
    job, mesh = prepare(recipe), Mesh.single()
    model, state = build_for_training(job.shape, mesh, recipe)
    loader, chosen = job.loader(job.corpus.train, mesh), []
    best = Router._best

    def note(self: Router, scores: T, by: int) -> T:
        ids = best(self, scores, by)
        chosen.append(ids.clone())
        return ids

    with mock.patch.object(Router, "_best", note):
        for step in range(steps):
            if step < steps - kept:
                chosen.clear()
            rate = learning_rate(recipe.optimizer, step, steps)
            train_step(
                model,
                state,
                loader.step(step * JOB.rows) or [],
                mesh,
                lr=rate,
                clip=1.0,
            )
    ids = torch.stack(chosen[-kept * shape.layers :]).view(
        kept, shape.layers, tokens, shape.experts_per_token
    )
    # [steps, layers, experts]
    counts = F.one_hot(ids.flatten(2), shape.experts).sum(2).double()
    shares = counts / counts.sum(-1, keepdim=True)
    running = torch.zeros_like(counts[0])
    errors = []
    for step in range(kept - 1):
        running = running / 2 + counts[step]  # as ``Copies.learn_from`` has it
        foreseen = running / running.sum(-1, keepdim=True)
        errors.append(float((foreseen - shares[step + 1]).abs().sum(-1).mean() / 2))
    drift = (
        (shares[10:] - shares[:-10]).abs().sum(-1).mean() / 2
        if kept > 10
        else shares.new_zeros(())
    )
    return Choices(ids, statistics.mean(errors), float(drift))


def on_rank(rank: int, ranks: int, rounds: int, slow: float, ids: T) -> dict[str, Any]:
    """Both sides on one of the ranks, whose tokens choose what is this rank's of ``ids``, step by step."""
    shape, tokens = JOB.shape, JOB.rows * JOB.length // ranks
    row_s, expert_s = (
        slow * ROW_S * ROWS / (tokens * shape.experts_per_token),
        slow * EXPERT_S,
    )
    made, borrowed = Experts._made, Copies.borrowed
    seen = {"rows": 0, "borrowed": 0}
    steps_of: Counter[int] = Counter()  # that each router has had

    def choose(self: Router, scores: T, by: int) -> T:
        step = steps_of[id(self)]
        steps_of[id(self)] += 1
        return ids[step % len(ids), self.layer, rank * tokens : (rank + 1) * tokens]

    def compute(self: Experts, rows: T, *others: T) -> T:
        seen["rows"] += len(rows)
        return made(self, _Asleep.apply(rows, len(rows) * row_s, 2.0), *others)

    def borrow(self: Copies, gate: T, *others: T) -> tuple[T, ...]:
        sent, received = sum(self.plan.sent), sum(self.plan.received)
        seen["borrowed"] += received
        return borrowed(
            self, _Asleep.apply(gate, max(sent, received) * expert_s, 1.0), *others
        )

    with (
        mock.patch.object(Router, "_best", choose), mock.patch.object(Experts, "_made", compute),
        mock.patch.object(Copies, "borrowed", borrow),
    ):  # fmt: skip
        one = Layout(shard=ranks, ep=ranks)
        layouts = {
            "static": one,
            "sharded": one.model_copy(update={"placement": "sharded"}),
        }
        steps = {
            name: weft_step(JOB, Mesh.create(layout, "cpu"))[0]
            for name, layout in layouts.items()
        }
        losses = {name: [step() for _ in range(3)] for name, step in steps.items()}
        if (
            max(abs(a - b) / b for a, b in zip(*losses.values(), strict=True))
            > TOLERANCE
        ):
            raise SystemExit(f"the sides compute different losses: {losses}")
        table: dict[str, Any] = {
            name: {"max_over_mean": [], "copies_per_layer": []} for name in steps
        }

        def counted(name: str) -> float:
            """Take a step; what its ranks have had to do goes into the table, after the time is taken."""
            seen.update(rows=0, borrowed=0)
            loss = steps[name]()
            pending.append((name, dict(seen)))
            return loss

        pending: list[tuple[str, dict[str, int]]] = []
        seconds = race({name: partial(counted, name) for name in steps}, rounds, 1)
        everyones: list[Any] = [None] * ranks
        dist.all_gather_object(everyones, pending)
    for turn in zip(*everyones, strict=True):
        rows = [had["rows"] for _, had in turn]
        side = table[turn[0][0]]
        side["max_over_mean"].append(max(rows) / statistics.mean(rows))
        side["copies_per_layer"].append(
            sum(had["borrowed"] for _, had in turn) / shape.layers
        )
    for name, times in seconds.items():
        table[name] = {
            key: round(statistics.mean(values), 3)
            for key, values in table[name].items()
        }
        table[name]["step_s"] = round(statistics.median(times), 3)
    ratios = [
        static / sharded for static, sharded in zip(*seconds.values(), strict=True)
    ]
    return table | {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(r, 3) for r in ratios],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--rounds", type=int, default=6, help="turns of both sides")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument(
        "--only", nargs="+", help="these routings, of: trained, balanced, zipf"
    )
    parser.add_argument(
        "--trained",
        type=int,
        default=160,
        help="steps of the runs whose routing is replayed",
    )
    parser.add_argument(
        "--slow",
        type=float,
        default=60.0,
        help="how many times slower than the real thing",
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    results: dict[str, Any] = {
        "machine": machine(), "rounds": options.rounds, "shape": JOB.shape.model_dump(exclude_defaults=True),
        "slow_motion": options.slow, "row_s": ROW_S, "expert_s": EXPERT_S,
    }  # fmt: skip
    kept = min(options.trained, options.rounds + 13)
    routings = {}
    for name, balance_loss in (("trained", 0.0), ("balanced", 0.01)):
        if options.only is None or name in options.only:
            routings[name] = recorded(options.trained, kept, balance_loss)
    for ranks in options.ranks:
        found = results[f"{ranks} ranks"] = {}
        fixed = (
            {"zipf": zipf(ranks)}
            if options.only is None or "zipf" in options.only
            else {}
        )
        for name, choices in (routings | fixed).items():
            table = on_ranks(
                ranks, on_rank, ranks, options.rounds, options.slow, choices.ids
            )
            known = {
                "prediction error": choices.prediction_error,
                "drift": choices.drift,
            }
            found[name] = table | known
            sides = {side: table[side] for side in ("static", "sharded")}
            print(
                f"{ranks} ranks, {name}: {table['ratio']:.2f}x",
                sides,
                known,
                flush=True,
            )
    write(results, options.json)


if __name__ == "__main__":
    main()
