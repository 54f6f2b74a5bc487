"""Models whose ids mean the same tokens, so that their probabilities can be joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from weft.errors import UsageError

if TYPE_CHECKING:
    from weft.checkpoint.address import Where
    from weft.checkpoint.model import OpenedModel
    from weft.data.tokenizer import Tokenizer


class AlikeModels(NamedTuple):
    """Opened models whose tokenizers agree, so that a token id means the same token in all of them.

    ``models``: the models, in the order in which they were asked for. ``tokenizer``: the tokenizer of the first model.
    """

    models: tuple[OpenedModel, ...]
    tokenizer: Tokenizer


def open_alike(
    places: Sequence[Where], device: str, warn: Callable[[str], None], ema: bool = False
) -> AlikeModels:
    """Open the models at ``places`` (paths or names), and check that a token id means the same token in all of them.

    ``device``, ``warn`` and ``ema`` are arguments of :func:`weft.checkpoint.model.open_model`. Raises
    :class:`UsageError` if a model's tokenizer or vocabulary size differs from that of the first one.
    """
    from weft.checkpoint.model import open_model, tokenizer_of

    opened = [open_model(place, device, warn, ema) for place in places]
    tokenizers = [
        tokenizer_of(each.files, place)
        for each, place in zip(opened, places, strict=True)
    ]
    vocabularies = [each.model.shape.vocab for each in opened]
    for name, tokenizer, vocab in zip(places, tokenizers, vocabularies, strict=True):
        if not tokenizers[0].has_ids_of(tokenizer) or vocab != vocabularies[0]:
            raise UsageError(
                f"{name} has other tokens than {places[0]}, so that their probabilities cannot be averaged; give "
                "models with the same tokenizer"
            )
    return AlikeModels(tuple(opened), tokenizers[0])
