"""The whole search of a policy: find it on some workloads, and judge it on others that the search has not seen."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from weft.errors import UsageError, why_unwritten
from weft.registry import KINDS, setting_values
from weft.search.evolution import JudgedExpression, SearchGeneration, evolve
from weft.search.judged_policy import JudgedPolicy
from weft.search.policy_language import Expression, parse_policy, run_of

#: Seeds of workloads for the search begin at 0, those of workloads for the choice among its best and of held-out
#: workloads here.
CHOICE, HELD_OUT = 5_000, 10_000
#: Values of a feature that the search begins with.
VALUES = 100
#: The cost of a policy with which the simulation does not end as it should.
FAILED = 1e30
#: What a simulation raises that does not end as it should.
FAILURES = (ArithmeticError, ValueError, RuntimeError, RecursionError)

#: Returns further expressions, given the best so far.
Propose = Callable[[Sequence[JudgedExpression]], Sequence[Expression]]


class SearchSize(NamedTuple):
    """Size of a policy search. ``generations``: number of generations; ``population``: number of expressions in each.
    ``workloads``: number of workloads for the search; as many serve the choice among its best expressions, and as many
    are held out. ``requests``: number of requests of each workload. ``seed``: seed of all random choices.
    """

    generations: int = 12
    population: int = 24
    workloads: int = 3
    requests: int = 120
    seed: int = 0


class PolicyFind(NamedTuple):
    """Result of a policy search.

    Attributes:
        ``expression``: the best expression.
        ``seen``: costs on the workloads of the search: of the result, as "find", and of each baseline by its name.
        ``held_out``: the same costs on held-out workloads, by which the result is judged to be better or not.
        ``judged``: number of expressions that were judged.
    """

    expression: Expression
    seen: dict[str, float]
    held_out: dict[str, float]
    judged: int

    def gain(self, baseline: str) -> float:
        """Return the fraction by which the result costs less than ``baseline`` on held-out workloads; below 0: it costs
        more.
        """
        cost = self.held_out[baseline]
        return 1 - self.held_out["find"] / cost if cost else 0.0


def mean_cost(
    policy: JudgedPolicy, expression: Expression, workloads: Sequence[Any]
) -> float:
    """Return the mean cost over ``workloads`` of the policy that ``expression`` describes. It is :data:`FAILED` where
    the simulation fails.
    """
    formula = run_of(expression, [*policy.features])
    costs = []
    for workload in workloads:
        try:
            cost = policy.cost(formula, workload)
        except FAILURES:
            return FAILED
        costs.append(cost if math.isfinite(cost) else FAILED)
    return sum(costs) / len(costs)


def feature_values(policy: JudgedPolicy, workload: Any) -> dict[str, Sequence[float]]:
    """Return, for each feature, some of the values that it takes where the policy in use decides about ``workload``.
    They are borders between cases that occur, and they show of what size a feature is.
    """
    names = [*policy.features]
    formula = run_of(parse_policy(policy.baselines[policy.greedy], names), names)
    drawn, kept, seen = Random(0), list[tuple[float, ...]](), 0

    def watched(values: Sequence[float]) -> float:
        nonlocal seen
        seen += 1
        place = drawn.randrange(seen)  # reservoir sampling: all are as likely
        if len(kept) < VALUES:
            kept.append(tuple(values))
        elif place < VALUES:
            kept[place] = tuple(values)
        return formula(values)

    with contextlib.suppress(*FAILURES):
        policy.cost(watched, workload)
    return {
        name: [values[index] for values in kept] or [0.0, 1.0]
        for index, name in enumerate(names)
    }


def search_policy(
    policy: JudgedPolicy,
    size: SearchSize,
    say: Callable[[SearchGeneration], None] = lambda generation: None,
    propose: Propose = lambda best: (),
) -> PolicyFind:
    """Search for an expression whose policy costs less than the baselines. Of the best ones, choose that which is best
    on further workloads too, so that it is not one that fits the search's workloads by chance. Judge it and all
    baselines on held-out workloads, and return the result.

    ``say``: called after every generation. ``propose``: returns further expressions, such as those of a model.
    """
    names = [*policy.features]
    baselines = {
        name: parse_policy(text, names) for name, text in policy.baselines.items()
    }
    loads, further, others = (
        [
            policy.workload(first + size.seed + i, size.requests)
            for i in range(size.workloads)
        ]
        for first in (0, CHOICE, HELD_OUT)
    )
    generation = None
    for generation in evolve(
        [*baselines.values()],
        feature_values(policy, loads[0]),
        lambda expression: mean_cost(policy, expression, loads),
        size.generations,
        size.population,
        Random(size.seed),
        propose,
    ):
        say(generation)
    assert generation is not None
    best = min(
        generation.leading,
        key=lambda each: each.cost + mean_cost(policy, each.expression, further),
    ).expression
    every = baselines | {"find": best}
    return PolicyFind(
        best,
        {name: mean_cost(policy, each, loads) for name, each in every.items()},
        {name: mean_cost(policy, each, others) for name, each in every.items()},
        generation.judged,
    )


def plugin_text(policy: JudgedPolicy, kind: str, name: str, find: PolicyFind) -> str:
    """Return the source of a Python module that registers the result ``find`` of a search as the technique ``name``.
    ``policy``, ``kind``: the kind of policy that was searched, and its name.
    """
    ours, greedy = find.held_out["find"], find.held_out[policy.greedy]
    return f'''"""A policy that `weft search {kind}` has found.

