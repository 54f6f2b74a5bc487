"""Quota controllers on planted loads: they go where a phase needs more, and stay where nothing is wrong."""

from __future__ import annotations

import pytest

from weft.errors import UsageError
from weft.generate.phase_costs import PhaseCosts
from weft.generate.policies import exact_fill
from weft.generate.quotas import LARGEST, LEAST, PassTime, PhaseView, quota_of
from weft.generate.request import Request
from weft.techniques.quotas.nexus import CostQuota, fitted_costs
from weft.techniques.quotas.semi_pd import LimitsQuota

COSTS = PhaseCosts((0, 2e-3, 0, 0, 0, 1e-6), (1e-2, 0, 0, 0, 1e-5, 0))


def view(now: float = 0.0, quota: float = 0.5, **other: object) -> PhaseView:
    values = {"prompts": [100], "oldest": 0.0, "texts": 4, "keys": 400, "usage": 0.1}
    return PhaseView(now, quota, **values | other)  # type: ignore[arg-type]


def follow(
    controller: LimitsQuota, first: float, later: float, windows: int, quota: float
) -> list[float]:
    """The quotas while both latencies are inverse to the shares; ``first``, ``later``: at the whole device."""
    quotas, now = list[float](), 0.0
    for _ in range(windows):
        for _ in range(10):
            controller.note_first(now, first / quota)
            controller.note_gap(now, later / (1 - quota))
            now += 0.05
            quota = controller.choose(view(now, quota))
        quotas.append(quota)
    return quotas


@pytest.mark.parametrize("begin", [LEAST, 0.5, LARGEST])
@pytest.mark.parametrize(("first", "later"), [(0.2, 0.02), (0.1, 0.06), (0.4, 0.01)])
def test_semi_pd_finds_the_quota_at_which_both_are_equally_late(
    begin: float, first: float, later: float
) -> None:
    quotas = follow(LimitsQuota(1.0, 0.1), first, later, 40, begin)
    reading, writing = first / 0.3, later / 0.1
    wanted = min(LARGEST, max(LEAST, reading / (reading + writing)))
    assert quotas[-1] == pytest.approx(wanted, abs=0.06)
    assert max(quotas[-10:]) - min(quotas[-10:]) < 0.05


def test_semi_pd_stays_while_both_are_well_within_their_limits() -> None:
    assert set(follow(LimitsQuota(100.0, 10.0), 0.2, 0.02, 20, 0.7)) == {0.7}


def test_semi_pd_mends_a_limit_that_is_missed_by_little_where_there_is_room() -> None:
    """However small the change is: a mean just above the limit misses it for half of all texts."""
    quotas = follow(LimitsQuota(1.0, 0.1), 0.15, 0.0515, 40, 0.5)
    assert 0.0515 / (1 - quotas[-1]) < 0.1
    assert 0.15 / quotas[-1] < 1


def test_semi_pd_sees_a_prompt_that_waits_before_it_has_a_token() -> None:
    controller, quota = LimitsQuota(1.0, 0.1), LEAST
    for step in range(20):
        controller.note_gap(step, 0.05)
        quota = controller.choose(view(step, quota, oldest=float(step)))
    assert quota > 0.6
    # and goes back when there are none, and texts are slow
    for step in range(20, 60):
        controller.note_gap(step, 0.3)
        quota = controller.choose(view(step, quota, prompts=[]))
    assert quota == LEAST


def passes(costs: PhaseCosts = COSTS) -> list[PassTime]:
    """Passes of both phases at different quotas, with times of ``costs``."""
    every = []
    for number in range(60):
        quota, beside = 0.2 + 0.1 * (number % 7), bool(number % 3)
        reads = [1.0, 50.0 + number, 1, 1, 300.0, 40.0 * number]
        writes = [1.0, 3.0 + number % 9, 3, 3, 100.0 * (number % 5), 9.0]
        needs = [costs.demand(work) for work in (reads, writes)]
        shares = (quota, 1 - quota) if beside else (1.0, 1.0)
        alone = [costs.seconds(each, 1.0) for each in needs]
        seconds = costs.both(*needs, quota) if beside else alone
        for phase, *ended in zip(("prefill", "decode"), (reads, writes), seconds, shares, strict=True):  # fmt: skip
            every.append(PassTime(phase, *ended, beside))  # type: ignore[arg-type]
    return every


def test_nexus_finds_the_costs_of_planted_passes() -> None:
    fitted = fitted_costs(passes(), rounds=3000)
    for ours, planted in ((fitted.compute, COSTS.compute), (fitted.memory, COSTS.memory)):  # fmt: skip
        assert list(ours) == pytest.approx(list(planted), rel=0.1)


def test_nexus_gives_prompts_what_writing_can_spare() -> None:
    """Texts that only read memory need no more than the share that uses all bandwidth; those that compute need more."""
    controller = CostQuota(1.3)
    controller.costs = COSTS
    light = controller.choose(view(prompts=[4000], texts=1, keys=4000))
    heavy = controller.choose(view(prompts=[4000], texts=40, keys=400))
    assert LEAST <= heavy < 0.4 < light <= LARGEST
    for quota, texts, keys in ((light, 1, 4000), (heavy, 40, 400)):
        writing = COSTS.demand([1, texts, texts, texts, keys, keys])
        reading = COSTS.demand([1, 4000, 1, 1, 4000, 0])
        took, best = (COSTS.both(reading, writing, q)[1] for q in (quota, LEAST))
        assert took <= 1.3 * best
    # a limit in seconds stands in place of the ratio
    writing, reading = COSTS.demand([1, 40, 40, 40, 400, 400]), COSTS.demand([1, 4000, 1, 1, 4000, 0])  # fmt: skip
    limited = CostQuota(1.3, (1.0, 0.3 / 0.9))
    limited.costs = COSTS
    quota = limited.choose(view(prompts=[4000], texts=40, keys=400))
    assert quota > heavy and COSTS.both(reading, writing, quota)[1] <= 0.3
    assert COSTS.both(reading, writing, quota + 0.06)[1] > 0.3
    # the cache is nearly full: now writing gets what prompts can spare
    assert controller.choose(view(prompts=[4000], texts=40, keys=400, usage=0.95)) <= 0.75  # fmt: skip


