"""Methods for saddle points: what devices compute and exchange in a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weft.errors import UsageError
from weft.saddle.direction import Direction
from weft.saddle.saddle_problem import Draw, SaddleProblem, Values
from weft.sync.compressor import Compressor

if TYPE_CHECKING:
    import torch

    from weft.saddle.device_exchange import DeviceExchange

    T = torch.Tensor


class SaddleMethod(ABC):
    """Base of methods that search for saddle points. The objective is the mean of the objectives of several simulated
    devices, which the ranks share. All devices hold the same parameters, and each evaluates its own objective.
    ``problem``: the objective; ``exchange``: computes means over devices; ``settings``: the section ``[saddle]``.

    Attributes:
        ``values``: the parameters, the same on all ranks.
        ``wholes``: how often devices have sent operators without compression.
        ``size``: bytes of an operator that is not compressed.
    """

    def __init__(
        self, problem: SaddleProblem, exchange: DeviceExchange, settings: Any
    ) -> None:
        self.problem, self.exchange, self.settings = problem, exchange, settings
        self.values = {name: t.clone() for name, t in problem.start().items()}
        self.wholes = 0
        self._plain = Direction(Compressor())
        self.size = self._plain.nbytes(self.values)

    @classmethod  # noqa: B027, most methods have nothing to refuse
    def check(cls, settings: Any) -> None:
        """Raise :class:`ValueError` if ``settings``, the section ``[saddle]``, are impossible with this method."""

    @abstractmethod
    def take_round(self, number: int) -> Values:
        """Update the parameters; return by how much they have changed, by name. All ranks must call it.

        ``number``: number of the round.
        """

    @abstractmethod
    def traffic(self, rounds: int) -> tuple[int, int]:
        """Return how many bytes each device has sent to the server in ``rounds`` rounds, and how many it has received
        from the server.
        """

    def shared(self) -> Values:
        """Return the tensors of which all ranks have the same values, by name, for a checkpoint."""
        return {f"values.{name}": t for name, t in self.values.items()}

    def residuals(self) -> dict[str, tuple[Direction, int]]:
        """Return the directions that have residuals, each with its number of senders, by the direction's name, for a
        checkpoint. By default there are none.
        """
        return {}

    def resume(self, wholes: int) -> None:
        """Continue after the tensors of a checkpoint have been loaded. ``wholes``: the saved value of :attr:`wholes`.
        All ranks must call it.
        """
        self.wholes = wholes

    def whole_mean(self, parts: Sequence[Values]) -> Values:
        """Send ``parts``, for each simulated device of this rank a tensor for each parameter, without compression.
        Return the mean over all devices. All ranks must call it.
        """
        self.wholes += 1
        return self.exchange.mean(parts, self.wholes, self._plain, self._plain)

    def operators(self, values: Mapping[str, T], draw: Draw) -> list[Values]:
        """Return the operator of each of this rank's simulated devices at the parameters ``values``: the gradients of
        its objective by parameter, with the sign turned for parameters that maximise. ``draw``: random choices, such as
        of samples.
        """
        return [
            self.problem.operator(device, values, draw) for device in self.exchange.own
        ]

    def moved(self, values: Mapping[str, T]) -> Values:
        """Set the parameters to ``values``; return by how much each has changed, by name."""
        changes = {name: values[name] - t for name, t in self.values.items()}
        for name, t in self.values.items():
            t.copy_(values[name])
        return changes

    def stepped(
        self, values: Mapping[str, T], direction: Mapping[str, T], rate: float
    ) -> Values:
        """Return the parameters ``values - rate * direction``, by name. The method's own parameters (:attr:`values`)
        stay as they are.
        """
        return {name: t - rate * direction[name] for name, t in values.items()}


class Extragradient(SaddleMethod):
    """The extragradient method for saddle points. An operator is the gradients of both players, with the sign turned
    for the player that maximises. A round takes a step to a point ahead. It then takes a step from the old point,
    against the operator at the point ahead. :meth:`agreed` computes the mean of all devices' operators, compressed
    or not.
    """

    def agreed(self, parts: Sequence[Values], number: int) -> Values:
        """Return the mean of all devices' operators, their gradients with the sign turned for parameters that maximise.
        ``parts``: the operators of this rank's devices; ``number``: number of the exchange. All ranks must call it.
        """
        return self.whole_mean(parts)

    def take_round(self, number: int) -> Values:
        draw, rate = Draw(number, whole=False), self.settings.lr
        here = self.agreed(self.operators(self.values, draw), 2 * number)
        ahead = self.stepped(self.values, here, rate)
        there = self.agreed(self.operators(ahead, draw), 2 * number + 1)
        return self.moved(self.stepped(self.values, there, rate))

    def traffic(self, rounds: int) -> tuple[int, int]:
        return 2 * rounds * self.size, 2 * rounds * self.size


def directions_of(
    settings: Any, exchange: DeviceExchange, values: Values, feedback: bool
) -> tuple[Direction, Direction]:
    """Return how values are compressed on the way to the server and back, with the compressors of ``settings``, the
    section ``[saddle]``. ``feedback``: whether errors of compression are added to the next message, which needs
    contractive compressors. Raises :class:`UsageError` if a compressor does not support a tensor of ``values``.
    """
    ways = []
    senders = exchange.own, range(exchange.devices, exchange.devices + exchange.serves)
    for word, those in zip(settings.compressors, senders, strict=True):
        compressor = word or Compressor()
        compressor = compressor.for_feedback if feedback else compressor
        for name, t in values.items():
            compressor.check(name, t.shape)
            if feedback and compressor.error(t.shape) >= 1:
                raise UsageError(
                    f"saddle.compress may lose all of {name} {list(t.shape)}, so that fed back errors would grow; send "
                    "more of it"
                )
        residuals = {
            sender: {name: t.new_zeros(t.shape) for name, t in values.items()}
            for sender in those
        }
        ways.append(Direction(compressor, residuals if feedback else None))
    return ways[0], ways[1]
