"""A text as a vector: what the model's output layer would have read."""

import base64
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from weft.errors import UsageError
from weft.generate.engine import check_prompt
from weft.models.transformer import Transformer

#: Tokens of a text at most, which is read in one forward pass beside the cache.
LONGEST = 8192


@torch.inference_mode()
def embed(model: Transformer, ids: Sequence[int], pooling: Literal["mean", "last"]) -> torch.Tensor:
    """A vector of length 1, float32 ``[embed]``: of the normed hidden states the mean, or the last one."""
    if model.mesh.layout.world > 1:
        raise UsageError("vectors are made on one rank; serve the model without --layout")
    check_prompt(model, ids)
    if len(ids) > LONGEST:
        raise UsageError(f"a text of {len(ids)} tokens is too long for one vector; give {LONGEST} at most")
    device = model.mesh.device
    tokens, positions = torch.tensor([ids], device=device), torch.arange(len(ids), device=device)[None]
    hidden = model.hidden(tokens, positions, torch.tensor([0, len(ids)], dtype=torch.int32))[0]  # [tokens, embed]
    vector = hidden.float().mean(0) if pooling == "mean" else hidden[-1].float()
    return F.normalize(vector, dim=0).cpu()


def encoded(vector: torch.Tensor, packed: bool) -> str | list[float]:
    """As a list of numbers, or ``packed``: the little-endian floats in base64, as OpenAI's client asks for them."""
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode() if packed else vector.tolist()
