"""Dispatch chosen by measured time beside every fixed way, in many settings and on a load that drifts.

    sudo python bench/timed_dispatch.py [--passes 60] [--first 200] [--rate 200mbit] [--quick] [--json FILE]

Four ranks on four hosts (network namespaces) whose cables carry ``--rate`` run one mixture of experts forward and
backward. A setting is a width, a number of experts and of experts per token, their width, tokens of a rank, and how
unevenly experts are chosen. In a setting the ranks' own choice (``timed``) and all options take turns, pass by pass in
drawn order, so that what else the machine does meets all of them. ``timed`` begins with the table that a first run of
``--first`` passes has left, as a machine's second run does; ``cold`` is as much of that first run, with all its trials.

``over best apart`` is ``over best`` where one half of the passes says which option is the best and the other half what
it takes, so that few passes do not make the best look better than it is: 8 minutes are ``--passes 40``.

``interval`` holds nine tenths of the values of ``over best apart`` if passes are drawn again from those taken.
A setting is ``surely within 3 %`` (``surely over 3 %``) if its interval lies below (above) that.

``by its options`` is the mean, over the passes of ``timed``, of how much longer the option that it took takes than the
best one, by the same turns: what the choice costs without what the machine did meanwhile.

``best`` and ``worst`` are the options with the smallest and largest median time of a pass. A side's time is the mean of
its passes without the slowest tenth, on the slowest rank. ``over best`` is what ``timed`` takes beyond the best option.
The drifting load has passes of three sizes in turn, whose best options differ: ``over worst`` says how much faster the
choice is than the worst option, and ``over best`` is taken to the best single option for all sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from step import machine, write

from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.experts import Mixture
from weft.models.router import Choice
from weft.parallel.build import parallelize
from weft.parallel.experts.dispatch import Placing
from weft.recipe import ModelShape, Train
from weft.techniques.dispatch.timed.choice import TimedDispatch
from weft.techniques.dispatch.timed.trials import FIRST, RISK

RESULTS = Path(__file__).parent / "results" / "timed_dispatch.json"
RANKS = 4
T = torch.Tensor


class Setting(NamedTuple):
    """``skew``: power of Zipf's law by which experts are chosen, 0 for all alike."""

    embed: int
    experts: int
    k: int
    ffn: int
    tokens: tuple[int, ...]
    skew: float


def settings(count: int) -> list[Setting]:
    """Drawn settings, from few tokens and large experts to many tokens and small experts."""
    rng = random.Random(0)
    return [
        Setting(
            rng.choice((64, 128, 256)), rng.choice((4, 8, 16)), rng.choice((1, 2, 4)), rng.choice((32, 64, 128, 256)),
            (rng.choice((16, 64, 256, 512)),), rng.choice((0.0, 0.0, 1.2)),
        )
        for _ in range(count)
    ]  # fmt: skip


#: A text's prompt and its tokens, or documents of other lengths: passes of these sizes follow each other.
DRIFTING = Setting(128, 8, 4, 128, (8, 64, 512), 0.0)


class Bench:
    """One mixture on this rank, and the tokens of each size with what they choose."""

    def __init__(self, setting: Setting) -> None:
        shape = ModelShape(
            vocab=32, layers=1, embed=setting.embed, heads=2, kv_heads=2, ffn=32, experts=setting.experts,
            experts_per_token=setting.k, expert_ffn=setting.ffn,
        )  # fmt: skip
        mesh = Mesh.create(Layout(dp=RANKS, ep=RANKS, dispatch="timed"), "cpu")
        model = parallelize(shape, mesh, Train(dtype="float32"), summed=False)[0]
        self.mixture = next(m for m in model.modules() if isinstance(m, Mixture))
        self.mixture.experts.requires_grad_(True)
        assert isinstance(self.mixture.dispatcher, Placing)
        self.ranks = self.mixture.dispatcher.ranks
        generator = torch.Generator().manual_seed(mesh.rank("dp"))
        odds = torch.arange(1, setting.experts + 1.0) ** -setting.skew
        self.given = {
            tokens: (
                torch.randn(tokens, setting.embed, generator=generator),
                Choice(
                    torch.rand(tokens, setting.k, generator=generator),
                    torch.multinomial(odds.expand(tokens, -1), setting.k, generator=generator),
                ),
            )
            for tokens in setting.tokens
        }  # fmt: skip

    def chooser(self) -> TimedDispatch:
        return TimedDispatch(self.ranks)

    def run(self, way: TimedDispatch, tokens: int, option: int | None) -> float:
        """The seconds of a pass, by an option or as ``way`` chooses."""
        x, choice = self.given[tokens]
        x = x.clone().requires_grad_()
        placed = self.ranks.placed(choice)
        dist.barrier()
        begun = time.perf_counter()
        # a sum before dispatch, as the tokens of a model are no leaves
        inner = x + 0
        if option is None:
            arriving = way.dispatch(inner, placed)
        else:
            arriving = way._by(option, inner, placed, None)
        rows = arriving()
        outputs = self.mixture.experts(rows.rows, rows.counts, (), rows.stacks)
        way.combine(outputs, rows.meta)().sum().backward()
        return time.perf_counter() - begun


