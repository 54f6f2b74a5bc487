"""Dispatch and combine as actions: they change nothing by themselves, and travel beside what others compute."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from weft.schedule import draw
from weft.schedule.actions import forward_half
from weft.schedule.build import build, builders
from weft.schedule.exchange import Beside, best_turns, with_exchanges
from weft.schedule.kinds import Clock
from weft.schedule.simulate import simulate, uniform_costs
from weft.schedule.times import Times
from weft.schedule.validate import validate

MICROSECOND = 1e-6
#: 32 tokens of width 7,000, each to 9 experts through 50 GB/s: in one byte there, in two back (2505.09343, 2.3.2).
BYTE = 32 * 9 * 7000 / 50e9
DEEPSEEK = Times(60 * MICROSECOND, dispatch=BYTE, combine=2 * BYTE)


def decoding(microbatches: int, beside: Beside, times: Times = DEEPSEEK) -> float:
    """Seconds in which one rank of DeepSeek-V3 runs forward once through its 61 layers."""
    table = with_exchanges(forward_half(build("gpipe", 1, microbatches)), [61], beside)
    return simulate(table, uniform_costs(table, times.scaled(61))).elapsed


def test_two_microbatches_of_deepseek_v3_take_as_long_as_published() -> None:
    """121 microseconds per exchange, 242 per layer for two microbatches, 14.8 ms per token: nothing else is seen."""
    assert decoding(
        1, Beside.NOTHING, replace(DEEPSEEK, forward=0.0)
    ) / 61 == pytest.approx(121e-6, rel=1e-3)
    two = decoding(2, Beside.SAME_PASS)
    # the first attention hides behind nothing
    assert two == pytest.approx(61 * 242e-6 + 30e-6, rel=1e-3)
    assert 1000 * two == pytest.approx(14.8, abs=0.05)
    assert decoding(2, Beside.NOTHING) == pytest.approx(
        61 * 2 * (121e-6 + 60e-6), rel=1e-3
    )
    # What is computed is hidden as long as it takes less than the other microbatch's rows.
    slow = replace(DEEPSEEK, forward=400 * MICROSECOND)
    assert decoding(2, Beside.SAME_PASS, slow) == pytest.approx(61 * 800e-6, rel=0.01)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", list(builders()))
def test_one_after_the_other_they_make_passes_longer(name: str) -> None:
    """The same makespan as of a table whose forwards and backwards contain them, and the same activations."""
    times = Times(1.0, 1.5, 0.5, dispatch=0.25, combine=0.5)
    table = build(name, 4, 8, 2 if builders()[name].free else None, times)
    longer = replace(times, forward=1.75, backward_input=2.25)
    plain = simulate(table, uniform_costs(table, longer))
    apart = with_exchanges(table, [2] * table.stages)
    found = simulate(apart, uniform_costs(apart, times))
    assert found.makespan == pytest.approx(
        plain.makespan
    ) and found.elapsed == pytest.approx(plain.elapsed)
    assert max(found.peaks) == pytest.approx(max(plain.peaks), rel=0.15)
    validate(apart)
    for beside, one in best_turns(
        table, [2] * table.stages, uniform_costs(apart, times)
    ).items():
        validate(one.table)
        assert sum(map(len, one.table.ranks)) == sum(map(len, apart.ranks)), beside


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "left"),
    [("dualpipe", 0.25), ("dualpipe-v", 0.3), ("interleaved-1f1b", 0.65)],
)
def test_a_forward_and_a_backward_hide_each_others_exchanges(
    name: str, left: float
) -> None:
    """Of what exchanges add to a step that does not overlap them, so large a share is left."""
    times = Times(2.0, 2.0, 2.0, dispatch=0.5, combine=0.5)
    table = build(name, 4, 24, 2 if builders()[name].free else None, times)
    layers = [4] * table.stages
    costs = uniform_costs(with_exchanges(table, layers), times)
    found = best_turns(table, layers, costs)
    without = simulate(
        table, uniform_costs(table, replace(times, dispatch=0.0, combine=0.0))
    ).makespan
    seen = found[Beside.OTHER_PASS].makespan - without
    assert 0 <= seen < left * (found[Beside.NOTHING].makespan - without)
    rank = found[Beside.OTHER_PASS]
    assert all(t.action.declared.clock is Clock.COMMUNICATION for t in rank.beside[0])
    told = {kind: meaning for kind, meaning, _ in draw.legend(rank.table)["kinds"]}
    assert told["Fd"] == "dispatch" and told["Bc"] == "gradients of combine"


def test_a_legend_of_many_kinds_has_as_many_rows_as_it_needs() -> None:
    table = with_exchanges(build("dualpipe-v", 2, 4), [3] * 4, Beside.OTHER_PASS)
    picture = ElementTree.fromstring(
        draw.svg(
            simulate(table, uniform_costs(table, Times(dispatch=0.2, combine=0.2)))
        )
    )
    told = [e for e in picture.iter() if e.text and e.get("font-size") == "14"]
    assert len(told) == 12 and len({e.get("y") for e in told}) > 1
    assert all(float(e.get("x", 0)) + 7.4 * len(e.text or "") <= 1600 for e in told)
