"""Embeddings: a text as a vector, from the input of the model's output layer."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from weft.errors import UsageError
from weft.generate.engine import Engine, check_prompt

#: Tokens of a text at most, which is read in one forward pass beside the cache.
LONGEST = 8192


def embed(
    engine: Engine,
    ids: Sequence[int],
    pooling: Literal["mean", "last"],
    size: int | None = None,
) -> torch.Tensor:
    """Return the embedding of the text ``ids``, float32 ``[embed]`` of L2 norm 1.

    ``pooling``: take the mean of the final hidden states over tokens, or the last token's hidden state. ``size``: keep
    only the first elements, for models trained with Matryoshka representations (Kusupati et al. 2022, 2205.13147).
    """
    check_prompt(engine.model, ids)
    if len(ids) > LONGEST:
        raise UsageError(
            f"a text of {len(ids)} tokens is too long for one vector; give {LONGEST} at most"
        )
    with torch.inference_mode():
        return F.normalize(
            engine.reader.embed(ids, pooling == "last")[:size], dim=0
        ).cpu()
