"""Slowdown by other programs: bounds hold on windows that were not seen, and probes tell more than a mean."""

import numpy as np
import pytest

from tests.conftest import Command
from weft.rehearse.interference import LEAST, judged, learn, shared_words, watch_windows


def windows_of(count: int, seed: int, steady: bool = False) -> np.ndarray:
    """Draw windows ``[window, probe]`` whose tenants come and go; probes show them with noise of their own."""
    draw = np.random.default_rng(seed)
    level, levels = 0.0, []
    for _ in range(count):
        level = 0.9 * level + 0.3 * abs(draw.normal())
        levels.append(0.0 if steady else level)
    busy = np.array(levels)
    noise = draw.normal(0, 0.05, (count, 3))
    step = 0.1 * np.exp(busy + noise[:, 0])
    stream, product = (0.01 * np.exp(0.8 * busy + noise[:, i]) for i in (1, 2))
    return np.stack([stream, product, step, 1 + 10 * busy], 1)


@pytest.mark.parametrize("seed", range(3))
def test_bounds_hold_four_windows_of_five_that_were_not_seen(seed: int) -> None:
    report = judged(windows_of(600, seed), 300)
    assert 0.7 < report["covered"] < 0.9
    assert report["error"] < 0.8 * report["constant"]


def test_a_quiet_machine_slows_nothing() -> None:
    windows = windows_of(100, 0, steady=True)
    expected = learn(windows).slowdown(windows)
    assert 1 <= expected.low <= expected.middle <= expected.high < 1.35


def test_bounds_widen_with_what_probes_do_not_show() -> None:
    shown, hidden = windows_of(300, 1), windows_of(300, 1)
    hidden[:, :2] = windows_of(300, 1, steady=True)[:, :2]
    hidden[:, 2] = np.random.default_rng(5).permutation(hidden[:, 2])
    hidden[:, 3] = 1.0
    width = [learn(w).spread[1] - learn(w).spread[0] for w in (shown, hidden)]
    assert width[1] > 1.5 * width[0]


def test_words_need_enough_windows() -> None:
    windows = windows_of(200, 2).tolist()
    assert shared_words(windows[: LEAST - 1]) == ""
    assert "in 80% of windows (200 probed)" in shared_words(windows)


def test_watching_measures_every_probe() -> None:
    calls: list[int] = []
    windows = watch_windows(lambda: calls.append(1), 3)
    assert windows.shape == (3, 4) and (windows > 0).all() and len(calls) == 3


def test_too_few_windows_are_refused_at_once(command: Command) -> None:
    code, _, error = command("probe", "--watch", 5)
    assert code == 2 and "--watch 5 is too few to learn from; give 24 or more" in error
