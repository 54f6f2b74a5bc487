"""MASHA1: differences of operators through unbiased compressors (Beznosikov et al. 2022)."""

from __future__ import annotations

from typing import Any

from weft.registry import register
from weft.saddle.masha import Masha, MashaSettings


@register(
    "saddle-method",
    "masha1",
    title="MASHA1: saddle points by unbiased compressed differences",
    paper="Beznosikov et al. 2022",
    recipe="saddle.toml",
    proof="tests/saddle/test_masha.py",
    figure=(
        "over four ranks at `0.000857` of the first distance after 3,000 rounds and `0.3904` MB, where compressed "
        "operators diverge (`bench/saddle.py`)"
    ),
    settings=MashaSettings,
)
class Masha1(Masha):
    """Sends differences between operators at the present point and at a reference point, by compressors whose
    expectation is exact (Beznosikov et al. 2022). An operator is the gradients of both players.
    """

    @classmethod
    def check(cls, settings: Any) -> None:
        words = settings.compress, settings.compress_back or settings.compress
        for word, compressor in zip(words, settings.compressors, strict=True):
            if compressor is not None and not compressor.unbiased:
                raise ValueError(
                    f"method = 'masha1' needs compressors that lose nothing on average, such as 'randk:0.2' or "
                    f"'int8:random', and {word!r} does; choose one of them, or method = 'masha2'"
                )
