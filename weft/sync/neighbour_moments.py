"""AdamW's second moments of islands that exchange in pairs: of gradients that are averaged over neighbours.

AdamW divides by the root of the mean square of gradients. A gradient of an island alone has more noise than the mean of
all islands, and the noise adds to the square: directions with little signal then take smaller steps than with the
gradient of the whole batch. Neighbours that exchange gradients along with their vectors come near to the latter.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from weft.refusal import Rule
from weft.section import Section

if TYPE_CHECKING:
    import torch

#: The slot that keeps AdamW's first moments as they were before a step.
BEFORE = "average_before"


class GossipSettings(Section):
    """Recipe settings of islands that exchange in pairs, without rounds: what AdamW's second moments average."""

    moments: Literal["own", "neighbours"] = Field(
        "own",
        description=(
            "Gradients whose squares AdamW averages. 'own': the island's own; 'neighbours': the mean of the island's "
            "own and of those that other islands have sent since, which is closer to AdamW of the whole batch. "
            "Islands then also send their gradient, once to each island with which they exchange."
        ),
    )


def _cannot_average(asked: Any) -> bool:
    adam = asked.optimizer.kind == "adamw" and asked.optimizer.state == "float32"
    return getattr(asked.sync, "moments", "own") == "neighbours" and not (
        adam and asked.sync.every == 1
    )


#: Gradients follow from AdamW's first moments, of one step, if these are exact.
NEIGHBOUR_MOMENTS: Rule[Any] = Rule(
    "second moments of neighbours",
    "sync optimizer",
    _cannot_average,
    "sync.moments = 'neighbours' averages the second moments of AdamW in float32 after every step, and here are "
    "optimizer.kind = {0.optimizer.kind!r}, state = {0.optimizer.state!r} and sync.every = {0.sync.every}",
    "set optimizer.kind = 'adamw', optimizer.state = 'float32' and sync.every = 1, or leave sync.moments out",
)


def gradient_of(
    average: torch.Tensor, before: torch.Tensor, beta: float
) -> torch.Tensor:
    """Return the gradient that has changed AdamW's first moments from ``before`` to ``average``. ``beta``: their
    decay.
    """
    return (average - beta * before) / (1 - beta)


def average_square(
    square: torch.Tensor,
    own: torch.Tensor,
    others: Collection[torch.Tensor],
    beta: float,
) -> None:
    """Change AdamW's second moments ``square`` in place, as if the last gradient had been a mean over islands.

    ``own``: the last gradient of the island, whose square the moments already have; ``others``: those of other islands
    after the same step, of which those that are not finite do not count, as their islands have skipped the step.
    ``beta``: decay of the second moments.
    """
    others = [other for other in others if other.isfinite().all()]
    if others:
        mean = (own + sum(others)) / (1 + len(others))
        square.add_((mean.square() - own.square()) * (1 - beta)).clamp_(min=0)
