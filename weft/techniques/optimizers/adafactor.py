"""Adafactor (Shazeer & Stern 2018): only the row and column means of a matrix's second moment are kept.

In a stack of matrices (experts) each matrix has means of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.registry import register
from weft.train.rules.update_rule import WHOLE_ROWS, UpdateRule

if TYPE_CHECKING:
    from torch import Tensor

    from weft.layout.parts import Part
    from weft.parallel.state import Held
    from weft.recipe import Optimizer
    from weft.train.rules.rank_sums import RankSums

#: How fast the moments' decay goes to one, least size of a parameter for the step's, and where an update is clipped.
DECAY, LEAST, CLIP = -0.8, 1e-3, 1.0


@register(
    "optimizer",
    "adafactor",
    rules=(WHOLE_ROWS,),
    title="Adafactor",
    paper="Shazeer & Stern 2018",
    recipe="optimizers.toml --set optimizer.kind=adafactor",
    proof="tests/techniques/test_optimizers.py",
    figure=(
        "equal to PyTorch's to 1e-12; 0.07 bytes per parameter, loss 2.335 (AdamW "
        "2.292) (`bench/optimizers.py`)"
    ),
)
class Adafactor(UpdateRule):
    """Adafactor as in PyTorch: updates are scaled by the parameter's magnitude, and there is no first moment (Shazeer &
    Stern 2018).
    """

    def __init__(self, settings: Optimizer, ranks: RankSums) -> None:
        self.ranks = ranks

    def slots(self, held: Held) -> dict[str, Part]:
        from weft.train.rules.rank_sums import Extent, like

        if len(held.logical.dims) < 2:
            return {"exp_avg_sq": like(held)}
        *stack, row, column = (Extent(i) for i in range(len(held.logical.dims)))
        return {
            "rows": self.ranks.slot(held, *stack, row),
            "columns": self.ranks.slot(held, *stack, column),
        }

    def update(
        self, held: Sequence[Held], grads: Sequence[Tensor], lr: float, decay: float
    ) -> None:
        from weft.train.rules.rank_sums import count_update

        step = count_update(held)
        for h, g in zip(held, grads, strict=True):
            rate = self._root_mean_square(h.local, h).clamp(min=LEAST) * min(
                lr, step**-0.5
            )
            h.local.mul_(1 - lr * decay)
            update = g * self._second_moment(h, g, step**DECAY).rsqrt()
            h.local.sub_(
                update
                * (rate / (self._root_mean_square(update, h) / CLIP).clamp(min=1))
            )

    def _second_moment(self, held: Held, grad: Tensor, weight: float) -> Tensor:
        """Update the estimate of the second moment by ``grad``. Returns the estimate of every local element."""
        import torch

        least = torch.finfo(grad.dtype).eps ** 2
        square = grad.square()
        if "exp_avg_sq" in held.slots:
            return (
                held.slots["exp_avg_sq"].values.lerp_(square, weight).clamp(min=least)
            )
        height, width = held.logical.shape[-2:]
        over_rows, over_columns = square.dim() - 2, square.dim() - 1
        rows, columns = held.slots["rows"].values, held.slots["columns"].values
        # [..., rows here]
        rows.lerp_(self.ranks.sum(square.sum(-1), held, over_columns) / width, weight)
        # [..., columns here]
        columns.lerp_(self.ranks.sum(square.sum(-2), held, over_rows) / height, weight)
        mean = self.ranks.sum(rows.sum(-1), held, over_rows) / height  # [...]
        mean = mean.clamp(min=torch.finfo(grad.dtype).eps)[..., None, None]
        return (rows[..., None] * columns[..., None, :] / mean).clamp(min=least)

    def _root_mean_square(self, x: Tensor, held: Held) -> Tensor:
        """Return the root mean square of the logical tensor whose local part is given."""
        return (
            self.ranks.sum(x.square().sum(), held, *range(x.dim())) / held.logical.numel
        ).sqrt()
