"""MASHA (Beznosikov et al. 2022): saddle points found by devices that exchange compressed differences.

Devices and a server look for ``z`` with ``F(z) = 0``, the mean of the devices' operators: of a saddle point, the
gradient down in ``x`` and up in ``y``. What an operator is at a new point is not sent; its difference to what it was at
an older point is, compressed, and becomes small, so that errors do, too. MASHA1 takes unbiased compressors, MASHA2
contractive ones and feeds errors back. :func:`naive` compresses the operators themselves. Run
``python -m examples.masha``.
"""

from dataclasses import dataclass

import torch

from weft.sync.compress import build_compressor, encode_with_feedback
from weft.sync.compressor import Compressor

T = torch.Tensor


@dataclass(frozen=True)
class Saddle:
    """``x^T A y + a^T x - b^T y`` and a little ``weight / 2 (x^2 - y^2)``, with ``A, a, b`` of each device its own."""

    matrices: T  # [devices, n, n]
    offsets: T  # [devices, 2 n]
    weight: float

    def operator(self, device: int, z: T) -> T:
        x, y = z.chunk(2)
        matrix = self.matrices[device]
        return (
            torch.cat((matrix @ y, -matrix.mT @ x))
            + self.weight * z
            + self.offsets[device]
        )

    @property
    def devices(self) -> int:
        return len(self.matrices)

    @property
    def lipschitz(self) -> float:
        """Of the device whose operator changes most."""
        return float(torch.linalg.matrix_norm(self.matrices, 2).max()) + self.weight

    def solution(self) -> T:
        mean, offset = self.matrices.mean(0), self.offsets.mean(0)
        zero = torch.zeros_like(mean)
        whole = torch.cat((torch.cat((zero, mean), 1), torch.cat((-mean.mT, zero), 1)))
        return torch.linalg.solve(
            whole + self.weight * torch.eye(len(offset), dtype=offset.dtype), -offset
        )


def random_saddle(devices: int = 4, size: int = 20, weight: float = 0.1) -> Saddle:
    """Devices have much in common, and something of their own."""
    random = torch.Generator().manual_seed(0)
    common = torch.randn(size, size, generator=random, dtype=torch.float64)
    own = torch.randn(devices, size, size, generator=random, dtype=torch.float64) / 4
    offsets = torch.randn(devices, 2 * size, generator=random, dtype=torch.float64)
    return Saddle((common + own) / size**0.5, offsets, weight)


@dataclass
class Found:
    """Distances to the solution after each round, as parts of the first one, and all bytes that devices have sent."""

    apart: list[float]
    sent: int = 0


def masha(
    problem: Saddle,
    compressor: Compressor,
    rounds: int,
    step: float,
    feedback: bool,
    keep: float,
) -> Found:
    """MASHA1, or with ``feedback`` MASHA2; the server sends what it has as compressed as devices do.

    With the probability ``1 - keep`` a round ends with a new reference point ``w``, at which operators are sent whole.
    """
    z = torch.zeros(problem.offsets.shape[1], dtype=torch.float64)
    random, solution, found = (
        torch.Generator().manual_seed(1),
        problem.solution(),
        Found([]),
    )
    w = z.clone()
    at_w = [problem.operator(device, w) for device in range(problem.devices)]
    residuals: list[T | None] = [
        torch.zeros_like(z) if feedback else None for _ in range(problem.devices + 1)
    ]

    def told(sender: int, x: T, seed: int) -> T:
        payload, residuals[sender] = encode_with_feedback(
            compressor, x, seed, residuals[sender]
        )
        found.sent += compressor.nbytes(x.shape, x.dtype) * (sender < problem.devices)
        return compressor.decode(payload, x.shape, seed)

    for number in range(rounds):
        middle = keep * z + (1 - keep) * w
        half = middle - step * sum(at_w) / problem.devices
        seeds = range(
            number * (problem.devices + 1), (number + 1) * (problem.devices + 1)
        )
        moves = [
            step * (problem.operator(i, half) - at_w[i]) for i in range(problem.devices)
        ]
        mean = (
            sum(told(i, move, seeds[i]) for i, move in enumerate(moves))
            / problem.devices
        )
        z = half - told(problem.devices, mean, seeds[-1])
        if float(torch.rand((), generator=random)) > keep:
            w = z.clone()
            at_w = [problem.operator(device, w) for device in range(problem.devices)]
            found.sent += problem.devices * w.numel() * w.element_size()
        found.apart.append(float((z - solution).norm() / solution.norm()))
    return found


def naive(problem: Saddle, compressor: Compressor, rounds: int, step: float) -> Found:
    """The extragradient method with operators compressed on their way."""
    z, solution, found = (
        torch.zeros(problem.offsets.shape[1], dtype=torch.float64),
        problem.solution(),
        Found([]),
    )

    def operator(at: T, seed: int) -> T:
        devices = range(problem.devices)
        payloads = [
            compressor.encode(problem.operator(i, at), seed + i) for i in devices
        ]
        found.sent += problem.devices * compressor.nbytes(at.shape, at.dtype)
        return (
            sum(compressor.decode(payloads[i], at.shape, seed + i) for i in devices)
            / problem.devices
        )

    for number in range(rounds):
        seed = 2 * number * problem.devices
        half = z - step * operator(z, seed)
        z = z - step * operator(half, seed + problem.devices)
        found.apart.append(float((z - solution).norm() / solution.norm()))
        if not found.apart[-1] < 1e12:
            break
    return found


def main() -> None:
    problem = random_saddle()
    for word in ("randk:0.2", "topk:0.2"):
        compressor = build_compressor(word)
        share = compressor.specs((40,))[0][0][0] / 40
        step = 0.5 * share / problem.lipschitz
        ours = masha(
            problem, compressor, 20_000, step, not compressor.unbiased, 1 - share
        )
        print(
            f"{word}: MASHA{1 + (not compressor.unbiased)} {ours.apart[-1]:.1e} after {ours.sent:,} bytes"
        )
        for factor in (1, 0.3, 0.1):
            plain = naive(problem, compressor, 20_000, factor / problem.lipschitz)
            print(
                f"  compressed operators, step {factor}/L: {plain.apart[-1]:.1e} after {plain.sent:,} bytes"
            )


if __name__ == "__main__":
    main()
