"""Integers of 8 to 4 bits (``int8`` to ``int4``), rounded to the nearest or, as ``int6:random``, at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from weft.errors import UsageError
from weft.registry import register
from weft.sync.rounded import Rounded

if TYPE_CHECKING:
    from weft.sync.compressor import Compressor


@register(
    "compressor",
    "int",
    title="Agreements in 8 to 4 bits, errors fed back on both ways",
    paper="Karimireddy et al. 2019",
    recipe="islands.toml",
    proof="tests/sync/test_streams.py",
    figure=(
        "equal to one process to rounding over 5 rounds, the same bits on all "
        "islands; bytes as the formula; 1/150 of data parallelism with `int4` and "
        "`every = 20`"
    ),
)
class Integers(Rounded):
    """Sends each element as an integer (Karimireddy et al. 2019). The number at the end of the setting (8 in ``int8``)
    is its number of bits.
    """

    words = ("int8", "int7", "int6", "int5", "int4")
    planned = ("int8", "int4")
    adjustable = True

    @classmethod
    def of_word(cls, word: str, argument: str | None) -> Self:
        if argument not in (None, "random"):
            raise UsageError(
                f"compressor '{word}:{argument}' rounds to the nearest, or at random; write {word!r} or "
                f"'{word}:random'"
            )
        return cls(unbiased=argument == "random", bits=int(word[3:]))

    def alternatives(self, shape: Sequence[int]) -> list[Compressor]:
        return [self, *(replace(self, bits=bits) for bits in range(2, 9))]
