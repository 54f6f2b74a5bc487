"""``weft plan MODEL --serve``: how many engines serve a load within limits, with which layout and role each."""

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from weft.cli.console import grid, plain_console, warn

if TYPE_CHECKING:
    from weft.serve.block_link import BlockLink
    from weft.serve.load_requests import LoadRequest
    from weft.serve.load_simulation import TimedRequest
    from weft.serve.placement_search import EngineLayout, EnginePlacement, PlacedLoad
    from weft.serve.simulated_caches import SimulatedCaches

#: Requests of the simulated load, and of those that are timed here.
REQUESTS, TIMED = 100, 4
#: Hosts like this machine, if no number is given; seconds and bytes per second from one to another.
HOSTS, LATENCY, RATE = 4, 1e-3, 1e9


class ServingQuestion(NamedTuple):
    """Requirements and load of ``weft plan --serve``.

    Attributes:
        ``ttft``: largest allowed time to the first token, in seconds.
        ``tpot``: largest allowed time per further token, in seconds.
        ``rate``: number of requests per second.
        ``prompt``: mean number of tokens of a prompt.
        ``answer``: mean number of tokens of an answer.
        ``shared``: number of tokens with which prompts begin as others do, before those of ``prompt``.
        ``beginnings``: number of different beginnings of ``shared`` tokens.
        ``memory``: GB of a cache engine, with which placements are tried too; 0: with none.
    """

    ttft: float
    tpot: float
    rate: float
    prompt: int
    answer: int
    shared: int = 0
    beginnings: int = 1
    memory: float = 0.0


class KnownLayouts(NamedTuple):
    """Layouts of an engine with known step times, and the devices for them.

    ``layouts``: the layouts with their times. ``devices``: number of devices. ``link``: speed of transfers between
    engines; None: it is unknown. ``where``: phrase that names the devices in the output.
    """

    layouts: "Sequence[EngineLayout]"
    devices: int
    link: "BlockLink | None"
    where: str


def plan_serving(
    model: str, cluster: str | None, gpus: int | None, asked: ServingQuestion, as_json: bool
) -> int:  # fmt: skip
    """Print the placements of engines that could serve ``model``, best first. Returns the exit code.

    ``cluster``: cluster file or preset; the planner estimates how long a step takes there. None: engine steps of
    ``model`` are timed on this machine. ``gpus``: largest number of devices to use; None: all. ``asked``: the latencies
    that are required, and the load. ``as_json``: print JSON instead of a table.
    """
    from itertools import accumulate

    from weft.serve.load_requests import arrival_pauses
    from weft.serve.load_simulation import TimedRequest
    from weft.serve.placement_search import PlacementSearch, ServiceLimits

    pauses = accumulate(arrival_pauses(REQUESTS, asked.rate, 1.0, 0))
    times = [*pauses, *[0.0] * TIMED]
    texts = zip(times, serving_requests(asked, REQUESTS + TIMED), strict=True)
    every = [TimedRequest(time, text.prompt, text.tokens) for time, text in texts]  # type: ignore[arg-type]
    load, few = every[:REQUESTS], every[REQUESTS:]
    with Console(stderr=True).status("timing a few requests") as status:
        known = (
            _timed_here(model, gpus or HOSTS, few)
            if cluster is None
            else _priced(model, cluster, gpus)
        )
        status.update("simulating placements")
        limits = ServiceLimits(asked.ttft, asked.tpot)
        caches = _cache_engine(model, known, asked.memory)
        search = PlacementSearch(known.layouts, known.devices, limits, known.link, caches=caches)  # fmt: skip
        placed = search.search(load)
    lines = start_lines(model, placed[0].placement, asked.memory) if placed[0].share else []  # fmt: skip
    if as_json:
        rows = [_record(each) for each in placed]
        print(json.dumps({"placements": rows, "start": lines}))
        return 0
    _show_placements(model, known.where, asked, placed, lines)
    return 0


def serving_requests(asked: ServingQuestion, count: int) -> "list[LoadRequest]":
    """Return ``count`` requests of random ids, as ``asked`` says. Each begins with one of its beginnings."""
    from random import Random

    from weft.serve.load_requests import random_requests

    texts = random_requests(count, asked.prompt, asked.answer, 0.3, 0, 0)
    draw = Random(1)
    starts = [[draw.randrange(256) for _ in range(asked.shared)] for _ in range(asked.beginnings)]  # fmt: skip
    return [
        text._replace(prompt=[*draw.choice(starts), *map(int, text.prompt)])
        for text in texts
    ]


def _cache_engine(
    model: str, known: KnownLayouts, memory: float
) -> "SimulatedCaches | None":
    """Return a cache engine of ``memory`` GB to simulate; None for 0 GB."""
    from weft.errors import UsageError
    from weft.serve.placement_search import BLOCK
    from weft.serve.simulated_caches import SimulatedCaches

    if not memory or known.link is None:
        return None
    size = known.link.token_bytes * BLOCK
    if not size:
        raise UsageError(f"{model} has no cache blocks to keep; leave out --cache-memory")  # fmt: skip
    if memory * 1e9 < size:
        raise UsageError(f"a cache block of {model} has {size / 1e9:.2g} GB; give more --cache-memory")  # fmt: skip
    return SimulatedCaches(1, int(memory * 1e9 / size), known.link)


