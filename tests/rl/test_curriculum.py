"""A curriculum by pass rate: what is asked follows from what was seen, and what is half right is asked most."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from weft.errors import WeftError
from weft.rl.curriculum import Curriculum, LevelResult


def test_levels_begin_even() -> None:
    counts = Counter(Curriculum.of_levels(4).level(i) for i in range(4000))
    assert all(abs(counts[level] - 1000) < 120 for level in range(4))


def test_half_right_is_asked_most() -> None:
    seen = Curriculum.of_levels(3, floor=0.0).after(
        [LevelResult(0, 98, 100), LevelResult(1, 50, 100), LevelResult(2, 1, 100)]
    )
    easy, half, hard = seen.chances
    assert half > 0.75 and hard < easy < 0.15
    assert sum(seen.chances) == pytest.approx(1)
    never = Curriculum.of_levels(3, floor=0.3).after([LevelResult(0, 1000, 1000)])
    assert min(never.chances) >= 0.1


def test_the_next_level_follows_when_a_learner_gets_better() -> None:
    """A simulated learner that has mastered a level is asked the next one."""
    curriculum, skill = Curriculum.of_levels(5, memory=128.0), 0.0
    draw, index, before = random.Random(0), 0, list[float]()
    for _ in range(150):
        levels = [curriculum.level(index + i) for i in range(16)]
        index += 16
        results = []
        for level in levels:
            rate = min(1.0, max(0.0, skill + 0.5 - 0.5 * level))
            right = sum(draw.random() < rate for _ in range(8))
            # it learns where answers differ
            skill += 0.002 * (0 < right < 8)
            results.append(LevelResult(level, right, 8))
        curriculum = curriculum.after(results)
        before.append(sum(levels) / 16)
    assert sum(before[:10]) / 10 < sum(before[-10:]) / 10 - 0.5
    assert skill > 1.0


def test_state_is_json_and_follows_from_results_alone() -> None:
    results = [LevelResult(i % 3, i % 5, 8) for i in range(40)]
    whole = Curriculum.of_levels(3).after(results)
    part = Curriculum.of_levels(3).after(results[:17])
    read = Curriculum.from_json(json.loads(json.dumps(part.to_json())), 3)
    assert read == part
    assert read.after(results[17:]) == whole
    levels = [whole.level(i, 5) for i in range(50)]
    again = Curriculum.from_json(json.loads(json.dumps(whole.to_json())), 3)
    assert [again.level(i, 5) for i in range(50)] == levels
    assert [whole.level(i, 6) for i in range(50)] != levels


def test_other_levels() -> None:
    saved = Curriculum.of_levels(2).after([LevelResult(1, 2, 4)]).to_json()
    assert Curriculum.from_json(saved, 3).answers == (0.0, 4.0, 0.0)
    with pytest.raises(WeftError, match=r"has 2 levels, and the task has 1"):
        Curriculum.from_json(saved, 1)
    with pytest.raises(WeftError, match=r"level 2, and the task has the levels 0 to 1"):
        Curriculum.of_levels(2).after([LevelResult(2, 0, 1)])
