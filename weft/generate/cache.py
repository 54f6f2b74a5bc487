"""Attention that remembers: what stands in for a layer's ``attend`` while a model reads a text piece by piece.

A block calls ``attend(q, k, v, cu_seqlens)``, with its window if it has one, and does not know whether earlier tokens
are remembered; training never does. Generation makes one such object per layer and batch of requests
(:func:`layer_caches`) and lets the layers use them for the time of one forward pass (:func:`attending`). A softmax
layer remembers keys and values, a latent one what they are made from, a linear one its state. Anything else with this
signature can take their place: keys and values of several ranks (:mod:`weft.generate.spread`), or a view of one layer
of a paged pool. Keys arrive already rotated to their positions, which the caller counts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from weft.models.attention import Attend, repeat_heads, wide
from weft.models.latent import LatentAttention
from weft.models.linear_attention import forward, local_state, state_to_state, state_to_tokens
from weft.models.transformer import Attention, Block, T, Transformer

#: Tokens by which stored keys and values grow at least, so that they are seldom copied.
ROOM = 256


def attention_layers(model: Transformer) -> list[Attention | LatentAttention]:
    """The attention of every block, first block first."""
    return [block.attention for block in model.blocks.values() if isinstance(block, Block)]


def layer_caches(model: Transformer) -> list[Attend]:
    """Empty caches for one batch of requests, one per layer as its mixer needs it."""

    def cache(layer: Attention | LatentAttention) -> Attend:
        if isinstance(layer, LatentAttention):
            return LatentCache()
        return KeyValueCache() if layer.mixer == "softmax" else StateCache(layer.decay)

    return [cache(layer) for layer in attention_layers(model)]


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

    def append(self, *new: T) -> tuple[T, ...]:
        """Keep ``new``, ``[rows, new tokens, kv_heads, head_dim]`` each; returns those of all tokens."""
        first, end = new[0], self.tokens + new[0].shape[1]
        if self.store is None or end > self.store.shape[2]:
            grown = first.new_empty(len(new), len(first), end + max(ROOM, self.tokens // 8), *first.shape[2:])
            if self.store is not None:
                grown[:, :, : self.tokens] = self.store[:, :, : self.tokens]
            self.store = grown
        kept = self.store[:, :, :end].unbind()
        for all_tokens, each in zip(kept, new, strict=True):
            all_tokens[:, self.tokens :] = each
        self.tokens = end
        return kept


class KeyValueCache:
    """Softmax attention of new tokens to themselves and to all earlier ones of their row (one document per row)."""

    def __init__(self) -> None:
        self.past = KeyValues()

    def __call__(self, q: T, k: T, v: T, cu_seqlens: T, window: int = 0) -> T:
        """``[rows, new tokens, heads or kv_heads, head_dim]``; what rows remember says where documents begin."""
        keys, values = self.past.append(k, v)
        return attend_all(q, keys, values, window)


class LatentCache:
    """Of latent attention (:mod:`weft.models.latent`): what all keys and values are made from, once for all heads."""

    def __init__(self) -> None:
        self.past = KeyValues()

    @property
    def tokens(self) -> int:
        return self.past.tokens

    def keep(self, latents: T) -> None:
        """Remember ``latents``, ``[rows, new tokens, 1, kv_rank + rope_dim]``."""
        self.past.append(latents)

    def __call__(self, q: T, k: T, v: T, cu_seqlens: T, window: int = 0) -> T:
        """``k`` are the new tokens' latent vectors, and ``v`` their first elements, which are not kept twice."""
        (latents,) = self.past.append(k)
        return attend_all(q, latents, latents[..., : v.shape[-1]], window)


def attend_all(q: T, k: T, v: T, window: int) -> T:
    """Attention of the last tokens, ``q``, of rows to all of theirs: ``[rows, tokens, heads or kv_heads, width]``."""
    past, keys, values = k.shape[1], k.transpose(1, 2), v.transpose(1, 2)
    if window:  # what no query sees any more
        first = max(0, past - q.shape[1] - window + 1)
        keys, values = keys[:, :, first:], values[:, :, first:]
    if q.shape[1] == 1:
        # One token sees every key. The query heads that share a key head can then be so many queries of it, and
        # the keys are read once for all of them: [rows, kv_heads, group, width].
        shared = q.reshape(q.shape[0], k.shape[2], -1, q.shape[3])
        return F.scaled_dot_product_attention(shared, keys, values).reshape(*q.shape[:3], -1)
    # Aligned at the last key: `is_causal` would align at the first one, and hide the past.
    mask: T = causal_lower_right(q.shape[1], past)
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
