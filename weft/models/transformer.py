"""One decoder-only transformer, written for one device; Llama, Mistral, Qwen and Gemma 3 are settings of it.

Modules name the dimensions of their parameters (:meth:`Module.weight`), and the mesh decides which shard of each
parameter this rank holds. Ranks exchange data only at ``gather_tokens`` / ``scatter_tokens`` (into and out of the norm
regions) and inside ``attend``; on one device these are identities. Shapes below are those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from weft.layout.boundary import gather_tokens, scatter_tokens
from weft.layout.dims import Logical
from weft.layout.placement import cut_range
from weft.models.attention import Attend, local_attention
from weft.models.drawing import drawing
from weft.models.feed_forward import FeedForward
from weft.models.fused import project
from weft.models.hooks import NO_HOOKS, Hooks
from weft.models.invariant import is_invariant
from weft.models.loss import linear_cross_entropy
from weft.models.module import Module, Norm
from weft.models.projections import Projections
from weft.models.rope import angles, frequencies, rotate, score_scales
from weft.models.widened import is_widened
from weft.shapes.parameters import (
    ROWS,
    VALUE_HEAD,
    Table,
    layer_table,
    outer_table,
    row_tokens,
)

if TYPE_CHECKING:
    from weft.data.batch import Batch
    from weft.layout.mesh import Mesh
    from weft.models.experts import EarlyMixture, Mixture
    from weft.models.hooks import Stages
    from weft.models.ladder import Stream
    from weft.models.latent import LatentAttention
    from weft.models.routed_depth import DuoFeedForward
    from weft.models.router import Loads, RouterPass
    from weft.models.token_parts import Enter, LayerRunner
    from weft.recipe import ModelShape, VocabularyWeight

T = torch.Tensor


class Embedding(Module):
    """The table of token embeddings, ``[vocab, embed]``, cut over the vocabulary.

    ``shape``: shape of the model; ``mesh``: ranks that share the model; ``table``: descriptions of the model's
    parameters.
    """

    def __init__(self, shape: ModelShape, mesh: Mesh, table: Table) -> None:
        super().__init__(mesh, table, "embedding")
        logical = self.weight("table")
        self.first, self.last = logical.box[0]
        self.vocab = shape.vocab
        self.scale = shape.embed**0.5 if shape.scaled_embedding else 1.0
        self.adapters = token_rows(shape, "embed_tokens", logical, mesh, table)
        # what finds rows of the table, [..., embed], by ids and table
        self.lookup: Callable[[T, T], T] = F.embedding
        self.scatter = scatter_tokens

    @property
    def rows(self) -> Any:
        """The rows that an adapter trains in place of the table's own; None if there are none.

        They are a :class:`weft.models.adapters.TokenRows`.
        """
        return self.adapters["table"] if len(self.adapters) else None

    @property
    def output(self) -> T:
        """This rank's rows of the table ``[vocab/tp, embed]``, for a model with tied embeddings to use as output layer.

        Rows that an adapter trains replace the table's own.
        """
        table: T = self.table if self.rows is None else self.rows.placed(self.table)
        return table

    def forward(self, tokens: T) -> T:
        """Map token ids ``[batch, seq]`` to embeddings ``[batch, seq/tp, embed]``.

        If the vocabulary is cut over ``tp``, each rank looks up the ids that it holds, and the sum over ranks is
        scattered over the tokens.
        """
        if self.last - self.first == self.vocab:
            x = self.lookup(tokens, self.table)
            x = x if self.rows is None else self.rows.looked_up(tokens, x)
            return x * self.scale if self.scale != 1 else x
        inside = (tokens >= self.first) & (tokens < self.last)
        x = self.lookup(torch.where(inside, tokens - self.first, 0), self.table)
        x = x if self.rows is None else self.rows.looked_up(tokens, x)
        x = self.scatter(x * inside[..., None], self.mesh)
        return x * self.scale if self.scale != 1 else x


def token_rows(
    shape: ModelShape, weight: VocabularyWeight, logical: Logical, mesh: Mesh,
    table: Table,
) -> nn.ModuleDict:  # fmt: skip
    """Return a dict of submodules for a vocabulary weight. If an adapter trains rows of some tokens, it has the module
    with these rows (:class:`weft.models.adapters.TokenRows`); otherwise it is empty.

    ``weight``: name of the weight, the embedding's or the output layer's. ``logical``: this rank's shard of the weight.
    ``table``: descriptions of the model's parameters.
    """
    tokens, modules = row_tokens(shape, weight), nn.ModuleDict()
    if tokens:
        from weft.models.adapters import TokenRows

        path = ROWS[weight].removesuffix(".rows")
        rows = TokenRows(tokens, logical.box[0], mesh, table, path)
        modules[path.rpartition(".")[2]] = rows
    return modules


class Attention(Projections):
    """Grouped-query attention over packed documents (Ainslie et al. 2023).

    If the layer's mixer is linear, linear attention takes the place of softmax attention. ``shape``: shape of the
    model; ``mesh``: ranks that share the model; ``layer``: index of the layer.
    """

    TOGETHER = (("wq", "wk", "wv"), ("wo",))

    def __init__(self, shape: ModelShape, mesh: Mesh, layer: int) -> None:
        path = f"blocks.{layer}.attention"
        super().__init__(shape, mesh, layer_table(shape, layer), path)
        assert shape.kv_heads and shape.head_dim
        # Query heads this rank computes, and the key/value heads they read. When these do not fall on equal cuts (fewer
        # key/value heads than ranks, odd head counts), every rank holds wk and wv whole and uses the rows it needs.
        tp, layout = mesh.size("tp"), mesh.layout
        first, last = cut_range(shape.heads, layout, ("tp",), mesh.rank("tp"))
        group = shape.heads // shape.kv_heads
        self.kv_first, self.kv_last = first // group, -(-last // group)
        self.shared_kv = tp > 1 and bool(shape.heads % tp or shape.kv_heads % tp)
        if layout.tp_shares:
            from weft.layout.shares import cuts_groups

            self.shared_kv = not cuts_groups(
                shape.heads, shape.kv_heads, layout.tp_shares
            )
        self.head_dim = shape.head_dim
        needed = [head // group - self.kv_first for head in range(first, last)]
        share = max(1, len(needed) // (self.kv_last - self.kv_first))
        even = [i // share for i in range(len(needed))]
        self.kv_index = None if needed == even else needed
        own_rows = None
        if self.shared_kv:
            own_rows = self.kv_first * shape.head_dim, self.kv_last * shape.head_dim
        self.projection("wq")
        self.projection("wk", own_rows)
        self.projection("wv", own_rows)
        self.projection("wo")
        self.bias = shape.qkv_bias
        if self.bias:
            self.weight("bq")
            self.weight("bk", self.shared_kv)
            self.weight("bv", self.shared_kv)
        self.q_norm = self.norm_of("q_norm", shape.norm_eps)
        self.k_norm = self.norm_of("k_norm", shape.norm_eps)
        self.mixer = shape.mixer_of(layer)
        self.attend: Attend = local_attention
        self.window = (shape.window_of(layer),) if shape.window_of(layer) else ()
        self.base = int(bool(shape.window_theta and shape.window_of(layer)))
        scale, rotated = score_scales(shape)
        self.query_scale = 1.0
        if shape.query_dim or rotated != 1:  # attention divides by the root of head_dim
            self.query_scale = scale * rotated * shape.head_dim**0.5
        self.interleaved = shape.rope_interleaved
        # Linear attention does not average: its outputs grow with what has been seen.
        self.o_norm = self.norm_of("o_norm", shape.norm_eps)
        if self.mixer != "softmax":
            from weft.models.linear_attention import linear_mixer, log_decay

            self.decay = log_decay(self.mixer, shape.heads)[first:last]
            self.attend = linear_mixer(mesh, self.decay)

    def forward(self, x: T, rope: tuple[T, ...], cu_seqlens: T) -> T:
        """Map ``x`` ``[batch, seq, embed]`` to this rank's part of the output, of the same shape.

        The output is the sum of the parts over the ranks of ``tp``. ``rope``: cosines and sines
        (:func:`weft.models.rope.angles`); ``cu_seqlens``: where documents begin in the flattened rows.
        """
        return self.project(self.attended(x, rope, cu_seqlens), "wo")[0]

    def attended(self, x: T, rope: tuple[T, ...], cu_seqlens: T) -> T:
        """Return the input of the output projection ``wo``, ``[batch, seq, heads/tp * head_dim]``.

        The arguments are those of :meth:`forward`.
        """
        q, k, v = self.project(x, "wq", "wk", "wv")
        if self.bias:
            q = q + self.bq
            k = k + self.own("wk", self.bk)
            v = v + self.own("wv", self.bv)
        # [batch, seq, heads/tp, head_dim]
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = (x[self.base] for x in rope[:2])
        q, k = (rotate(each, cos, sin, self.interleaved) for each in (q, k))
        if self.query_scale != 1:
            q = q * self.query_scale
        if self.kv_index is not None:
            k, v = k[:, :, self.kv_index], v[:, :, self.kv_index]
        out = self.attend(q, k, v, cu_seqlens, *self.window)
        if self.o_norm is not None:
            out = self.o_norm(out)
        return out.flatten(-2)


def attention_module(
    shape: ModelShape, mesh: Mesh, layer: int
) -> Attention | LatentAttention:
    """Return a new module for the attention of the layer with index ``layer``: latent attention if ``shape`` has it,
    else grouped-query attention.
    """
    if not shape.kv_rank:
        return Attention(shape, mesh, layer)
    from weft.models.latent import LatentAttention

    return LatentAttention(shape, mesh, layer)


def feed_forward_module(
    shape: ModelShape, mesh: Mesh, layer: int
) -> FeedForward | DuoFeedForward | Mixture:
    """Return a new module for the feed-forward of the layer with index ``layer``: dense, a pair of a big and a small
    one, or a mixture of experts, as ``shape`` says.
    """
    if shape.small_ffn:
        from weft.models.routed_depth import DuoFeedForward

        return DuoFeedForward(shape, mesh, layer)
    if not shape.experts_of(layer):
        return FeedForward(
            shape, mesh, layer_table(shape, layer), f"blocks.{layer}.ffn"
        )
    from weft.models.experts import Mixture

    return Mixture(shape, mesh, layer)


class Block(Module):
    """A pre-norm transformer block; ``shape``, the model's, may add norms after attention and feed-forward.

    ``mesh``: ranks that share the model; ``layer``: index of the block. The attribute ``recompute`` says what backward
    computes again: ``none``, ``full``, or ``selective`` (all but attention and the transfers inside it).
    """

    # computes the block in other operators, or returns None (weft.models.lean_block)
    lean: Callable[[T, tuple[T, ...], T], T | None] | None = None

    def __init__(self, shape: ModelShape, mesh: Mesh, layer: int) -> None:
        super().__init__(mesh, layer_table(shape, layer), f"blocks.{layer}")
        self.attention_norm = self.norm_of("attention_norm", shape.norm_eps)
        self.attention = attention_module(shape, mesh, layer)
        self.ffn_norm = self.norm_of("ffn_norm", shape.norm_eps)
        self.ffn = feed_forward_module(shape, mesh, layer)
        self.attention_out_norm = self.norm_of("attention_out_norm", shape.norm_eps)
        self.ffn_out_norm = self.norm_of("ffn_out_norm", shape.norm_eps)
        self.ladder, self.dropout = shape.is_ladder(layer), shape.dropout
        self.recompute = "none"
        self.kept_ops: list[torch._ops.OpOverload] = [torch.ops.weft.attention.default]

    def forward(
        self, x: Any, rope: tuple[T, ...], cu_seqlens: T, seen: RouterPass | None = None
    ) -> Any:
        """Map ``x`` ``[batch, seq/tp, embed]`` to the output of the same shape.

        ``rope``: cosines and sines (:func:`weft.models.rope.angles`); ``cu_seqlens``: where documents begin in the
        flattened rows; ``seen``: where routers record their counts; None: nowhere. In a ladder layer, ``x`` and output
        are a :class:`weft.models.ladder.LadderStream`.
        """
        if self.lean and (y := self.lean(x, rope, cu_seqlens)) is not None:
            return y
        if self.ladder:
            from weft.models.ladder import ladder_block

            return ladder_block(self, x, rope, cu_seqlens, seen)
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self.body(x, rope, cu_seqlens, seen)
        from weft.models.recompute import recomputed

        kept_ops = self.kept_ops if self.recompute == "selective" else []
        inputs = x, rope, cu_seqlens, seen
        return recomputed(self.body, kept_ops, *inputs)

    def body(
        self, x: T, rope: tuple[T, ...], cu_seqlens: T, seen: RouterPass | None
    ) -> T:
        """Compute the block; the arguments and the result are those of :meth:`forward`. That method calls this one, and
        runs it again in backward if activations are recomputed.
        """
        x, early = self.after_attention(x, rope, cu_seqlens, seen)
        with drawing(rope[2:]):
            return self.added(x, self.ffn(self.ffn_norm(x), seen, early))

    def after_attention(
        self, x: T, rope: tuple[T, ...], cu_seqlens: T, seen: RouterPass | None
    ) -> tuple[T, EarlyMixture | None]:
        """Run the block's attention. Return ``x`` plus the output of attention, and the :class:`EarlyMixture` with the
        work that the feed-forward has begun before attention, or None.
        """
        normed = self.attention_norm(x)
        y = gather_tokens(normed, self.mesh)
        early = self.ffn.early(normed, y, seen)
        with drawing(rope[2:]):
            y = scatter_tokens(self.attention(y, rope, cu_seqlens), self.mesh)
            return self.added(x, y, "attention"), early

    def added(self, x: T, y: T, part: str = "ffn") -> T:
        """Return the residual stream ``x`` plus the contribution of ``y``, the output of ``part`` (``attention`` or
        ``ffn``), after the block's norm and dropout.
        """
        return x + self.out(y, part)

    def changes(self, part: str) -> bool:
        """Return whether a norm or dropout follows the output of ``part``: ``attention`` or ``ffn``."""
        norm = self.ffn_out_norm if part == "ffn" else self.attention_out_norm
        return norm is not None or self.dropout > 0

    def out(self, y: T, part: str) -> T:
        """Return the contribution of a part to the residual stream. ``y``: output of ``part``, which is ``attention``
        or ``ffn``. The norm behind the part, if it has one, and dropout are applied to it.
        """
        norm = self.ffn_out_norm if part == "ffn" else self.attention_out_norm
        y = y if norm is None else norm(y)
        if not self.dropout:
            return y
        from weft.models.dropout import dropped_part

        return dropped_part(y, self.dropout, f"{self.path}.{part}", self.mesh)


class Transformer(Module):
    """A decoder-only model of ``shape``, or the part of it that this rank of ``mesh`` holds.

    Parameters are on the meta device until they are filled.

    Args:
        ``loss_chunk``: number of tokens whose logits are computed at a time.
        ``layers``: indices of the blocks that this rank makes, in a pipeline; None: all blocks.
        ``ends``: which of embedding, final norm and output layer (``head``) this rank makes; by default all.
        ``hooks``: functions that passes call, such as a loss in place of the model's own.
        ``pipeline``: runs the stages of this rank; None without a pipeline.
    """

    def __init__(
        self,
        shape: ModelShape,
        mesh: Mesh,
        loss_chunk: int = 1024,
        layers: Collection[int] | None = None,
        ends: Collection[str] = ("embedding", "norm", "head"),
        hooks: Hooks = NO_HOOKS,
        pipeline: Stages | None = None,
    ) -> None:
        table = outer_table(shape)
        super().__init__(mesh, table)
        self.shape, self.loss_chunk = shape, loss_chunk
        self.hooks, self.pipeline = hooks, pipeline
        # in place of the output layer's product (weft.models.products)
        self.logits: Callable[[T], T] | None = None
        # runs layers whose tokens compute in parts
        self.woven: LayerRunner | None = None
        self.gather = gather_tokens
        self.freq = frequencies(shape)
        self.loads: Loads | None = None
        if shape.mixtures:
            from weft.models.router import Loads

            self.loads = Loads(shape, mesh)
        if "embedding" in ends or (shape.tied and "head" in ends):
            self.embedding = Embedding(shape, mesh, table)
        held = range(shape.layers) if layers is None else sorted(layers)
        self.blocks = nn.ModuleDict({str(i): Block(shape, mesh, i) for i in held})
        if "norm" in ends:
            self.norm = Norm(mesh, table, "norm", shape.norm_eps)
            if shape.value_head:
                self.weight(VALUE_HEAD)
        if "head" in ends and not shape.tied:
            head = self.weight("head")
            self.outputs: Any = nn.Module()
            self.outputs.adapters = token_rows(shape, "lm_head", head, mesh, table)

    def forward(
        self,
        tokens: T,
        positions: T,
        cu_seqlens: T,
        learned: Batch | None = None,
        only: slice | T | None = None,
        seen: RouterPass | None = None,
        hooks: Hooks | None = None,
        route: Sequence[int] | None = None,
    ) -> T:
        """Return logits ``[batch, seq, vocab]`` of this rank's data, or the summed loss of the batch ``learned``.

        A model that scores texts has one logit per token.

        Args:
            ``tokens``: token ids, ``[batch, seq]``.
            ``positions``: position of each token in its document, ``[batch, seq]``.
            ``cu_seqlens``: boundaries of the documents in the flattened tokens of the whole rows.
            ``learned``: batch with the labels, to get the loss; None: return logits.
            ``only``: positions of each row whose logits are computed; None: all.
            ``seen``: where routers record their counts; None: nowhere.
            ``hooks``: functions whose losses replace the model's own; None: the model's own.
            ``route``: indices of the blocks to run, in order; None: all. In a partial pipeline a text skips some
                blocks.
        """
        draws = None if learned is None else learned.draws
        hidden = self.hidden(tokens, positions, cu_seqlens, seen, draws, route)
        if learned is not None:
            return self.loss(hidden, learned, hooks)
        return self.scores(hidden, only)

    def embedded_batch(self, batch: Batch) -> T:
        """Return the embeddings of the tokens of ``batch``, ``[batch, seq/tp, embed]``."""
        return self.embedding(batch.tokens)

    def shared(self, batch: Batch, dtype: torch.dtype) -> tuple[T, ...]:
        """Return what all blocks read beside their input, for the tokens of ``batch``: cosines and sines of rotary
        embedding, and random bits for dropout (:func:`angles`).
        """
        return angles(batch.positions, self.freq, dtype, batch.draws)

    def scores(self, hidden: T, only: slice | T | None = None) -> T:
        """Return the logits ``[batch, seq, vocab]`` of hidden states ``[batch, seq/tp, embed]``.

        ``only``: positions of each row whose logits are computed; None: all.
        """
        hidden = self.gather(hidden, self.mesh)  # [batch, seq, embed]
        if only is not None:
            hidden = hidden[:, only]
        if self.shape.output == "score":
            return F.linear(hidden, self.output)
        if self.logits is not None:
            logits = self.logits(hidden)
        else:
            by_hand = is_invariant() or is_widened(hidden)
            weight, rows = (
                (self.embedding.table, self.embedding.rows)
                if self.shape.tied
                else (self.head, self.rows)
            )
            logits = project(hidden, weight)[0] if by_hand else F.linear(hidden, weight)
            logits = logits if rows is None else rows.scored(hidden, logits)
        if (layout := self.mesh.layout).tp == 1:
            return logits
        from weft.layout.logits import gather_vocab

        vocab, ranks = self.shape.vocab, range(layout.tp)
        shares = [cut_range(vocab, layout, ("tp",), rank) for rank in ranks]
        return gather_vocab(logits, [hi - lo for lo, hi in shares], self.mesh)

    def hidden(
        self,
        tokens: T,
        positions: T,
        cu_seqlens: T,
        seen: RouterPass | None = None,
        draws: T | None = None,
        route: Sequence[int] | None = None,
    ) -> T:
        """Return the input of the output layer, after the final norm: ``[batch, seq/tp, embed]``.

        ``tokens, positions``: token ids, and the position of each token in its document, ``[batch, seq]``;
        ``cu_seqlens``: boundaries of the documents in the flattened tokens of the whole rows; ``seen``: where routers
        record their counts; ``draws``: random bits of the tokens for dropout (:mod:`weft.models.dropout`); ``route``:
        indices of the blocks to run, in order; None: all.
        """
        x = self.embedding(tokens)  # [batch, seq/tp, embed]
        rope = angles(positions, self.freq, x.dtype, draws)
        x = self.entered(x, rope)
        layers = range(len(self.blocks)) if route is None else route
        x = self.run_blocks(layers, x, rope, cu_seqlens, seen)
        return self.norm(self.settled(x))

    def entered(self, x: T, rope: tuple[T, ...]) -> T:
        """Return the residual stream ``[batch, seq/tp, embed]`` before the first block: embeddings after dropout.

        ``x``: the embeddings; ``rope``: cosines, sines and random bits (:func:`weft.models.rope.angles`).
        """
        if not self.shape.dropout:
            return x
        from weft.models.dropout import dropped_part

        with drawing(rope[2:]):
            return dropped_part(x, self.shape.dropout, "embedding", self.mesh)

    def run_blocks(
        self,
        layers: Sequence[int],
        x: Stream,
        rope: tuple[T, ...],
        cu_seqlens: T,
        seen: RouterPass | None = None,
        enter: Enter | None = None,
    ) -> Stream:
        """Run the blocks ``layers``, in order, on ``x`` ``[batch, seq/tp, embed]``; return the output of the last.

        ``enter``: function that prepares attention to cached tokens for a part of the tokens, where these compute in
        parts (:mod:`weft.models.weave`); None: nothing is cached. The other arguments are those of :meth:`run_block`.
        """
        if self.woven is not None:
            return self.woven.run(self, layers, x, rope, cu_seqlens, seen, enter)
        for i in layers:
            x = self.run_block(i, x, rope, cu_seqlens, seen)
        return x

    def run_block(
        self,
        i: int,
        x: Stream,
        rope: tuple[T, ...],
        cu_seqlens: T,
        seen: RouterPass | None = None,
    ) -> Stream:
        """Run the block with index ``i`` on ``x`` ``[batch, seq/tp, embed]``, and return its output of the same shape.

        In a ladder model (``model.residual``) ``x`` may have the other forms that :meth:`settled` and :meth:`packed`
        take. ``rope``: cosines and sines (:func:`weft.models.rope.angles`); ``cu_seqlens``: where documents begin;
        ``seen``: where routers record their counts.
        """
        block, saver = self.blocks[str(i)], self.hooks.saver
        if self.shape.residual == "ladder":
            from weft.models import ladder

            enter = ladder.ladder_stream if block.ladder else ladder.settled_stream
            x = enter(x, self.shape.embed, self.mesh)
        if saver is None:
            return block(x, rope, cu_seqlens, seen)
        entry = x if isinstance(x, torch.Tensor) else x.base
        with saver.block(block, entry, *rope, cu_seqlens):
            return block(x, rope, cu_seqlens, seen)

    def settled(self, x: Any) -> T:
        """Return the output of the last block that ran as a plain tensor ``[batch, seq/tp, embed]``. ``x``: the value
        that :meth:`run_block` or :meth:`run_blocks` returned.
        """
        if self.shape.residual == "ladder":
            from weft.models.ladder import settled_stream

            x = settled_stream(x, self.shape.embed, self.mesh)
        output: T = x
        return output

    def packed(self, x: Any) -> T:
        """Return the output ``x`` of a block, in any form, as one tensor. The tensor can be sent to the rank that runs
        the next block.
        """
        if self.shape.residual == "ladder":
            from weft.models.ladder import packed_stream

            x = packed_stream(x, self.mesh)
        output: T = x
        return output

    def learn_loads(self, loads: Sequence[int]) -> None:
        """Update the routers of all mixtures after a training step. ``loads``: for each expert, how many of the step's
        tokens on all ranks were routed to it. The experts of the first mixture come first, then those of the second,
        and so on.
        """
        if not self.shape.mixtures:
            return
        from weft.models.experts import Mixture
        from weft.models.router import by_layer

        of_layers = by_layer(self.shape.mixtures, loads)
        for module in self.modules():
            if isinstance(module, Mixture):
                module.learn_from(of_layers[module.router.layer])

    @property
    def output(self) -> T:
        """The output layer's weight ``[vocab/tp, embed]``, or ``[1, embed]`` for a model that scores texts."""
        if self.shape.tied:
            table: T = self.embedding.output
            return table
        return self.head if self.rows is None else self.rows.placed(self.head)

    @property
    def rows(self) -> Any:
        """The rows of an output layer that an adapter trains.

        None if no rows are trained, or if the output layer is tied to the embedding.
        """
        return self.outputs.adapters["head"] if len(self.outputs.adapters) else None

    def loss(self, normed: T, batch: Batch, hooks: Hooks | None = None) -> T:
        """Return the weighted sum of the losses of the tokens, or of the pairs of answers, in ``batch``.

        ``normed``: output of the final norm, ``[batch, seq/tp, embed]``. ``hooks``: functions whose losses replace the
        model's own; None: the model's own.
        """
        hooks = hooks or self.hooks
        objective = hooks.objective
        if self.shape.output == "score":
            from weft.models.preference import reward_loss
            from weft.models.token_objective import TokenObjective
            from weft.models.value_loss import value_loss

            assert objective is not None
            if isinstance(objective, TokenObjective):
                return value_loss(normed, self.output, batch, objective, self.mesh)
            return reward_loss(normed, self.output, batch, objective, self.mesh)
        loss = self._text_loss(normed, batch, hooks)
        if not self.shape.value_head:
            return loss
        from weft.models.value_loss import shared_value_loss

        return loss + shared_value_loss(
            normed, self.value_head, batch, objective, self.mesh
        )

    def _text_loss(self, normed: T, batch: Batch, hooks: Hooks) -> T:
        """Return the loss of what the output layer says; the arguments are those of :meth:`loss`."""
        objective = hooks.objective
        hidden = self.gather(normed, self.mesh).flatten(0, 1)  # [batch * seq, embed]
        first = (
            self.logical["head"].box[0][0]
            if not self.shape.tied
            else self.embedding.first
        )
        of_answers = batch.paired is not None or batch.rollout is not None
        if of_answers and objective is not None:
            from weft.models.answer_loss import answer_loss

            return answer_loss(
                hidden, self.output, batch, first, self.loss_chunk, objective, self.mesh
            )
        counts = None if batch.weights is None else batch.weights.flatten()
        return (hooks.criterion or linear_cross_entropy)(
            hidden,
            self.output,
            batch.labels.flatten(),
            first,
            self.loss_chunk,
            self.mesh,
            counts,
        )

    def logical_parameters(self) -> Iterator[tuple[str, Logical]]:
        """Yield the full name of every parameter and its :class:`Logical` tensor, in order of :meth:`parameters`."""
        for prefix, module in self.named_modules():
            if isinstance(module, Module):
                for name, logical in module.logical.items():
                    yield f"{prefix}.{name}" if prefix else name, logical


def model_class(shape: ModelShape) -> type[Transformer]:
    """Return the class of a model that is no plugin's: the decoder of tokens, or the class that
    ``model.kind`` names.
    """
    return own.model() if (own := shape.architecture) else Transformer
