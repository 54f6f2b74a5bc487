"""Multi-head latent attention (DeepSeek-AI 2024, 2405.04434): keys and values of all heads from one small vector.

In training, and for a prompt, keys and values are computed from the latent vectors, and attention is as usual. Token by
token, the same sums are taken in another order (the absorbed form): the weights that make keys are applied to the
query, the weights that make values are applied after the average, and all heads attend to the latent vectors
themselves. Only the latent vectors are cached.
"""

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from weft.layout.mesh import Mesh
from weft.models.adapters import merged
from weft.models.attention import local_attention
from weft.models.projections import Projections
from weft.models.rope import rotate, score_scales
from weft.recipe import ModelShape
from weft.shapes.parameters import layer_table

T = torch.Tensor

#: ``eps`` of the norms of latent vectors, whatever that of the model's other norms.
EPS = 1e-6


@runtime_checkable
class Latents(Protocol):
    """Interface of an attention function that caches the latent vectors of earlier tokens. ``tokens``: the largest
    number of cached tokens of any text.
    """

    tokens: int

    def keep(self, latents: T) -> None:
        """Cache the latent vectors of new tokens whose texts have no earlier tokens.

        ``latents``: ``[rows, new tokens, 1, kv_rank + rope_dim]``.
        """

    def __call__(self, q: T, k: T, v: T, cu_seqlens: T, window: int = 0) -> T: ...


class LatentAttention(Projections):
    """Multi-head latent attention (DeepSeek-V2).

    Keys and values are computed from a latent vector of ``kv_rank`` elements per token, and from a rotated key that all
    heads share. Weights that compute the latent vectors are whole on every rank of ``tp``; weights that read the latent
    vectors are cut by heads. ``shape``: shape of the model; ``mesh``: ranks that share the model; ``layer``: index of
    the layer.
    """

    def __init__(self, shape: ModelShape, mesh: Mesh, layer: int) -> None:
        path = f"blocks.{layer}.attention"
        super().__init__(shape, mesh, layer_table(shape, layer), path)
        assert shape.head_dim
        self.plain = shape.head_dim
        self.rope_dim = shape.rope_dim
        self.value_dim = shape.value_dim
        self.kv_rank, self.interleaved = shape.kv_rank, shape.rope_interleaved
        for name in ("wq_a", "wq_b") if shape.q_rank else ("wq",):
            self.projection(name)
        self.q_a_norm = self.norm_of("q_a_norm", EPS)
        for name in ("wkv_a", "wkv_b", "wo"):
            self.projection(name)
        self.kv_a_norm = self.norm_of("kv_a_norm", EPS)
        self.scale, self.rotated_scale = score_scales(shape)
        self.mixer = "softmax"
        self.attend = local_attention
        self.window = (shape.window_of(layer),) if shape.window_of(layer) else ()
        self.base = int(bool(shape.window_theta and shape.window_of(layer)))

    def forward(self, x: T, rope: tuple[T, ...], cu_seqlens: T) -> T:
        """Map ``x`` ``[batch, seq, embed]`` to this rank's part of the output, of the same shape.

        The output is the sum of the parts over the ranks of ``tp``. ``rope``: cosines and sines
        (:func:`weft.models.rope.angles`); ``cu_seqlens``: where documents begin in the flattened rows.
        """
        return self.project(self.attended(x, rope, cu_seqlens), "wo")[0]

    def attended(self, x: T, rope: tuple[T, ...], cu_seqlens: T) -> T:
        """Return the input of the output projection ``wo``, ``[batch, seq, heads/tp * value_dim]``.

        The arguments are those of :meth:`forward`.
        """
        cos, sin = (each[self.base] for each in rope[:2])
        # [batch, seq, heads/tp, ...]
        q, rotated = self._queries(x).split([self.plain, self.rope_dim], -1)
        rotated = rotate(rotated, cos, sin, self.interleaved) * self.rotated_scale
        latent, key = self.project(x, "wkv_a")[0].split(
            [self.kv_rank, self.rope_dim], -1
        )
        latent = self.kv_a_norm(latent)
        # [batch, seq, 1, rope_dim]
        key = rotate(key[:, :, None], cos, sin, self.interleaved)
        attend = self.attend
        if isinstance(attend, Latents):
            both = torch.cat((latent[:, :, None], key), -1)
            if attend.tokens:
                return self._absorbed(attend, q, rotated, both, cu_seqlens).flatten(-2)
            attend.keep(both)
            attend = local_attention
        heads = self.project(latent, "wkv_b")[0].unflatten(-1, (q.shape[2], -1))
        k, v = heads.split([self.plain, self.value_dim], -1)
        q = torch.cat((q, rotated), -1)
        k = torch.cat((k, key.expand(-1, -1, k.shape[2], -1)), -1)
        # kernels take heads of one width: zeros add nothing
        width = max(q.shape[-1], v.shape[-1])
        q = q * (self.scale * width**0.5)  # attention divides by the root of the width
        q, k, v = (F.pad(each, (0, width - each.shape[-1])) for each in (q, k, v))
        out = attend(q, k, v, cu_seqlens, *self.window)[..., : self.value_dim]
        return out.flatten(-2)

    def _queries(self, x: T) -> T:
        """Queries ``[batch, seq, heads/tp, head_dim + rope_dim]``."""
        if self.q_a_norm is None:
            q = self.project(x, "wq")[0]
        else:
            q = self.project(self.q_a_norm(self.project(x, "wq_a")[0]), "wq_b")[0]
        return q.unflatten(-1, (-1, self.plain + self.rope_dim))

    def _absorbed(
        self, attend: Latents, q: T, rotated: T, latents: T, cu_seqlens: T
    ) -> T:
        """Attention of new tokens to all latent vectors: ``[batch, seq, heads, value_dim]``."""
        # [heads, of one, kv_rank]
        weight = merged(self, "wkv_b").to(q.dtype).unflatten(0, (q.shape[2], -1))
        to_keys, to_values = weight.split([self.plain, self.value_dim], 1)
        q = torch.cat((torch.einsum("bshn,hnr->bshr", q, to_keys), rotated), -1)
        q = q * (self.scale * q.shape[-1] ** 0.5)
        mean = attend(
            q, latents, latents[..., : self.kv_rank], cu_seqlens, *self.window
        )
        return torch.einsum("bshr,hvr->bshv", mean, to_values)
