"""A bilinear game between two players, whose saddle point is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field, NonNegativeFloat, PositiveInt

from weft.registry import register
from weft.saddle.saddle_problem import SaddleProblem
from weft.section import Section

if TYPE_CHECKING:
    import torch

    from weft.recipe.saddle_section import Saddle
    from weft.saddle.saddle_problem import Draw, Values

    T = torch.Tensor


class BilinearSettings(Section):
    """Settings of the bilinear game: number of variables, weight of the quadratic terms, and how much the simulated
    devices' matrices differ.
    """

    size: PositiveInt = Field(
        20,
        description=(
            "Number of elements of each of the two vectors: x, by which the objective is minimised, and y, by which "
            "it is maximised."
        ),
    )
    weight: NonNegativeFloat = Field(
        0.1,
        description=(
            "Weight w of the quadratic terms w/2 |x|^2 - w/2 |y|^2, which are added to the bilinear part of the "
            "objective."
        ),
    )
    spread: NonNegativeFloat = Field(
        0.25,
        description=(
            "How much the devices' objectives differ: the matrix A in the term x^T A y is C + s x D on each device, "
            "where s is this number, C a random matrix that all share, and D a random matrix of the device. 0: all "
            "have the same matrix."
        ),
    )


@register(
    "saddle-problem",
    "bilinear",
    title="Bilinear game",
    paper="Beznosikov et al. 2022",
    recipe="saddle.toml",
    proof="tests/saddle/test_masha.py",
    figure="its operator equal to the closed form to 1e-12; its saddle point has an operator of 0",
    settings=BilinearSettings,
)
class BilinearGame(SaddleProblem):
    """A bilinear game with the objective ``x^T A y + a^T x - b^T y + weight / 2 (|x|^2 - |y|^2)``; ``x`` minimises it
    and ``y`` maximises it (Beznosikov et al. 2022). Each simulated device has its own ``A``, ``a`` and ``b``. The
    matrices ``A`` have a part in common, and differ by a part of the size ``spread``; the vectors of different devices
    are independent.
    """

    maximised = frozenset({"y"})

    def __init__(
        self, settings: Saddle, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        import torch

        super().__init__(settings, seed, dtype, device)
        game = settings.own(BilinearSettings)
        count, size, self.weight = self.devices, game.size, game.weight
        random = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> T:
            return torch.randn(*shape, generator=random, dtype=torch.float64)

        common, own = drawn(size, size), drawn(count, size, size)
        matrices = (common + game.spread * own) / size**0.5  # [devices, size, size]
        offsets = drawn(count, 2, size)
        self.matrices = matrices.to(device, dtype)
        self.offsets = offsets.to(device, dtype)
        self.solution = self._solved()

    def start(self) -> Values:
        size = self.matrices.shape[1]
        zeros = self.matrices.new_zeros
        return {"x": zeros(size), "y": zeros(size)}

    def value(self, number: int, values: Mapping[str, T], draw: Draw) -> T:
        x, y = values["x"], values["y"]
        of_x, of_y = self.offsets[number]
        paid = self.weight / 2 * (x @ x - y @ y)
        return x @ (self.matrices[number] @ y) + of_x @ x - of_y @ y + paid

    def measures(self, values: Mapping[str, T]) -> dict[str, float]:
        """Return ``{"distance": ...}``: the distance of ``values`` to the saddle point, divided by the norm of the
        saddle point.
        """
        import torch

        z = torch.cat((values["x"], values["y"]))
        return {"distance": float((z - self.solution).norm() / self.solution.norm())}

    def _solved(self) -> T:
        """Return the saddle point ``[2 size]`` of the mean of all devices."""
        import torch

        mean, offset = self.matrices.mean(0).double(), self.offsets.mean(0).double()
        zero = torch.zeros_like(mean)
        rows = torch.cat((zero, mean), 1), torch.cat((-mean.mT, zero), 1)
        whole = torch.cat(rows)
        whole += self.weight * torch.eye(
            len(whole), dtype=whole.dtype, device=whole.device
        )
        return torch.linalg.lstsq(whole, -offset.flatten()[:, None]).solution[:, 0]
