"""What a policy must declare so that ``weft search`` can improve it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

#: Computes an expression from the values of its features.
Formula = Callable[[Sequence[float]], float]


class JudgedPolicy:
    """A kind of decision that a searched expression makes, with a simulator that judges expressions. The expression
    gives a number for each choice, and the choice with the smallest number is made.

    Attributes:
        ``features``: meaning of each name that an expression may use, by name.
        ``baselines``: expressions of known policies, by name. The search begins with them.
        ``greedy``: name of the baseline that Weft uses by default.
        ``unit``: unit of the cost, for people.
        ``registered``: kind of technique as which a result is registered.
        ``base``: name of the class in :mod:`weft.search.expression_policies` that runs a result.
        ``usage``: command line that uses a result; ``{module}`` and ``{name}`` stand for its module and name.
    """

    features: ClassVar[Mapping[str, str]] = {}
    baselines: ClassVar[Mapping[str, str]] = {}
    greedy: ClassVar[str] = ""
    unit: ClassVar[str] = "seconds"
    registered: ClassVar[str] = ""
    base: ClassVar[str] = ""
    usage: ClassVar[str] = ""

    def workload(self, seed: int, size: int) -> Any:
        """Return a workload of about ``size`` requests, drawn with ``seed``."""
        raise NotImplementedError

    def cost(self, formula: Formula, workload: Any) -> float:
        """Return the cost of the policy ``formula`` on ``workload``, in :attr:`unit`; smaller is better."""
        raise NotImplementedError
