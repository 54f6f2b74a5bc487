"""Prompts are read before further tokens are generated, so that the first token of a request comes early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from weft.generate.policies import Order, SchedulingPolicy, exact_fill
from weft.registry import register

if TYPE_CHECKING:
    from weft.generate.request import Request


@register(
    "policy",
    "prompts-first",
    title="Prompts before new tokens",
    paper="Yu et al. 2022 (Orca)",
    recipe="weft serve --checkpoint RUN --policy prompts-first",
    proof="tests/generate/test_scheduler.py, tests/generate/test_many.py",
    figure="tokens of every step as the policy says",
)
class PromptsFirst(SchedulingPolicy):
    """Schedules prompts first: requests that generate wait while prompts are read (Orca, Yu et al. 2022; early
    vLLM).
    """

    candidates: ClassVar[tuple[str, ...]] = ("prompts-first",)

    def __call__(
        self, running: Sequence[Request], waiting: Sequence[Request], budget: int
    ) -> Order:
        order = exact_fill(running, waiting, budget)
        return sorted(order, key=lambda served: served[1] == 1 and served[0].runs)
