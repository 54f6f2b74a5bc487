"""PowerSGD between islands: a matrix is sent as two thin matrices that are summed over rings (Vogels et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Self

from weft.errors import UsageError
from weft.registry import register
from weft.sync.compressor import Compressor
from weft.sync.kept_share import number_in

if TYPE_CHECKING:
    import torch

    from weft.sync.compressor import Average, Payload, Spec

    T = torch.Tensor


@register(
    "compressor",
    "powersgd",
    title="PowerSGD between islands: a matrix as two thin ones, over rings",
    paper="Vogels et al. 2019",
    recipe="islands.toml --set sync.compress=powersgd:2",
    proof="tests/sync/test_streams.py",
    figure="exact for a mean of that rank; bytes of two rings of thin matrices",
)
@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Sends a matrix as the product of two thin matrices of ``rank`` columns, by one iteration of the power method
    (Vogels et al. 2019).

    The matrix ``M`` is a tensor ``[m, n, k]`` seen as ``[m, n k]``. The product is ``P (M^T P)^T``, where ``P`` is an
    orthonormal basis of ``M Q``. In the first round ``Q`` is random. In every other round it is the ``M^T P`` of the
    round before. Both ``M Q`` and ``M^T P`` are linear in ``M``. Islands therefore need only sum these two thin
    matrices to compress the mean of their matrices. A tensor that would not become smaller (a vector) is sent
    unchanged.

    :meth:`error` estimates the error with a random ``Q``. The error is smaller from the second round on if the matrices
    of successive rounds are similar. ``unbiased`` is False: the mean of decoded tensors is not the tensor itself.
    """

    unbiased: bool = False
    rank: int = 1
    in_rings = True
    adjustable = True

    @classmethod
    def of_word(cls, word: str, argument: str | None) -> Self:
        rank = number_in(argument)
        if not (rank >= 1 and rank == int(rank)):
            whole = word if argument is None else f"{word}:{argument}"
            raise UsageError(
                f"compressor {whole!r} needs a rank of at least 1, as in '{word}:4'"
            )
        return cls(rank=int(rank))

    def _factors(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return height and width of the matrix to factorise; None for a tensor that is sent unchanged."""
        height, width = (
            (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
        )
        return (
            (height, width) if self.rank * (height + width) < height * width else None
        )

    def specs(self, shape: Sequence[int], dtype: torch.dtype) -> list[Spec]:
        factors = self._factors(shape)
        return (
            [((size, self.rank), dtype) for size in factors]
            if factors
            else [(tuple(shape), dtype)]
        )

    def error(self, shape: Sequence[int]) -> float:
        return (
            1 - self.rank / min(factors) if (factors := self._factors(shape)) else 0.0
        )

    def agreed(
        self, x: T, seed: int, average: Average, warm: T | None = None
    ) -> tuple[Payload, Payload]:
        if not self._factors(x.shape):
            return super().agreed(x, seed, average)
        import torch

        matrix = x.flatten(1)  # [m, n]
        start = torch.randn(
            matrix.shape[1],
            self.rank,
            generator=torch.Generator().manual_seed(seed),
            dtype=x.dtype,
        )
        start = start.to(x.device)
        if warm is not None:  # of whatever rank it was
            start[:, : warm.shape[1]] = warm[:, : self.rank]
        basis = orthonormal(average(matrix @ start))  # [m, rank]
        product = matrix.mT @ basis  # [n, rank]
        return [basis, average(product)], [basis, product]

    def decode(self, payload: Payload, shape: Sequence[int], seed: int) -> T:
        sent = self._checked(payload, shape)
        return (sent[0] @ sent[1].mT).view(*shape) if len(sent) == 2 else sent[0]

    def warm(self, payload: Payload) -> T | None:
        return payload[1] if len(payload) == 2 else None

    def alternatives(self, shape: Sequence[int]) -> list[Compressor]:
        ranks = range(max(1, self.rank // 2), 2 * self.rank + 1)
        others = [replace(self, rank=rank) for rank in ranks]
        return [
            self,
            *(o for o in others if self._factors(shape) and o._factors(shape)),
        ]

    def check(self, name: str, shape: Sequence[int]) -> None:
        most = min(shape[0], prod(shape[1:])) if len(shape) > 1 else 1
        if 1 < most < self.rank:
            above = f"a rank above the {shape[0]} x {prod(shape[1:])} matrix {name}"
            raise UsageError(
                f"compressor 'powersgd:{self.rank}' has {above}; use at most 'powersgd:{most}'"
            )


def orthonormal(x: T) -> T:
    """Return ``r`` orthonormal columns, ``[m, r]``, whose span contains the columns of ``x`` ``[m, r]``."""
    import torch

    return torch.linalg.qr(x).Q.contiguous()