def test_nexus_makes_no_small_changes_and_none_without_both_phases() -> None:
    controller = CostQuota(1.3)
    assert controller.choose(view(quota=0.33)) == 0.33  # nothing is known yet
    for each in passes():
        controller.note_pass(each)
    assert controller.costs is not None
    chosen = controller.choose(view(quota=0.2, prompts=[4000], texts=1, keys=4000))
    assert chosen > 0.3
    near = chosen - 0.05
    assert controller.choose(view(quota=near, prompts=[4000], texts=1, keys=4000)) == near  # fmt: skip
    # a quota with which texts are too slow is left at once, however small the change
    over = chosen + 0.05
    assert controller.choose(view(quota=over, prompts=[4000], texts=1, keys=4000)) < over  # fmt: skip
    assert controller.choose(view(quota=0.2, texts=0)) == 0.2
    assert controller.choose(view(quota=0.2, prompts=[])) == 0.2


def test_nexus_learns_by_how_much_passes_are_longer_than_its_costs_say() -> None:
    """Limits in seconds are kept in what is measured, not in what is predicted."""
    busy = view(prompts=[4000], texts=40, keys=400)
    writing, reading = COSTS.demand([1, 40, 40, 40, 400, 400]), COSTS.demand([1, 4000, 1, 1, 4000, 0])  # fmt: skip
    controller, quota = CostQuota(1.3, (1.0, 0.3)), 0.5
    controller.costs = COSTS
    for _ in range(12):  # fewer than make it fit its costs anew
        quota = controller.choose(busy._replace(quota=quota))
        seconds = 1.3 * COSTS.both(reading, writing, quota)[1]
        controller.note_pass(PassTime("decode", [1, 40, 40, 40, 400, 400], seconds, 1 - quota, True))  # fmt: skip
    assert 1.1 < controller.longer < 1.3
    quota = controller.choose(busy._replace(quota=quota))
    bound = 0.9 * 0.3 / controller.longer
    assert COSTS.both(reading, writing, quota)[1] <= bound
    assert COSTS.both(reading, writing, quota + 0.11)[1] > bound


def test_nexus_reads_short_prompts_first_and_lets_none_starve() -> None:
    controller = CostQuota()
    long, short = Request([0] * 500, 600), Request([0] * 20, 30)
    assert [r for r, _ in controller.order(exact_fill((), (long, short), 64))] == [short, long]  # fmt: skip
    turns = 0
    while next(iter(controller.order([(long, 500), (Request([0] * 20, 30), 20)])))[0] is not long:  # fmt: skip
        turns += 1
    assert 2 < turns < 50


def test_nexus_with_limits_reads_prompts_in_turn_while_they_can_be_in_time() -> None:
    controller = CostQuota(1.3, (1.0, 0.1))
    long, short = Request([0] * 500, 600), Request([0] * 20, 30)
    long.asked_at, short.asked_at = 0.0, 2.0

    def first(now: float) -> Request:
        controller.choose(view(now))
        return next(iter(controller.order([(long, 500), (short, 20)])))[0]

    assert [first(now) for now in (0.4, 0.6, 0.9, 1.1)] == [long, long, long, short]
    # a quarter of a second is needed for it at half of the device
    controller.costs = PhaseCosts((0, 0.25 * 0.5 / 500, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0))
    assert [first(now) for now in (0.6, 0.74, 0.76)] == [long, long, short]


@pytest.mark.parametrize(
    "word",
    [
        "semi-pd:1",
        "semi-pd:0,1",
        "semi-pd:1,nan",
        "nexus:0.5",
        "nexus:",
        "nexus:2,0",
        "two",
    ],
)
def test_a_word_that_names_no_quota_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="--quota cannot be"):
        quota_of(word)


def test_words_name_controllers() -> None:
    limits, costs = quota_of("semi-pd:2,0.05"), quota_of("nexus")
    assert isinstance(limits, LimitsQuota) and (limits.first, limits.later) == (2, 0.05)
    assert isinstance(costs, CostQuota) and costs.slack == 1.6
    limited = quota_of("nexus:2,1,0.05")
    assert isinstance(limited, CostQuota) and limited.limits == (1, 0.05)


def test_semi_pd_lets_first_tokens_wait_within_their_limit_before_further_ones_miss_theirs() -> (
    None
):
    """Prompts later than what is aimed at, but in time, and texts that go to nine tenths of their limit."""
    controller, quota = LimitsQuota(1.0, 0.1), 0.5
    for step in range(200):
        now = 0.05 * step
        controller.note_first(now, 0.7)
        controller.note_gap(now, 0.05 / (1 - quota))
        quota = controller.choose(view(now, quota))
    assert quota == pytest.approx(1 - 0.05 / 0.09, abs=0.02)
    for step in range(
        200, 400
    ):  # a first token that would miss its limit counts as much
        controller.note_first(0.05 * step, 1.4)
        controller.note_gap(0.05 * step, 0.05 / (1 - quota))
        quota = controller.choose(view(0.05 * step, quota))
    assert quota > 0.7
