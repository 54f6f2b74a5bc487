"""Random settings of federated training for ``weft verify --random``: real clients against the virtual clock.

Every case is a small real run, as ``weft verify`` makes it of one recipe, with drawn settings. A case that the recipe's
rules refuse in one line counts as refused.
"""

from __future__ import annotations

import random
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import UsageError
from weft.federated.real_run_check import compare_real_run
from weft.prove.fuzz import CaseResult
from weft.recipe import load_recipe
from weft.registry import find, names

#: Settings that can be drawn with the values that they can take; each is drawn with the probability :data:`OFTEN`.
SETTINGS: Mapping[str, Sequence[Any]] = {
    "federated.steps": (1, 2, 5),
    "federated.per_round": (1,),
    "federated.weights": ("equal",),
    "federated.rate": (0.7,),
    "federated.staleness": (0.0, 1.0),
    "federated.clip": (0.001, 1.0),
    "federated.secure": (True,),
    "federated.compress": ("topk:0.25", "randk:0.5", "int8", "powersgd:1"),
    "federated.moments": ("kept",),
    "adapter.kind": ("lora", "dora"),
}
OFTEN = 0.3
#: Ways to add up updates, of which a case has at most one.
SUMS: Sequence[Mapping[str, Any]] = (
    {"federated.fan_in": 2},
    {"federated.fan_in": 3, "federated.aggregator": "process"},
    *({"federated.aggregate": name} for name in names("aggregator")),
)
#: Values of settings in the place of those that suit a virtual clock alone: a real run waits for its ticks.
REAL: Mapping[str, Sequence[Any]] = {"federated.tick": (0.05, 1.0)}


@dataclass(frozen=True)
class FederatedCases:
    """Random test cases of federated runs, drawn as variations of the recipe in the file ``path``.

    ``fixed``: texts ``section.key=value`` that hold in every case, whatever is drawn.
    """

    path: Path
    fixed: Sequence[str] = ()

    def draw(self, rng: random.Random) -> dict[str, Any]:
        """Draw the settings of a case at random, and return their values by full names such as ``federated.policy``. An
        equal state of ``rng`` gives the same case.
        """
        policy = rng.choice(names("federation-policy"))
        case: dict[str, Any] = {"federated.policy": policy}
        for name, values in SETTINGS.items():
            if rng.random() < OFTEN:
                case[name] = rng.choice(values)
        if rng.random() < OFTEN:
            case |= rng.choice(SUMS)
        for name, values in find("federation-policy", policy).draws.items():
            name = f"federated.{name}"
            case[name] = rng.choice(REAL.get(name, values))
        return case

    def verdict_of(self, case: Mapping[str, Any]) -> CaseResult:
        """Run a case, and return its result. An error of the run becomes part of the result."""
        kept = {text.partition("=")[0].strip() for text in self.fixed}
        drawn = {n: value for n, value in case.items() if n not in kept}
        own = [f"{n}={value!r}" for n, value in drawn.items() if n.startswith("federated.")]  # fmt: skip
        adapter = {"kind": case["adapter.kind"], "rank": 2} if "adapter.kind" in case else {}  # fmt: skip
        try:
            recipe = load_recipe(self.path, [*(word.replace("True", "true") for word in own), *self.fixed])  # fmt: skip
            result = compare_real_run(recipe, lambda line: None, adapter)
        except UsageError as refusal:
            return CaseResult("refused", str(refusal))
        except Exception as error:  # whatever it is, it is what the campaign is for
            return CaseResult("crashed", f"{type(error).__name__}: {error}")
        return CaseResult("equal" if result.ok else "wrong", str(result))

    def campaign(
        self, count: int, seed: int, ranks: int, minutes: float | None, first: int = 0
    ) -> Iterator[tuple[dict[str, Any], CaseResult]]:
        """Run ``count`` random cases, from number ``first`` on, and yield each with its result.

        ``seed``: seed of the cases. ``minutes``: limit of the time; None: no limit. ``ranks`` has no effect here.
        """
        end = time.monotonic() + 60 * minutes if minutes else float("inf")
        load_recipe(self.path, self.fixed)  # whose mistakes are no results of cases
        for number in range(first, first + count):
            if time.monotonic() > end:
                return
            case = self.draw(random.Random(f"{seed}-{number}"))
            yield {**case, "number": number, "seed": seed}, self.verdict_of(case)

    def command_of(self, case: Mapping[str, Any]) -> str:
        """Return the command line that repeats a ``case`` of :meth:`campaign`."""
        drawn = " ".join(f"{n}={value}" for n, value in case.items() if "." in n)
        more = "".join(f" --set {shlex.quote(text)}" for text in self.fixed)
        return (
            f"weft verify {self.path} --random 1 --first {case['number']} --seed {case['seed']}{more}  "
            f"# {drawn}"
        )
