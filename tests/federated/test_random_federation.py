"""Random cases of federated training: drawn the same again, refused in one line, and faults come with their command."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from weft.federated import random_federation
from weft.federated.random_federation import FederatedCases
from weft.federated.real_run_check import LIMIT, RealRunDifference
from weft.registry import names

RECIPE = Path("recipes/federated.toml")


def test_cases_reach_every_policy_and_setting_and_are_refused_by_rules() -> None:
    cases = FederatedCases(RECIPE)
    drawn = [cases.draw(Random(number)) for number in range(200)]
    assert {case["federated.policy"] for case in drawn} == {*names("federation-policy")}
    assert {*random_federation.SETTINGS} <= {name for case in drawn for name in case}
    assert drawn[3] == cases.draw(Random(3))
    case = {"federated.aggregate": "krum", "federated.fan_in": 2}
    verdict = cases.verdict_of(case)
    assert verdict.kind == "refused" and "looks at all updates" in verdict.why


@pytest.mark.parametrize(
    ("apart", "kind"), [(0.1 * LIMIT, "equal"), (10 * LIMIT, "wrong"), (None, "crashed")]
)  # fmt: skip
def test_a_case_is_as_its_real_run(
    monkeypatch: pytest.MonkeyPatch, apart: float | None, kind: str
) -> None:
    def compare(recipe: object, say: object, adapter: object) -> RealRunDifference:
        if apart is None:
            raise RuntimeError("a process fell over")
        return RealRunDifference(apart, "w", 8, 4)

    monkeypatch.setattr(random_federation, "compare_real_run", compare)
    cases = FederatedCases(RECIPE)
    (drawn, verdict), *rest = cases.campaign(1, 5, 4, None)
    assert not rest
    assert drawn == {**cases.draw(Random("5-0")), "number": 0, "seed": 5}
    assert verdict.kind == kind
    assert "--random 1 --first 0 --seed 5" in cases.command_of(drawn)
