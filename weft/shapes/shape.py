"""The model as the few numbers that time and memory depend on: read by flops, planner, balancer and partition."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from weft.errors import UsageError
from weft.recipe import ModelShape
from weft.shapes.parameters import learns, parameters
from weft.shapes.untrainable import UntrainableShape, has_gate, untrainable

#: A number, or an array with one entry per row or candidate: everything here works on both without change.
Num = Any


class ForwardFlops(NamedTuple):
    """Flops per token of the forward passes of the embedding, one layer, and the output layer with the loss."""

    embedding: Num
    layer: Num
    output: Num


@dataclass(frozen=True)
class Shape:
    """A decoder; every field may be an array with one entry per row.

    Weights are the table's (:func:`shape_of`), as means over the layers: ``dense_weights`` are the matrices of
    attention, dense and shared feed-forward and router, ``expert_weights`` those of all experts, ``chosen_weights``
    those that a token goes through, ``extras`` all else. ``outside``: parameters of no layer, without tables.
    ``qkv_width``: of the projections into attention. ``qk``: width of a head's queries and keys, if it is not that of
    its values. ``gated``: 1 for SwiGLU (three matrices), 0 for two. ``experts`` of width ``expert_ffn``, ``top_k`` of
    them per token, and a shared one of ``shared_ffn``, in ``moe_layers`` of the layers. ``windowed``: share of the
    layers whose attention reaches back ``window`` tokens. ``clamped``: 1 if experts have biases and a clamped gate
    (GPT-OSS), which grouped kernels do not fuse. ``linear``: share of the layers with linear attention, whose tokens
    are added to a state and read from it. ``cached``: numbers that generation keeps of a token in a layer, if not the
    keys and values of all heads. ``hottest``: how often the busiest expert of a layer is chosen, as a multiple of the
    mean. ``frozen`` 1: only adapters learn, of ``adapters`` weights per layer (LoRA, 2106.09685), and the weights of
    layers take ``stored`` bytes each.
    """

    layers: Num
    embed: Num
    heads: Num
    kv_heads: Num
    head_dim: Num
    ffn: Num
    vocab: Num
    dense_weights: Num
    expert_weights: Num
    chosen_weights: Num
    extras: Num
    outside: Num
    qkv_width: Num
    qk: Num = 0
    gated: Num = 1
    tied: Num = 0
    experts: Num = 0
    top_k: Num = 0
    expert_ffn: Num = 0
    shared_ffn: Num = 0
    moe_layers: Num = 0
    window: Num = 0
    windowed: Num = 0
    clamped: Num = 0
    linear: Num = 0
    frozen: Num = 0
    adapters: Num = 0
    stored: Num = 2
    cached: Num = 0
    hottest: Num = 1

    @property
    def score_dim(self) -> Num:
        """Mean of the widths of keys and values per head."""
        return (self.qk + (self.qk == 0) * self.head_dim + self.head_dim) / 2

    def reach(self, seq: Num) -> Num:
        """Twice the tokens that a token attends to, as the mean over the layers: ``seq`` if all of them are full.

        A state of linear attention costs as much as attending to as many tokens as a head is wide.
        """
        short = np.minimum(seq, 2 * self.window)
        return (
            seq
            + self.windowed * (short - seq)
            + self.linear * (2 * self.head_dim - seq)
        )

    @property
    def dense_share(self) -> Num:
        """Share of the layers whose feed-forward is dense."""
        return 1 - self.moe_layers / self.layers

    def inner_width(self, load: Num = 1) -> Num:
        """Hidden units of the feed-forwards that a token goes through, averaged over the layers; ``load``: of experts,
        as a multiple of the mean."""
        moe = self.top_k * load * self.expert_ffn + self.shared_ffn
        return self.dense_share * self.ffn + (1 - self.dense_share) * moe

    @property
    def active_weights(self) -> Num:
        """Per layer, what a token is multiplied with."""
        return self.dense_weights + self.chosen_weights

    @property
    def table(self) -> Num:
        return self.vocab * self.embed

    @property
    def parameters(self) -> Num:
        """All parameters."""
        layer = self.dense_weights + self.expert_weights + self.extras
        return self.layers * layer + (2 - self.tied) * self.table + self.outside

    @property
    def active_parameters(self) -> Num:
        """The parameters that a token passes through: all but the experts that it does not choose."""
        unused = self.expert_weights - self.chosen_weights
        return self.parameters - self.layers * unused

    @property
    def cache_bytes(self) -> Num:
        """What generation keeps of a token, in two bytes per number."""
        return (
            2
            * self.layers
            * (self.cached + (self.cached == 0) * 2 * self.kv_heads * self.head_dim)
        )

    def busiest(self, ranks: Num) -> Num:
        """The load of the rank with the busiest expert, of so many ranks with experts, as a multiple of the mean."""
        here, others = (
            np.maximum(self.experts / ranks, 1),
            np.maximum(self.experts - 1, 1),
        )
        return (
            self.hottest + (here - 1) * (self.experts - self.hottest) / others
        ) / here

    def rows_sent(self, ranks: Num) -> dict[str, Num]:
        """How many rows, as wide as the model, each kind of ``layout.dispatch`` sends for a token, on average.

        Combining, and both in backward, send as many. All choices of experts are taken to be equally likely; a share
        ``1 / ranks`` of the rows stays on its rank. Kinds that add up the results of experts where these are also send
        ids and weights. Experts that are fewer than the ranks are cut in pieces.
        """
        pieces = np.maximum(1, ranks // np.maximum(self.experts, 1))
        experts, k = self.experts * pieces, self.top_k * pieces
        none_there = np.ones(())  # the chance that none of the k is on a certain rank
        for i in range(int(np.max(k))):
            left = np.clip(
                (experts - experts / ranks - i) / np.maximum(experts - i, 1), 0, 1
            )
            none_there = none_there * np.where(i < k, left, 1.0)
        more = 1 + 3 * k / (4 * self.embed)
        return {
            "all-to-all": k,
            "per-rank": more * ranks * (1 - none_there),
            "all-gather": more * ranks,
        }

    def expert_share(self, seq: Num) -> Num:
        """Share of a layer's forward that chosen experts compute, as the mean over the layers."""
        return 2 * self.chosen_weights / self.forward_flops(seq).layer

    def flops_per_token(self, seq: Num, causal: float = 0.5) -> Num:
        """Model flops of forward and backward per token (Chowdhery et al. 2022): three times the forward's products.

        A causal token sees half of the others on average; ``causal`` 1 counts the masked half too. Recomputation does
        not count. Frozen weights have no gradient.
        """
        attention = 4 * self.heads * self.score_dim * self.reach(seq) * causal
        weights = self.layers * self.active_weights + self.table
        return 2 * (3 - self.frozen) * weights + 3 * self.layers * (
            attention + 2 * self.adapters
        )

    def forward_flops(self, seq: Num) -> ForwardFlops:
        """Forward flops per token of the embedding, one layer and the output layer with its loss.

        A look-up moves bytes instead: a few flops' worth per element.
        """
        attention = 2 * self.heads * self.score_dim * self.reach(seq)
        layer = 2.0 * self.active_weights + attention
        return ForwardFlops(8.0 * self.embed, layer, 2.0 * self.table)


