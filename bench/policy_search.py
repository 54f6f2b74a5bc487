"""Policies that ``weft search`` finds, beside those that are in use, on workloads that the search has not seen.

The peer is the policy in use where nothing else is said (``greedy``), and all other policies that are known.

    python bench/policy_search.py [--generations 12] [--population 24] [--requests 120] [--only prompt-order] [--quick]

``held_out`` is what ``weft search`` itself says at its end. ``again`` is the mean cost of each policy on ``--again``
more workloads, and on how many of them the find costs less than every known policy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.registry import declared
from weft.search.evolution import SearchGeneration
from weft.search.judged_policy import JudgedPolicy
from weft.search.policy_language import parse_policy
from weft.search.policy_search import PolicyFind, SearchSize, mean_cost, search_policy

RESULT = Path(__file__).with_name("results") / "policy_search.json"
#: Seeds of the workloads on which a find is judged again begin here.
AGAIN = 20_000


def judged_again(
    policy: JudgedPolicy, find: PolicyFind, workloads: int, requests: int
) -> dict[str, Any]:
    """Costs of a find and of the known policies on workloads that neither the search nor its check has seen."""
    names = [*policy.features]
    every = {n: parse_policy(text, names) for n, text in policy.baselines.items()}
    every["find"] = find.expression
    costs: dict[str, list[float]] = {name: [] for name in every}
    for seed in range(AGAIN, AGAIN + workloads):
        load = policy.workload(seed, requests)
        for name, expression in every.items():
            costs[name].append(mean_cost(policy, expression, [load]))
    means = {name: sum(each) / workloads for name, each in costs.items()}

    def gain(cost: float) -> float:
        return 1 - means["find"] / cost if cost else 0.0

    known = [*zip(*(costs[name] for name in policy.baselines), strict=True)]
    return {
        "workloads": workloads,
        "costs": means,
        "gain_over_greedy": gain(means[policy.greedy]),
        "gain_over_best_known": gain(min(means[name] for name in policy.baselines)),
        "best_of_all": sum(a < min(b) for a, b in zip(costs["find"], known, strict=True)),
    }  # fmt: skip


def main(
    generations: int = 12,
    population: int = 24,
    workloads: int = 3,
    requests: int = 120,
    again: int = 8,
    seed: int = 0,
    only: str = "",
    quick: Annotated[bool, typer.Option("--quick")] = False,
    out: Path = RESULT,
) -> None:
    """Search every policy that can be searched, and write what was found with its costs."""
    size = SearchSize(generations, population, workloads, requests, seed)
    if quick:
        size, again = SearchSize(2, 4, 1, 12, seed), 1
    figures: dict[str, Any] = {}
    if only and out.exists():
        figures = json.loads(out.read_text())["policies"]
    for technique in declared("search"):
        if only not in ("", technique.name):
            continue
        policy = technique.implementation()

        def say(generation: SearchGeneration, kind: str = technique.name) -> None:
            best = generation.best
            print(f"{kind} {generation.number} {best.cost:.4f} {best.expression}", flush=True)  # fmt: skip

        best = search_policy(policy, size, say)
        figures[technique.name] = {
            "expression": str(best.expression),
            "seen": best.seen,
            "held_out": best.held_out,
            "judged": best.judged,
            "greedy": policy.greedy,
            "gain_over_greedy": best.gain(policy.greedy),
            "gain_over_best_known": min(best.gain(name) for name in policy.baselines),
            "again": judged_again(policy, best, again, size.requests),
            # last, as tables of results show the first columns
            "size": size._asdict(),
        }
        print(f"{technique.name}: {figures[technique.name]['again']}")
        if not quick:
            out.write_text(json.dumps({"policies": figures}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
