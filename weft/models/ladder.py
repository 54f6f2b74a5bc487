"""Ladder Residual (Zhang et al. 2025, 2501.06589): each part reads the residual stream without the part before it.

Parts are attention and feed-forward in turn: ``x[i+1] = x[i] + part[i](x[i-1])``. The first ladder layer begins with
the whole stream, so that its attention and its feed-forward read the same. Over ``tp`` a part's output is summed while
the next part computes. Every rank of ``tp`` therefore holds the stream of all tokens, of type R: no part waits until
tokens are gathered, and gradients are summands that the same sums complete.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from weft.layout.boundary import gather_tokens, own_tokens
from weft.layout.pending import Arrived, Pending, start_gather, start_sum
from weft.models.drawing import drawing
from weft.models.feed_forward import FeedForward
from weft.models.recompute import recomputed

if TYPE_CHECKING:
    from collections.abc import Callable

    from weft.layout.mesh import Mesh
    from weft.models.router import RouterPass

T = torch.Tensor


class LatePart:
    """Output of attention or of a feed-forward whose sum over the ranks of ``tp`` is still being computed. It can be
    waited for again when backward recomputes. ``pending``: the collective that has been started.
    """

    def __init__(self, pending: Pending) -> None:
        self._pending: Pending | None = pending
        self._output: T | None = None

    def wait(self) -> T:
        """Wait for the sum ``[batch, seq, embed]`` and return it, each time the same tensor."""
        if self._pending is not None:
            self._output, self._pending = self._pending.wait(), None
        assert self._output is not None
        return self._output


class LadderStream(NamedTuple):
    """The residual stream between two ladder layers, in which a part (attention or feed-forward) does not wait for the
    sum of the part before it.

    Attributes:
        ``base``: the stream without the output of the part before, ``[batch, seq, embed]``, on every rank of ``tp``.
        ``late``: that output, or its sum over ``tp`` while it is computed; None before the first ladder layer.
    """

    base: T
    late: T | LatePart | None

    @property
    def whole(self) -> T:
        """The complete stream ``[batch, seq, embed]``: ``base`` plus ``late``. It waits for the sum of ``late``."""
        late = landed(self.late)
        return self.base if late is None else self.base + late


#: The residual stream between two layers, of which only ladder layers have more than one tensor.
Stream = T | LadderStream


class LadderLayer(Protocol):
    """Interface of objects with the modules that a ladder layer computes with, such as a
    :class:`weft.models.transformer.Block`.
    """

    mesh: Mesh
    attention_norm: Any
    attention: Any
    ffn_norm: Any
    ffn: Any
    recompute: str
    kept_ops: list[torch._ops.OpOverload]

    def changes(self, part: str) -> bool: ...
    def out(self, y: T, part: str) -> T: ...


def landed(late: T | LatePart | None) -> T | None:
    """Return the output ``late`` of a part, attention or a feed-forward. If its sum over ``tp`` is under way, wait for
    the sum first; a tensor or None is returned unchanged.
    """
    return late.wait() if isinstance(late, LatePart) else late


def settled_stream(x: Stream, width: int, mesh: Mesh) -> T:
    """Return the whole residual stream ``[batch, seq/tp, embed]``, as the final norm or a standard layer reads it.

    ``x``: the stream in any form (:func:`ladder_stream`). ``width``: the model's ``embed``.
    """
    if isinstance(x, torch.Tensor):
        return x if x.shape[-1] == width else x[..., :width] + x[..., width:]
    return own_tokens(x.whole, mesh)


def packed_stream(x: Stream, mesh: Mesh) -> T:
    """Return the residual stream as a tensor of this rank's tokens, to be handed to another rank or process.

    The result is ``[batch, seq/tp, embed]``, or ``[batch, seq/tp, 2 * embed]`` for a ladder stream: first the stream
    without the late part, then that part.
    """
    if isinstance(x, torch.Tensor):
        return x
    late = landed(x.late)
    assert late is not None  # a layer has run
    return torch.cat([own_tokens(x.base, mesh), own_tokens(late, mesh)], -1)


def ladder_stream(x: Stream, width: int, mesh: Mesh) -> LadderStream:
    """Return the residual stream as a :class:`LadderStream`, the form that a layer of Ladder Residual reads.

    ``x`` has one of three forms: a :class:`LadderStream`, which is returned as it is; the tensor ``[batch, seq/tp, 2 *
    embed]`` that :func:`packed_stream` returns; or a plain stream ``[batch, seq/tp, embed]``. ``width``: the model's
    ``embed``, by which the two tensors are told apart.
    """
    if not isinstance(x, torch.Tensor):
        return x
    x = gather_tokens(x, mesh)
    if x.shape[-1] == width:
        return LadderStream(x, None)
    base, late = x.split(width, -1)
    return LadderStream(base, late)


def ladder_block(
    block: LadderLayer,
    x: LadderStream,
    rope: tuple[T, ...],
    cu_seqlens: T,
    seen: RouterPass | None,
) -> LadderStream:
    """Run a ladder layer, and return the stream after it; the sum of its feed-forward's output may be under way.

    ``rope``: cosines and sines (:func:`weft.models.rope.angles`); ``cu_seqlens``: where documents begin in the
    flattened rows; ``seen``: where routers record their counts; None: nowhere.
    """
    if block.recompute == "none" or not torch.is_grad_enabled():
        return _climbed(block, x, rope, cu_seqlens, seen)
    runs = count()

    def compute(base: T, late: T | LatePart | None) -> LadderStream:
        # the second run is that of backward, which wants what is saved on the way and no result
        first = not next(runs)
        return _climbed(block, LadderStream(base, late), rope, cu_seqlens, seen, first)

    kept_ops = block.kept_ops if block.recompute == "selective" else []
    stream: LadderStream = recomputed(compute, kept_ops, *x)
    return stream


def _climbed(
    block: LadderLayer,
    x: LadderStream,
    rope: tuple[T, ...],
    cu_seqlens: T,
    seen: RouterPass | None,
    results: bool = True,
) -> LadderStream:
    """Compute a ladder layer. ``results``: whether anybody reads what is returned; if not, no output is summed."""
    mesh, ffn = block.mesh, block.ffn
    normed = block.attention_norm(x.base)
    early = ffn.early(own_tokens(normed, mesh), normed, seen)
    with drawing(rope[2:]):
        part = block.attention(normed, rope, cu_seqlens)
        attended = _sent(block, part, "attention", start_sum, results)
    base = x.whole
    normed = block.ffn_norm(base)
    with drawing(rope[2:]):
        if isinstance(ffn, FeedForward):
            part, start = ffn.share(normed), start_sum
        else:
            part, start = ffn(own_tokens(normed, mesh), seen, early), start_gather
        late = _sent(block, part, "ffn", start, results)
    return LadderStream(LadderStream(base, attended).whole, late)


def _sent(
    block: LadderLayer,
    part: T,
    name: str,
    start: Callable[[T, Mesh], Pending | Arrived],
    results: bool,
) -> T | LatePart | None:
    """Start to complete a part's output over ``tp``, by ``start``. ``name``: ``attention`` or ``ffn``.

    A norm or dropout after the part needs the whole output, and the norm's weights are at hand only while the layer
    runs, so that the output is waited for. ``results``: whether anybody reads the output.
    """
    if block.changes(name):
        return block.out(start(part, block.mesh).wait(), name)
    if not results:
        return None
    pending = start(part, block.mesh)
    if isinstance(pending, Pending):
        return LatePart(pending)
    # a product's result is a view, and hooks on a layer's output want none
    whole = pending.wait()
    return whole.clone() if torch.is_grad_enabled() else whole