def slowest(seconds: list[float]) -> list[float]:
    """The longest time of any rank, pass by pass."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def trimmed(seconds: list[float]) -> float:
    """The mean without the slowest tenth."""
    return statistics.mean(sorted(seconds)[: max(1, len(seconds) * 9 // 10)])


def over_best_apart(times: dict[str, list[float]], sizes: int) -> float:
    """What ``timed`` takes beyond the best option, where one half of the passes says which option that is.

    The smallest of several measured means is smaller than the best option's true mean, the more so the fewer passes
    there are. So the option is named by one half of the passes and timed by the other, both ways; the mean of both.
    ``times``: seconds of the passes of every side, of all ``sizes`` in turn.
    """
    halves: list[dict[str, float]] = []
    for half in (0, 1):
        of_half = {
            side: [s for at, s in enumerate(each) if at // sizes % 2 == half]
            for side, each in times.items()
        }
        halves.append(
            {
                side: sum(trimmed(each[at::sizes]) for at in range(sizes))
                for side, each in of_half.items()
            }
        )
    over = []
    for named, judged in (halves, halves[::-1]):
        best = min((side for side in named if side != "timed"), key=named.__getitem__)
        over.append(judged["timed"] / judged[best] - 1)
    return statistics.mean(over)


def interval(
    times: dict[str, list[float]], sizes: int, draws: int = 200
) -> list[float]:
    """The fifth and 95th percentile of :func:`over_best_apart` over rounds of passes drawn with replacement.

    A round has a pass of every size by every side. Rounds of each half are drawn from that half.
    """
    rounds, rng = len(times["timed"]) // sizes, random.Random(2)
    values = []
    for _ in range(draws):
        drawn = [rng.randrange(at % 2, rounds, 2) for at in range(rounds)]
        again = {
            side: [each[r * sizes + at] for r in drawn for at in range(sizes)]
            for side, each in times.items()
        }
        values.append(over_best_apart(again, sizes))
    values.sort()
    return [values[draws // 20], values[-draws // 20 - 1]]


def measured(setting: Setting, passes: int, before: int) -> dict[str, Any]:
    """Of a setting the time of each option and of the choice, and what was chosen, after a run of ``before`` passes."""
    bench = Bench(setting)
    first = bench.chooser()
    cold = [
        bench.run(first, tokens, None)
        for _ in range(before)
        for tokens in setting.tokens
    ][: passes * len(setting.tokens)]
    way, options = bench.chooser(), len(first.options)
    taken: dict[str, list[float]] = {
        str(side): [] for side in (*range(options), "timed")
    }
    chosen: Counter[str] = Counter()
    took: list[int] = []
    by = way._by

    def noted(number: int, *given: Any) -> Any:
        took.append(number)
        return by(number, *given)

    order = random.Random(1)
    for _ in range(passes):
        for tokens in setting.tokens:
            for side in order.sample([*taken], len(taken)):
                option = None if side == "timed" else int(side)
                with patch.object(way, "_by", noted if option is None else by):
                    taken[side].append(bench.run(way, tokens, option))
            chosen[f"{tokens}: {took[-1]}"] += 1
    sizes = len(setting.tokens)
    times = {side: slowest(seconds) for side, seconds in taken.items()}
    of_size = {
        side: [trimmed(each[at::sizes]) for at in range(sizes)]
        for side, each in times.items()
    }
    apart = over_best_apart(times, sizes)
    of_side = {side: sum(each) for side, each in of_size.items()}
    timed = of_side.pop("timed")
    by_options = (
        sum(of_size[str(option)][at % sizes] for at, option in enumerate(took)) / passes
    )
    return {
        "setting": setting._asdict(), "timed s": timed, "options s": of_side, "chosen": dict(chosen),
        "best s": min(of_side.values()), "worst s": max(of_side.values()),
        "over best": timed / min(of_side.values()) - 1, "over worst": max(of_side.values()) / timed,
        "over best apart": apart,
        # other ranks wait meanwhile
        "interval": interval(times, sizes) if not dist.get_rank() else [],
        "by its options": by_options / min(of_side.values()) - 1,
        "cold over best": sum(slowest(cold)) * sizes / len(cold) / min(of_side.values()) - 1,
        "passes ms": [[round(1e3 * s, 3) for s in times[str(option)]] for option in range(options)],
    }  # fmt: skip


def be_rank(
    rank: int, address: str, passes: int, before: int, count: int, folder: Path
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_RANK": "0",
        "WEFT_CACHE": str(folder / "cache"),
    }
    rows = []
    for number, setting in enumerate((*settings(count), DRIFTING)):
        # Each setting has process groups of its own: threads of all that there were wake a hundred times a second,
        # and those of twenty settings took half of the machine.
        place = f"tcp://{address}:{29573 + number}"
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS)
        rows.append(measured(setting, passes, before))
        dist.barrier()
        dist.destroy_process_group()
        if not rank:
            row = rows[-1]
            print(f"{tuple(setting)}: timed {row['timed s'] * 1e3:.1f} ms, best {row['best s'] * 1e3:.1f}, worst "
                  f"{row['worst s'] * 1e3:.1f}, {row['over best']:+.1%}, {row['chosen']}", flush=True)  # fmt: skip
    if not rank:
        (folder / "rows.json").write_text(json.dumps(rows))


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument(
        "--passes", type=int, default=60, help="of each side and setting"
    )
    parser.add_argument(
        "--first", type=int, default=200, help="passes of the run before"
    )
    parser.add_argument("--settings", type=int, default=20)
    parser.add_argument("--rate", default="200mbit", help="of the cables")
    parser.add_argument("--quick", action="store_true", help="few passes: that it runs")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--rank", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank, address, passes, before, count, folder = options.rank
        numbers = int(passes), int(before), int(count)
        be_rank(int(rank), address, *numbers, Path(folder))
        return
    from hosts import hosts

    passes, before, count = options.passes, options.first, options.settings
    if options.quick:
        passes, before, count = 6, 20, 2
    results: dict[str, Any] = {
        "machine": machine(),
        "command": shlex.join(["python", "bench/timed_dispatch.py", *sys.argv[1:]]),
        "policy": {"RISK": RISK, "FIRST": FIRST},
        "rate": options.rate,
        "passes": passes,
        "passes before": before,
    }
    with (
        tempfile.TemporaryDirectory() as name,
        hosts(RANKS, f"weft-timed-{os.getpid()}", options.rate) as places,
    ):
        words = [str(passes), str(before), str(count), name]
        running = [
            subprocess.Popen(host.command([sys.executable, __file__, "--rank", str(rank), places[0].address, *words]))
            for rank, host in enumerate(places)
        ]  # fmt: skip
        try:
            for process in running:
                if process.wait(5400):
                    raise SystemExit("a rank failed")
        finally:
            for process in running:
                process.kill()
        *rows, drifting = json.loads((Path(name) / "rows.json").read_text())
    over = [row["over best"] for row in rows]
    results |= {
        "settings": rows,
        "drifting": drifting,
        "most by its options": max(row["by its options"] for row in rows),
        "most over best": max(over),
        "most over best apart": max(row["over best apart"] for row in rows),
        "median over best apart": statistics.median(
            row["over best apart"] for row in rows
        ),
        "within 3 % apart": sum(row["over best apart"] <= 0.03 for row in rows),
        "surely within 3 %": sum(row["interval"][1] <= 0.03 for row in rows),
        "surely over 3 %": sum(row["interval"][0] > 0.03 for row in rows),
        "within 3 % by its options": sum(row["by its options"] <= 0.03 for row in rows),
        "median over best": statistics.median(over),
        "within 3 %": sum(each <= 0.03 for each in over),
        "over worst": statistics.median(row["over worst"] for row in rows),
        "drifting over worst": drifting["over worst"],
        "drifting over best": drifting["over best"],
    }
    print({name: value for name, value in results.items() if name not in ("settings", "drifting")})  # fmt: skip
    write(results, options.json)


if __name__ == "__main__":
    main()
