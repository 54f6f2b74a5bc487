"""Blocks in few operators, for generation on the CPU.

A block of a small model calls some four hundred functions of Python for the tokens of a step, which took a tenth of a
step of 32 texts. Where weights are packed (:mod:`weft.models.products`), a plain block needs no more than some forty
operators, which :class:`LeanBlock` calls one after the other: heads of queries and keys are rotated together, and the
last product of each half adds the residual stream. It computes what the block computes, up to rounding.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from weft.models.feed_forward import FeedForward
from weft.models.invariant import is_invariant
from weft.models.module import Norm
from weft.models.products import Packed, SplitProduct, packed_product, packed_sum
from weft.models.projections import Projections
from weft.models.transformer import Attention, Block, Transformer

T = torch.Tensor


class LeanNorm:
    """RMSNorm over the last dimension, computed in five operators for passes without gradients. ``norm``: the module
    whose scale and constant are used.
    """

    def __init__(self, norm: Norm) -> None:
        self.scale: T = norm.scale.detach()
        self.norm_eps, self.share = norm.eps, 1 / len(self.scale)
        self.eps = self.scale.new_tensor(norm.eps)

    def __call__(self, x: T) -> T:
        """Apply the norm to ``x`` ``[..., size]``."""
        if x.dtype == torch.bfloat16:  # which F.rms_norm computes in float32
            return F.rms_norm(x, self.scale.shape, self.scale, self.norm_eps)
        size = torch.linalg.vector_norm(x, 2, -1, True)
        inverse = torch.addcmul(self.eps, size, size, value=self.share).rsqrt_()
        return torch.mul(x, inverse).mul_(self.scale)


class BlockWeights(NamedTuple):
    """The packed weights of a block's four products. ``heads``: the weights that compute queries, keys and values.
    ``out``: the output weight of attention. ``wide``: the weights gate and up of the feed-forward. ``down``: its output
    weight.
    """

    heads: T
    out: T
    wide: T
    down: T


class LeanBlock:
    """Computes a block in few operators, in passes without gradients. :func:`packed_weights` says for which blocks this
    is possible. ``block``: the block. ``weights``: its packed weights.
    """

    def __init__(self, block: Block, weights: BlockWeights) -> None:
        attention = block.attention
        assert isinstance(attention, Attention)
        self.attention, self.ffn, self.weights = attention, block.ffn, weights
        self.first, self.second = LeanNorm(block.attention_norm), LeanNorm(block.ffn_norm)  # fmt: skip
        self.width, self.base, self.bias = attention.head_dim, attention.base, None
        if attention.bias:
            own = [attention.own(f"w{i}", getattr(attention, f"b{i}")) for i in "qkv"]
            self.bias = torch.cat(own).detach()
        sizes = split_of(attention, "wq", "wk", "wv").sizes
        # heads of queries, and heads that are rotated
        self.queries = sizes[0] // self.width
        self.rotated = self.queries + sizes[1] // self.width

    def __call__(self, x: T, rope: tuple[T, ...], cu_seqlens: T) -> T | None:
        """Compute the block as :meth:`weft.models.transformer.Block.forward` does, with the same arguments. Return None
        where the block must compute itself: for gradients, adapters of single texts, and passes with a promise of equal
        bits.
        """
        beside = self.attention.beside is not None or self.ffn.beside is not None
        if beside or is_invariant() or not torch.is_inference_mode_enabled():
            return None
        heads = packed_product(self.first(x), self.weights.heads)
        if self.bias is not None:
            heads.add_(self.bias)
        attended = self._attended(heads, rope, cu_seqlens)
        x = packed_sum(attended, self.weights.out, x)
        gate, up = packed_product(self.second(x), self.weights.wide).chunk(2, -1)
        return packed_sum(F.silu(gate).mul_(up), self.weights.down, x)

    def _attended(self, joined: T, rope: tuple[T, ...], cu_seqlens: T) -> T:
        """Return the input of the output projection. ``joined``: queries, keys and values of all heads, ``[batch,
        tokens, elements]``.
        """
        batch, tokens = joined.shape[:2]
        heads = joined.view(batch, tokens, -1, self.width)
        cos, sin = rope[0][self.base], rope[1][self.base]
        # in the type of the angles, so that bfloat16 is rounded once
        turned = cos.new_empty(batch, tokens, self.rotated, self.width)
        a, b = heads[:, :, : self.rotated].chunk(2, -1)
        first, second = turned.chunk(2, -1)
        torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=second).addcmul_(a, sin)
        attention, turned = self.attention, turned.to(joined.dtype)
        q, k = turned[:, :, : self.queries], turned[:, :, self.queries :]
        v = heads[:, :, self.rotated :]
        return attention.attend(q, k, v, cu_seqlens, *attention.window).flatten(2)


def split_of(module: Projections, *names: str) -> SplitProduct:
    """Return the product that replaces the weights ``names`` of ``module``."""
    product = module.products[names]
    assert isinstance(product, SplitProduct)
    return product


def is_plain(block: nn.Module) -> bool:
    """Return whether ``block`` is on one device and has softmax attention and a dense SiLU feed-forward, without
    dropout and without norms beside those before its two parts.
    """
    if type(block) is not Block or block.dropout or block.ladder:
        return False
    attention, ffn = block.attention, block.ffn
    if type(attention) is not Attention or type(ffn) is not FeedForward:
        return False
    usual = attention.mixer == "softmax" and attention.query_scale == 1
    norms = [attention.q_norm, attention.k_norm, attention.o_norm]
    norms += [block.attention_out_norm, block.ffn_out_norm]
    turned = attention.interleaved or attention.kv_index is not None
    if not usual or turned or any(norm is not None for norm in norms):
        return False
    return ffn.activate is F.silu and block.mesh.layout.world == 1


def packed_weights(block: Block) -> BlockWeights | None:
    """Return the packed weights of ``block`` if :class:`LeanBlock` can compute it, else None.

    It can compute a block on one device with softmax attention and a dense SiLU feed-forward. The block must have no
    further norms and no dropout, and its weights must be packed for oneDNN.
    """
    if not is_plain(block):
        return None
    attention, ffn = block.attention, block.ffn
    weights = []
    for module in (attention, ffn):
        for names in module.TOGETHER:
            split = module.products.get(names)
            product = split.product if isinstance(split, SplitProduct) else None
            if not isinstance(product, Packed) or not product.packed:
                return None
            weights.append(product.weight)
    return BlockWeights(*weights)


def make_lean(model: Transformer) -> None:
    """Change ``model`` so that passes without gradients compute its plain blocks in few operators (:class:`LeanBlock`).
    Only blocks whose weights are packed are changed.
    """
    for block in model.blocks.values():
        if isinstance(block, Block) and (weights := packed_weights(block)) is not None:
            block.lean = LeanBlock(block, weights)
