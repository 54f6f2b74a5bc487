"""Guesses from the texts of all requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from weft.generate.lookup import Lookup
from weft.registry import register

if TYPE_CHECKING:
    from weft.models.transformer import Transformer

#: Tokens of other requests' texts that guesses are looked up in.
SHARED = 2**18


@register(
    "drafter",
    "texts",
    title="Guesses from the texts of all requests",
    paper="Oliaro et al. 2024 (SuffixDecoding)",
    recipe="weft generate --checkpoint RUN --prompt TEXT --draft texts",
    proof="tests/generate/test_speculation.py, tests/generate/test_scheduler.py",
    figure="the tokens and log-probabilities without guesses, also of drawn texts",
)
class AllTexts(Lookup):
    """Guesses the tokens that most often followed the text's last tokens in all texts of the same tenant
    (SuffixDecoding, Oliaro et al. 2024).
    """

    @classmethod
    def open(
        cls, word: str, model: Transformer, warn: Callable[[str], None], ahead: int
    ) -> Self:
        return cls(shared=SHARED)
