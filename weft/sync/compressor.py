"""Compressors: fewer bytes per tensor, so that islands can synchronise over slow links.

A compressor is a frozen value without state. :func:`weft.sync.compress.build_compressor` makes one of a recipe's word.
What it makes of a tensor is a *payload*: a list of contiguous tensors whose shapes and types :meth:`Compressor.specs`
tells beforehand, so that a receiver knows how much to read and :meth:`Compressor.nbytes` is exact. How a round uses
one::

    payload, residual = encode_with_feedback(compressor, x, seed, residual)  # everybody's payload goes to everybody
    mean = sum(compressor.decode(p, x.shape, seed) for p in payloads) / len(payloads)

    payload, residual = encode_with_feedback(compressor, x, seed, residual, warm, average)
    # if compressor.linear, over a ring
    mean = compressor.decode(payload, x.shape, seed)
    warm = compressor.warm(payload)

``x`` is float32 or float64. ``seed`` is a number that sender and receivers know without saying it. Successive rounds of
a tensor have successive seeds (the rolling mask of ``cocktail`` walks by them). Islands have the same one where
``linear`` exchange is used; else they may have different ones, so that random errors of theirs cancel. ``average`` is
the mean over islands of a plain tensor, by whoever has the connections; a linear compressor calls it once or twice.
``warm`` is what makes PowerSGD begin where it ended: a slot of the state, ``None`` at first.

*Contractive* compressors lose a part of the tensor: ``E|C(x) - x|^2 <= error |x|^2``, with :meth:`Compressor.error`
below 1. They must have the loss fed back, which
:func:`encode_with_feedback` does when it is given a residual (zeros at first).
*Unbiased* ones lose nothing on average over seeds and need no residual; their error may be above 1. ``for_feedback`` is
a compressor's contractive relative. A number that is not finite makes what it shares a scale or matrix with not finite.
Tensors come back in the type they had, or as float32 where the payload does not tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, ClassVar, Self

from weft.errors import UsageError, WeftError

if TYPE_CHECKING:
    import torch

    T = torch.Tensor

Payload = list["torch.Tensor"]
#: Shape and type of one tensor of a payload.
Spec = tuple[tuple[int, ...], "torch.dtype"]
#: The mean over islands of a plain tensor, the same on all of them to the last bit.
Average = Callable[["torch.Tensor"], "torch.Tensor"]

#: Elements of a tensor that share a scale, which is a bfloat16.
BLOCK = 128


@dataclass(frozen=True)
class Compressor:
    """Base of all compressors, which shrink tensors for the exchange between islands; this one changes nothing.

    What is sent in place of a tensor is its payload: one or more smaller tensors.

    Attributes:
        ``unbiased``: whether the decompressed tensor equals the tensor in the mean over seeds.
        ``linear``: whether islands can average payloads, made with the same seed, in place of their tensors
            (:meth:`agreed`).
        ``in_rings``: whether islands exchange whole matrices by ring all-reduces, instead of each being responsible for
            a chunk.
        ``words``: names in recipes; by default the compressor's own name.
        ``planned``: the words that ``weft plan`` considers.
        ``adjustable``: whether a setting can differ from tensor to tensor (:meth:`alternatives`).
    """

    unbiased: bool = True
    linear: ClassVar[bool] = True
    in_rings: ClassVar[bool] = False
    words: ClassVar[tuple[str, ...]] = ()
    planned: ClassVar[tuple[str, ...]] = ()
    adjustable: ClassVar[bool] = False

    @classmethod
    def of_word(cls, word: str, argument: str | None) -> Self:
        """Return the compressor that ``word`` in a recipe names.

        ``argument``: the text after the word's colon, None if there is no colon. Raises :class:`UsageError` if the
        compressor does not accept the argument.
        """
        if argument is not None:
            raise UsageError(
                f"compressor '{word}:{argument}' takes nothing after its name; write {word!r}"
            )
        return cls()

    @property
    def exact(self) -> bool:
        """Whether decompression restores a tensor without loss."""
        return type(self) is Compressor

    @property
    def bytes_per_element(self) -> float:
        """Bytes of the payload per element, for a large float32 tensor."""
        return 4.0

    def specs(self, shape: Sequence[int], dtype: torch.dtype) -> list[Spec]:
        """Return shape and type of each tensor in the payload of a tensor of this ``shape`` and ``dtype``."""
        return [(tuple(shape), dtype)]

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> int:
        """Return the bytes of the payload of a tensor of this ``shape`` and ``dtype`` (default: float32)."""
        import torch

        specs = self.specs(shape, dtype or torch.float32)
        return sum(prod(size) * kind.itemsize for size, kind in specs)

    def error(self, shape: Sequence[int]) -> float:
        """Return an upper bound ``e`` of the relative squared error of compression, for all tensors ``x`` of this
        ``shape``.

        The bound means ``E|C(x) - x|^2 <= e |x|^2``. ``C(x)`` is ``x`` compressed and decompressed, and ``E`` is the
        mean over seeds. The result is the least bound that is known.
        """
        return 0.0

    def encode(self, x: T, seed: int, warm: T | None = None) -> Payload:
        """Compress ``x`` and return the payload.

        ``seed``: seed of random choices, also known to the receiver; ``warm``: the warm start from the previous round.
        """
        return self.agreed(x, seed, lambda own: own, warm)[1]

    def agreed(
        self, x: T, seed: int, average: Average, warm: T | None = None
    ) -> tuple[Payload, Payload]:
        """Average ``x`` over all islands in compressed form. Linear compressors only.

        Returns the payload of the mean, and the payload of this island's contribution to the mean. ``average(tensor)``
        returns the mean of a tensor over all islands; ``warm``: the tensor from which compression starts, as
        :meth:`warm` returned it in the previous round; None in the first. ``seed``: the seed of the compressor's random
        choices.
        """
        return [average(x.contiguous())], [x.contiguous()]

    def decode(self, payload: Payload, shape: Sequence[int], seed: int) -> T:
        """Decompress ``payload`` into a tensor of this ``shape``.

        ``seed``: seed of the random choices with which the tensor was compressed. Raises :class:`WeftError` if the
        payload does not fit the shape.
        """
        return self._checked(payload, shape)[0]

    def warm(self, payload: Payload) -> T | None:
        """Return the warm start for the next round of the tensor with this ``payload``; None if there is none.

        A warm start is a tensor from which the next round's compression begins, in place of random values; for PowerSGD
        it is one of the two factors. If islands average their payloads (linear compressors), the warm start is the same
        on all islands.
        """
        return None

    @property
    def for_feedback(self) -> Self:
        """Compressor of the same kind whose error is always smaller than the tensor (contractive).

        Error feedback, which adds the error of one round to the next round's tensor, needs such a compressor.
        """
        return replace(self, unbiased=False)

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raise :class:`UsageError` if this compressor cannot compress a tensor with this ``name`` and ``shape``."""

    def alternatives(self, shape: Sequence[int]) -> list[Compressor]:
        """Return this compressor and variants of it, to choose from for a tensor of ``shape``.

        A variant differs in one setting: the rank of low-rank factors, the share of elements that are kept, or the bits
        of an element. :mod:`weft.sync.greco` chooses one for each tensor.
        """
        return [self]

    def cut(self, part: slice) -> Compressor:
        """Return a compressor for the elements ``part`` of a flat tensor. This compressor is for the whole tensor.

        Both are the same unless several tensors, each with a compressor of its own, lie end to end in the flat tensor.
        The result then has the compressors of those tensors that ``part`` touches.
        """
        return self

    def _checked(self, payload: Payload, shape: Sequence[int]) -> Payload:
        import torch

        float_type = next(
            (x.dtype for x in payload if x.dtype in (torch.float32, torch.float64)),
            torch.float32,
        )
        wanted, came = (
            self.specs(shape, float_type),
            [(tuple(x.shape), x.dtype) for x in payload],
        )
        if wanted != came:
            raise WeftError(
                f"a compressed tensor of shape {tuple(shape)} came as {came} in the place of {wanted}"
            )
        return payload
