"""Tensors as they travel between server and clients: raw bytes whose number both ends know beforehand.

Both ends know names, shapes and type of the tensors and the compressor, so that a frame says none of them, and what is
too long or too short is refused before anything is read. Tensors stand one after the other in the order of their
names; each of them is the payload of its compressor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from weft.errors import WeftError
from weft.sync.compress import build_compressor, encode_with_feedback
from weft.sync.compressor import Compressor

T = torch.Tensor


@dataclass(frozen=True)
class TensorPacket:
    """Encoded tensors, ready to be sent.

    Attributes:
        ``views``: the encoded bytes.
        ``left``: the compression error of each tensor, by name; empty without loss.
        ``nbytes``: number of bytes.
    """

    views: Sequence[memoryview]
    left: Mapping[str, T]

    @property
    def nbytes(self) -> int:
        return sum(view.nbytes for view in self.views)


@dataclass(frozen=True)
class TensorForm:
    """Encoding of tensors for the network: their shapes, dtype and compressor.

    Attributes:
        ``shapes``: the shape of each tensor by name.
        ``dtype``: dtype of the tensors, float32 or float64.
        ``compress``: word of a compressor, such as ``topk:0.01``; ``none`` sends all elements.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    compress: str = "none"

    @cached_property
    def compressor(self) -> Compressor:
        """The compressor, in the contractive form that error feedback needs."""
        compressor = build_compressor(self.compress)
        return compressor if compressor.exact else compressor.for_feedback

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes that all tensors take when they are encoded."""
        return sum(
            self.compressor.nbytes(shape, self.dtype) for shape in self.shapes.values()
        )

    def packed(
        self, tensors: Mapping[str, T], seed: int, left: Mapping[str, T] = {}
    ) -> TensorPacket:
        """Encode ``tensors`` for sending.

        ``seed``: seed of the compressor's random choices, which the receiver knows. ``left``: compression error of the
        last call, which is added to ``tensors`` before compression (error feedback, Karimireddy et al. 2019).
        """
        views, rest = list[memoryview](), dict[str, T]()
        for name in sorted(self.shapes):
            x = tensors[name].detach().to("cpu", self.dtype).contiguous()
            residual = None
            if not self.compressor.exact and x.numel():
                residual = left[name] if name in left else torch.zeros_like(x)
            payload, lost = encode_with_feedback(self.compressor, x, seed, residual)
            if lost is not None:
                rest[name] = lost
            views += [_bytes_of(part) for part in payload]
        return TensorPacket(views, rest)

    def unpacked(self, payload: memoryview, seed: int) -> dict[str, T]:
        """Decode the tensors in ``payload``. ``seed``: the seed with which they were encoded. Raises :class:`WeftError`
        if the bytes do not fit this form.
        """
        if payload.nbytes != self.nbytes:
            raise WeftError(
                f"{payload.nbytes} bytes came where {len(self.shapes)} tensors take {self.nbytes}"
            )
        start, tensors = 0, dict[str, T]()
        for name in sorted(self.shapes):
            shape, parts = self.shapes[name], list[T]()
            for size, dtype in self.compressor.specs(shape, self.dtype):
                count = prod(size) * dtype.itemsize
                # a copy, as a number may begin anywhere in a frame
                text = bytearray(payload[start : start + count])
                flat = (
                    torch.frombuffer(text, dtype=dtype)
                    if count
                    else torch.empty(0, dtype=dtype)
                )
                parts.append(flat.view(size))
                start += count
            x = self.compressor.decode(parts, shape, seed)
            tensors[name] = x.to(self.dtype).view(shape)
        return tensors


def _bytes_of(x: T) -> memoryview:
    """Return the bytes of the tensor ``x`` on the host."""
    flat = x.contiguous().view(-1)
    return (
        memoryview(flat.view(torch.uint8).numpy().data)
        if flat.numel()
        else memoryview(b"")
    )


def flat_tensors(tensors: Mapping[str, T]) -> T:
    """Return the elements of all tensors in the order of their names, flat."""
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def split_tensors(flat: T, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, T]:
    """Split ``flat``, as :func:`flat_tensors` returns it, into tensors of the given ``shapes`` by name."""
    names = sorted(shapes)
    parts = flat.split([prod(shapes[name]) for name in names])
    return {name: x.view(shapes[name]) for name, x in zip(names, parts, strict=True)}
