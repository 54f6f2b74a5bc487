"""Naive compression: the extragradient method whose operators are compressed on their way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weft.registry import register
from weft.saddle.saddle_method import Extragradient, directions_of

if TYPE_CHECKING:
    from weft.saddle.device_exchange import DeviceExchange
    from weft.saddle.saddle_problem import SaddleProblem, Values


@register(
    "saddle-method",
    "naive",
    title="Extragradient method with compressed operators",
    paper="Beznosikov et al. 2022",
    recipe="saddle.toml --set saddle.method=naive",
    proof="tests/saddle/test_masha.py",
    figure=(
        "a baseline: with a random fifth of the elements it goes away at the step size of MASHA1 and is at `0.00848` "
        "at a tenth of it, with the largest fifth at `0.5` or more (`bench/saddle.py`)"
    ),
)
class CompressedExtragradient(Extragradient):
    """Compresses the operators (the gradients of both players) themselves (Beznosikov et al. 2022). They do not vanish
    at the saddle point, so that the errors of compression do not either. It is a baseline for other methods.
    """

    def __init__(
        self, problem: SaddleProblem, exchange: DeviceExchange, settings: Any
    ) -> None:
        super().__init__(problem, exchange, settings)
        self.up, self.back = directions_of(
            settings, exchange, self.values, feedback=False
        )

    def agreed(self, parts: Sequence[Values], number: int) -> Values:
        return self.exchange.mean(parts, number, self.up, self.back)

    def traffic(self, rounds: int) -> tuple[int, int]:
        up, back = self.up.nbytes(self.values), self.back.nbytes(self.values)
        return 2 * rounds * up, 2 * rounds * back
