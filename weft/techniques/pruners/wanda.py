"""Wanda: pruning by weights and activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register

if TYPE_CHECKING:
    import torch


@register(
    "pruner",
    "wanda",
    title="Wanda: pruning by weights times the norms of their inputs, row by row",
    paper="Sun et al. 2023 (2306.11695)",
    recipe="weft prune --checkpoint RUN --share 0.5 --by wanda --data FILE --out FOLDER",
    proof="tests/models/test_pruning.py",
    figure=(
        "as the formula, row by row; with half of the elements the perplexity of SmolLM2-135M is 129.7, before 82.3 "
        "(`bench/sparse_weights.py`)"
    ),
)
class Wanda:
    """Drops in each row of a weight the elements with the smallest product of absolute value and input norm (Wanda; Sun
    et al. 2023). The input norm of a column is taken over the values of this input element for all tokens of the texts.
    """

    reads_texts = True

    def kept(
        self, weight: torch.Tensor, norms: torch.Tensor | None, share: float
    ) -> torch.Tensor:
        from weft.models.pruning import keep_largest

        assert norms is not None
        return keep_largest(weight.abs() * norms.to(weight.dtype), share)
