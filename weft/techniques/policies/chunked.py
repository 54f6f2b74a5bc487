"""Prompts are read in chunks, one chunk per step beside generated tokens, so that steps take about equal time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from weft.generate.policies import Order, SchedulingPolicy, exact_fill
from weft.registry import register

if TYPE_CHECKING:
    from weft.generate.request import Request


@register(
    "policy",
    "chunked",
    title=(
        "Prompts in chunks with other requests' new tokens beside them; steps filled "
        "exactly"
    ),
    paper="Agrawal et al. 2023 (SARATHI); Holmes et al. 2024 (DeepSpeed-FastGen)",
    recipe="weft serve --checkpoint RUN --policy chunked:64",
    proof="tests/generate/test_scheduler.py, tests/generate/test_many.py",
    figure="tokens of every step as the policy says",
)
@dataclass(frozen=True)
class Chunked(SchedulingPolicy):
    """Schedules generated tokens first, then a chunk of at most ``chunk`` tokens of one prompt (SARATHI, Agrawal et al.
    2023; DeepSpeed-FastGen, Holmes et al. 2024).
    """

    chunk: int
    example: ClassVar[str] = "chunked:64"
    argument: ClassVar[str] = "a whole number of tokens above 0"
    candidates: ClassVar[tuple[str, ...]] = ("chunked:32", "chunked:128")

    @classmethod
    def of_argument(cls, argument: str | None) -> Self | None:
        if argument is None or not argument.isdecimal() or not int(argument):
            return None
        return cls(int(argument))

    def __call__(
        self, running: Sequence[Request], waiting: Sequence[Request], budget: int
    ) -> Order:
        order = exact_fill(running, waiting, budget)
        later = [r for r, tokens in order if tokens > 1 or not r.runs][1:]
        return [(r, min(tokens, self.chunk)) for r, tokens in order if r not in later]
