"""Work under communication: training steps and long prompts under tp over slow links, without and with each overlap.

    sudo python bench/overlap.py [--ranks 2 4] [--rounds 5] [--quick] [--json bench/results/overlap.json]

Every rank is on a host of its own, a network namespace; a cable lets 200 Mbit/s through and a frame takes 2 ms from any
host to any other. All kinds of layout.overlap take turns in one run, on the same weights and data. A step is
measured from barrier to barrier. The share of communication that is hidden is that of profiled steps, in which the
threads of gloo mark what is under way (weft/observe/time_split.py). nano searches before anything is measured; what it
chose is compared with every candidate of its space.
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
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "overlap.json"
RATE, DELAY_S, PORT = "200mbit", 0.002, 29571
PLAIN, KINDS = "none", ("domino", "tokens", "chunks", "nano")
#: Passes until a search of nano has ended.
SEARCH = 22
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
SIZES = {2: Sizes(2048, 6144, 2, 2, 256, 1024), 4: Sizes(2048, 6144, 2, 2, 192, 768)}
SMALL = Sizes(64, 128, 2, 4, 32, 64)


def be_rank(given: dict[str, Any]) -> None:
    """Take training steps and read prompts with every kind in turn; the first rank prints the seconds."""
    import torch
    import torch.distributed as dist

    from weft.generate.engine import Engine
    from weft.generate.leader import follow_leader
    from weft.layout.layout import Layout
    from weft.layout.mesh import Mesh
    from weft.models.token_parts import PassTokens
    from weft.models.weave import WovenLayers
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
    woven = {PLAIN: None} | {
        kind: WovenLayers(find("overlap", kind).implementation(), 0, 0, False)
        for kind in given["kinds"]
    }
    torch.manual_seed(2)
    tokens = torch.randint(0, 512, (sizes.rows, sizes.length))
    batch = packed_batch(tokens)

    def train() -> float:
        loss = pass_loss(model, batch, torch.tensor(float(tokens.numel())), mesh)
        loss.backward()
        return float(loss.detach())

    prompts = torch.randint(0, 512, (64, sizes.prompt)).tolist()

    def read() -> float:
        """Seconds of a prompt's one pass, from the engine that a user's would be."""
        if dist.get_rank():
            follow_leader(model)
            return 0.0
        engine = Engine(model, budget=sizes.prompt, ranks=True, tokens=4 * sizes.prompt)
        engine.submit(prompts.pop(), 1)
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

    seconds = defaultdict[str, list[float]](list)
    hidden = defaultdict[str, list[list[float]]](list)
    losses: dict[str, float] = {}
    for round_ in range(-1, given["rounds"]):
        for kind, layers in woven.items():
            model.woven = layers
            model.zero_grad()
            if round_ < 0:
                losses[kind] = train()
                for _ in range(SEARCH if kind == "nano" else 0):
                    train()
                    read()
                continue
            seconds[f"train {kind}"].append(timed(train))
            spent = read()
            seconds[f"prompt {kind}"].append(spent)
    space: dict[str, float] = {}
    if given["space"]:
        whole = PassTokens(sizes.rows, sizes.length, ranks, learns=True)
        searched = woven["nano"].overlap(whole)
        for _ in range(given["space"]):
            for choice in (None, *every_choice(whole)):
                weave = choice.weave(whole) if choice else searched
                model.woven = WovenLayers(Fixed(weave), 0, 0, False)
                model.zero_grad()
                name = str(tuple(choice)) if choice else "searched"
                space[name] = min(space.get(name, 1e9), timed(train))
    for kind, layers in woven.items():
        model.woven = layers
        dist.barrier()
        _, split = profile_step(train)
        hidden[kind].append([split.communication, split.hidden, split.total])
    if dist.get_rank() == 0:
        print(
            json.dumps(
                {"seconds": seconds, "hidden": hidden, "losses": losses, "space": space}
            )
        )
    dist.destroy_process_group()


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
        hosts(ranks, rate=RATE, delay_s=DELAY_S) as places,
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
    """Medians in seconds, by how much each kind is faster than none, and the share of communication that it hides."""
    rows: dict[str, Any] = {}
    for work in ("train", "prompt"):
        middle = {
            kind: statistics.median(result["seconds"][f"{work} {kind}"])
            for kind in (PLAIN, *kinds)
        }
        rows[work] = {
            kind: {"seconds": round(s, 4), "ratio": round(middle[PLAIN] / s, 3)}
            for kind, s in middle.items()
        }
    for kind, ((exposed, hidden, total),) in result["hidden"].items():
        rows["train"][kind] |= {
            "communication": round((exposed + hidden) / total, 3),
            "hidden": round(hidden / ((exposed + hidden) or 1), 3),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
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
    written: dict[str, Any] = {
        "rate": RATE,
        "delay_s": DELAY_S,
        "when": datetime.now().isoformat(timespec="seconds"),
    }
    for ranks in asked.ranks:
        sizes = SMALL if asked.quick else SIZES[ranks]
        given = {
            "sizes": sizes,
            "rounds": 2 if asked.quick else asked.rounds,
            "kinds": asked.kinds,
            "space": 0 if "nano" not in asked.kinds else 1 if asked.quick else 3,
        }
        result = measure(ranks, given)
        assert max(result["losses"].values()) - min(result["losses"].values()) < 1e-4
        written[f"{ranks} ranks"] = {
            "sizes": sizes._asdict(),
            **ratios(result, asked.kinds),
        }
        if space := result["space"]:
            best = min(space, key=space.__getitem__)
            found = {
                "searched_s": space["searched"],
                "best_s": space[best],
                "best": best,
            }
            written[f"{ranks} ranks"]["search"] = found | {
                "over_best": round(space["searched"] / space[best], 3)
            }
            print(
                f"{ranks} ranks, search: {written[f'{ranks} ranks']['search']}",
                flush=True,
            )
        for work in ("train", "prompt"):
            for kind, row in written[f"{ranks} ranks"][work].items():
                print(f"{ranks} ranks, {work}, {kind}: {row}", flush=True)
    if not asked.quick:
        asked.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