def start_lines(
    model: str, placement: "EnginePlacement", memory: float = 0.0
) -> list[str]:
    """Return lines that show the user how to start ``placement`` with the checkpoint ``model``. ``memory``: GB of a
    cache engine.

    They are one command, or the content of a cluster file with the commands that use it.
    """
    groups = placement.groups
    local = all(not group.layout.name for group in groups.values())
    caches = placement.caches
    if local and placement.mixed is not None and not caches:
        return [f"weft serve --checkpoint {model} --engines {placement.mixed.engines}"]
    total = sum(group.engines for group in groups.values())
    file = ["# cluster.toml", "[cluster]"]
    serve = f"weft serve --checkpoint {model} --cluster cluster.toml"
    if local:
        named = {r: g.engines for r, g in groups.items() if r != "any"}
        named |= {"cache": caches} if caches else {}
        counts = ", ".join(f"{role} = {count}" for role, count in named.items())
        return [*file, f"engines = {total + caches}", f"roles = {{ {counts} }}", serve]
    joins = []
    for role, group in groups.items():
        words = f"weft engine --checkpoint {model} --join HOST:8100"
        words += "" if role == "any" else f" --role {role}"
        words += f" --layout {group.layout.name}" if group.layout.name else ""
        joins.append(f"{words}    # {group.engines} of these")
    if caches:
        words = f"weft engine --checkpoint {model} --join HOST:8100 --role cache"
        joins.append(f"{words} --host-cache {memory:g}    # {caches} of these")
    return [*file, 'listen = "HOST:8100"', serve, *joins]


def _priced(model: str, cluster: str, gpus: int | None) -> KnownLayouts:
    """Price every tensor-parallel layout of a model on the devices of a cluster."""
    import numpy as np

    from weft.checkpoint.weights import shape_named
    from weft.errors import UsageError
    from weft.generate.step_work import work_of
    from weft.planner.machine import load_cluster
    from weft.planner.planned_model import load_model
    from weft.planner.serving_price import EnginePrice
    from weft.recipe.shipped import find_recipe
    from weft.serve.block_link import BlockLink
    from weft.serve.placement_search import EngineLayout

    machines = load_cluster(cluster, gpus)
    shape = load_model(str(find_recipe(model) or model), shape_named).shape
    machine = machines.machine()
    layouts, ranks = [], 1
    while ranks <= machines.count and not int(shape.kv_heads) % ranks:
        price = EnginePrice(shape, machine, ranks)

        def seconds(step, price=price):  # type: ignore[no-untyped-def]
            return price.step_seconds(*work_of(step)[1:])

        name = f"tp={ranks}" if ranks > 1 else ""
        layouts.append(EngineLayout(name, ranks, seconds, price.cache_tokens))
        ranks *= 2
    if not any(layout.cache for layout in layouts):
        raise UsageError(
            f"the weights of {model} do not fit on {layouts[-1].devices} devices; give more --gpus, or larger devices"
        )
    near = machines.count <= float(np.max(machine.domain))
    rate = float(machine.link if near else machine.network)
    latency = float(machine.link_latency if near else machine.network_latency)
    link = BlockLink(latency, rate, float(shape.cache_bytes))
    where = f"{machines.count} x {machines.device}, priced by the planner"
    return KnownLayouts(layouts, machines.count, link, where)


def _timed_here(model: str, hosts: int, few: "Sequence[TimedRequest]") -> KnownLayouts:
    """Time a few requests of a checkpoint here; engines are hosts like this one."""
    import torch

    from weft.checkpoint.model import open_model
    from weft.generate.engine import Engine
    from weft.generate.policies import policy_of
    from weft.serve.block_link import BlockLink
    from weft.serve.placement_search import EngineLayout
    from weft.serve.policy_choice import time_steps
    from weft.shapes.shape import shape_of

    device = "cuda" if torch.cuda.is_available() else "cpu"
    opened, _, _ = open_model(model, device, warn)
    cache = 65_536

    def build(policy: str, budget: int) -> Engine:
        return Engine(opened, cache, budget, 64, policy_of(policy))

    curve = time_steps(build, few)
    shape = opened.shape
    width = next(opened.parameters()).element_size()
    token = float(shape_of(shape).cache_bytes) / 2 * width
    layouts = [EngineLayout("", 1, curve, cache)]
    link = BlockLink(LATENCY, RATE, token)
    where = (
        f"up to {hosts} engines like this machine, which was timed; 1 GB/s between them"
    )
    return KnownLayouts(layouts, hosts, link, where)


def _record(placed: "PlacedLoad") -> dict[str, object]:
    placement = placed.placement
    groups = {
        role: {"engines": group.engines, "layout": group.layout.name}
        for role, group in placement.groups.items()
    }
    return {
        "engines": groups, "caches": placement.caches, "devices": placement.devices, "share": placed.share,
        "goodput": placed.goodput, "reason": placed.reason, "figures": placed.figures,
    }  # fmt: skip


def _show_placements(
    model: str, where: str, asked: ServingQuestion, placed: "Sequence[PlacedLoad]", lines: Sequence[str]
) -> None:  # fmt: skip
    say = partial(plain_console(200).print, markup=False)
    alike = f"{asked.shared} (of {asked.beginnings} kinds)+" if asked.shared else ""
    say(
        f"{model} on {where}: {asked.rate:g} requests/s of {alike}{asked.prompt}+{asked.answer} tokens, first token "
        f"within {asked.ttft:g} s, each further one within {asked.tpot:g} s\n"
    )
    table = grid(("placement", "devices", "within limits", "good/s", "why"), ("placement", "why"))  # fmt: skip
    for each in placed:
        share = f"{each.share:.0%}" if each.figures else "-"
        good = f"{each.goodput:.3g}" if each.figures else "-"
        table.add_row(str(each.placement), str(each.placement.devices), share, good, each.reason)  # fmt: skip
    plain_console(200).print(table)
    say("")
    for line in lines or ["none of these serves a request within the limits"]:
        say(line)