On workloads that the search has not seen it takes {ours:.4g} {policy.unit},
and {policy.greedy!r} takes {greedy:.4g}.
"""

from weft.registry import register
from weft.search.expression_policies import {policy.base}


@register("{policy.registered}", "{name}")
class Find({policy.base}):
    """Chooses where the expression is smallest."""

    source = {str(find.expression)!r}
'''


def technique_name(path: Path) -> str:
    """Return the name as which the plugin in the file ``path`` registers its policy."""
    return path.stem.replace("_", "-")


def check_plugin_path(path: Path, kind: str) -> None:
    """Raise :class:`UsageError` if a find cannot be written to ``path``: if a file is there already, or if a technique
    of this ``kind`` has its name.
    """
    if path.suffix != ".py" or not re.fullmatch(r"[A-Za-z_]\w*", path.stem):
        raise UsageError(
            f"--out {path} must be a file that Python can import, such as better.py"
        )
    if path.exists():
        raise UsageError(f"--out {path} exists; remove it, or choose another file")
    name = technique_name(path)
    if name in setting_values(KINDS[kind].setting):
        raise UsageError(
            f"--out {path} would register {name!r}, which is there already; choose another file"
        )
    if not path.parent.is_dir():
        raise UsageError(f"--out {path}: there is no folder {path.parent}; make it")


def write_plugin(path: Path, text: str) -> None:
    """Write ``text``, the Python module of a policy that a search has found, to the new file ``path``. Raises
    :class:`UsageError` if the file exists or cannot be written.
    """
    try:
        with path.open("x") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(
            f"--out {path} cannot be written: {why_unwritten(error, 'name another file')}"
        ) from None


def expression_diff(policy: JudgedPolicy, find: PolicyFind) -> str:
    """Return the difference between the expression in use and the result of the search, as ``diff -u`` writes it."""
    before = parse_policy(policy.baselines[policy.greedy], [*policy.features])
    lines = difflib.unified_diff(
        _broken(before), _broken(find.expression), policy.greedy, "find", lineterm=""
    )
    return "\n".join(lines)


def _broken(expression: Expression, deep: int = 2) -> list[str]:
    """Return the text of an expression as lines, one for each part down to ``deep`` levels."""
    if deep == 0 or not expression.parts:
        return [str(expression)]
    lines = [f"{expression.operation}:"]
    for part in expression.parts:
        lines += [f"    {line}" for line in _broken(part, deep - 1)]
    return lines


def find_json(kind: str, size: SearchSize, find: PolicyFind) -> str:
    """Return ``find``, the result of a search, as JSON, with its costs and the size of the search. ``kind``: name of
    the kind of policy.
    """
    return json.dumps(
        {
            "policy": kind,
            "expression": str(find.expression),
            "seen": find.seen,
            "held_out": find.held_out,
            "judged": find.judged,
            **size._asdict(),
        },
        indent=1,
    )
