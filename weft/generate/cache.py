"""Attention that remembers: what stands in for a layer's ``attend`` while a model reads a text piece by piece.

A block calls ``attend(q, k, v, cu_seqlens)``, with its window if it has one, and does not know whether earlier tokens
are remembered; training never does. Generation makes one such object per layer and batch of requests
(:func:`layer_caches`) and lets the layers use them for the time of one forward pass (:func:`attending`). A softmax
layer remembers keys and values, a linear one its state. Anything else with this signature can take their place: keys
and values of several ranks (:mod:`weft.generate.spread`), or a view of one layer of a paged pool. Keys arrive already
rotated to their positions, which the caller counts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from weft.models.attention import repeat_heads, wide
from weft.models.linear_attention import forward, local_state, state_to_state, state_to_tokens
from weft.models.transformer import Attend, Attention, Block, T, Transformer

#: Tokens by which stored keys and values grow at least, so that they are seldom copied.
ROOM = 256


def attention_layers(model: Transformer) -> list[Attention]:
    """The attention of every block, first block first."""
    return [block.attention for block in model.blocks.values() if isinstance(block, Block)]


def layer_caches(model: Transformer) -> list[Attend]:
    """Empty caches for one batch of requests, one per layer as its mixer needs it."""
    return [
        KeyValueCache() if layer.mixer == "softmax" else StateCache(layer.decay) for layer in attention_layers(model)
    ]


@contextmanager
def attending(model: Transformer, attends: Sequence[Attend]) -> Iterator[None]:
    """In here the layers of ``model`` attend by ``attends``, and afterwards as before."""
    layers = attention_layers(model)
    before = [layer.attend for layer in layers]
    try:
        for layer, attend in zip(layers, attends, strict=True):
            layer.attend = attend
        yield
    finally:
        for layer, attend in zip(layers, before, strict=True):
            layer.attend = attend


class KeyValues:
    """Keys and values of the first ``tokens`` tokens of each row, in memory that grows by at least an eighth."""

    def __init__(self) -> None:
        self.tokens = 0
        self.store: T | None = None  # [2, rows, room, kv_heads, head_dim]

    def append(self, k: T, v: T) -> tuple[T, T]:
        """Keep ``k`` and ``v``, ``[rows, new tokens, kv_heads, head_dim]``; returns those of all tokens."""
        end = self.tokens + k.shape[1]
        if self.store is None or end > self.store.shape[2]:
            grown = k.new_empty(2, k.shape[0], end + max(ROOM, self.tokens // 8), *k.shape[2:])
            if self.store is not None:
                grown[:, :, : self.tokens] = self.store[:, :, : self.tokens]
            self.store = grown
        keys, values = self.store[:, :, :end].unbind()
        keys[:, self.tokens :], values[:, self.tokens :] = k, v
        self.tokens = end
        return keys, values


class KeyValueCache:
    """Softmax attention of new tokens to themselves and to all earlier ones of their row (one document per row)."""

    def __init__(self) -> None:
        self.past = KeyValues()

    def __call__(self, q: T, k: T, v: T, cu_seqlens: T, window: int = 0) -> T:
        """``[rows, new tokens, heads or kv_heads, head_dim]``; what rows remember says where documents begin."""
        keys, values = (x.transpose(1, 2) for x in self.past.append(k, v))
        if window:  # what no query sees any more
            first = max(0, keys.shape[2] - q.shape[1] - window + 1)
            keys, values = keys[:, :, first:], values[:, :, first:]
        if q.shape[1] == 1:
            # One token sees every key. The query heads that share a key head can then be so many queries of it, and
            # the keys are read once for all of them: [rows, kv_heads, group, head_dim].
            shared = q.reshape(q.shape[0], k.shape[2], -1, q.shape[3])
            return F.scaled_dot_product_attention(shared, keys, values).reshape(q.shape)
        # Aligned at the last key: `is_causal` would align at the first one, and hide the past.
        mask: T = causal_lower_right(q.shape[1], self.past.tokens)
        if window:
            new = torch.arange(q.shape[1], device=q.device)[:, None] + keys.shape[2] - q.shape[1]
            old = torch.arange(keys.shape[2], device=q.device)
            mask = (old <= new) & (old > new - window)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask, enable_gqa=True)
        return out.transpose(1, 2)


class StateCache:
    """Linear attention of new tokens after those that a state sums up (the recurrent form; one document per row).

    ``decay``: logarithms, one per head.
    """

    def __init__(self, decay: Sequence[float]) -> None:
        self.decay, self.tokens = decay, 0
        self.state: T | None = None  # [rows, heads, head_dim, head_dim]

    def __call__(self, q: T, k: T, v: T, cu_seqlens: T) -> T:
        """``[rows, new tokens, heads or kv_heads, head_dim]``."""
        dtype, group, count = wide(q.dtype), q.shape[2] // k.shape[2], q.shape[1]
        decay = torch.tensor(self.decay, dtype=dtype, device=q.device)
        positions = torch.arange(self.tokens, self.tokens + count, device=q.device).expand(q.shape[0], -1)
        heads_first = (q * q.shape[-1] ** -0.5, repeat_heads(k, group), repeat_heads(v, group))
        qs, ks, vs = (x.to(dtype).transpose(1, 2) for x in heads_first)
        out, state = forward(qs, ks, vs, positions, decay), local_state(ks, vs, positions, decay)
        if self.state is not None:
            out = out + (qs * state_to_tokens(positions, decay)) @ self.state
            state = state + self.state * state_to_state(positions, decay)
        self.state, self.tokens = state, self.tokens + count
        return out.transpose(1, 2).to(q.dtype)