def shape_of(model: ModelShape, vocab: int = 0) -> Shape:
    """The numbers of a recipe's model; ``vocab``: of the tokenizer, if the model leaves it to that."""
    if model.kind:
        raise UsageError(f"what is inside of a plugin's model ({model.kind!r}) is not known, so it cannot be planned; "
                         "write the [layout], of dp and shard")  # fmt: skip
    layers, mixtures = model.layers, model.mixtures
    experts = sum(mixtures.values()) / len(mixtures) if mixtures else 0
    linear = sum(model.mixer_of(layer) != "softmax" for layer in range(layers))
    windowed = sum(model.window_of(layer) > 0 for layer in range(layers))
    scores, latent = model.output == "score", bool(model.kv_rank)
    table = parameters(model, vocab)
    inside = [row for row in table if row.name.startswith("blocks.")]
    products, sizes = Counter[str](), Counter[str]()
    for row in inside:
        products[row.kind] += row.products
        sizes[row.kind] += row.numel
    into_attention = sum(
        row.products
        for row in inside
        if ".attention." in row.name
        and row.kind in ("matrix", "stored")
        and not row.name.endswith((".wo", ".wo.codes"))
    )
    adapters = sum(row.numel for row in table if row.kind == "adapter")
    return Shape(
        layers,
        model.embed,
        model.heads,
        model.kv_heads,
        model.value_dim if latent else model.head_dim,
        model.ffn or 0,
        model.vocab or vocab,
        dense_weights=(products["matrix"] + products["stored"]) / layers,
        expert_weights=sizes["expert"] / layers,
        chosen_weights=products["expert"] / layers,
        extras=sizes["vector"] / layers,
        outside=(1 + scores) * model.embed,
        qkv_width=into_attention / model.embed / layers,
        qk=model.score_width if latent else 0,
        gated=int(has_gate(model)),
        tied=int(model.tied or scores),  # a score has no table
        experts=experts,
        top_k=model.experts_per_token if mixtures else 0,
        expert_ffn=model.expert_ffn or 0,
        shared_ffn=model.shared_experts * (model.expert_ffn or 0),
        moe_layers=len(mixtures),
        window=model.window,
        windowed=windowed / layers,
        clamped=int(isinstance(model, UntrainableShape) and model.clamped),
        linear=linear / layers,
        frozen=int(model.adapter is not None),
        adapters=adapters / layers,
        stored=sizes["stored"] / products["stored"] if sizes["stored"] else 2,
        cached=model.kv_rank + model.rope_dim if latent else 0,
    )


def shape_of_sizes(layers: float, **sizes: Any) -> Shape:
    """The numbers of a decoder whose ``layers`` are alike, from fields of :class:`UntrainableShape`."""
    return replace(shape_of(untrainable(layers=1, **sizes)), layers=layers)


def flops_per_token(
    model: ModelShape, vocab: int, seq: int, freeze: Sequence[str] = ()
) -> float:
    """Model flops of forward and backward per token; a frozen weight has no gradient, and below all that learns nothing
    is propagated: a forward alone, if nothing learns. If all learns, that is :meth:`Shape.flops_per_token`: three times
    the forward's."""
    rows = list(parameters(model, vocab))
    learning = {p.name for p in rows if learns(p.name, model, freeze)}
    lowest = min((p.step for p in rows if p.name in learning), default=len(rows) * 2)
    attention, table, total = 0.0, 0.0, 0.0
    if not model.kind:
        shape = shape_of(model, vocab)
        # forward, the causal half
        attention = 2 * float(shape.heads * shape.score_dim * shape.reach(seq))
        table = float(shape.table)
    for p in rows:
        total += 2 * p.products * (1 + (p.name in learning) + (p.step > lowest))
        if p.name.endswith((".wo", ".wo.codes")):
            total += attention * (1 + 2 * (p.step > lowest))
    if model.tied:  # the table is the output layer, too
        total += 2 * table * (1 + bool(learning) + ("embedding.table" in learning))
    return total
