"""Which cases of a campaign run when: in ``make test-quick``, in ``make test``, in ``make soak``."""

from __future__ import annotations

import pytest

from tests.conftest import pytest_collection_modifyitems


@pytest.mark.parametrize(("kept", "slow", "quick", "daily"), [
    (1, 0, 1, 1), (2, 0, 1, 2), (3, 0, 2, 3), (9, 0, 3, 5), (3, 3, 2, 3), (3, 4, 1, 3), (3, 5, 0, 3),
])  # fmt: skip
def test_a_sample_is_for_every_day_and_half_of_it_is_quick(
    request: pytest.FixtureRequest, kept: int, slow: int, quick: int, daily: int
) -> None:
    """Of five cases, of which ``slow`` are marked so. Nothing is lost: every case runs every day or in soak."""
    cases = [
        pytest.Function.from_parent(
            request.node.parent,
            name=f"case[{number}]",
            originalname="case",
            callobj=lambda: None,
        )
        for number in range(5)
    ]
    for number, case in enumerate(cases):
        case.add_marker(pytest.mark.sampled(kept))
        if number < slow:
            case.add_marker("slow")
    left = list(cases)
    pytest_collection_modifyitems(left)
    assert {*left} == {*cases}
    marks = [{mark.name for mark in case.iter_markers()} & {"slow", "soak"} for case in cases]  # fmt: skip
    assert sum("soak" not in names for names in marks) == daily
    assert sum(not names for names in marks) == quick
