"""Whole logits from the shares of the ranks that cut the vocabulary."""

from collections.abc import Sequence

import spmd_types as spmd
import torch
from spmd_types import R, S

from weft.layout.mesh import Mesh

T = torch.Tensor


def gather_vocab(logits: T, sizes: Sequence[int], mesh: Mesh) -> T:
    """Return whole logits ``[batch, seq, vocab]``, gathered from the ranks of ``tp``. ``logits``: this rank's share,
    ``[batch, seq, entries]``.

    With ``mesh.sums`` only the first rank gets them, and every other rank its own share. ``sizes``: the number of
    entries of each rank's share; they may differ.
    """
    if mesh.size("tp") == 1:
        return logits
    if mesh.sums:
        return mesh.sums.gather(logits, sizes)
    most = max(sizes)
    if most > min(sizes):  # gloo takes equal parts only: [batch, seq, most] each
        logits = torch.nn.functional.pad(logits, (0, most - logits.shape[2]))
    whole = spmd.all_gather(logits, mesh.group("tp"), src=S(2), dst=R)
    if most == min(sizes):
        return whole
    parts = zip(whole.split(most, dim=2), sizes, strict=True)
    return torch.cat([part[..., :size] for part, size in parts], dim=2)
