"""Curriculum by pass rate: levels of difficulty are asked the more, the more there is to learn from them.

A level whose questions are all answered right, or all wrong, gives groups without signal. The chance of a level follows
the variance of its rewards, p (1 - p) for a pass rate p, which is largest where half of the answers are right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple

from weft.errors import WeftError

#: Right and wrong answers that each level is assumed to have had: a level that was never asked counts as half right.
PRIOR = 1.0


class LevelResult(NamedTuple):
    """Rewards of a number of ``answers`` to questions of one ``level``.

    ``passed``: sum of the rewards, each from 0 to 1.
    """

    level: int
    passed: float
    answers: int


@dataclass(frozen=True)
class Curriculum:
    """Chooses the difficulty of questions by pass rates: levels whose answers are neither all right nor all wrong come
    most.

    All values depend only on the results so far, so that ranks with the same results agree.

    Attributes:
        ``passed``, ``answers``: for each level, the sum of rewards and the number of answers; older results weigh less.
        ``memory``: number of later answers on a level after which the weight of a result has fallen to 1/e.
        ``floor``: share of the questions, from 0 to 1, that is spread evenly over all levels.
    """

    passed: tuple[float, ...]
    answers: tuple[float, ...]
    memory: float = 512.0
    floor: float = 0.1

    @classmethod
    def of_levels(cls, levels: int, **settings: float) -> Curriculum:
        """Return the curriculum at the start of a run.

        ``levels``: number of levels. ``settings``: ``memory`` and ``floor``.
        """
        return cls((0.0,) * levels, (0.0,) * levels, **settings)

    @property
    def rates(self) -> tuple[float, ...]:
        """Pass rate of each level, from 0 to 1, as estimated from the rewards of the answers so far."""
        pairs = zip(self.passed, self.answers, strict=True)
        return tuple((p + PRIOR) / (n + 2 * PRIOR) for p, n in pairs)

    @property
    def chances(self) -> tuple[float, ...]:
        """Probability with which the next question has each level; the sum is 1."""
        variances = [rate * (1 - rate) for rate in self.rates]
        total, even = sum(variances), self.floor / len(variances)
        return tuple(even + (1 - self.floor) * v / total for v in variances)

    def level(self, index: int, seed: int = 0) -> int:
        """Return the level of question number ``index``.

        It depends only on ``index``, the seed and the results so far.
        """
        levels = range(len(self.answers))
        return Random(f"level {seed}/{index}").choices(levels, self.chances)[0]

    def after(self, results: Iterable[LevelResult]) -> Curriculum:
        """Return the curriculum with more results added, in their order.

        Raises :class:`WeftError` for an unknown level.
        """
        passed, answers = [*self.passed], [*self.answers]
        for result in results:
            if not 0 <= result.level < len(answers):
                raise WeftError(
                    f"a question of level {result.level}, and the task has the levels 0 to {len(answers) - 1}"
                )
            kept = math.exp(-result.answers / self.memory)
            passed[result.level] = passed[result.level] * kept + result.passed
            answers[result.level] = answers[result.level] * kept + result.answers
        return replace(self, passed=tuple(passed), answers=tuple(answers))

    def to_json(self) -> dict[str, Any]:
        """Return all values as JSON, from which :meth:`from_json` builds an equal curriculum."""
        return {
            "passed": [*self.passed],
            "answers": [*self.answers],
            "memory": self.memory,
            "floor": self.floor,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], levels: int) -> Curriculum:
        """Build a curriculum from saved ``values``. ``levels``: number of levels that the task has now.

        Levels that were added to the task since begin without results. Raises :class:`WeftError` if levels were
        removed.
        """
        saved = len(values["answers"])
        if saved > levels:
            raise WeftError(
                f"the curriculum of this checkpoint has {saved} levels, and the task has {levels}; give it the "
                "settings that it had"
            )
        more = (0.0,) * (levels - saved)
        return cls(
            (*values["passed"], *more),
            (*values["answers"], *more),
            values["memory"],
            values["floor"],
        )
