"""What compressors that send a share of the elements have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import ClassVar, Self

from weft.errors import UsageError
from weft.sync.compressor import Compressor

#: Alternatives: so many times the share.
FACTORS = (0.125, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 8.0)


def number_in(text: str | None) -> float:
    """Parse ``text`` as a finite number; return 0 if it is none."""
    try:
        number = float(text or 0)
    except ValueError:
        return 0.0
    return number if isfinite(number) else 0.0


def kept_of(count: int, share: float) -> int:
    """Return how many elements a ``share`` of ``count`` elements is: at least one, if ``count`` is not 0."""
    return min(count, max(1, round(share * count)))


@dataclass(frozen=True)
class KeptShare(Compressor):
    """Base of compressors that send only a ``share`` of the elements, above 0 and at most 1.

    In a recipe the share is the argument after the colon; ``example``: an argument for error messages.
    """

    share: float = 1.0
    adjustable = True
    example: ClassVar[str] = "0.1"

    @classmethod
    def of_word(cls, word: str, argument: str | None) -> Self:
        share = number_in(argument)
        if not 0 < share <= 1:
            whole = word if argument is None else f"{word}:{argument}"
            raise UsageError(
                f"compressor {whole!r} needs the share of elements to keep, above 0 and at most 1, as in "
                f"'{word}:{cls.example}'"
            )
        return cls(share=share)

    @property
    def exact(self) -> bool:
        return self.share == 1

    def alternatives(self, shape: Sequence[int]) -> list[Compressor]:
        shares = (min(1.0, self.share * factor) for factor in FACTORS)
        return [self, *(replace(self, share=share) for share in shares)]
