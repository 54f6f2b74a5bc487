"""Gradient coding: a step ends without waiting for its stragglers (Tandon et al. 2017)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register
from weft.sync.coded import GradientCode

if TYPE_CHECKING:
    from weft.recipe import Resilience


@register(
    "code",
    "gradient",
    title="Gradient coding: a step ends without its stragglers",
    paper="Tandon et al. 2017",
    recipe="coded.toml",
    proof="tests/sync/test_coded.py",
    figure=(
        "equal to one device to 1e-10 from every admissible set of 2 to 8 ranks, and "
        "over 4 ranks"
    ),
)
def gradient(settings: Resilience, ranks: int) -> GradientCode:
    """Return a gradient code for ``ranks`` data parallel ranks that encodes the gradient of each step separately
    (Tandon et al. 2017).

    ``settings``: the recipe's section ``[resilience]``.
    """
    return GradientCode(ranks, settings.stragglers, settings.jobs)
