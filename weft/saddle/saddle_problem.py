"""What a saddle problem is: parameters, of which some minimise and the others maximise a value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from weft.recipe.saddle_section import Saddle

    T = torch.Tensor

#: Parameters, or a direction for each of them, by name.
Values = dict[str, "torch.Tensor"]


class Draw(NamedTuple):
    """Random choices of one evaluation of the objective, such as samples or latent variables.

    Attributes:
        ``number``: number of the choice; the same number gives the same samples.
        ``whole``: whether all samples of the device are taken instead of a few.
    """

    number: int
    whole: bool


class SaddleProblem(ABC):
    """Base of saddle problems: some parameters minimise an objective, others maximise it. The objective is the mean of
    the objectives of several simulated devices, which have different data. ``settings``: the section ``[saddle]``.
    ``seed``: seed of all random choices; ``dtype`` and ``device``: type of the parameters, and where they are.

    Attributes:
        ``maximised``: names of the parameters that maximise; the others minimise.
        ``devices``: number of simulated devices.
        ``stochastic``: whether evaluations that are not whole take only a few samples.
    """

    maximised: ClassVar[frozenset[str]]

    def __init__(
        self, settings: Saddle, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.devices, self.seed = settings.devices, seed
        self.dtype, self.device = dtype, device
        self.stochastic = False

    @abstractmethod
    def start(self) -> Values:
        """Return the parameters with which the search begins: a tensor for each name."""

    @abstractmethod
    def value(self, number: int, values: Mapping[str, T], draw: Draw) -> T:
        """Return the objective of the simulated device ``number``, a scalar, at the parameters ``values``. ``draw``:
        random choices, such as the samples that are used.
        """

    @abstractmethod
    def measures(self, values: Mapping[str, T]) -> dict[str, float]:
        """Return numbers that say how good the parameters ``values`` are, such as the distance to the solution, by
        name.
        """

    def write_results(self, values: Mapping[str, T], folder: Path) -> None:  # noqa: B027, most have nothing to show
        """Write files into ``folder`` that show the parameters ``values``; by default none."""

    def operator(self, number: int, values: Mapping[str, T], draw: Draw) -> Values:
        """Return the operator of the simulated device ``number`` at the parameters ``values``: the gradients of its
        objective by parameter, with the sign turned for parameters that maximise. ``draw``: random choices, such as of
        samples.

        A step against the operator goes down for some parameters and up for the others.
        """
        import torch

        own = {name: t.detach().requires_grad_() for name, t in values.items()}
        gradients = torch.autograd.grad(
            self.value(number, own, draw), list(own.values())
        )
        return {
            name: -gradient if name in self.maximised else gradient
            for name, gradient in zip(own, gradients, strict=True)
        }
