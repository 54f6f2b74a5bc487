"""Loss of texts under a model that Weft opens: how surprising each is, in nats per token."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from weft.cache import digest
from weft.checkpoint.model import OpenedModel, open_model, tokenizer_of
from weft.curation.data_operators import OperatorFailed
from weft.data.tasks import Text
from weft.data.tokenizer import Tokenizer
from weft.errors import WeftError
from weft.generate.fingerprint import open_for_reading, weights_fingerprint
from weft.train.score import scores

#: Tokens of a window of models that do not say on how many they were trained.
WINDOW = 1024


class TextLoss(NamedTuple):
    """Loss of a text under a model.

    ``loss``: mean over its tokens in nats; NaN if no token is predicted. ``tokens``: number of tokens that are
    predicted.
    """

    loss: float
    tokens: int


@cache
def model_and_tokenizer_hash(model: str) -> str:
    """Return a hash of the weights and of the tokenizer of ``model``. A process computes it only once."""
    opened = open_for_reading(model)
    tokenizer = tokenizer_of(dict(opened.files), model)
    return digest(weights_fingerprint(opened), tokenizer.fingerprint)


@cache
def _opened(model: str, device: str) -> tuple[OpenedModel, Tokenizer]:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise OperatorFailed("device = 'cuda', and there is no GPU here; leave it out")
    try:
        opened = open_model(model, device, lambda line: print(line, file=sys.stderr))
        return opened, tokenizer_of(opened.files, model)
    except WeftError as error:  # it is no document's
        raise OperatorFailed(str(error)) from None


def text_losses(
    texts: Sequence[str], model: str, device: str = "cpu", window: int = 0
) -> list[TextLoss]:
    """Return the loss of each text under ``model``, a run, a checkpoint or a name that Weft opens.

    A text is read in windows of ``window`` tokens (0: the length that the model was trained with). Each window begins
    with the last token of the one before, so that all tokens but the first are predicted once. If the tokenizer has a
    token that begins texts, the first is predicted, too. Each text is computed alone, so its loss does not depend on
    others. ``device``: "cpu" or "cuda".
    """
    opened, tokenizer = _opened(model, device)
    size = window or opened.length or WINDOW
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    results = []
    for ids in tokenizer.encode_many(list(texts)):
        windows = token_windows([*begin, *ids.tolist()], size)
        total = sum(len(part.following) for part in windows)
        if not total:
            results.append(TextLoss(float("nan"), len(ids)))
            continue
        parts = scores(opened.model, None, opened.model.mesh, windows, room=1)
        sums = [part.log_probability for part in parts]
        results.append(TextLoss(-float(np.sum(sums)) / total, len(ids)))
    return results


def token_windows(ids: Sequence[int], size: int) -> list[Text]:
    """Cut a text into windows of at most ``size`` predicted tokens. Each begins with the last token of the one before.

    ``ids``: token ids of a text; fewer than two give no window.
    """
    return [
        Text(ids[start : start + 1], ids[start + 1 : start + 1 + size])
        for start in range(0, len(ids) - 1, size)
    ]
