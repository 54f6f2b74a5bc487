"""A small generative adversarial network on handwritten digits (Goodfellow et al. 2014)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from weft.registry import register
from weft.saddle.saddle_problem import SaddleProblem
from weft.section import Section

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from weft.recipe.saddle_section import Saddle
    from weft.saddle.saddle_problem import Draw, Values

    T = torch.Tensor


class GanSettings(Section):
    """Settings of the game of a generator and a critic on images of digits: size of both networks, number of images,
    and penalty.
    """

    hidden: PositiveInt = Field(
        32,
        description="Width of the two hidden layers in the generator and in the critic.",
    )
    latent: PositiveInt = Field(
        8,
        description="Number of random numbers from which the generator makes an image.",
    )
    batch: NonNegativeInt = Field(
        32,
        description="Number of images from which a device computes each gradient. 0: all images that it has.",
    )
    penalty: NonNegativeFloat = Field(
        0.1,
        description=(
            "Weight w of a penalty that keeps the critic's weights small: w/2 times the sum of their squares is "
            "subtracted from the objective that the critic maximises."
        ),
    )


@register(
    "saddle-problem",
    "gan",
    title="Adversarial training of a small network on digits",
    paper="Goodfellow et al. 2014",
    recipe="gan.toml",
    proof="tests/saddle/test_gan.py",
    figure=(
        "Fréchet distance from digits after 1,500 rounds: `5.96` whole with `79.5` MB, `7.53` with MASHA2 and the "
        "largest tenth, `10.754` MB, `9.95` with compressed operators; `52.9` before (`bench/saddle.py`)"
    ),
    settings=GanSettings,
)
class DigitsGan(SaddleProblem):
    """A game of a generator, which makes images from random numbers, and a critic, which tells them from real digits
    (Goodfellow et al. 2014). Both are perceptrons with two hidden layers. The objective is the mean of ``log D(image)``
    over a device's digits, plus the mean of ``log (1 - D(G(latent)))``. ``D`` is the critic's probability that an image
    is real, and ``G`` the generator. The critic maximises it, the generator minimises it. Device ``d`` of ``n`` has
    every ``n``-th digit, from the ``d``-th on.
    """

    def __init__(
        self, settings: Saddle, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        import torch

        from weft.data.digits import read_digits

        super().__init__(settings, seed, dtype, device)
        self.gan = settings.own(GanSettings)
        self.stochastic = self.gan.batch > 0
        images = torch.from_numpy(read_digits().images).flatten(1)  # [images, 64]
        self.images = (images * 2 - 1).to(device, dtype)
        self.center = self.images.mean(0)

    maximised = frozenset(
        f"critic.{layer}.{part}" for layer in range(3) for part in ("weight", "bias")
    )

    def start(self) -> Values:
        import torch

        random = torch.Generator().manual_seed(self.seed)
        hidden, pixels = self.gan.hidden, self.images.shape[1]
        values: Values = {}
        widths = {
            "generator": (self.gan.latent, hidden, hidden, pixels),
            "critic": (pixels, hidden, hidden, 1),
        }
        for name, sizes in widths.items():
            for layer in range(3):
                wide, high = sizes[layer : layer + 2]
                weight = torch.randn(high, wide, generator=random, dtype=torch.float64)
                values[f"{name}.{layer}.weight"] = weight * (1.5 / wide) ** 0.5
                values[f"{name}.{layer}.bias"] = torch.zeros(high)
        return {name: t.to(self.device, self.dtype) for name, t in values.items()}

    def value(self, number: int, values: Mapping[str, T], draw: Draw) -> T:
        import torch.nn.functional as F

        real = self.images[number :: self.devices]  # [rows, 64]
        random = self._random(number, draw)
        if self.stochastic and not draw.whole:
            import torch

            rows = torch.randint(len(real), (self.gan.batch,), generator=random)
            real = real[rows.to(self.device)]
        made_up = self.generated(values, len(real), random)
        sure = self._layers("critic", values, real - self.center)  # [rows, 1]
        fooled = self._layers("critic", values, made_up - self.center)
        weights = (values[name] for name in sorted(self.maximised) if name.endswith("t"))  # fmt: skip
        paid = sum((t * t).sum() for t in weights)
        told_apart = F.logsigmoid(sure).mean() + F.logsigmoid(-fooled).mean()
        return told_apart - self.gan.penalty / 2 * paid

    def generated(
        self, values: Mapping[str, T], count: int, random: torch.Generator
    ) -> T:
        """Return ``count`` images ``[count, 64]`` that the generator with the weights ``values`` makes, pixels from -1
        to 1. ``random``: source of the random numbers.
        """
        import torch

        latents = torch.randn(
            count, self.gan.latent, generator=random, dtype=torch.float64
        )
        x = latents.to(self.device, self.dtype)
        return self._layers("generator", values, x).tanh()

    def _layers(self, name: str, values: Mapping[str, T], x: T) -> T:
        """Return what the perceptron ``name`` makes of ``x`` ``[rows, features]``."""
        import torch.nn.functional as F

        for layer in range(3):
            weight, bias = (values[f"{name}.{layer}.{part}"] for part in ("weight", "bias"))  # fmt: skip
            x = F.linear(x, weight, bias)
            if layer < 2:
                x = F.leaky_relu(x, 0.2)
        return x

    def _random(self, number: int, draw: Draw) -> torch.Generator:
        import torch

        # all samples: the same latent variables for each of them in every evaluation
        place = 0 if draw.whole or not self.stochastic else draw.number + 1
        seed = ((self.seed * 1_000_003 + number) << 32) + place
        return torch.Generator().manual_seed(seed % (1 << 62))

    def measures(self, values: Mapping[str, T]) -> dict[str, float]:
        """Return the Fréchet distance between real and generated images, and the objective's value.

        The distance is that of two normal distributions with the images' means and covariances (Heusel et al. 2017),
        here of pixels.
        """
        import torch

        from weft.saddle.saddle_problem import Draw

        random = torch.Generator().manual_seed(self.seed + 1)
        with torch.no_grad():
            images = self.generated(values, 2_000, random)
            value = sum(
                float(self.value(d, values, Draw(0, whole=True)))
                for d in range(self.devices)
            )
        return {
            "frechet": frechet_distance(self.images.double(), images.double()),
            "value": value / self.devices,
        }

    def write_results(self, values: Mapping[str, T], folder: Path) -> None:
        """Write 50 digits that the generator with the weights ``values`` makes to ``samples.png`` in ``folder``."""
        import torch

        from weft.diffusion.image_files import image_grid, png_bytes

        random = torch.Generator().manual_seed(self.seed + 2)
        images = self.generated(values, 50, random).view(-1, 1, 8, 8)
        pixels = image_grid(images.float().cpu().numpy())
        (folder / "samples.png").write_bytes(png_bytes(pixels))


def frechet_distance(real: T, generated: T) -> float:
    """Return the Fréchet distance between normal distributions with the mean and covariance of two sets of rows.

    ``real``, ``generated``: ``[rows, features]``, float64. Rows that are not finite are infinitely far away.
    """
    import torch

    if not generated.isfinite().all():
        return float("inf")
    a, b = torch.cov(real.mT), torch.cov(generated.mT)  # [features, features]
    levels, vectors = torch.linalg.eigh(a)
    root = vectors * levels.clamp(min=0).sqrt() @ vectors.mT
    both = torch.linalg.eigvalsh(root @ b @ root).clamp(min=0).sqrt().sum()
    apart = (real.mean(0) - generated.mean(0)).square().sum()
    return float(apart + a.trace() + b.trace() - 2 * both)
