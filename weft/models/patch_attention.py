"""Attention in which every patch of an image sees every other, and attention to the states of a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from weft.layout.boundary import gather_tokens, scatter_tokens
from weft.layout.gathered_keys import gather_keys, gathered_positions
from weft.layout.sequence import padded_length
from weft.models.projections import Projections

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.recipe import ModelShape
    from weft.shapes.parameters import Table

T = torch.Tensor

#: ``attend(layer, q, k, v)`` with ``[batch, heads, patches, head_dim]`` each.
AttendPatches = Callable[[int, T, T, T], T]


class PatchAttention(Projections):
    """Attention, with biases, of all patches of an image to each other, or of patches to the states of a text.
    ``shape``: shape of the model; ``mesh``: ranks that share the model; ``table``: descriptions of the layer's
    parameters; ``path``: name of this module in the model; ``layer``: index of the layer; ``patches``: number of
    patches of an image without padding, 0 for attention to a text.
    """

    TOGETHER = (("wq", "wk", "wv"), ("wo",))
    #: Not the attention of texts, which :func:`weft.parallel.build.connect` spreads over ranks.
    mixer = "all"

    def __init__(
        self, shape: ModelShape, mesh: Mesh, table: Table, path: str, layer: int, patches: int = 0
    ) -> None:  # fmt: skip
        super().__init__(shape, mesh, table, path)
        self.layer, self.patches, self.head_dim = layer, patches, shape.head_dim or 1
        for name in ("wq", "wk", "wv", "wo"):
            self.projection(name)
        for name in ("bq", "bk", "bv", "bo"):
            self.weight(name)
        self.q_norm = self.norm_of("q_norm", shape.norm_eps)
        self.k_norm = self.norm_of("k_norm", shape.norm_eps)
        self.attend_with: AttendPatches | None = None

    def forward(
        self, x: T, cos: T | None = None, sin: T | None = None, states: T | None = None, real: T | None = None
    ) -> T:  # fmt: skip
        """Map ``x`` ``[batch, seq/tp, embed]`` to the output of the same shape. ``cos``, ``sin``: rotations ``[batch,
        seq, head_dim / 2]`` of queries and keys; empty or None: no rotation. ``states``: states of a text to attend to,
        ``[batch, words, text]``; None: patches attend to each other. ``real``: which patches of all ranks are of the
        image, bool ``[batch, patches]``; empty or None: all are.
        """
        whole = gather_tokens(x, self.mesh)  # [batch, seq, embed]
        if states is None:
            q, k, v = self.project(whole, "wq", "wk", "wv")
        else:
            (q,), (k, v) = self.project(whole, "wq"), self.project(states, "wk", "wv")
        q, k, v = q + self.bq, k + self.bk, v + self.bv
        # [batch, seq, heads/tp, head_dim]
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos is not None and sin is not None and cos.numel():
            q, k = (rotated_heads(y, cos, sin) for y in (q, k))
        if states is None:
            k, v = self._of_image(torch.cat((k, v), -1)).chunk(2, -1)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        if self.attend_with is not None and states is None:
            out = self.attend_with(self.layer, q, k, v)
        else:
            seen = None
            if real is not None and real.numel() and states is None:
                seen = self._in_order(real)[:, None, None]  # [batch, 1, 1, patches]
            out = F.scaled_dot_product_attention(q, k, v, seen)
        share = self.project(out.transpose(1, 2).flatten(-2), "wo")[0]
        return scatter_tokens(share, self.mesh) + self.bo

    def _of_image(self, keys: T) -> T:
        """Return the keys of all ranks of ``cp`` without padding: ``[batch, patches, heads/tp, 2 head_dim]``."""
        length = keys.shape[1] * self.mesh.size("cp")
        keys = gather_keys(keys, self.mesh)
        if self.mesh.size("cp") == 1:
            return keys[:, : self.patches] if length > self.patches else keys
        where = gathered_positions(length, self.mesh.layout)
        real = [i for i, position in enumerate(where) if position < self.patches]
        return keys[:, real]

    def _in_order(self, real: T) -> T:
        """Return ``real`` ``[batch, patches]`` in the order of the keys that :meth:`_of_image` returns."""
        ranks = self.mesh.size("cp")
        if ranks == 1:
            return real
        length = padded_length(self.patches, self.mesh.layout)
        where = gathered_positions(length, self.mesh.layout)
        return real[:, [position for position in where if position < self.patches]]


def rotated_heads(x: T, cos: T, sin: T) -> T:
    """Rotate the pairs of elements ``(x[i], x[i + half])`` of every head of ``x`` ``[batch, seq, heads, head_dim]``.
    ``cos``, ``sin``: ``[batch, seq, half]``. If ``head_dim`` is odd, the last element stays.
    """
    half = cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
