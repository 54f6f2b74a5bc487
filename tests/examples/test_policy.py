"""Policies on the simulator: what is scored is what was proposed, and better policies score better."""

from math import inf

import pytest
from policy import Proposal, Scenario, balanced, even, overall, run, scenarios, score

from weft.errors import UsageError
from weft.schedule.build import build


def test_scores_are_the_simulator_s() -> None:
    """1F1B of equal stages: (M + P - 1) / M of the ideal, and P microbatches on the first rank."""
    (row,) = score(even, [Scenario("plain", 4, 16, 8)])
    assert row.slower == pytest.approx((8 + 3) / 8) and row.peak == 4 * 4
    (slow,) = score(even, [Scenario("slow", 4, 16, 64, speeds=(1, 1, 0.5, 1))])
    # the slow rank sets the pace
    assert slow.slower == pytest.approx(2 * 3.5 / 4, rel=0.07)


def test_what_cannot_be_is_infinitely_slow_and_says_why() -> None:
    scenario = Scenario("tight", 4, 16, 8, memory=8)
    assert run(scenario, even(scenario)).reason == "holds 16 of 8"
    wrong = Proposal((4, 4, 4, 3), build("1f1b", 4, 8))
    assert (
        run(scenario, wrong).slower == inf
        and "16 layers" in run(scenario, wrong).reason
    )

    def fails(scenario: Scenario) -> Proposal:
        raise UsageError("cannot")

    assert [row.reason for row in score(fails, [scenario])] == ["cannot"]


@pytest.mark.slow
def test_the_balanced_policy_beats_the_even_one_everywhere() -> None:
    given = scenarios()
    plain, better = score(even, given), score(balanced, given)
    assert all(b.slower <= a.slower + 1e-9 for a, b in zip(plain, better, strict=True))
    assert overall(better) < inf and overall(plain) == inf, (
        "only one of them knows what to do with little memory"
    )
    with_room = [row for row in plain if row.slower < inf]
    names = {row.scenario for row in with_room}
    assert overall([row for row in better if row.scenario in names]) < 0.93 * overall(
        with_room
    )
