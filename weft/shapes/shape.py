"""A model as the few numbers that time and memory depend on: read by flops, planner, balancer and partition."""

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

#: Endings of the names of attention's output projections.
OUTPUT_PROJECTIONS = (".wo", ".wo.codes")


class ForwardFlops(NamedTuple):
    """Flops per token of the forward pass: of the embedding, of one layer, and of the output layer with the loss."""

    embedding: Num
    layer: Num
    output: Num


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder, from which plans compute memory and time.

    Each attribute is a number or, for many cases at once, an array. Sizes of a layer are means over the layers.

    Attributes:
        ``layers``, ``embed``, ``vocab``: number of layers, width of the model, tokens in the vocabulary.
        ``heads``, ``kv_heads``, ``head_dim``: query heads, key/value heads, and width of a head's values.
        ``ffn``: hidden width of dense feed-forwards.
        ``dense_weights``: elements per layer of the matrices of attention, dense and shared feed-forward and router.
        ``expert_weights``, ``chosen_weights``: elements per layer of all experts, and of those that a token is routed
            to.
        ``extras``: elements per layer of all other weights.
        ``outside``: elements of parameters in no layer, without embedding and output layer.
        ``qkv_width``: width of the projections into attention.
        ``qk``: width of a head's queries and keys; 0: equal to that of its values.
        ``gated``: 1 for SwiGLU (three matrices), 0 for two matrices.
        ``tied``: 1 if the output layer is the embedding.
        ``experts``, ``top_k``: experts in each layer that has any, and how many of them a token is routed to.
        ``expert_ffn``, ``shared_ffn``: hidden width of an expert, and of all shared experts together.
        ``moe_layers``: number of layers with experts.
        ``window``, ``windowed``: tokens that attention with a window sees, and share of the layers that have it.
        ``clamped``: 1 if experts have biases and a clamped gate (GPT-OSS), which grouped kernels do not fuse.
        ``linear``: share of the layers with linear attention.
        ``ladder``: share of the layers whose sums over ``tp`` travel while the next part computes.
        ``frozen``, ``adapters``: 1 if only adapters are trained (LoRA, 2106.09685), and their elements per layer.
        ``stored``: bytes per element of a layer's weights, less than 2 if quantised.
        ``cached``: elements per token and layer in the generation cache; 0: keys and values of all heads.
        ``hottest``: load of the busiest expert of a layer, as a multiple of the mean.
        ``critic``: size of a critic with layers of its own that is trained beside the model in every step, as a
            multiple of the model's layers; 0: there is none on the same ranks.
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
    ladder: Num = 0
    frozen: Num = 0
    adapters: Num = 0
    stored: Num = 2
    cached: Num = 0
    hottest: Num = 1
    critic: Num = 0

    @property
    def score_dim(self) -> Num:
        """Mean of a head's key width and value width, from which the cost of attention scores follows."""
        return (self.qk + (self.qk == 0) * self.head_dim + self.head_dim) / 2

    def reach(self, seq: Num) -> Num:
        """Return twice the number of tokens to which a token attends, as the mean over tokens and layers.

        ``seq``: tokens of a sequence. With full causal attention in all layers the result is ``seq``, because a token
        attends to half the sequence on average. A layer of linear attention counts as if each token attended to
        ``head_dim`` tokens.
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
        """Return how many hidden units of feed-forwards a token goes through in a layer, as the mean over the layers.

        ``load``: the load of the routed experts, as a multiple of the mean load.
        """
        moe = self.top_k * load * self.expert_ffn + self.shared_ffn
        return self.dense_share * self.ffn + (1 - self.dense_share) * moe

    @property
    def active_weights(self) -> Num:
        """Number of a layer's weights that a token is multiplied with, as the mean over the layers."""
        return self.dense_weights + self.chosen_weights

    @property
    def table(self) -> Num:
        """Number of elements of the embedding: vocabulary times width."""
        return self.vocab * self.embed

    @property
    def parameters(self) -> Num:
        """Number of all parameters of the model, experts included."""
        layer = self.dense_weights + self.expert_weights + self.extras
        return self.layers * layer + (2 - self.tied) * self.table + self.outside

    @property
    def active_parameters(self) -> Num:
        """Number of the parameters with which a token is computed: all parameters except those of the experts to which
        it is not routed.
        """
        unused = self.expert_weights - self.chosen_weights
        return self.parameters - self.layers * unused

    @property
    def cache_bytes(self) -> Num:
        """Bytes of the generation cache per token, over all layers, with two bytes per element."""
        keys_and_values = (self.cached == 0) * 2 * self.kv_heads * self.head_dim
        return 2 * self.layers * (self.cached + keys_and_values)

    def busiest(self, ranks: Num) -> Num:
        """Return the expected load of the rank that holds the busiest expert, as a multiple of the ranks' mean load.

        ``ranks``: the number of ranks over which the experts are distributed.
        """
        here = np.maximum(self.experts / ranks, 1)
        others = np.maximum(self.experts - 1, 1)
        return (
            self.hottest + (here - 1) * (self.experts - self.hottest) / others
        ) / here

    def rows_sent(self, ranks: Num) -> dict[str, Num]:
        """Return the mean number of rows of width ``embed`` sent per token, for each way to dispatch tokens to experts.

        The result is a dict with the keys ``all-to-all``, ``per-rank`` and ``all-gather``. Each number counts one
        exchange: tokens to experts in forward. Three more exchanges send as many rows each: the results back to the
        tokens in forward, and two in backward. Rows that stay on their rank, a share of ``1 / ranks``, are counted too.

        ``ranks``: the number of ranks over which experts are distributed. A token is taken to be routed to all experts
        with equal probability. With ``per-rank`` and ``all-gather`` the ids and weights that are also sent count as
        part of a row. If there are fewer experts than ranks, each expert is cut in pieces.
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
        """Return the fraction of a layer's forward flops that experts chosen by a router take, as the mean over the
        layers.

        ``seq``: tokens of a sequence.
        """
        return 2 * self.chosen_weights / self.forward_flops(seq).layer

    def flops_per_token(self, seq: Num, causal: float = 0.5) -> Num:
        """Return the model flops of forward and backward per token: three times the forward's (Chowdhery et al. 2022).

        ``seq``: tokens of a sequence. ``causal``: the share of the attention scores that counts. 0.5 leaves out the
        half that causal attention masks, and 1 counts all scores. Recomputation does not count. If only adapters are
        trained, weights count two times instead of three, as frozen weights have no gradient.
        """
        attention = 4 * self.heads * self.score_dim * self.reach(seq) * causal
        weights = self.layers * self.active_weights + self.table
        return 2 * (3 - self.frozen) * weights + 3 * self.layers * (
            attention + 2 * self.adapters
        )

    def forward_flops(self, seq: Num) -> ForwardFlops:
        """Return the flops per token of the forward pass, for sequences of ``seq`` tokens; masked scores count too.

        A look-up of the embedding has no products, but moves bytes: it counts as 8 flops per element.
        """
        attention = 2 * self.heads * self.score_dim * self.reach(seq)
        layer = 2.0 * self.active_weights + attention
        return ForwardFlops(8.0 * self.embed, layer, 2.0 * self.table)


def shape_of(model: ModelShape, vocab: int = 0) -> Shape:
    """Return the :class:`Shape` of a recipe's model, from which plans compute memory and time.

    ``vocab``: size of the tokenizer, if the model leaves it open. Raises :class:`UsageError` for a plugin's model.
    """
    if own := model.architecture:
        numbers: Shape = own.numbers(model)
        return numbers
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
        and not row.name.endswith(OUTPUT_PROJECTIONS)
    )
    adapters = sum(row.numel for row in table if row.kind == "adapter")
    return Shape(
        layers,
        model.embed,
        model.heads,
        model.kv_heads,
        model.value_dim if latent else model.head_dim,
        (model.ffn or 0) + model.small_ffn,
        model.vocab or vocab,
        dense_weights=(products["matrix"] + products["stored"]) / layers,
        expert_weights=sizes["expert"] / layers,
        chosen_weights=products["expert"] / layers,
        extras=sizes["vector"] / layers,
        outside=(1 + scores + model.value_head) * model.embed,
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
        ladder=sum(map(model.is_ladder, range(layers))) / layers,
        frozen=int(model.adapter is not None),
        adapters=adapters / layers,
        stored=sizes["stored"] / products["stored"] if sizes["stored"] else 2,
        cached=model.kv_rank + model.rope_dim if latent else 0,
    )


def shape_of_sizes(layers: float, **sizes: Any) -> Shape:
    """Return the :class:`Shape` of a decoder whose layers are all alike.

    ``layers``: the number of layers; ``sizes``: fields of :class:`UntrainableShape`.
    """
    return replace(shape_of(untrainable(layers=1, **sizes)), layers=layers)


def flops_per_token(
    model: ModelShape, vocab: int, seq: int, freeze: Sequence[str] = ()
) -> float:
    """Return the model flops of forward and backward per token for a model with frozen parameters.

    ``vocab``: size of the tokenizer, if the model leaves it open; ``seq``: tokens of a sequence; ``freeze``: patterns
    of the names of frozen parameters. A frozen weight has no gradient, and nothing is propagated below the first
    parameter that is trained. If all parameters are trained, the result is :meth:`Shape.flops_per_token`.
    """
    rows = parameters(model, vocab)
    learning = {p.name for p in rows if learns(p.name, model, freeze)}
    lowest = min((p.step for p in rows if p.name in learning), default=len(rows) * 2)
    attention = table = total = 0.0
    if not model.is_plugin:
        shape = shape_of(model, vocab)
        # forward, the causal half
        attention = 2 * float(shape.heads * shape.score_dim * shape.reach(seq))
        table = float(shape.table)
    for p in rows:
        total += 2 * p.products * (1 + (p.name in learning) + (p.step > lowest))
        if p.name.endswith(OUTPUT_PROJECTIONS):
            total += attention * (1 + 2 * (p.step > lowest))
    if model.tied:  # the table is the output layer, too
        total += 2 * table * (1 + bool(learning) + ("embedding.table" in learning))
    return total
