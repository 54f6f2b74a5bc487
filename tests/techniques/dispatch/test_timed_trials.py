"""Trials of dispatch options: what is tried how often, what it may cost, and what is chosen."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from math import exp, inf, log
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.techniques.dispatch.timed import SEVERAL
from weft.techniques.dispatch.timed.choice import DispatchClock, TimedDispatch
from weft.techniques.dispatch.timed.evidence import NOISE, Evidence, OptionRatio
from weft.techniques.dispatch.timed.trials import (
    AGAIN,
    FIRST,
    KEPT,
    MARGIN,
    PATIENCE,
    SPENT,
    TRUST,
    TURNS,
    OptionTimes,
)


def driven(
    times: OptionTimes, passes: int, seconds: Callable[[int, int], float]
) -> list[int]:
    """The options of so many passes; ``seconds``: what a pass with an option takes."""
    took = []
    for number in range(passes):
        if times.due:
            times.learn([*times.forward], [*times.backward])
        option, timed = times.next()
        if timed:
            times.note(
                option, seconds(number, option) / 4, seconds(number, option) * 3 / 4
            )
        took.append(option)
    return took


def turn(times: OptionTimes, *seconds: float) -> list[int]:
    """The options of one turn, which take so long in forward."""
    taken = [times.next() for _ in range(len(times.cold) + len(times.left))]
    assert times.due
    times.learn([*seconds], [0.0] * len(seconds))
    return sorted(option for option, timed in taken if timed)


def test_exchanges_that_are_under_way_at_once_are_not_timed() -> None:
    def refused(pieces: int, overlap: str, ep: int = 2) -> bool:
        layout = SimpleNamespace(ep=ep, pieces=pieces, overlap=overlap)
        return SEVERAL.meets(SimpleNamespace(layout=layout))

    assert not refused(1, "") and not refused(0, "domino", 1)
    assert refused(0, "") and refused(3, "") and refused(1, "domino")


def test_a_pass_that_the_ranks_have_agreed_after_is_not_noted() -> None:
    x = torch.zeros(1)
    for agreed in (False, True):
        times = OptionTimes([inf] * 2)
        clock = DispatchClock(times, 0, x)
        if agreed:
            times.learn([*times.forward], [*times.backward])
        clock.back(x)
        assert (times.forward[0] == inf) == agreed


def agreed_times() -> tuple[bool, dict[str, Any]]:
    """What a rank thinks after a turn; the logarithms of the last rank are wrong."""
    Mesh.create(Layout(dp=2), "cpu")
    dispatcher = TimedDispatch.__new__(TimedDispatch)
    dispatcher.ranks = SimpleNamespace(group=dist.group.WORLD)  # type: ignore[assignment]
    times = OptionTimes([inf] * 2)
    for _ in range(4):
        option, timed = times.next()
        if timed:
            times.note(option, 1.0 + option, 1.0)
    wrong = (lambda x: -log(x)) if dist.get_rank() else log
    with mock.patch("weft.techniques.dispatch.timed.evidence.log", wrong):
        keeps = dispatcher.agree(times, torch.device("cpu"))
    return keeps, vars(times)


def test_the_first_rank_decides_for_all(pool: Any) -> None:
    first, second = pool.run(2, agreed_times)
    assert first == second


def test_options_are_compared_by_turns_in_which_both_were_tried() -> None:
    """Else an option of a quick moment would be chosen where the machine has become slow."""
    evidence = Evidence([inf] * 3, [0.0] * 3)
    assert evidence.ratios(0)[1] == OptionRatio(inf, inf)
    evidence.turns = [[1.0, 1.2, 2.1], [3.0, 3.6, inf], [3.0, 3.6, inf]]
    ratios = evidence.ratios(0)
    assert [exp(ratio.slower) for ratio in ratios] == pytest.approx([1.0, 1.2, 2.1])
    # three turns say more than one
    assert ratios[1].error == pytest.approx(ratios[2].error / 3**0.5)
    # what an earlier run knows counts as so many turns, unless turns contradict it
    evidence = Evidence([1.0, 1.2], [9.0, 3.0], turns=[[1.0, 1.0]])
    assert evidence.ratios(0)[1].slower == pytest.approx(log(1.2) * 3 / 4)
    evidence = Evidence([1.0, 1.2], [24.0, 24.0], 0.02, [[1.2, 1.0]] * 2)
    assert evidence.ratios(0)[1].slower > 0.1
    evidence.turns *= 2
    assert evidence.ratios(0)[1].slower == pytest.approx(-log(1.2))


def test_the_noise_is_what_ratios_scatter_by() -> None:
    """As many turns say more on a quiet machine than on a busy one, and a stalled pass is not the rule."""

    def error(width: float, turns: int) -> float:
        draw = random.Random(0)
        rows = [[1.0, 1.1 * exp(draw.gauss(0, width))] for _ in range(turns)]
        return Evidence([inf] * 2, [0.0] * 2, turns=rows).ratios(0)[1].error

    assert error(0.3, 1) == error(0.01, 1) == NOISE
    for width in (0.01, 0.3):
        assert error(width, 300) == pytest.approx(width / 300**0.5, rel=0.3)
    usual = [[1.0, 1.1]] * 9
    stalled = Evidence([inf] * 2, [0.0] * 2, turns=[*usual, [1.0, 9.0]])
    quiet = Evidence([inf] * 2, [0.0] * 2, turns=[*usual, [1.0, 1.1]])
    assert stalled.ratios(0)[1].error == quiet.ratios(0)[1].error
    mean = (9 * log(1.1) + log(9.0)) / 10
    assert stalled.ratios(0)[1].slower < (log(1.1) + mean) / 2


def test_the_expected_loss_is_the_mean_of_what_would_be_saved() -> None:
    draw = random.Random(0)
    for slower, error in ((0.0, 0.1), (0.1, 0.1), (-0.05, 0.02)):
        saved = [max(0.0, -draw.gauss(slower, error)) for _ in range(20_000)]
        loss = OptionRatio(slower, error).loss
        assert loss == pytest.approx(sum(saved) / len(saved), rel=0.05)
    assert OptionRatio(inf, inf).loss == inf


def test_what_is_clearly_slower_is_left_out_at_once() -> None:
    """What is nearly as fast is tried until it is known, longer on a busy machine than on a quiet one."""
    bases = [6.0, 1.0, 1.3, 1.1]

    def trials(width: float) -> list[int]:
        draw = random.Random(1)
        noises = [exp(draw.gauss(0, width)) for _ in range(60)]
        times = OptionTimes([inf] * 4)
        took = driven(times, 60, lambda number, option: bases[option] * noises[number])
        assert times.chosen == 1
        return [took.count(option) for option in range(4)]

    quiet, busy = trials(0.01), trials(0.2)
    # one pass that is not timed, and one that is
    assert quiet[0] == busy[0] == 2
    assert 3 <= quiet[2] <= quiet[3] < busy[3] <= TURNS + 1


def test_a_first_pass_with_an_option_is_not_timed() -> None:
    """Connections and buffers are made in it, in each run."""
    times = OptionTimes([inf] * 2)
    first = [times.next() for _ in range(4)]
    assert times.due and first == [(0, False), (1, False), (0, True), (1, True)]
    times = OptionTimes([1.0, 1.0])
    # every other turn in reverse order, as a run becomes faster at first
    assert times.left == [0, 1]
    again = [(0, False), (1, False), (1, True), (0, True)]
    assert [times.next() for _ in range(4)] == again
    times.learn([1.0, 1.0], [0.0] * 2)
    assert [times.next() for _ in range(2)] == [(0, True), (1, True)]


def test_a_wrong_start_is_noticed_within_a_few_passes() -> None:
    """An earlier run, whose few noisy turns took the slower one for the better, does not decide all of the next."""
    shares = []
    for seed in range(12):
        draw = random.Random(seed)
        noises = [exp(draw.gauss(0, 0.15)) for _ in range(60)]
        wrong = OptionTimes.resumed([1.05, 1.0, 8.0, 6.0, 6.0, 1.0, 0.25])
        assert wrong.chosen == 1

        def seconds(number: int, option: int, noises: list[float] = noises) -> float:
            return (1.0, 1.2, 8.0)[option] * noises[number]

        took = driven(wrong, 60, seconds)
        assert 2 not in took and wrong.chosen == 0
        shares.append(took.count(1) / 60)
    # trials go on until little is lost, with the wrong one in half of the passes
    assert sorted(shares)[6] < 0.4


def test_trials_cost_no_more_than_a_share_of_the_time() -> None:
    """Where noise does not tell two options apart, the slower one is tried ever so often."""
    costs = []
    for seed in range(9):
        draw = random.Random(seed)
        noises = [exp(draw.gauss(0, 0.8)) for _ in range(60)]

        def seconds(number: int, option: int, noises: list[float] = noises) -> float:
            return (1.0, 1.15)[option] * noises[number]

        times = OptionTimes.resumed([1.0, 1.15, 9.0, 9.0, 1.0])
        costs.append(0.15 * driven(times, 60, seconds).count(1))
    assert 0 < sorted(costs)[4] <= SPENT * 60
    # an option without a difference costs nothing, but turns end
    times = OptionTimes([1.0, 1.0])
    took = driven(times, 120, lambda _, option: 1.0)
    assert times.rounds >= 1 and took.count(1 - times.chosen) <= 2 * TURNS


def test_what_a_run_knows_goes_on_in_the_next_one() -> None:
    draw = random.Random(3)
    noises = [exp(draw.gauss(0, 0.02)) for _ in range(60)]

    def seconds(number: int, option: int) -> float:
        return (4.0, 1.0, 1.2)[option] * noises[number]

    times = OptionTimes([inf] * 3)
    driven(times, 60, seconds)
    kept = times.kept()
    again = OptionTimes.resumed(kept)
    assert again.chosen == 1 and again.evidence.weights == kept[3:6]
    # each turn counts, also those before the run's last round
    assert kept[3] == 1.0 and 2.0 < kept[5] <= kept[4] <= TRUST
    assert kept[2] / kept[1] == pytest.approx(1.2, rel=0.02)
    # it is known well enough: nothing is tried
    assert driven(again, 50, seconds) == [1] * 50
    # a run that ended after its first turn left more to try
    short = OptionTimes([inf] * 3)
    driven(short, 7, seconds)
    left = OptionTimes.resumed(short.kept())
    took = driven(left, 60, seconds)
    # as soon as it has earned what a trial costs
    assert left.chosen == 1 and took[:20] == [1] * 20 and 0 < took.count(2) <= 3
    assert not took.count(0)


def test_options_are_tried_again_after_more_and_more_passes() -> None:
    """Those that a small share of the passes since the last trials pays for, the nearest first."""
    bases = [1.5, 1.0, 1.04, 3.0]
    times = OptionTimes.resumed([*bases, 24.0, 24.0, 24.0, 24.0, 0.02])
    took = driven(times, 3000, lambda _, option: bases[option])
    trials = [number for number, option in enumerate(took) if option == 2]
    rounds = [trials[0], *(b for a, b in pairwise(trials) if b - a > 9)]
    gaps = [b - a for a, b in pairwise([0, *rounds])]
    assert gaps[:4] == pytest.approx([50, 100, 200, 400], abs=3 * AGAIN)
    assert gaps[4:] == pytest.approx([KEPT] * len(gaps[4:]), abs=3 * AGAIN) and gaps[4:]
    # half as slow again: less often; three times as slow: never yet
    assert took.count(2) > took.count(0) > 0 == took.count(3)
    cost = sum(bases[option] - 1 for option in took)
    assert cost <= SPENT * len(took) + 0.5
    assert took.count(2) <= AGAIN * len(rounds) + 1


def test_a_change_is_noticed_in_a_later_round() -> None:
    """What turns have shown before counts half, each round."""
    times = OptionTimes.resumed([1.0, 1.06, 24.0, 24.0, 0.05])
    driven(times, 51, lambda _, option: (1.0, 1.06)[option])
    assert times.left == [0, 1] and times.evidence.weights == [12.0, 12.0]
    took = driven(times, 2000, lambda _, option: (1.2, 1.0)[option])
    assert times.chosen == 1 and took.count(0) < 400


def test_a_turn_whose_passes_have_not_ended_says_nothing() -> None:
    times = OptionTimes([inf] * 2)
    assert turn(times, inf, inf) == [0, 1] and times.known == [inf] * 2
    assert turn(times, 1.0, inf) == [0, 1] and times.known[0] == 1.0
    for _ in range(5):
        assert turn(times, 1.0, 0.9) == [0, 1]
    assert times.chosen == 1


def test_one_pass_that_is_quick_or_slow_by_chance_decides_nothing() -> None:
    times = OptionTimes([inf] * 2)
    for first, second in ((1.9, 1.1), (1.0, 1.1), (1.0, 0.97)):
        assert turn(times, first, second) == [0, 1]
    driven(times, 100, lambda _, option: (1.0, 1.1)[option])
    assert times.chosen == 0 and times.known == pytest.approx([1.0, 1.1], rel=0.04)


def test_a_choice_by_time_holds_within_its_margin() -> None:
    times = OptionTimes([3.0, 1.0, 2.0])
    for second, chosen in ((1 - MARGIN / 2, 1), (1 - 2 * MARGIN, 2)):
        times.evidence = Evidence([inf] * 3, [0.0] * 3, turns=[[3.0, 1.0, second]])
        times.decide()
        assert times.chosen == chosen


def test_all_options_are_tried_again_when_the_load_has_changed() -> None:
    times = OptionTimes.resumed([3.0, 1.0, 2.0, 24.0, 24.0, 24.0, 0.02])
    times.rounds = 9

    def looked(*looks: float) -> list[int]:
        for seconds in looks:
            assert not times.left
            for _ in range(50):
                times.next()
            times.learn([inf, seconds, inf], [inf] * 3)
        return times.left

    def settle(*seconds: float) -> None:
        while times.left:
            turn(times, *seconds)

    # three odd looks may be chance, four are not; a first one that was slow is not the usual one
    times.rest = 10_000
    assert looked(1.3, 1.0, 1.0, 1.0, 1.2, 1.3, 1.3, 1.1, 1.3, 1.3, 1.3) == []
    assert looked(1.3) == [0, 1, 2] and times.credit == FIRST
    settle(4.0, 1.3, 3.0)
    # it has changed no choice, so that it takes more of them
    assert (times.chosen, times.patience) == (1, 2 * PATIENCE)
    times.rest = 10_000
    assert looked(1.3, 1.3, *[2.0] * 7) == []
    assert looked(2.0) == [0, 1, 2]
    # what an option took before, when it was the slower one, counts as one turn
    settle(4.0, 2.0, 1.0)
    assert (times.chosen, times.patience) == (2, PATIENCE)
