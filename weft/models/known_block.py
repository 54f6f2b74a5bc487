"""A block whose products with weights are known, as the passes that wrote its tokens have computed them.

The forward pass adds two of them to the residual stream. Backward computes what it needs beside products, such as norms
and attention, and then all gradients, which are written by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from weft.models.attention import attend_backward, attend_forward, join
from weft.models.fused import times
from weft.models.prompt_attention import attend_after_prompts, backward_after_prompts
from weft.models.rope import rotate
from weft.models.row_pieces import gate_gradients, gated, norm_gradients, normed_rows
from weft.models.segment_attention import AttentionPass, attend_and_differentiate
from weft.models.segments import document_segments
from weft.models.transformer import Attention, Block
from weft.models.widened import multiply

T = torch.Tensor


class BlockProducts(NamedTuple):
    """What a block's products make of a pass's tokens, ``[tokens, out]`` each: queries, keys and values of all
    ``heads`` beside each other, without biases; the output of attention ``out``; gate and up (``wide``); the output
    ``down``.
    """

    heads: T
    out: T
    wide: T
    down: T


class BlockFacts(NamedTuple):
    """What the gradients of a block depend on beside tensors that learn. ``cos``, ``sin``: of rotary embedding, ``[1,
    tokens, 1, width / 2]``; ``cu_seqlens``: boundaries of documents; ``window``: number of tokens that a token sees; 0:
    all. ``width``: elements of a head; ``eps``: constant of the norms.
    """

    cos: T
    sin: T
    cu_seqlens: T
    window: int
    width: int
    eps: float


class KnownBlock:
    """Takes the place of ``block`` in one forward pass (:attr:`weft.models.transformer.Block.lean`). The block must be
    plain (:func:`weft.models.lean_block.is_plain`). ``take``: gives the products of the pass's tokens.
    """

    def __init__(self, block: Block, take: Callable[[], BlockProducts]) -> None:
        self.block, self.take = block, take

    def __call__(self, x: T, rope: tuple[T, ...], cu_seqlens: T) -> T:
        """Return the output of the block, of the shape of ``x`` ``[1, tokens, embed]``. The arguments are those of
        :meth:`weft.models.transformer.Block.forward`. Later passes compute the block themselves.
        """
        block = self.block
        block.lean = None
        attention, ffn = block.attention, block.ffn
        assert isinstance(attention, Attention)
        biases = [attention.bq, attention.bk, attention.bv] if attention.bias else []
        weights = [
            block.attention_norm.scale, attention.wq, attention.wk, attention.wv, attention.wo,
            block.ffn_norm.scale, ffn.gate, ffn.up, ffn.down, *biases,
        ]  # fmt: skip
        cos, sin = rope[0][attention.base], rope[1][attention.base]
        facts = BlockFacts(
            cos, sin, cu_seqlens, *(attention.window or (0,)), attention.head_dim, block.ffn_norm.eps
        )  # fmt: skip
        y: T = _KnownBlock.apply(x, self.take(), facts, *weights)
        return y


class _KnownBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, products, facts, *weights):  # type: ignore[no-untyped-def]
        middle = x + products.out
        ctx.save_for_backward(x, middle, products.heads, products.wide, *weights)
        ctx.facts = facts
        return middle + products.down

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, middle, heads, wide, *weights = ctx.saved_tensors
        facts, learns = ctx.facts, ctx.needs_input_grad[3:]
        grad = grad[0].contiguous()
        of_x, of_weights = _gradients(grad, x[0], middle[0], heads, wide, weights, facts, learns)  # fmt: skip
        return of_x[None], None, None, *of_weights


def _gradients(
    grad: T,
    x: T,
    middle: T,
    heads: T,
    wide: T,
    weights: list[T],
    facts: BlockFacts,
    learns: tuple[bool, ...],
) -> tuple[T, list[T | None]]:
    """Return the gradient of a block's input ``x`` ``[tokens, embed]``, and of each of its weights; None for one that
    does not learn.

    ``grad``: the gradient of the block's output; ``middle``: the residual stream between its two parts; ``heads``,
    ``wide``: products of the block; all ``[tokens, ...]``.
    """
    first, wq, wk, wv, wo, second, w_gate, w_up, w_down = weights[:9]
    # the feed-forward
    active = gated(wide)
    of_gate, of_up = gate_gradients(wide, times(grad, w_down.t()))
    normed = normed_rows(middle, second, facts.eps)
    of_normed = times(of_up, w_up.t(), plus=times(of_gate, w_gate.t()))
    of_ffn = [
        multiply(each.t(), rows) if learn else None
        for each, rows, learn in zip(
            (of_gate, of_up, grad), (normed.rows, normed.rows, active), learns[6:9], strict=True
        )
    ]  # fmt: skip
    of_middle = norm_gradients(of_normed, middle, second, normed.inverse, grad)
    # attention
    sizes = [len(wq), len(wk), len(wv)]
    bias = torch.cat(weights[9:]) if weights[9:] else None
    of_rows = times(of_middle.rows, wo.t())
    attended = _differentiated(heads, bias, of_rows, sizes, facts)
    of_out = multiply(of_middle.rows.t(), attended.out) if learns[4] else None
    normed = normed_rows(x, first, facts.eps)
    of_normed = times(attended.heads, torch.cat([wq, wk, wv]).t())
    of_weights: list[T | None] = [None] * 3
    if any(learns[1:4]):
        of_weights = [*multiply(attended.heads.t(), normed.rows).split(sizes)]
    of_x = norm_gradients(of_normed, x, first, normed.inverse, of_middle.rows)
    of_biases = attended.heads.sum(0).split(sizes)[: len(weights) - 9]
    scales = [
        each.scale if learn else None
        for each, learn in ((of_x, learns[0]), (of_middle, learns[5]))
    ]
    rest = [of_out, scales[1], *of_ffn, *of_biases]
    return of_x.rows, [scales[0], *of_weights, *rest]


def _differentiated(
    heads: T, bias: T | None, grad: T, sizes: list[int], facts: BlockFacts
) -> AttentionPass:
    """Compute attention from the products ``heads`` ``[tokens, elements]``, and the gradient by them.

    ``bias``: what is added to the products; ``grad``: gradient of the result, ``[tokens, heads * width]``; ``sizes``:
    elements of queries, keys and values.
    """
    cos, sin, cu_seqlens, window, width, _ = facts
    if not window:
        both = attend_and_differentiate(heads, bias, cos, sin, grad, sizes, cu_seqlens)
        if both is not None:
            return both
    heads = heads if bias is None else heads + bias
    q, k, v = (x.unflatten(1, (-1, width)) for x in heads.split(sizes, 1))
    q, k = (rotate(each[None], cos, sin)[0] for each in (q, k))
    v, grad = v.contiguous(), grad.unflatten(1, (-1, width))
    if cu_seqlens.dim() > 1:
        out, lse = attend_after_prompts(attend_forward, join, q, k, v, cu_seqlens)
        grads = backward_after_prompts(attend_backward, grad, q, k, v, out, lse, cu_seqlens)  # fmt: skip
    else:
        segments = document_segments(cu_seqlens, window)
        out, lse = attend_forward(q, k, v, segments)
        grads = attend_backward(grad, q, k, v, out, lse, segments)
    turned = (rotate(each[None], cos, -sin)[0] for each in grads[:2])
    of_heads = torch.cat([each.flatten(1) for each in (*turned, grads[2])], 1)
    return AttentionPass(out.flatten(1), of_heads)
