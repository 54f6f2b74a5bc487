"""A transformer that denoises patches of images or videos (DiT, Peebles & Xie 2023), written for one device.

As in :mod:`weft.models.transformer`, modules name the dimensions of their parameters and the mesh decides which part a
rank holds. A sequence is the patches of one image or video, and every patch sees every other. What a block does depends
on the time and the class of the image through shifts, scales and gates (adaLN-Zero).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from weft.data.batch import IGNORE
from weft.errors import UsageError
from weft.layout.boundary import gather_tokens, scatter_tokens, sum_over
from weft.models.hooks import NO_HOOKS, Hooks
from weft.models.module import Module
from weft.models.patch_attention import PatchAttention
from weft.models.patches import axis_angles, real_values, sine_positions, time_waves
from weft.models.projections import Projections
from weft.models.transformer import Block, Transformer
from weft.shapes.diffusion_shape import WAVES, diffusion_layer, settings_of
from weft.shapes.parameters import Table, whole_table

if TYPE_CHECKING:
    from weft.data.batch import Batch
    from weft.layout.mesh import Mesh
    from weft.models.hooks import Stages
    from weft.recipe import ModelShape
    from weft.shapes.diffusion_shape import DiffusionSettings

T = torch.Tensor

#: Added to the variance in norms without a scale, as in DiT.
NORM_EPS = 1e-6


class Signals(NamedTuple):
    """Inputs that all blocks of a diffusion transformer read beside the vectors of the patches. An empty tensor, of
    shape ``[0]``, stands for an input that is not used.

    Attributes:
        ``cos``, ``sin``: rotations of queries and keys, ``[batch, seq/cp, head_dim / 2]``; empty: no rotation.
        ``time``: noise levels ``[batch]``; after :meth:`DiffusionTransformer.conditioned` the conditioning vectors
            ``[batch, embed]``.
        ``condition``: numbers of classes ``[batch]``, captions ``[batch, words, pieces]``, or states of text ``[batch,
            words, text]``; empty: no condition.
        ``modulation``: shifts, scales and gates that all blocks share, ``[batch, 6 embed]``; empty: blocks compute
            their own.
        ``real``: which patches of all ranks are of the image, bool ``[batch, patches]``; empty: all are.
    """

    cos: T
    sin: T
    time: T
    condition: T
    modulation: T
    real: T


def modulated(x: T, shift: T, scale: T, eps: float = NORM_EPS) -> T:
    """Apply layer norm without weights to ``x`` ``[batch, seq, embed]``, multiply by ``1 + scale`` and add ``shift``.
    ``shift``, ``scale``: ``[batch, 1, embed]``; ``eps``: constant that is added to the variance.
    """
    normed = F.layer_norm(x, x.shape[-1:], eps=eps)
    return normed * (1 + scale) + shift


class PatchEmbedding(Module):
    """The linear layer that maps the values of a patch to its embedding. The arguments are those of :class:`Module`."""

    def __init__(self, mesh: Mesh, table: Table) -> None:
        super().__init__(mesh, table, "embedding")
        self.weight("patches")
        self.weight("patches_bias")

    def forward(self, values: T) -> T:
        """Map the values of patches ``[batch, seq, values]`` to embeddings ``[batch, seq, embed]``."""
        return F.linear(values, self.patches, self.patches_bias)


class Conditioning(Module):
    """Computes the vector that conditions all blocks, from the noise level (time) and the class of an image (DiT).
    ``settings``: settings of the diffusion model. The other arguments are those of :class:`Module`.
    """

    def __init__(self, mesh: Mesh, table: Table, settings: DiffusionSettings) -> None:
        super().__init__(mesh, table, "conditioning")
        self.settings = settings
        for name in ("time_in", "time_out"):
            self.weight(name)
            self.weight(f"{name}_bias")
        self.has_classes = self.inside("classes") in table
        if self.has_classes:
            self.weight("classes")
        if settings.text and settings.words:
            self.weight("words")
            self.weight("places")
        self.pixart = settings.form == "pixart"
        shared = ("modulation",) * self.pixart
        shared += ("text_in", "text_out") * bool(self.pixart and settings.text)
        for name in shared:
            self.weight(name)
            self.weight(f"{name}_bias")

    def forward(self, time: T, condition: T) -> T:
        """Return the conditioning vectors ``[batch, embed]`` for times ``[batch]`` and numbers of classes ``[batch]``.
        ``condition`` is not used by a model without classes.
        """
        waves = time_waves(time, WAVES, self.settings).to(self.time_in.dtype)
        hidden = F.silu(F.linear(waves, self.time_in, self.time_in_bias))
        c = F.linear(hidden, self.time_out, self.time_out_bias)
        return c + F.embedding(condition, self.classes) if self.has_classes else c

    def states(self, condition: T) -> T:
        """Return the states ``[batch, words, text]`` of texts that blocks attend to. ``condition``: captions ``[batch,
        words, pieces]``, as :func:`weft.data.captions.caption_rows` returns them, or states that a text encoder has
        computed. The state of a caption's word is the mean of the trained rows of its pieces, plus a trained row for
        its place. In PixArt the states also go through two linear layers, to ``[batch, words, embed]``. Without text
        ``condition`` is returned unchanged.
        """
        if not self.settings.text:
            return condition
        if not condition.is_floating_point():
            condition = self.of_words(condition)
        if not self.pixart:
            return condition
        states = condition.to(self.text_in.dtype)
        hidden = F.linear(states, self.text_in, self.text_in_bias)
        hidden = F.gelu(hidden, approximate="tanh")
        return F.linear(hidden, self.text_out, self.text_out_bias)

    def shared(self, c: T) -> T:
        """Compute the shifts, scales and gates ``[batch, 6 embed]`` that all blocks of a PixArt share, from the
        conditioning vectors ``c`` ``[batch, embed]``. For other models the result is empty, ``[0]``.
        """
        if not self.pixart:
            return c.new_zeros(0)
        return F.linear(F.silu(c), self.modulation, self.modulation_bias)

    def of_words(self, condition: T) -> T:
        """Return the states ``[batch, words, text]`` of captions ``[batch, words, pieces]``: for each word the mean of
        the trained rows of its pieces, plus a trained row for its place.
        """
        rows = F.embedding(condition, self.words)  # [batch, words, pieces, text]
        counted = condition > 0
        # where there is no word, the row of none
        counted[..., 0] = True
        shares = (counted / counted.sum(-1, keepdim=True)).to(rows.dtype)
        return torch.einsum("bwpt,bwp->bwt", rows, shares) + self.places


class PatchFeedForward(Projections):
    """A feed-forward without a gate: ``down(gelu(up(x)))``, with biases.

    The arguments are those of :class:`Projections`.
    """

    TOGETHER = (("up",), ("down",))

    def __init__(self, shape: ModelShape, mesh: Mesh, table: Table, path: str) -> None:
        super().__init__(shape, mesh, table, path)
        for name in ("up", "down"):
            self.projection(name)
            self.weight(f"{name}_bias")

    def forward(self, x: T) -> T:
        """Map ``x`` ``[batch, seq/tp, embed]`` to the output of the same shape."""
        whole = gather_tokens(x, self.mesh)
        hidden = self.project(whole, "up")[0] + self.up_bias  # [batch, seq, ffn/tp]
        hidden = F.gelu(hidden, approximate="tanh")
        share = self.project(hidden, "down")[0]
        return scatter_tokens(share, self.mesh) + self.down_bias


class DiffusionBlock(Block):
    """A block of a diffusion transformer, with the interface of :class:`weft.models.transformer.Block`.

    ``shape``: shape of the model; ``mesh``: ranks that share the model; ``layer``: index of the block.
    """

    def __init__(self, shape: ModelShape, mesh: Mesh, layer: int) -> None:
        table, path = diffusion_layer(shape, layer), f"blocks.{layer}"
        Module.__init__(self, mesh, table, path)
        settings = settings_of(shape)
        self.pixart = settings.form == "pixart"
        if self.pixart:
            self.weight("modulation_table")
        else:
            self.weight("modulation")
            self.weight("modulation_bias")
        patches = settings.patches if settings.size else 1
        inside = (shape, mesh, table)
        attention: Any = PatchAttention(*inside, f"{path}.attention", layer, patches)
        self.attention = attention
        self.cross_attention: Any = None
        if settings.text:
            self.cross_attention = PatchAttention(
                *inside, f"{path}.cross_attention", layer
            )
        self.ffn: Any = PatchFeedForward(*inside, f"{path}.ffn")
        # DiT has another one here
        self.eps = shape.norm_eps
        self.ladder, self.recompute = False, "none"
        self.kept_ops = []

    def body(self, x: T, rope: Any, cu_seqlens: T, seen: object = None) -> T:
        """Map ``x`` ``[batch, seq/tp, embed]`` to the output of the same shape.

        ``rope``: the :class:`Signals` of the patches, with the conditioning vector. The other arguments are not used.
        """
        signals = Signals(*rope)
        if self.pixart:
            vectors = signals.modulation + self.modulation_table
        else:
            vectors = F.linear(F.silu(signals.time), self.modulation, self.modulation_bias)  # fmt: skip
        # each [batch, 1, embed]
        shift, scale, gate, f_shift, f_scale, f_gate = vectors[:, None].chunk(6, -1)
        turns = signals.cos, signals.sin
        x = x + gate * self.attention(
            modulated(x, shift, scale), *turns, real=signals.real
        )
        if self.cross_attention is not None:
            text = signals.condition.to(x.dtype)
            # PixArt has no norm here
            normed = x if self.pixart else F.layer_norm(x, x.shape[-1:], eps=NORM_EPS)
            x = x + self.cross_attention(normed, states=text)
        return x + f_gate * self.ffn(modulated(x, f_shift, f_scale, self.eps))


class PatchHead(Module):
    """The last layer, which maps the vector of each patch to the predicted values of its pixels. The arguments are
    those of :class:`Module`.
    """

    def __init__(self, mesh: Mesh, table: Table) -> None:
        super().__init__(mesh, table, "head")
        self.pixart = self.inside("modulation_table") in table
        for name in ("output",) if self.pixart else ("modulation", "output"):
            self.weight(name)
            self.weight(f"{name}_bias")
        if self.pixart:
            self.weight("modulation_table")

    def forward(self, x: T, c: T) -> T:
        """Map vectors of patches ``[batch, seq, embed]`` to values ``[batch, seq, values]``. ``c``: conditioning
        vectors, ``[batch, embed]``.
        """
        if self.pixart:
            vectors = self.modulation_table + torch.cat((c, c), -1)
        else:
            vectors = F.linear(F.silu(c), self.modulation, self.modulation_bias)
        shift, scale = vectors[:, None].chunk(2, -1)
        return F.linear(modulated(x, shift, scale), self.output, self.output_bias)


class DiffusionTransformer(Transformer):
    """A diffusion transformer of ``shape``, or the part of it that this rank of ``mesh`` holds.

    The arguments are those of :class:`weft.models.transformer.Transformer`.
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
        table = whole_table(shape)
        Module.__init__(self, mesh, table)
        self.shape, self.loss_chunk, self.hooks = shape, loss_chunk, hooks
        self.pipeline, self.loads, self.logits, self.woven = pipeline, None, None, None
        self.settings = settings_of(shape)
        self.freq = torch.zeros(0)
        if "embedding" in ends:
            self.embedding: Any = PatchEmbedding(mesh, table)
        # every stage of a pipeline computes it from times and classes
        self.conditioning = Conditioning(mesh, table, self.settings)
        held = range(shape.layers) if layers is None else sorted(layers)
        self.blocks = nn.ModuleDict(
            {str(i): DiffusionBlock(shape, mesh, i) for i in held}
        )
        self.norm: Any = nn.Identity()
        if "head" in ends:
            self.head: Any = PatchHead(mesh, table)

    def forward(
        self, tokens: T, positions: T, cu_seqlens: T, learned: Batch | None = None, only: slice | T | None = None,
        seen: Any = None, hooks: Hooks | None = None, route: Sequence[int] | None = None,
    ) -> T:  # fmt: skip
        """Return the summed loss of the images in ``learned``, whose ``arrays`` hold the patches. The arguments are
        those of :meth:`weft.models.transformer.Transformer.forward`. Raises :class:`UsageError` if ``learned`` is None,
        because this model reads no tokens.
        """
        if learned is None or learned.arrays is None:
            raise UsageError(
                "model.kind = 'diffusion' makes images, and neither reads nor writes text; weft sample makes some"
            )
        x = self.embedded_batch(learned)
        layers = range(len(self.blocks)) if route is None else route
        x = self.run_blocks(layers, x, self.shared(learned, x.dtype), cu_seqlens)
        return self.loss(x, learned, hooks)

    def embedded_batch(self, batch: Batch) -> T:
        """Return the input of the first block, ``[batch, seq/tp, embed]``."""
        assert batch.arrays is not None
        values = self.own_tokens(batch.arrays["noised"])
        return self.embedded(values, self.own_tokens(batch.positions))

    def embedded(self, values: T, positions: T) -> T:
        """Return the embeddings ``[batch, seq, embed]`` of patches, with their positions added if the model uses sine
        positions. ``values``: values of the patches, ``[batch, seq, values]``; ``positions``: numbers of the patches in
        their images, ``[batch, seq]``.
        """
        x: T = self.embedding(values.to(self.conditioning.time_in.dtype))
        if self.settings.positions != "sines":
            return x
        return x + sine_positions(positions, self.settings, self.shape.embed).to(x.dtype)  # fmt: skip

    def own_tokens(self, x: T) -> T:
        """Return this rank's share of the tokens of ``x`` ``[batch, seq, ...]``, which is equal on all ranks of ``tp``:
        ``[batch, seq/tp, ...]``.
        """
        ranks = self.mesh.size("tp")
        return x if ranks == 1 else x.chunk(ranks, 1)[self.mesh.rank("tp")]

    def shared(self, batch: Batch, dtype: torch.dtype) -> tuple[T, ...]:
        """Return what all blocks read beside their input, the :class:`Signals` of ``batch``. Their ``time`` is the
        noise level, which :meth:`conditioned` replaces later.
        """
        assert batch.arrays is not None
        arrays = batch.arrays
        about = arrays["time"], arrays["condition"]
        return self.signals(batch.positions, *about, dtype, arrays.get("real"))

    def signals(
        self, positions: T, time: T, condition: T, dtype: torch.dtype, real: T | None = None
    ) -> Signals:  # fmt: skip
        """Return the inputs that all blocks share; their ``time`` is the noise level. ``positions``: numbers of the
        patches, ``[batch, seq/cp]``; ``time``, ``condition``, ``real``: as in :class:`Signals`; ``dtype``: type of the
        rotations.
        """
        cos = sin = positions.new_zeros(0, dtype=dtype)
        if self.settings.positions == "rotary":
            width = self.shape.head_dim or 0
            theta = self.shape.rope_theta
            angles = axis_angles(positions, self.settings, width, theta)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        none = cos.new_zeros(0)
        real = none.bool() if real is None else real
        return Signals(cos, sin, time, condition, none, real)

    def conditioned(self, signals: Signals) -> Signals:
        """Return ``signals`` with the conditioning vectors in place of noise levels, states of text in place of
        captions, and the modulation that blocks share.
        """
        c = self.conditioning(signals.time, signals.condition)
        states = self.conditioning.states(signals.condition)
        shared = self.conditioning.shared(c)
        return signals._replace(time=c, condition=states, modulation=shared)

    def run_blocks(
        self, layers: Sequence[int], x: Any, rope: tuple[T, ...], cu_seqlens: T, seen: Any = None, enter: Any = None
    ) -> Any:  # fmt: skip
        """Run the blocks ``layers`` in order on ``x`` ``[batch, seq/tp, embed]``; return the output of the last.
        ``rope``: the :class:`Signals` with noise levels, from which the conditioning is computed first. The other
        arguments are not used.
        """
        signals = self.conditioned(Signals(*rope))
        return super().run_blocks(layers, x, signals, cu_seqlens)

    def loss(self, normed: T, batch: Batch, hooks: Hooks | None = None) -> T:
        """Return the sum over the patches of ``batch`` of the mean squared error of their predicted values.

        ``normed``: output of the last block, ``[batch, seq/tp, embed]``. The result is the same on all ranks of ``tp``.
        """
        assert batch.arrays is not None
        arrays = batch.arrays
        c = self.conditioning(arrays["time"], arrays["condition"])
        predicted = self.of_prediction(self.head(normed, c))  # [batch, seq/tp, values]
        predicted = predicted if predicted.dtype == torch.float64 else predicted.float()
        target, positions, labels = map(
            self.own_tokens, (arrays["target"], batch.positions, batch.labels)
        )
        values = target.shape[-1]
        real = real_values(self.settings).to(predicted.device)
        # patches that reach beyond the image have fewer values
        weight = real.to(predicted.dtype) / real.double().mean().item() / values
        weights = weight[positions.clamp(max=len(real) - 1)]
        weights = weights * (labels != IGNORE)[..., None]
        errors = predicted - target.to(predicted.dtype)
        share = (errors.square() * weights).sum(dtype=torch.float64)
        return sum_over("tp", share, self.mesh)

    def ended(self, x: T, signals: Signals) -> T:
        """Return the values ``[batch, seq, values]`` that the model predicts, from the last block's output ``x``
        ``[batch, seq, embed]``. ``signals``: inputs of the blocks with the conditioning vectors. If the model also
        predicts a variance, it is left out.
        """
        return self.of_prediction(self.head(x, signals.time))

    def of_prediction(self, values: T) -> T:
        """Return the prediction of the noise, image or velocity, ``[batch, seq, values]``. ``values``: the last layer's
        output. Some models also predict variances there; these are removed.
        """
        if not self.settings.variance:
            return values
        return values.unflatten(-1, (-1, 2, self.settings.channels))[..., 0, :].flatten(-2)  # fmt: skip
