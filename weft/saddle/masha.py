"""MASHA (Beznosikov et al. 2022): devices send compressed differences of operators.

What an operator is at a new point is not sent. Its difference to what it was at an older point, the reference, is sent
compressed. Near the solution these differences vanish, and errors of compression with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from weft.saddle.saddle_method import SaddleMethod, directions_of
from weft.saddle.saddle_problem import Draw, SaddleProblem, Values
from weft.section import Section

if TYPE_CHECKING:
    from weft.saddle.device_exchange import DeviceExchange


class MashaSettings(Section):
    """Settings of the saddle methods MASHA1 and MASHA2: how often a round ends with a new reference point."""

    refresh: float = Field(
        0.0,
        ge=0,
        le=1,
        description=(
            "Probability that, after an update, the present parameters become the reference point. At a reference "
            "point devices send whole gradients. At other points they send, compressed, how their gradients differ "
            "from those at the reference point. 0: chosen automatically, so that in the long run all whole messages "
            "together have as many bytes as all compressed ones."
        ),
    )


class Masha(SaddleMethod):
    """The saddle methods MASHA1, or MASHA2 if :attr:`feedback` is True.

    With the parameters ``z``, the reference ``w`` and the probability ``p`` of a new reference, a round is ::

        ahead = (1 - p) z + p w - lr mean F(w)
        z     = ahead - back(mean up(lr (F(ahead) - F(w))))

    where ``up`` and ``back`` compress. ``F`` is a device's operator: its gradients, with the sign turned for parameters
    that maximise. If only a few samples are taken for ``F(ahead) - F(w)``, they are the same for both; ``mean F(w)`` is
    always over all samples.
    """

    feedback = False

    def __init__(
        self, problem: SaddleProblem, exchange: DeviceExchange, settings: Any
    ) -> None:
        super().__init__(problem, exchange, settings)
        self.reference = {name: t.clone() for name, t in self.values.items()}
        self.up, self.back = directions_of(
            settings, exchange, self.values, self.feedback
        )
        share = self.up.nbytes(self.values) / self.size
        self.refresh = settings.refresh or min(1.0, share)
        self._own: list[Values] = []
        self._mean: Values = {}

    def _look(self) -> None:
        """Evaluate the operators at the reference, and send them whole."""
        self._own = self.operators(self.reference, Draw(self.wholes, whole=True))
        self._mean = self.whole_mean(self._own)

    def take_round(self, number: int) -> Values:
        if not self._mean:
            self._look()
        rate, p = self.settings.lr, self.refresh
        middle = {
            name: (1 - p) * t + p * self.reference[name]
            for name, t in self.values.items()
        }
        ahead = self.stepped(middle, self._mean, rate)
        draw = Draw(number, whole=False)
        there = self.operators(ahead, draw)
        before = self._own
        if self.problem.stochastic:
            before = self.operators(self.reference, draw)
        moves = [
            {name: rate * (t - b[name]) for name, t in a.items()}
            for a, b in zip(there, before, strict=True)
        ]
        mean = self.exchange.mean(moves, number, self.up, self.back)
        changes = self.moved(self.stepped(ahead, mean, 1.0))
        if self._renews(number):
            for name, t in self.reference.items():
                t.copy_(self.values[name])
            self._look()
        return changes

    def _renews(self, number: int) -> bool:
        """Return whether round ``number`` ends with a new reference; all ranks draw the same."""
        import torch

        seed = (self.exchange.seed * 1_000_003 + number) % (1 << 62)
        generator = torch.Generator().manual_seed(seed)
        return float(torch.rand((), generator=generator)) < self.refresh

    def traffic(self, rounds: int) -> tuple[int, int]:
        up, back = self.up.nbytes(self.values), self.back.nbytes(self.values)
        whole = self.wholes * self.size
        return rounds * up + whole, rounds * back + whole

    def shared(self) -> Values:
        reference = {f"reference.{name}": t for name, t in self.reference.items()}
        return super().shared() | reference

    def residuals(self) -> dict[str, Any]:
        if not self.feedback:
            return {}
        return {"up": (self.up, self.exchange.devices), "back": (self.back, 1)}

    def resume(self, wholes: int) -> None:
        # what was sent at the reference is evaluated again, with the same random choices
        self.wholes = wholes - 1 if wholes else 0
        if wholes:
            self._look()
