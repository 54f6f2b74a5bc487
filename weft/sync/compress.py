"""Compressors: fewer bytes per tensor, so that islands can synchronise over slow links.

A compressor is a frozen value without state. :func:`build_compressor` makes one of a recipe's word. What it makes of a
tensor is a *payload*: a list of contiguous tensors whose shapes and types :meth:`Compressor.specs` tells beforehand, so
that a receiver knows how much to read and :meth:`Compressor.nbytes` is exact. How a round uses one::

    payload, residual = encoded(compressor, x, seed, residual)  # everybody's payload goes to everybody
    mean = sum(compressor.decode(p, x.shape, seed) for p in payloads) / len(payloads)

    payload, residual = encoded(compressor, x, seed, residual, warm, average)  # if compressor.linear, over a ring
    mean = compressor.decode(payload, x.shape, seed)
    warm = compressor.warm(payload)

``x`` is float32 or float64. ``seed`` is a number that sender and receivers know without saying it. Successive rounds of
a tensor have successive seeds (the rolling mask of ``cocktail`` walks by them). Islands have the same one where
``linear`` exchange is used; else they may have different ones, so that random errors of theirs cancel. ``average`` is
the mean over islands of a plain tensor, by whoever has the connections; a linear compressor calls it once or twice.
``warm`` is what makes PowerSGD begin where it ended: a slot of the state, ``None`` at first.

*Contractive* compressors lose a part of the tensor: ``E|C(x) - x|^2 <= error |x|^2``, with :meth:`Compressor.error`
below 1. They must have the loss fed back, which :func:`encoded` does when it is given a residual (zeros at first).
*Unbiased* ones lose nothing on average over seeds and need no residual; their error may be above 1. ``for_feedback`` is
a compressor's contractive relative. A number that is not finite makes what it shares a scale or matrix with not finite.
Tensors come back in the type they had, or as float32 where the payload does not tell.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Self

import torch
import torch.nn.functional as F

from weft.errors import UsageError, WeftError
from weft.memory.quantised import unpacked
from weft.models.nf4 import packed
from weft.recipe.compressor_word import BLOCK, compressor_word

T = torch.Tensor
Payload = list[T]
#: Shape and type of one tensor of a payload.
Spec = tuple[tuple[int, ...], torch.dtype]
#: The mean over islands of a plain tensor, the same on all of them to the last bit.
Average = Callable[[T], T]

#: Cocktail's rounds until every element was in the mask once, and the share of the mask that is sent.
COCKTAIL_ROUNDS, COCKTAIL_SHARE = 10, 0.2


@dataclass(frozen=True)
class Compressor:
    """What all compressors have; this one sends everything as it is.

    ``unbiased``: the mean over seeds of what is decoded is the tensor. ``linear``: payloads of one seed can be averaged
    in place of the tensors, see :meth:`agreed`.
    """

    unbiased: bool = True
    linear: ClassVar[bool] = True

    def specs(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> list[Spec]:
        """Shape and type of each tensor of the payload of a tensor of this ``shape`` and ``dtype``."""
        return [(tuple(shape), dtype)]

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the payload."""
        return sum(
            prod(size) * kind.itemsize for size, kind in self.specs(shape, dtype)
        )

    def error(self, shape: Sequence[int]) -> float:
        """The least known ``e`` with ``E|C(x) - x|^2 <= e |x|^2`` for all ``x`` of this shape, over seeds."""
        return 0.0

    def encode(self, x: T, seed: int, warm: T | None = None) -> Payload:
        """The payload of ``x``."""
        return self.agreed(x, seed, lambda mine: mine, warm)[1]

    def agreed(
        self, x: T, seed: int, average: Average, warm: T | None = None
    ) -> tuple[Payload, Payload]:
        """The payload of all islands' mean, and the one of this island's part in it. Of linear compressors only."""
        return [average(x.contiguous())], [x.contiguous()]

    def decode(self, payload: Payload, shape: Sequence[int], seed: int) -> T:
        """The tensor that a payload stands for. One that cannot be of this shape is a :class:`WeftError`."""
        return self._checked(payload, shape)[0]

    def warm(self, payload: Payload) -> T | None:
        """What the next round of the tensor can begin with; of a linear exchange the same on all islands."""
        return None

    @property
    def for_feedback(self) -> Self:
        """The contractive compressor of the same kind, which is the one to use with a residual."""
        return replace(self, unbiased=False)

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raise :class:`UsageError` if a tensor of this name and shape cannot be compressed so."""

    def cut(self, part: slice) -> "Compressor":
        """The compressor of the elements ``part`` of a flat tensor that this one is for."""
        return self

    def _checked(self, payload: Payload, shape: Sequence[int]) -> Payload:
        float_type = next(
            (x.dtype for x in payload if x.dtype in (torch.float32, torch.float64)),
            torch.float32,
        )
        wanted, found = (
            self.specs(shape, float_type),
            [(tuple(x.shape), x.dtype) for x in payload],
        )
        if wanted != found:
            raise WeftError(
                f"a compressed tensor of shape {tuple(shape)} came as {found} in the place of {wanted}"
            )
        return payload


@dataclass(frozen=True)
class Rounded(Compressor):
    """Integers of 4 to 8 bits and a scale for each block of 128 elements.

    Scales are bfloat16, rounded up so that no element is cut off. To the nearest is contractive; at random, up or down
    with such probability that the mean is right, is unbiased.
    """

    unbiased: bool = False
    bits: int = 8
    linear: ClassVar[bool] = False

    @property
    def levels(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def specs(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> list[Spec]:
        count = prod(shape)
        codes = (
            ((count,), torch.int8)
            if self.bits == 8
            else ((-(-count * self.bits // 8),), torch.uint8)
        )
        return [codes, ((-(-count // BLOCK),), torch.bfloat16)]

    def error(self, shape: Sequence[int]) -> float:
        # An error is half a step for the nearest, and has at most the variance of half a step at random.
        return min(prod(shape), BLOCK) * ((1 + 2**-7) / (2 * self.levels)) ** 2

    def encode(self, x: T, seed: int, warm: T | None = None) -> Payload:
        blocks = in_blocks(x)  # [blocks, 128]
        scales = rounded_up(blocks.abs().amax(1) / self.levels)
        steps = blocks / divisor(scales, x.dtype)[:, None]
        if self.unbiased:
            noise = torch.rand(
                steps.shape,
                generator=torch.Generator().manual_seed(seed),
                dtype=x.dtype,
            )
            codes = (steps + noise.to(x.device)).floor()
        else:
            codes = steps.round()
        codes = (
            codes.clamp(-self.levels, self.levels)
            .nan_to_num()
            .to(torch.int8)
            .flatten()[: x.numel()]
        )
        if self.bits == 4:
            codes = packed(F.pad((codes + 8).to(torch.uint8), (0, codes.numel() % 2)))
        elif self.bits < 8:
            codes = codes_packed(codes + 2 ** (self.bits - 1), self.bits)
        return [codes, scales]

    def decode(self, payload: Payload, shape: Sequence[int], seed: int) -> T:
        codes, scales = self._checked(payload, shape)
        whole = codes
        if self.bits == 4:
            whole = unpacked(codes).to(torch.int8) - 8
        elif self.bits < 8:
            whole = codes_unpacked(codes, self.bits, prod(shape)) - 2 ** (self.bits - 1)
        return spread(whole[: prod(shape)].float(), scales).view(*shape)


@dataclass(frozen=True)
class Sign(Compressor):
    """A bit per element, and for each block of 128 the mean of the magnitudes (Karimireddy et al. 2019)."""

    unbiased: bool = False
    linear: ClassVar[bool] = False

    def specs(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> list[Spec]:
        count = prod(shape)
        return [
            ((-(-count // 8),), torch.uint8),
            ((-(-count // BLOCK),), torch.bfloat16),
        ]

    def error(self, shape: Sequence[int]) -> float:
        # the worst is a block with one element that is not 0
        return 1 - (1 - 2**-16) / max(1, min(prod(shape), BLOCK))

    def encode(self, x: T, seed: int, warm: T | None = None) -> Payload:
        count, blocks = x.numel(), in_blocks(x)
        sizes = torch.full((len(blocks),), BLOCK, dtype=x.dtype, device=x.device)
        sizes[-1:] -= len(blocks) * BLOCK - count
        return [bits_packed(x.flatten() >= 0), (blocks.abs().sum(1) / sizes).bfloat16()]

    def decode(self, payload: Payload, shape: Sequence[int], seed: int) -> T:
        bits, scales = self._checked(payload, shape)
        return spread(bits_unpacked(bits, prod(shape)).float() * 2 - 1, scales).view(
            *shape
        )


@dataclass(frozen=True)
class TopK(Compressor):
    """The largest elements, and where they are: as numbers, or as a bit per element where that is less."""

    unbiased: bool = False
    share: float = 1.0
    linear: ClassVar[bool] = False

    def specs(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> list[Spec]:
        count, kept = prod(shape), kept_of(prod(shape), self.share)
        return [((kept,), dtype), positions_spec(kept, count)]

    def error(self, shape: Sequence[int]) -> float:
        return 1 - kept_of(prod(shape), self.share) / max(1, prod(shape))

    def encode(self, x: T, seed: int, warm: T | None = None) -> Payload:
        flat = x.flatten()
        kept = largest(flat, kept_of(flat.numel(), self.share))
        return [flat[kept], positions_sent(kept, flat.numel())]

    def decode(self, payload: Payload, shape: Sequence[int], seed: int) -> T:
        values, sent = self._checked(payload, shape)
        kept = positions_found(sent, values.numel(), prod(shape))
        return values.new_zeros(prod(shape)).index_put_((kept,), values).view(*shape)


@dataclass(frozen=True)
class RandomK(Compressor):
    """Some elements that the seed chooses, so that nobody needs to say which, scaled so that the mean is right."""

    share: float = 1.0

    def specs(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> list[Spec]:
        return [((kept_of(prod(shape), self.share),), dtype)]

    def error(self, shape: Sequence[int]) -> float:
        count, kept = prod(shape), kept_of(prod(shape), self.share)
        return (count / max(1, kept) - 1) if self.unbiased else 1 - kept / max(1, count)

    def agreed(
        self, x: T, seed: int, average: Average, warm: T | None = None
    ) -> tuple[Payload, Payload]:
        mine = x.flatten()[self._chosen(x.numel(), seed).to(x.device)]
        return [average(mine)], [mine]

    def decode(self, payload: Payload, shape: Sequence[int], seed: int) -> T:
        (values,) = self._checked(payload, shape)
        count = prod(shape)
        scale = count / max(1, values.numel()) if self.unbiased else 1.0
        chosen = self._chosen(count, seed).to(values.device)
        return (
            values.new_zeros(count).index_put_((chosen,), values * scale).view(*shape)
        )

    def _chosen(self, count: int, seed: int) -> T:
        return shared_permutation(count, seed)[: kept_of(count, self.share)]


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """A matrix as a product of two thin ones, by one turn of the power method (Vogels et al. 2019).

    With ``M`` the matrix of a tensor ``[m, ...]`` it is ``P (M^T P)^T``, ``P`` an orthonormal basis of ``M Q``. ``Q``
    is what ``M^T P`` was in the last round, or random. Means over islands of ``M Q`` and ``M^T P`` are those of the
    mean matrix, so that two rings of thin matrices do. What would not become less (a vector) is sent as it is.
    :meth:`error` is that of a random ``Q``; a warm one is better if matrices of successive rounds are alike.
    """

    unbiased: bool = False
    rank: int = 1

    def _factors(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Height and width of the matrix that is replaced by factors; None if it is sent as it is."""
        height, width = (
            (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
        )
        return (
            (height, width) if self.rank * (height + width) < height * width else None
        )

    def specs(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> list[Spec]:
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
        mine = matrix.mT @ basis  # [n, rank]
        return [basis, average(mine)], [basis, mine]

    def decode(self, payload: Payload, shape: Sequence[int], seed: int) -> T:
        sent = self._checked(payload, shape)
        return (sent[0] @ sent[1].mT).view(*shape) if len(sent) == 2 else sent[0]

    def warm(self, payload: Payload) -> T | None:
        return payload[1] if len(payload) == 2 else None

    def check(self, name: str, shape: Sequence[int]) -> None:
        most = min(shape[0], prod(shape[1:])) if len(shape) > 1 else 1
        if 1 < most < self.rank:
            above = f"a rank above the {shape[0]} x {prod(shape[1:])} matrix {name}"
            raise UsageError(
                f"compressor 'powersgd:{self.rank}' has {above}; use at most 'powersgd:{most}'"
            )


@dataclass(frozen=True)
class Cocktail(Compressor):
    """A tenth of the elements by a random mask, of these the largest fifth, of these 4 bits (Wang et al. 2023).

    The mask rolls: within ten successive seeds every element is in it.
    """

    unbiased: bool = False
    linear: ClassVar[bool] = False
    values: ClassVar[Rounded] = Rounded(bits=4)
    top: ClassVar[TopK] = TopK(share=COCKTAIL_SHARE)

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int]:
        """Elements in the mask, and those that are sent."""
        masked = -(-prod(shape) // COCKTAIL_ROUNDS)
        return masked, kept_of(masked, COCKTAIL_SHARE)

    def specs(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> list[Spec]:
        masked, kept = self._sizes(shape)
        return [*self.values.specs((kept,)), positions_spec(kept, masked)]

    def error(self, shape: Sequence[int]) -> float:
        _, kept = self._sizes(shape)
        return 1 - (1 - self.values.error((kept,))) * kept / max(1, prod(shape))

    def encode(self, x: T, seed: int, warm: T | None = None) -> Payload:
        within = x.flatten()[self._mask(x.numel(), seed).to(x.device)]
        kept = largest(within, self._sizes(x.shape)[1])
        return [
            *self.values.encode(within[kept], seed),
            positions_sent(kept, within.numel()),
        ]

    def decode(self, payload: Payload, shape: Sequence[int], seed: int) -> T:
        codes, scales, sent = self._checked(payload, shape)
        masked, kept = self._sizes(shape)
        values = self.values.decode([codes, scales], (kept,), seed)
        at = self._mask(prod(shape), seed).to(values.device)[
            positions_found(sent, kept, masked)
        ]
        return values.new_zeros(prod(shape)).index_put_((at,), values).view(*shape)

    def _mask(self, count: int, seed: int) -> T:
        turn, size = seed % COCKTAIL_ROUNDS, -(-count // COCKTAIL_ROUNDS)
        first = max(0, min(turn * size, count - size))
        return shared_permutation(count, seed // COCKTAIL_ROUNDS)[first : first + size]


@dataclass(frozen=True)
class PerTensor(Compressor):
    """A compressor for each of several tensors that lie end to end in a flat one: pairs of a size and a compressor."""

    unbiased: bool = False
    pieces: tuple[tuple[int, Compressor], ...] = ()
    linear: ClassVar[bool] = False

    def specs(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> list[Spec]:
        assert prod(shape) == sum(size for size, _ in self.pieces)
        return [
            spec
            for size, compressor in self.pieces
            for spec in compressor.specs((size,), dtype)
        ]

    def error(self, shape: Sequence[int]) -> float:
        return max(
            (compressor.error((size,)) for size, compressor in self.pieces), default=0.0
        )

    def encode(self, x: T, seed: int, warm: T | None = None) -> Payload:
        parts = x.flatten().split([size for size, _ in self.pieces])
        payloads = [
            c.encode(part, seed)
            for part, (_, c) in zip(parts, self.pieces, strict=True)
        ]
        return [tensor for payload in payloads for tensor in payload]

    def decode(self, payload: Payload, shape: Sequence[int], seed: int) -> T:
        rest = iter(self._checked(payload, shape))
        parts = []
        for size, compressor in self.pieces:
            own = [next(rest) for _ in compressor.specs((size,))]
            parts.append(compressor.decode(own, (size,), seed))
        return torch.cat(parts).view(*shape) if parts else torch.zeros(*shape)

    @property
    def for_feedback(self) -> Self:
        return replace(
            self,
            unbiased=False,
            pieces=tuple((size, c.for_feedback) for size, c in self.pieces),
        )

    def cut(self, part: slice) -> Compressor:
        kept: list[tuple[int, Compressor]] = []
        start = 0
        for size, compressor in self.pieces:
            inside = min(start + size, part.stop) - max(start, part.start)
            if inside > 0:
                kept.append((inside, compressor))
            start += size
        return replace(self, pieces=tuple(kept))


def build_compressor(word: str) -> Compressor:
    """The compressor that a recipe names, such as ``topk:0.01``."""
    name, share, rank, random = compressor_word(word)
    if name.startswith("int"):
        return Rounded(unbiased=random, bits=int(name[3:]))
    compressors: dict[str, Compressor] = {
        "none": Compressor(), "topk": TopK(share=share), "randk": RandomK(share=share), "powersgd": PowerSGD(rank=rank),
        "sign": Sign(), "cocktail": Cocktail(),
    }  # fmt: skip
    return compressors[name]


def encoded(
    compressor: Compressor,
    x: T,
    seed: int,
    residual: T | None = None,
    warm: T | None = None,
    average: Average | None = None,
) -> tuple[Payload, T | None]:
    """The payload of ``x``, and what it lacks of it: the residual that is to be added in the next round.

    With a ``residual`` that of the last round is added first (error feedback, Seide et al. 2014, Karimireddy et al.
    2019), which takes a contractive compressor: what it loses of the sum is smaller than the sum. With ``average``,
    of a linear compressor, the payload is the one of all islands' mean, but the residual this island's own.
    """
    if residual is None:
        payload = (
            compressor.agreed(x, seed, average, warm)[0]
            if average
            else compressor.encode(x, seed, warm)
        )
        return payload, None
    if compressor.error(x.shape) >= 1:
        raise ValueError(
            f"errors of {compressor} fed back would grow; take its for_feedback"
        )
    wanted = x + residual
    if average:
        payload, mine = compressor.agreed(wanted, seed, average, warm)
    else:
        payload = mine = compressor.encode(wanted, seed, warm)
    return payload, wanted - compressor.decode(mine, x.shape, seed).to(wanted.dtype)


# --- what compressors are made of


def kept_of(count: int, share: float) -> int:
    """How many elements are a ``share`` of so many: at least one, if there is one."""
    return min(count, max(1, round(share * count)))


def in_blocks(x: T) -> T:
    """``[blocks, 128]``, filled up with zeros."""
    return F.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)


def spread(values: T, scales: T) -> T:
    """Each of the ``values [n]`` times its block's scale."""
    return values * scales.to(values.dtype).repeat_interleave(BLOCK)[: values.numel()]


def rounded_up(x: T) -> T:
    """``x``, not negative, as bfloat16 that are not below it."""
    near = x.bfloat16()
    return torch.where(
        near.to(x.dtype) < x,
        torch.nextafter(near, torch.full_like(near, torch.inf)),
        near,
    )


def divisor(scales: T, dtype: torch.dtype) -> T:
    """``scales`` to divide by: those that are 0 have nothing but zeros to scale."""
    return torch.where(scales == 0, 1.0, scales.to(dtype))


def largest(flat: T, count: int) -> T:
    """Where the so many largest magnitudes are, in ascending order."""
    return flat.abs().topk(count, sorted=False).indices.sort().values


def shared_permutation(count: int, seed: int) -> T:
    """A permutation that is the same everywhere, whatever the device."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def orthonormal(x: T) -> T:
    """An orthonormal basis ``[m, r]`` of a space that contains the columns of ``x [m, r]``."""
    return torch.linalg.qr(x).Q.contiguous()


def positions_spec(kept: int, count: int) -> Spec:
    bitmap = -(-count // 8)
    return ((kept,), torch.int32) if kept * 4 < bitmap else ((bitmap,), torch.uint8)


def positions_sent(kept: T, count: int) -> T:
    """Ascending positions ``kept`` among so many, as :func:`positions_spec` says."""
    (_, dtype) = positions_spec(kept.numel(), count)
    if dtype == torch.int32:
        return kept.int()
    return bits_packed(
        torch.zeros(count, dtype=torch.bool, device=kept.device).index_fill_(
            0, kept, True
        )
    )


def positions_found(sent: T, kept: int, count: int) -> T:
    """The positions that :func:`positions_sent` was given."""
    found = (
        sent.long()
        if sent.dtype == torch.int32
        else bits_unpacked(sent, count).nonzero().flatten()
    )
    if found.numel() != kept or (
        kept and not bool(((found >= 0) & (found < count)).all())
    ):
        raise WeftError(
            f"a compressed tensor names positions that are not {kept} among {count}"
        )
    return found


def codes_packed(codes: T, bits: int) -> T:
    """Numbers ``[n]`` of so many ``bits`` each, below 8, one after the other in bytes."""
    eights = F.pad(codes.to(torch.int64), (0, -codes.numel() % 8)).view(-1, 8)
    # [n / 8], 8 x bits of 64 are used
    words = (eights << torch.arange(0, 8 * bits, bits, device=codes.device)).sum(1)
    return (
        words.view(torch.uint8)
        .view(-1, 8)[:, :bits]
        .flatten()[: -(-codes.numel() * bits // 8)]
        .contiguous()
    )


def codes_unpacked(sent: T, bits: int, count: int) -> T:
    """The first so many of the numbers that :func:`codes_packed` was given, int8."""
    groups = F.pad(sent, (0, -sent.numel() % bits)).view(-1, bits)
    words = F.pad(groups, (0, 8 - bits)).contiguous().view(torch.int64)  # [n / 8, 1]
    codes = words >> torch.arange(0, 8 * bits, bits, device=sent.device) & (2**bits - 1)
    return codes.flatten()[:count].to(torch.int8)


def bits_packed(bits: T) -> T:
    """Eight of the booleans ``[n]`` in a byte, the first in its lowest bit."""
    eights = F.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    return (eights << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(
        1, dtype=torch.uint8
    )


def bits_unpacked(sent: T, count: int) -> T:
    """The first so many of the booleans."""
    return (
        (sent[:, None] >> torch.arange(8, dtype=torch.uint8, device=sent.device) & 1)
        .flatten()[:count]
        .bool()
    )
