"""Embeddings of documents: vectors of a model that Weft opens, or those of a column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from weft.curation.column_values import finite_vector
from weft.curation.k_means import unit_rows
from weft.errors import WeftError


def embed_documents(
    texts: Sequence[str],
    model: str,
    weights: str,
    device: str,
    pooling: Literal["mean", "last"],
    most_tokens: int,
) -> list[np.ndarray]:
    """Return a vector for each text, of length 1 in float16. A text without tokens gets an empty vector.

    ``pooling``: "mean" takes the mean of the final hidden states over the text's tokens, "last" the state of its last
    token. Every text is read alone, so that its vector does not depend on the others. ``model``: any name that ``weft
    generate`` opens. ``weights``: form of its weights. ``most_tokens``: number of tokens of a text that are read, from
    its beginning.
    """
    import torch

    from weft.checkpoint.model import tokenizer_of
    from weft.curation.engine_generator import open_generator
    from weft.generate.reader import pooled

    opened = open_generator(model, weights, device)
    tokenizer = tokenizer_of(opened.files, model)
    vectors = []
    with torch.inference_mode():
        for text in texts:
            ids = tokenizer.encode(text)[:most_tokens].tolist()
            if not ids:
                vectors.append(np.zeros(0, np.float16))
                continue
            row = torch.tensor([ids, range(len(ids))], device=device)
            ends = torch.tensor([0, len(ids)], dtype=torch.int32)
            hidden = opened.model.hidden(row[:1], row[1:], ends)[0]
            vector = pooled(hidden, pooling == "last").cpu().numpy()
            vectors.append(unit_rows(vector[None])[0].astype(np.float16))
    return vectors


def column_vectors(values: Sequence[Any], column: str) -> list[np.ndarray]:
    """Return the vectors of a column, each scaled to length 1 in float16. None in the column gives an empty vector.

    ``column``: name of the column, for errors. Raises :class:`WeftError` for a value that is no vector of finite
    numbers.
    """
    rows = []
    for value in values:
        row = finite_vector([] if value is None else value)
        if row is None:
            raise WeftError(
                f"column {column!r} holds {str(value)[:40]!r}, which is no vector of finite numbers"
            )
        rows.append(unit_rows(row[None])[0].astype(np.float16))
    return rows
