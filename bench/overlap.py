"""Work under communication: training steps and long prompts under tp over slow links, without and with each overlap.

    sudo python bench/overlap.py [--ranks 2 4] [--rounds 4] [--quick] [--json bench/results/overlap.json]

Every rank is on a host of its own, a network namespace; a cable lets 200 Mbit/s through and a frame takes 2 ms from any
host to any other. All kinds of layout.overlap take turns in one run, on the same weights and data. A step is
measured from barrier to barrier. The share of communication that is hidden is that of profiled steps, in which the
threads of gloo mark what is under way (weft/observe/time_split.py). nano searches before anything is measured; what it
chose is compared with every candidate of its space.

Two sides do not overlap: "none" is a run without layout.overlap, whose reduce-scatter is gloo's and sends twice the
bytes that are needed; "in turn" is the same with the exchange that overlaps use, waited for at once. What a kind is
faster than "in turn" it owes to what it hides alone.

"exchange" is the time of one exchange of a pass's tokens, of which the other ranks know 10 ms after the first: the
floor that bytes, rate and delay set; gloo's gather; an all-to-all over one process group; and the exchange that
overlaps use, in which each rank sends in a group of its own (weft/layout/flights.py).
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
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "overlap.json"
RATE, DELAY_S, PORT = "200mbit", 0.002, 29571
#: Bytes that a cable which has rested carries at once: as little as its clock allows, or rests would be paid back.
BURST = "64kb"
PLAIN, IN_TURN, KINDS = "none", "in turn", ("domino", "tokens", "chunks", "nano")
#: More passes than a search of nano takes.
SEARCH = 60
#: Candidates of nano's space that are measured again, and how often, after each was measured once.
AGAIN, TIMES = 5, 6
#: Seconds by which other ranks come later to a timed exchange, and how often it is timed.
LATE_S, EXCHANGES = 0.01, 8
#: Seconds that a set of ranks may take.
LIMIT = 3000


class Sizes(NamedTuple):
    """Of the model, of a training pass, and of a prompt; so that communication takes about as long as computing."""

    embed: int
    ffn: int
    layers: int
    rows: int
    length: int
    prompt: int


#: By the number of ranks, which share two cores.
SIZES = {2: Sizes(1536, 4608, 4, 2, 192, 512), 4: Sizes(2048, 6144, 4, 2, 128, 384)}
SMALL = Sizes(64, 128, 2, 4, 32, 64)


@contextmanager
def waiting_at_once() -> Iterator[None]:
    """Let layers in one part send what overlaps send, and wait for each transfer where they start it."""
    from weft.models import feed_forward, transformer
    from weft.models.weave import gather_at_once, scatter_at_once

    with ExitStack() as stack:
        for module in (feed_forward, transformer):
            for name, at_once in (("gather_tokens", gather_at_once), ("scatter_tokens", scatter_at_once)):  # fmt: skip
                stack.enter_context(mock.patch.object(module, name, at_once))
        yield


def be_rank(given: dict[str, Any]) -> None:
    """Take training steps and read prompts with every kind in turn; the first rank prints the seconds."""
    import torch
    import torch.distributed as dist

    from weft.generate.engine import Engine
    from weft.generate.leader import follow_leader
    from weft.layout.boundary import gather_tokens, scatter_tokens
    from weft.layout.layout import Layout
    from weft.layout.mesh import Mesh
    from weft.models.token_parts import PassTokens
    from weft.models.weave import WovenLayers, gather_at_once, scatter_at_once
    from weft.observe.time_split import profile_step
    from weft.parallel.build import parallelize
    from weft.recipe import ModelShape, Train
    from weft.registry import find
    from weft.techniques.overlaps.nano.nano_search import every_choice
    from weft.train.step import pass_loss

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes, ranks = Sizes(*given["sizes"]), dist.get_world_size()
    shape = ModelShape(
        vocab=512, layers=sizes.layers, embed=sizes.embed, ffn=sizes.ffn, heads=8, kv_heads=4,
        head_dim=sizes.embed // 8,
    )  # fmt: skip
    mesh = Mesh.create(Layout(tp=ranks), "cpu")
    model = parallelize(shape, mesh, Train(dtype="float32", seed=1))[0]
    woven: dict[str, Any] = {PLAIN: None, IN_TURN: None} | {
        kind: WovenLayers(find("overlap", kind).implementation(), 0, 0, False)
        for kind in given["kinds"]
    }
    torch.manual_seed(2)
    tokens = torch.randint(0, 512, (sizes.rows, sizes.length))
    batch = packed_batch(tokens)

    @contextmanager
    def side(kind: str) -> Iterator[None]:
        model.woven = woven[kind]
        model.gather = gather_tokens if kind == PLAIN else gather_at_once
        model.embedding.scatter = scatter_tokens if kind == PLAIN else scatter_at_once
        with waiting_at_once() if kind == IN_TURN else ExitStack():
            yield

    def train() -> float:
        model.zero_grad()
        loss = pass_loss(model, batch, torch.tensor(float(tokens.numel())), mesh)
        loss.backward()
        return float(loss.detach())

    prompt = torch.randint(0, 512, (sizes.prompt,)).tolist()

    def read() -> float:
        """Seconds of a prompt's one pass, from the engine that a user's would be."""
        if dist.get_rank():
            follow_leader(model)
            return 0.0
        engine = Engine(model, budget=sizes.prompt, ranks=True, tokens=4 * sizes.prompt)
        engine.submit(prompt, 1)
        begun = time.perf_counter()
        engine.run()
        spent = time.perf_counter() - begun
        engine.close()
        return spent

    def timed(work: Callable[[], Any]) -> float:
        dist.barrier()
        begun = time.perf_counter()
        work()
        dist.barrier()
        return time.perf_counter() - begun

    def search(work: Callable[[], Any], learns: bool) -> None:
        """Repeat ``work`` until nano's searches for passes that learn, or for those that do not, have ended."""
        searches = woven["nano"].overlap.searches
        for _ in range(SEARCH):
            work()
            if not any(
                each.trying for key, each in searches.items() if key[-1] == learns
            ):
                return
        raise SystemExit("nano still searches")

    seconds = defaultdict[str, list[float]](list)
    losses: dict[str, float] = {}
    for kind in woven:
        with side(kind):
            losses[kind] = train()
            read()
            if kind == "nano":
                # each ends with a pass that hears of the time of the one before
                search(train, True)
                search(read, False)
    for _ in range(given["rounds"]):
        for kind in woven:
            with side(kind):
                seconds[f"train {kind}"].append(timed(train))
                seconds[f"prompt {kind}"].append(read())
    space = defaultdict[str, list[float]](list)
    if given["space"]:
        whole = PassTokens(sizes.rows, sizes.length, ranks, learns=True)
        weaves = {str(tuple(each)): each.weave(whole) for each in every_choice(whole)}
        chosen = woven["nano"].overlap(whole)
        searched = next(name for name, weave in weaves.items() if weave == chosen)

        def measure(name: str) -> float:
            model.woven = WovenLayers(Fixed(weaves[name]), 0, 0, False)
            return timed(train)

        once = agreed({name: measure(name) for name in weaves})
        best = sorted(once, key=once.__getitem__)[:AGAIN]
        for _ in range(TIMES if given["space"] > 1 else 1):
            for name in {searched: 0} | dict.fromkeys(best):
                space[name].append(measure(name))
    exchange = exchange_seconds(mesh, sizes)
    hidden: dict[str, dict[str, list[float]]] = {"train": {}, "prompt": {}}
    for kind in woven:
        for name, work in (("train", train), ("prompt", read)):
            with side(kind):
                dist.barrier()
                _, split = profile_step(work)
                shares = [split.communication, split.hidden, split.total]
                hidden[name][kind] = shares
    if dist.get_rank() == 0:
        print(
            json.dumps(
                {
                    "seconds": seconds,
                    "hidden": hidden,
                    "losses": losses,
                    "space": space,
                    "exchange": exchange,
                }
            )
        )
    dist.destroy_process_group()


