"""Pruning by magnitude: the smallest elements of a weight become zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register

if TYPE_CHECKING:
    import torch


@register(
    "pruner",
    "magnitude",
    title="Pruning by magnitude, when weights are loaded or into a checkpoint",
    paper="Han et al. 2015",
    recipe="weft prune --checkpoint RUN --share 0.5 --by magnitude --out FOLDER",
    proof="tests/models/test_pruning.py",
    figure=(
        "as many zeros as asked for, to the element; with half of the elements the perplexity of SmolLM2-135M is 1,186 "
        "where it was 82.3 (`bench/sparse_weights.py`)"
    ),
)
class Magnitude:
    """Drops the elements of a weight whose absolute values are smallest (Han et al. 2015)."""

    reads_texts = False

    def kept(
        self, weight: torch.Tensor, norms: torch.Tensor | None, share: float
    ) -> torch.Tensor:
        from weft.models.pruning import keep_largest

        return keep_largest(weight.abs().flatten()[None], share).view(weight.shape)
