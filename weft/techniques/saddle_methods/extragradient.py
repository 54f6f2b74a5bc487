"""The extragradient method, whose operators travel whole (Korpelevich 1976)."""

from __future__ import annotations

from typing import Any

from weft.registry import register
from weft.saddle.saddle_method import Extragradient


@register(
    "saddle-method",
    "extragradient",
    title="Extragradient method over ranks",
    paper="Korpelevich 1976",
    recipe="saddle.toml --set saddle.method=extragradient --set saddle.compress=none",
    proof="tests/saddle/test_masha.py",
    figure="four devices equal to the mean objective on one to 1e-10 in float64; bytes as the formula",
)
class WholeExtragradient(Extragradient):
    """Sends the operators (the gradients of both players) uncompressed, twice in each round (Korpelevich 1976)."""

    @classmethod
    def check(cls, settings: Any) -> None:
        if any(settings.compressors):
            raise ValueError(
                "method = 'extragradient' sends everything; leave compress out, or choose method = 'masha1' or 'masha2'"
            )
