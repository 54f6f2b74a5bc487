"""Four weak hosts generate together: all-reduces over links of 1, 10 and 50 ms, and an uneven cut with one slow host.

    sudo python bench/weak_hosts.py [--quick] [--only sums|tokens|uneven] [--delays 1 10 50] [--json FILE]

Hosts are network namespaces (bench/hosts.py): a frame takes the delay from any host to any other, and a host sends and
receives at ``--rate``. The ranks are those of ``weft generate --layout tp=4``: the same connections, reader, engine.

``--only`` measures one of these alone, and leaves the figures of the others in FILE as they are:

1. Sums: every all-reduce for one token and for a prompt of 512 tokens, measured in turn after ``layout.sum = "auto"``
   has measured and chosen; then again for two ranks on each of two hosts. The choice is right where it is the fastest,
   or not worse by more than the noise: not slower than the fastest in all but one of the rounds or more.
2. Tokens: seconds a token of a model of SmolLM2-135M's shape with a third of its layers (weights are random, which no
   time depends on).
3. One host at half the speed: an even cut beside ``tp_shares = "auto"``, of a layer of Llama-3-70B's shape. What
   a rank does for a token beside products is not cut, and in narrow layers it is most.
   Four hosts share two cores here, so a host's
   processor is emulated: after what a rank has computed between two exchanges it sleeps, as long as makes it a
   processor of ``SPEED`` of a core (half of that on the last host). What is computed and sent is real; a host that
   sleeps is free. The measurement of speeds gets what the emulated processors are.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from hosts import Host, hosts, unavailable

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "weak_hosts.json"
RANKS = 4
#: A model of SmolLM2-135M's shape, with a third of its layers.
SHAPE = {
    "vocab": 49152, "layers": 10, "embed": 576, "heads": 9, "kv_heads": 3, "ffn": 1536, "tied": True,
}  # fmt: skip
#: A layer of Llama-3-70B's shape, a model for several weak hosts: its products take most of a token's time. Of two
#: layers of Llama-3-8B's shape, a third of the time on the slow host was what no cut divides.
WIDE = {
    "vocab": 4096, "layers": 1, "embed": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "tied": True,
}  # fmt: skip
#: Part of a core that a host's processor is, where hosts differ; the last host has half of it.
SPEED = 0.1
#: No processor computes so many seconds between two sums.
LONGEST_S = 8.0
#: Rounds in which sums are measured in turn, and sums of a round, of which the first is not measured. A choice that is
#: slower than the fastest in all but one of the rounds is worse by more than the noise (sign test, 3.5 %).
SUM_ROUNDS, BURST = 8, 4
#: Times that every side is measured, in turn; tokens that it reads and writes each time where cuts are compared.
ROUNDS, PROMPT, NEW = 2, 32, 5
#: Tokens of the two sums, and of the prompt of a long text.
SIZES = (1, 512)


# --- a rank ---


def be_rank(out: Path, quick: bool, only: str) -> None:
    import torch
    import torch.distributed as dist

    from weft.run.rank_processes import init_ranks

    torch.set_num_threads(1)
    init_ranks("cpu", 300)
    shape = SHAPE | ({"layers": 4, "vocab": 4096} if quick else {})
    answer: dict[str, Any] = {}
    if only in ("", "sums"):
        answer |= {"sums": sums_of_rank(quick)}
    if only in ("", "tokens"):
        answer |= {"tokens": tokens_of_rank(shape, quick)}
    if only in ("", "uneven"):
        wide = WIDE | ({"embed": 1024, "ffn": 2048} if quick else {})
        answer |= {"cuts": cuts_of_rank(wide, quick)}
    if dist.get_rank() == 0:
        out.write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def sums_of_rank(quick: bool) -> dict[str, Any]:
    """What ``auto`` chooses for each size, and the seconds of every all-reduce measured afterwards, in turn."""
    import torch
    import torch.distributed as dist

    from weft.layout.sums import TokenSums

    sums = TokenSums(dist.group.WORLD, "auto")
    sums.measure(SIZES, SHAPE["embed"], torch.float32)
    seconds: dict[int, dict[str, list[float]]] = {}
    for tokens in SIZES:
        x = torch.ones(tokens * SHAPE["embed"])
        each = seconds[tokens] = {name: [] for name in sums.ways}
        for _ in range(2 if quick else SUM_ROUNDS):
            for name, way in sums.ways.items():
                way(x)
                each[name].append(slowest(partial(way, x), BURST - 1))
    rows = {
        str(tokens): {
            "chosen": measured.fastest,
            "measured_ms": {
                name: 1e3 * took for name, took in measured.seconds.items()
            },
            "ms": {name: 1e3 * statistics.median(took) for name, took in each.items()},
            "slower_rounds": slower_rounds(each, measured.fastest),
        }
        for measured, (tokens, each) in zip(sums.measured, seconds.items(), strict=True)
    }
    sums.close()
    return rows


def slower_rounds(each: dict[str, list[float]], chosen: str) -> str:
    """In how many of the rounds the chosen all-reduce was slower than the one that is fastest in the median."""
    fastest = min(each, key=lambda name: statistics.median(each[name]))
    slower = sum(a > b for a, b in zip(each[chosen], each[fastest], strict=True))
    return f"{slower} of {len(each[chosen])}"


def slowest(call: Callable[[], Any], count: int) -> float:
    """Seconds of a call on the rank where ``count`` of them take longest."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    begun = time.perf_counter()
    for _ in range(count):
        call()
    spent = torch.tensor((time.perf_counter() - begun) / count, dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def model_of(shape: dict[str, Any], shares: str, word: str) -> Any:
    from weft.generate.leader import mesh_of_rank
    from weft.layout.layout import Layout
    from weft.parallel.build import parallelize
    from weft.recipe import ModelShape, Train

    layout = Layout(tp=RANKS, tp_shares=shares, sum=word)
    mesh = mesh_of_rank(layout, "cpu")
    train = Train(seed=1, dtype="float32")
    return parallelize(ModelShape(**shape), mesh, train, summed=False)[0].eval()


def written(model: Any, prompt: int, new: int) -> tuple[float, float, list[int]]:
    """Seconds to the first token and of each further one, and what is written; on the first rank, 0 on others."""
    import torch.distributed as dist

    from weft.generate.engine import Engine
    from weft.generate.leader import follow_leader
    from weft.generate.sampling import GREEDY

    if dist.get_rank():
        follow_leader(model)
        return 0.0, 0.0, []
    with closing(Engine(model, ranks=True)) as engine:
        for _ in engine.stream(engine.submit([9, 8], 1, GREEDY)[0]):
            pass  # what an engine does when it is new is over
        ids = [1 + i * 7 % (model.shape.vocab - 1) for i in range(prompt)]
        times, text = [time.perf_counter()], list[int]()
        for token in engine.stream(engine.submit(ids, new, GREEDY)[0]):
            times.append(time.perf_counter())
            text.append(token)
    steps = [after - before for before, after in pairwise(times)]
    return steps[0], statistics.median(steps[1:]), text


def tokens_of_rank(shape: dict[str, Any], quick: bool) -> dict[str, Any]:
    """Seconds of a token by the way in which sums are made, in turn; ``plain``: without ``layout.sum``."""
    model = model_of(shape, "", "auto")
    sums, taken = model.mesh.sums, dict[str, list[float]]()
    texts = {}
    for _ in range(1 if quick else ROUNDS):
        for name in ("auto", *sums.ways, "plain"):
            # the model's mesh is frozen: what a command opens once is changed here between texts
            object.__setattr__(model.mesh, "sums", None if name == "plain" else sums)
            sums.word, sums.measured = name, []
            _, each, texts[name] = written(model, 4, 4)
            taken.setdefault(name, []).append(each)
    sums.close()
    return {
        "s": {name: statistics.median(each) for name, each in taken.items()},
        "equal": len({json.dumps(text) for text in texts.values()}) == 1,
    }


@contextmanager
def weak_processors(speed: float) -> Iterator[list[float]]:
    """Make this rank's processor one of ``speed`` of a core for what it computes between two sums; the yielded list
    gets the seconds of each time.
    """
    from unittest import mock

    from weft.layout import rank_power
    from weft.layout.sums import TokenSums

    since, times = [time.process_time()], list[float]()

    def sleeping(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def after_a_sleep(*arguments: Any) -> Any:
            computed = time.process_time() - since[0]
            times.append(computed)
            # not what came before the first sum, such as the weights' initialisation
            time.sleep(min(LONGEST_S, computed * (1 / speed - 1)))
            result = exchange(*arguments)
            since[0] = time.process_time()
            return result

        return after_a_sleep

    def rate(rows: int, device: Any) -> float:
        return speed

    with (
        mock.patch.object(TokenSums, "add", sleeping(TokenSums.add)),
        mock.patch.object(TokenSums, "gather", sleeping(TokenSums.gather)),
        mock.patch.object(rank_power, "_rate", rate),
    ):
        yield times


def cuts_of_rank(shape: dict[str, Any], quick: bool) -> dict[str, Any]:
    """Seconds of a token and to the first of a longer prompt, with an even cut and by measured speed, in turn."""
    import torch.distributed as dist

    from weft.layout.rank_power import measure_ranks, power_line

    speed = SPEED / (2 if dist.get_rank() == RANKS - 1 else 1)
    rows: dict[str, Any] = {"even": {}, "auto": {}}
    with weak_processors(speed) as times:
        models = {
            "even": model_of(shape, "", "auto"), "auto": model_of(shape, "auto", "auto"),
        }  # fmt: skip
        for name, model in models.items():
            layout, heads = model.mesh.layout, model.shape.heads
            powers = measure_ranks(model.mesh.device)
            rows[name]["shares"] = list(layout.tp_shares)
            rows[name]["line"] = power_line(layout, powers, heads)
        tokens: dict[str, list[float]] = {name: [] for name in models}
        computed: dict[str, list[float]] = {name: [] for name in models}
        firsts: dict[str, list[float]] = {name: [] for name in models}
        texts = {}
        for _ in range(1 if quick else ROUNDS):
            for name, model in models.items():
                times.clear()
                first, each, texts[name] = written(model, PROMPT, NEW)
                firsts[name].append(first)
                tokens[name].append(each)
                computed[name].append(of_a_token(times))
    for name, model in models.items():
        rows[name]["token_s"] = statistics.median(tokens[name])
        rows[name]["first_s"] = statistics.median(firsts[name])
        of_ranks = [0.0] * RANKS
        dist.all_gather_object(of_ranks, statistics.median(computed[name]))
        rows[name]["computed_ms"] = [round(1e3 * each, 2) for each in of_ranks]
        model.mesh.sums.close()
    rows["equal"] = texts["even"] == texts["auto"]
    return rows


def of_a_token(times: Sequence[float]) -> float:
    """Processor seconds of the last tokens of a text, each; ``times``: those between the exchanges of all passes."""
    # one pass before the text, and the one for its prompt, have as many exchanges as that of a further token
    each = len(times) // (NEW + 1)
    return statistics.median(sum(times[-each * (i + 1) :][:each]) for i in range(NEW - 1))  # fmt: skip


# --- all of them ---


def on_hosts(made: tuple[Host, ...], quick: bool, port: int, only: str = "") -> Any:
    """Start a rank on every host of ``made``, which may be there twice, and return what rank 0 wrote of the part
    ``only``, or of all parts.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, ranks = Path(folder) / "answer", list[subprocess.Popen[bytes]]()
        try:
            for rank, host in enumerate(made):
                env = {
                    "RANK": rank, "WORLD_SIZE": len(made), "LOCAL_RANK": made[:rank].count(host),
                    "LOCAL_WORLD_SIZE": made.count(host),
                    "OMP_NUM_THREADS": 1, "TORCH_CPP_LOG_LEVEL": "ERROR", "MASTER_ADDR": made[0].address,
                    "MASTER_PORT": port, "PYTHONPATH": ROOT,
                }  # fmt: skip
                words = ["env", *(f"{name}={value}" for name, value in env.items())]
                words += [sys.executable, __file__, "--rank", "--json", str(out)]
                words += ["--quick"] * quick + (["--only", only] if only else [])
                ranks.append(subprocess.Popen(host.command(words)))
            codes = [rank.wait(timeout=1800) for rank in ranks]
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--delays", type=float, nargs="+", default=[1, 10, 50])
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=("sums", "tokens", "uneven"), default="")
    parser.add_argument("--sums", dest="only", action="store_const", const="sums", help="as --only sums")  # fmt: skip
    options = parser.parse_args()
    if options.rank:
        return be_rank(options.json, options.quick, options.only)
    if why := unavailable():
        raise SystemExit(why)
    # what ends with the hosts ends on SIGTERM, too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows: dict[str, Any] = {}
    if options.only and options.json.exists():
        rows = json.loads(options.json.read_text())["rows"]
    for i, delay in enumerate(options.delays):
        name = f"weft-weak-{os.getpid()}"
        with hosts(RANKS, name, options.rate, delay / 1e3) as made:
            row = on_hosts(made, options.quick, 29700 + 2 * i, options.only)
            if "sums" in row:
                pairs, port = (*made[:2], *made[:2]), 29701 + 2 * i
                row["pairs"] = on_hosts(pairs, options.quick, port, "sums")["sums"]
        print_row(delay, row)
        rows[f"{delay:g}"] = rows.get(f"{delay:g}", {}) | row
        record(options, rows)
    print(json.dumps(summary(rows)))


def record(options: argparse.Namespace, rows: dict[str, Any]) -> None:
    """Write what has been measured so far."""
    about = {
        "when": datetime.now().isoformat(timespec="minutes"), "quick": options.quick, "hosts": RANKS,
        "rate": options.rate, "speed": SPEED, "shape": SHAPE, "wide": WIDE, "rows": rows, "summary": summary(rows),
    }  # fmt: skip
    options.json.write_text(json.dumps(about, indent=1) + "\n")


def print_row(delay: float, row: dict[str, Any]) -> None:
    print(f"--- links of {delay:g} ms")
    both = ("4 hosts", row.get("sums", {})), ("2 ranks on 2 hosts", row.get("pairs", {}))  # fmt: skip
    for where, sums in both:
        for tokens, each in sums.items():
            order = sorted(each["ms"].items(), key=lambda item: float(item[1]))
            times = ", ".join(f"{name} {ms:.4g}" for name, ms in order)
            print(f"{where}, {tokens} tokens, ms: {times}; auto takes {each['chosen']}")
    if "tokens" in row:
        order = sorted(row["tokens"]["s"].items(), key=lambda item: float(item[1]))
        times = ", ".join(f"{name} {seconds:.3g}" for name, seconds in order)
        print(f"a token, s: {times}; equal texts: {row['tokens']['equal']}")
    if "cuts" not in row:
        return
    even, auto = row["cuts"]["even"], row["cuts"]["auto"]
    for name in ("token_s", "first_s"):
        ratio = even[name] / auto[name]
        print(f"{name}: even {even[name]:.3g}, uneven {auto[name]:.3g}: {ratio:.2f}x")
    print(f"computed for a token, ms: even {even['computed_ms']}, uneven {auto['computed_ms']}; "
          f"equal texts: {row['cuts']['equal']}")  # fmt: skip
    print(auto["line"], flush=True)


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    """The figures of the claims, by delay."""
    found: dict[str, Any] = {}
    for delay, row in rows.items():
        of_delay: dict[str, Any] = {}
        found[delay] = of_delay
        if "sums" in row:
            every = (*row["sums"].values(), *row["pairs"].values())
            worst = max(
                each["ms"][each["chosen"]] / min(each["ms"].values()) for each in every
            )
            of_delay["chosen_over_fastest"] = round(worst, 3)
            if all("slower_rounds" in each for each in every):
                slower = [
                    [*map(int, each["slower_rounds"].split(" of "))] for each in every
                ]
                of_delay["chosen_is_fastest"] = all(
                    count < rounds - 1 for count, rounds in slower
                )
            ms = row["sums"]["1"]["ms"]
            of_delay["ring_over_star"] = round(ms["ring"] / ms["star"], 2)
            of_delay["ring_over_direct"] = round(ms["ring"] / ms["direct"], 2)
        if "tokens" in row:
            taken = row["tokens"]["s"]
            of_delay["token_ring_over_star"] = round(taken["ring"] / taken["star"], 2)
            of_delay["token_plain_over_auto"] = round(taken["plain"] / taken["auto"], 2)
        if "cuts" in row:
            even, auto = row["cuts"]["even"], row["cuts"]["auto"]
            for name, what in (("", "token_s"), ("prompt_", "first_s")):
                ratio = round(even[what] / auto[what], 2)
                of_delay[f"{name}even_over_uneven"] = ratio
    return found


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("ended; the hosts are gone")
