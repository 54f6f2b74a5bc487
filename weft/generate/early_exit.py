"""Early exits: what an early layer of the model thinks likely, shown before the later layers of the same pass run.

The hidden states after an early layer are read by the model's final norm and output layer. A drafter can use these
logits while the later layers compute the true ones (Mirror Speculative Decoding, 2510.13161).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from weft.errors import UsageError

if TYPE_CHECKING:
    import torch

    from weft.generate.request import Generation
    from weft.models.transformer import Transformer

    T = torch.Tensor


class EarlyText(NamedTuple):
    """Rows of early logits that belong to one request. Early logits are computed from the output of a layer in the
    middle of the model.

    ``first``: index of the row that is computed at the request's last token, and predicts the next one. Then comes one
    row for each token of ``path``. ``path``: the tokens that a drafter has guessed for the request, and that this pass
    checks.
    """

    request: Generation
    path: Sequence[int]
    first: int


class EarlyExit(NamedTuple):
    """A place in the middle of a forward pass at which logits are computed from the hidden states. ``layer``: number of
    layers before it. ``take``: function that is called with these logits ``[rows, vocab]``. Their rows are for the same
    tokens as the rows of the pass's own logits.
    """

    layer: int
    take: Callable[[T], None]


def raise_for_ranks(layer: int) -> NoReturn:
    """Raise :class:`UsageError`, which says that ``--early-layer`` needs a model on one rank. ``layer``: the option's
    value.
    """
    raise UsageError(
        f"--early-layer {layer} is for a model on one rank; leave out --layout, or --early-layer"
    )


def check_early_layer(model: Transformer, layer: int) -> None:
    """Raise :class:`UsageError` if passes of ``model`` cannot show logits after ``layer`` layers."""
    last = model.shape.layers - 1
    if model.mesh.layout.world > 1:
        raise_for_ranks(layer)
    if model.shape.kind:
        raise UsageError(
            f"--early-layer {layer} is for Weft's own models, and this is a plugin's ({model.shape.kind}); leave it out"
        )
    if not last:
        raise UsageError(
            f"--early-layer {layer} is for models of several layers, and this has one; leave it out"
        )
    if not 1 <= layer <= last:
        raise UsageError(
            f"--early-layer {layer} is none of the layers before the last; give 1 to {last}"
        )
