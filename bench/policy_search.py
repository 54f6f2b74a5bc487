"""Policies that ``weft search`` finds, beside those that are in use, on workloads that the search has not seen.

The peer is the policy in use where nothing else is said (``greedy``), and all other policies that are known.

    python bench/policy_search.py [--generations 10] [--population 20] [--requests 80] [--only prompt-order] [--quick]
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.registry import declared
from weft.search.evolution import SearchGeneration
from weft.search.policy_search import SearchSize, search_policy

RESULT = Path(__file__).with_name("results") / "policy_search.json"


def main(
    generations: int = 10,
    population: int = 20,
    workloads: int = 2,
    requests: int = 80,
    seed: int = 0,
    only: str = "",
    quick: Annotated[bool, typer.Option("--quick")] = False,
    out: Path = RESULT,
) -> None:
    """Search every policy that can be searched, and write what was found with its costs."""
    size = SearchSize(generations, population, workloads, requests, seed)
    if quick:
        size = SearchSize(2, 4, 1, 12, seed)
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
            # last, as tables of results show the first columns
            "size": size._asdict(),
        }
        ours, greedy = best.held_out["find"], best.held_out[policy.greedy]
        print(
            f"{technique.name}: ours {ours:.4g}, {policy.greedy} {greedy:.4g}, ratio {ours / greedy:.3f}"
        )
    if not quick:
        out.write_text(json.dumps({"policies": figures}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
