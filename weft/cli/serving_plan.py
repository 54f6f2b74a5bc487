"""``weft plan MODEL --serve``: how many engines serve a load within limits, with which layout and role each."""

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from weft.cli.console import grid, plain_console, warn

if TYPE_CHECKING:
    from weft.serve.cluster_simulation import BlockLink
    from weft.serve.load_simulation import TimedRequest
    from weft.serve.placement_search import EngineLayout, EnginePlacement, PlacedLoad

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
    """

    ttft: float
    tpot: float
    rate: float
    prompt: int
    answer: int


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

    from weft.serve.load_requests import arrival_pauses, random_requests
    from weft.serve.load_simulation import TimedRequest
    from weft.serve.placement_search import PlacementSearch, ServiceLimits

    texts = random_requests(REQUESTS + TIMED, asked.prompt, asked.answer, 0.3, 0, 0)
    pauses = accumulate(arrival_pauses(REQUESTS, asked.rate, 1.0, 0))
    load = [
        TimedRequest(time, [int(i) for i in text.prompt], text.tokens)
        for time, text in zip(pauses, texts, strict=False)
    ]
    few = [TimedRequest(0.0, [int(i) for i in t.prompt], t.tokens) for t in texts[-TIMED:]]  # fmt: skip
    with Console(stderr=True).status("timing a few requests") as status:
        known = (
            _timed_here(model, gpus or HOSTS, few)
            if cluster is None
            else _priced(model, cluster, gpus)
        )
        status.update("simulating placements")
        limits = ServiceLimits(asked.ttft, asked.tpot)
        search = PlacementSearch(known.layouts, known.devices, limits, known.link)
        placed = search.search(load)
    lines = start_lines(model, placed[0].placement) if placed[0].share else []
    if as_json:
        rows = [_record(each) for each in placed]
        print(json.dumps({"placements": rows, "start": lines}))
        return 0
    _show_placements(model, known.where, asked, placed, lines)
    return 0


def start_lines(model: str, placement: "EnginePlacement") -> list[str]:
    """Return lines that show the user how to start ``placement`` with the checkpoint ``model``.

    They are one command, or the content of a cluster file with the commands that use it.
    """
    groups = placement.groups
    local = all(not group.layout.name for group in groups.values())
    if local and placement.mixed is not None:
        return [f"weft serve --checkpoint {model} --engines {placement.mixed.engines}"]
    total = sum(group.engines for group in groups.values())
    file = ["# cluster.toml", "[cluster]"]
    serve = f"weft serve --checkpoint {model} --cluster cluster.toml"
    if local:
        counts = ", ".join(f"{role} = {g.engines}" for role, g in groups.items())
        return [*file, f"engines = {total}", f"roles = {{ {counts} }}", serve]
    joins = []
    for role, group in groups.items():
        words = f"weft engine --checkpoint {model} --join HOST:8100"
        words += "" if role == "any" else f" --role {role}"
        words += f" --layout {group.layout.name}" if group.layout.name else ""
        joins.append(f"{words}    # {group.engines} of these")
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
    from weft.serve.cluster_simulation import BlockLink
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
    from weft.serve.cluster_simulation import BlockLink
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
        "engines": groups, "devices": placement.devices, "share": placed.share, "goodput": placed.goodput,
        "reason": placed.reason, "figures": placed.figures,
    }  # fmt: skip


def _show_placements(
    model: str, where: str, asked: ServingQuestion, placed: "Sequence[PlacedLoad]", lines: Sequence[str]
) -> None:  # fmt: skip
    say = partial(plain_console(200).print, markup=False)
    say(
        f"{model} on {where}: {asked.rate:g} requests/s of {asked.prompt}+{asked.answer} tokens, first token within "
        f"{asked.ttft:g} s, each further one within {asked.tpot:g} s\n"
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
