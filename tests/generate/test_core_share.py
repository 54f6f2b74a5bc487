"""Shares of cores: whole cores, threads and duty add up, and a phase rests as long as it was ahead."""

from __future__ import annotations

import pytest

from weft.generate.core_share import Clocks, CoreShare, Pacer, core_share


@pytest.mark.parametrize("cores", [1, 2, 3, 8])
@pytest.mark.parametrize("quota", [0.1, 0.3, 0.5, 0.55, 0.7, 0.9])
def test_both_phases_together_have_all_cores_and_meet_on_one(
    cores: int, quota: float
) -> None:
    numbers = list(range(10, 10 + cores))
    first = core_share(numbers, quota, last=False)
    second = core_share(numbers, 1 - quota, last=True)
    amounts = [share.threads * share.duty for share in (first, second)]
    assert amounts == pytest.approx([quota * cores, (1 - quota) * cores])
    assert {*first.cores} | {*second.cores} == {*numbers}
    assert len({*first.cores} & {*second.cores}) <= 1


class Machine:
    """A clock whose time passes while a phase computes or rests."""

    def __init__(self, share: float) -> None:
        self.now = self.spent = 0.0
        self.share, self.applied = share, list[CoreShare]()
        clocks = Clocks(lambda: self.now, lambda: self.spent)
        self.pacer = Pacer([0, 1], self, False, self.applied.append, self.rest, clocks)

    def present_share(self) -> float:
        return self.share

    def rest(self, seconds: float) -> None:
        self.now += seconds

    def compute(self, seconds: float, stolen: float = 0.0) -> None:
        """Compute on all threads; other programs take the cores for ``stolen`` seconds."""
        self.spent += seconds * self.applied[-1].threads
        self.now += seconds + stolen
        self.pacer.pace()


@pytest.mark.parametrize("share", [0.1, 0.25, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_over_time_a_phase_has_its_share(share: float) -> None:
    machine = Machine(share)
    for _ in range(200):
        machine.compute(0.01)
    assert machine.spent / machine.now / 2 == pytest.approx(share, rel=1e-3)
    assert len(machine.applied) == 1


def test_time_that_others_took_is_not_rested_again() -> None:
    machine = Machine(0.25)
    machine.compute(0.01, stolen=0.01)
    assert machine.pacer.rested == pytest.approx(0.0)
    machine.compute(0.01)
    assert machine.pacer.rested == pytest.approx(0.01)


def test_a_rest_ends_when_the_other_phase_does() -> None:
    machine = Machine(0.05)

    def rest(seconds: float) -> None:
        machine.now += seconds
        machine.share = 1.0

    machine.pacer.rest = rest
    machine.compute(0.01)
    assert machine.now == pytest.approx(0.015)  # of 0.1
    assert machine.applied[-1] == CoreShare((0, 1), 2, 1.0)
    machine.compute(0.01)
    assert machine.now == pytest.approx(0.025)