def exchange_seconds(mesh: Any, sizes: Sizes) -> dict[str, float]:
    """Median seconds of exchanges in which a rank gets all tokens of a training pass, or all their summands, from when
    the last rank begins.
    """
    import torch
    import torch.distributed as dist

    from weft.layout.boundary import gather_tokens
    from weft.models.weave import gather_at_once, scatter_at_once

    group, ranks = mesh.group("tp"), mesh.size("tp")
    whole = torch.ones(sizes.rows, sizes.length, sizes.embed)
    share = whole[:, : sizes.length // ranks].contiguous()
    came = torch.empty_like(whole)
    ways: dict[str, Callable[[], Any]] = {
        "gloo's gather": lambda: gather_tokens(share, mesh),
        "all-to-all in a single group": lambda: dist.all_to_all_single(
            came.flatten(), whole.flatten(), group=group
        ),
        "gather, a group for each sender": lambda: gather_at_once(share, mesh),
        "sum, a group for each sender": lambda: scatter_at_once(whole, mesh),
    }
    seconds = defaultdict[str, list[float]](list)
    for _ in range(EXCHANGES):
        for name, way in ways.items():
            dist.barrier()
            begun = time.perf_counter()
            time.sleep(LATE_S * bool(dist.get_rank()))
            way()
            dist.barrier()
            seconds[name].append(time.perf_counter() - begun - LATE_S)
    sent = share.numel() * share.element_size() * (ranks - 1)
    floor = sent / 25e6 + DELAY_S
    return {"floor": floor} | {n: statistics.median(s) for n, s in seconds.items()}


def agreed(seconds: dict[str, float]) -> dict[str, float]:
    """The first rank's seconds, on all ranks."""
    import torch.distributed as dist

    box = [seconds]
    dist.broadcast_object_list(box)
    return box[0]


class Fixed:
    """A kind of overlap that always gives the same answer."""

    def __init__(self, weave: Any) -> None:
        self.weave = weave

    def __call__(self, tokens: Any) -> Any:
        return self.weave

    def awaits(self, tokens: Any) -> bool:
        return False


def packed_batch(tokens: Any) -> Any:
    """A batch of whole rows of a document each."""
    import torch

    from weft.data.batch import Batch

    rows, length = tokens.shape
    positions = torch.arange(length).expand(rows, -1)
    starts = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    return Batch(tokens, tokens.roll(-1, 1), positions, starts)


def measure(ranks: int, given: dict[str, Any]) -> dict[str, Any]:
    """Start ``ranks`` ranks on hosts of their own; return what the first has printed."""
    from hosts import hosts

    with (
        hosts(ranks, rate=RATE, delay_s=DELAY_S, burst=BURST) as places,
        tempfile.TemporaryDirectory() as folder,
    ):
        processes = []
        for rank, host in enumerate(places):
            environment = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "MASTER_PORT": str(PORT),
                "MASTER_ADDR": places[0].address, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
                "PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}", "WEFT_CACHE": folder,
            }  # fmt: skip
            words = [sys.executable, __file__, "--rank", json.dumps(given)]
            processes.append(
                subprocess.Popen(
                    host.command(words),
                    env=environment,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            said, _ = processes[0].communicate(timeout=LIMIT)
            for process in processes[1:]:
                process.wait(60)
        finally:
            for process in processes:
                process.kill()
    if processes[0].returncode:
        raise SystemExit("a rank has failed")
    result: dict[str, Any] = json.loads(said.splitlines()[-1])
    return result


def ratios(result: dict[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """Medians in seconds, by how much each kind is faster than sides without overlap, and the share of communication
    that it hides.
    """
    rows: dict[str, Any] = {}
    for work in ("train", "prompt"):
        middle = {
            kind: statistics.median(result["seconds"][f"{work} {kind}"])
            for kind in (PLAIN, IN_TURN, *kinds)
        }
        rows[work] = {
            kind: {
                "seconds": round(s, 4),
                "ratio": round(middle[PLAIN] / s, 3),
                "of in turn": round(middle[IN_TURN] / s, 3),
            }
            for kind, s in middle.items()
        }
        for kind, (exposed, hidden, total) in result["hidden"][work].items():
            rows[work][kind] |= {
                "communication": round((exposed + hidden) / total, 3),
                "hidden": round(hidden / ((exposed + hidden) or 1), 3),
            }
    return rows


def search_row(space: dict[str, list[float]]) -> dict[str, Any]:
    """What nano's search has chosen, the first of ``space``, beside the fastest of the candidates."""
    middle = {name: statistics.median(each) for name, each in space.items()}
    searched, best = next(iter(middle)), min(middle, key=middle.__getitem__)
    return {
        "searched": searched,
        "searched_s": round(middle[searched], 4),
        "best": best,
        "best_s": round(middle[best], 4),
        "over_best": round(middle[searched] / middle[best], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--sizes", type=int, nargs=6, help="as in Sizes, for all ranks")
    parser.add_argument("--no-space", action="store_true", help="not nano's candidates")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        be_rank(asked.rank)
        return
    from hosts import unavailable

    if why := unavailable():
        raise SystemExit(why)
    # numbers of ranks that are not measured now stay
    before = json.loads(asked.json.read_text()) if asked.json.exists() else {}
    before.pop("when", None)
    written: dict[str, Any] = before | {"rate": RATE, "delay_s": DELAY_S}
    for ranks in asked.ranks:
        sizes = Sizes(*asked.sizes) if asked.sizes else SIZES[ranks]
        sizes = SMALL if asked.quick else sizes
        measured = "nano" in asked.kinds and not asked.no_space
        given = {
            "sizes": sizes,
            "rounds": 2 if asked.quick else asked.rounds,
            "kinds": asked.kinds,
            "space": measured * (1 if asked.quick else 2),
        }
        begun = time.monotonic()
        result = measure(ranks, given)
        assert max(result["losses"].values()) - min(result["losses"].values()) < 1e-4
        row: dict[str, Any] = {
            "when": datetime.now().isoformat(timespec="seconds"),
            "sizes": sizes._asdict(),
            "exchange": {n: round(s, 4) for n, s in result["exchange"].items()},
            **ratios(result, asked.kinds),
        }
        if result["space"]:
            row["search"] = search_row(result["space"])
        row["minutes"] = round((time.monotonic() - begun) / 60, 1)
        written[f"{ranks} ranks"] = row
        for work in ("train", "prompt"):
            for kind, each in row[work].items():
                print(f"{ranks} ranks, {work}, {kind}: {each}")
        print(f"{ranks} ranks, exchange: {row['exchange']}")
        print(f"{ranks} ranks, search: {row.get('search')}; {row['minutes']} min", flush=True)  # fmt: skip
        if not asked.quick:
            asked.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
