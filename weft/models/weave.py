"""Layers whose tokens compute in parts: while the tokens of one part travel over ``tp``, another part computes.

The layers of each part are a generator that stops where tokens travel. The generators take turns in an order that is
the same on all ranks. Backward takes the turns in the reverse order, because autograd does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import spmd_types as spmd
import torch
import torch.distributed as dist

from weft.layout.pending import Arrived, Pending, start_gather, start_scatter
from weft.layout.token_order import to_parts, to_rows
from weft.models.attention import local_attention
from weft.models.drawing import drawing
from weft.models.feed_forward import FeedForward
from weft.models.fused import project
from weft.models.graph_parts import Steps
from weft.models.part_attention import PartKeys
from weft.models.part_products import adding_in_place
from weft.models.pass_clock import PassClock
from weft.models.projections import Projections
from weft.models.token_parts import Enter, Overlap, PassTokens, TokenPart, Weave
from weft.registry import find

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.models.router import RouterPass
    from weft.models.transformer import Block, Transformer

T = torch.Tensor


class PartInputs(NamedTuple):
    """Inputs of the layers for one part of the tokens, besides activations. ``rope``: cosines and sines of its tokens;
    ``starts``: where documents begin in its rows, and at last where they end; ``seen``: where routers record the part's
    counts; None: nowhere.
    """

    rope: tuple[T, ...]
    starts: T
    seen: RouterPass | None


def weave_layers(model: Transformer, whole_blocks: bool) -> None:
    """Make the layers of ``model`` compute their tokens in parts, with the kind of overlap that ``layout.overlap`` of
    its mesh names. ``whole_blocks``: whether a block must be called once for all parts, because hooks gather its
    parameters.
    """
    layout = model.mesh.layout
    overlap = find("overlap", layout.overlap).implementation()
    model.woven = WovenLayers(overlap, layout.parts, layout.overlap_least, whole_blocks)
    if layout.parts == 1:
        return
    # the same exchanges as between parts, though nothing computes meanwhile
    model.gather = gather_at_once
    if embedding := getattr(model, "embedding", None):
        embedding.scatter = scatter_at_once


def gather_at_once(x: T, mesh: Mesh) -> T:
    """Return the result of :func:`weft.layout.boundary.gather_tokens`, by the exchanges of :func:`start_gather`."""
    return start_gather(x, mesh).wait()


def scatter_at_once(x: T, mesh: Mesh) -> T:
    """Return the result of :func:`weft.layout.boundary.scatter_tokens`, by the exchange of :func:`start_scatter`."""
    return start_scatter(x, mesh).wait()


class WovenLayers:
    """Runs layers of a model with their tokens in parts that take turns.

    ``overlap``: decides about parts and turns. ``asked``: number of parts that the layout asks for; 0: ``overlap``
    chooses the number. ``least``: passes with fewer tokens are not cut. ``whole_blocks``: whether a block
    must be called once for all parts, as hooks gather its parameters.
    """

    def __init__(
        self, overlap: Overlap, asked: int, least: int, whole_blocks: bool
    ) -> None:
        self.overlap, self.asked, self.least = overlap, asked, least
        self.whole_blocks = whole_blocks
        # passes whose time is wanted, the oldest first; gradients of some may never come
        self.timed: deque[tuple[PassTokens, Weave, PassClock]] = deque(maxlen=16)

    def run(
        self,
        model: Transformer,
        layers: Sequence[int],
        x: T,
        rope: tuple[T, ...],
        cu_seqlens: T,
        seen: RouterPass | None,
        enter: Enter | None = None,
    ) -> T:
        """Run the blocks ``layers`` on ``x`` ``[batch, seq/tp, embed]``, and return the output of the last.

        ``rope``: cosines and sines; ``cu_seqlens``: where documents begin; ``seen``: where routers record their counts;
        ``enter``: prepares attention to cached tokens for a part. If it is None, the layers' attention is replaced by
        one that keeps the keys of earlier parts.
        """
        blocks = [cast("Block", model.blocks[str(i)]) for i in layers]
        cut = enter is not None or (
            seen is None
            and all(block.attention.attend is local_attention for block in blocks)
        )
        unit = model.mesh.size("tp")
        tokens = PassTokens(
            len(x), x.shape[1] * unit, unit, cut, self.asked, torch.is_grad_enabled()
        )
        few = len(x) * tokens.tokens < self.least
        if few or not layers or spmd.is_type_checking():
            return self._whole(model, layers, x, rope, cu_seqlens, seen)
        self._tell(model.mesh)
        weave: Weave = self.overlap(tokens)
        clock = PassClock() if self.overlap.awaits(tokens) else None
        if len(weave.parts) == 1 and weave.columns == 1:
            y = self._whole(model, layers, x, rope, cu_seqlens, seen)
        else:
            y = self._woven(model, weave, blocks, x, rope, cu_seqlens, seen, enter)
        if clock is not None:
            clock.watch(x, y)
            self.timed.append((tokens, weave, clock))
        return y

    def _tell(self, mesh: Mesh) -> None:
        """Tell the kind of overlap how long passes took that are over; ranks of ``tp`` agree on the slowest's time."""
        while self.timed and (seconds := self.timed[0][2].seconds) is not None:
            slowest = torch.tensor(seconds, dtype=torch.float64, device=mesh.device)
            if mesh.size("tp") > 1:
                dist.all_reduce(slowest, dist.ReduceOp.MAX, group=mesh.group("tp"))
            tokens, weave, _ = self.timed.popleft()
            self.overlap.took(tokens, weave, float(slowest))

    def _whole(
        self,
        model: Transformer,
        layers: Sequence[int],
        x: T,
        rope: tuple[T, ...],
        cu_seqlens: T,
        seen: RouterPass | None,
    ) -> T:
        """Run the blocks one after the other on all tokens."""
        for i in layers:
            x = model.settled(model.run_block(i, x, rope, cu_seqlens, seen))
        return x

    def _woven(
        self,
        model: Transformer,
        weave: Weave,
        blocks: Sequence[Block],
        x: T,
        rope: tuple[T, ...],
        cu_seqlens: T,
        seen: RouterPass | None,
        enter: Enter | None,
    ) -> T:
        """Run the blocks on parts that take turns."""
        parts, mesh = weave.parts, model.mesh
        unit, tokens = mesh.size("tp"), x.shape[1] * mesh.size("tp")
        of_rows = [part for part in parts if part.top == parts[0].top]
        sizes = [part.last - part.first for part in of_rows]
        x = to_parts(x, sizes, mesh)
        # a part's shares stand in the order of the parts, which is that of their first tokens
        xs: Sequence[T] = [
            x[part.top : part.bottom, part.first // unit : part.last // unit]
            for part in parts
        ]
        inputs = [part_inputs(part, rope, cu_seqlens, seen, len(x)) for part in parts]
        if enter is not None:
            inputs = [
                each._replace(starts=part_ends(cu_seqlens, part))
                for part, each in zip(parts, inputs, strict=True)
            ]
        woven = WovenPass(weave, tokens, inputs, enter)
        saver = model.hooks.saver
        again = torch.is_grad_enabled() and any(b.recompute != "none" for b in blocks)
        if self.whole_blocks or again or saver is not None:
            for block in blocks:
                saved = (
                    saver.block(block, xs[0], *rope, cu_seqlens)
                    if saver
                    else nullcontext()
                )
                with saved, woven.running(block):
                    xs = block(tuple(xs), rope, cu_seqlens)
        else:
            xs = woven.through(blocks, xs)
        if seen is not None:
            add_up_counts(seen, [each.seen for each in inputs if each.seen is not None])
        rows = dict.fromkeys(part.top for part in parts)
        joined = [
            torch.cat([y for y, p in zip(xs, parts, strict=True) if p.top == top], 1)
            for top in rows
        ]
        return to_rows(torch.cat(joined), sizes, mesh)


class WovenPass:
    """Runs the parts of one pass through layers. ``weave``: how the parts take turns; ``tokens``: tokens of a row;
    ``inputs``: what the layers read beside activations, for each part; ``enter``: as in :meth:`WovenLayers.run`.
    """

    def __init__(
        self,
        weave: Weave,
        tokens: int,
        inputs: Sequence[PartInputs],
        enter: Enter | None,
    ) -> None:
        self.weave, self.tokens, self.inputs = weave, tokens, inputs
        self.enter = enter

    def through(self, blocks: Sequence[Block], xs: Sequence[T]) -> tuple[T, ...]:
        """Run ``blocks`` on the parts ``xs``, each ``[rows, tokens/tp, embed]``; return their outputs."""
        parts = self.weave.parts
        results: dict[int, T] = {}

        def layers(number: int) -> Steps:
            x = xs[number]
            for block in blocks:
                x = yield from part_steps(
                    block, x, self.inputs[number], self.weave.columns
                )
            return x

        running = [layers(number) for number in range(len(parts))]
        turns = [0] * len(parts)
        summed = [each for block in blocks for each in (block.attention, block.ffn)]
        summed = summed if len(parts) > 1 else []
        with (
            self._attending(blocks) as enter,
            adding_in_place(summed, xs[0], len(parts)),
        ):
            for number in self.weave.order(parts):
                if number in results:
                    continue
                before = parts[number].first > 0 and number - 1 not in results
                if before and turns[number] >= turns[number - 1]:
                    raise ValueError(
                        f"part {number} attends to part {number - 1}, which has not come as far"
                    )
                enter(parts[number])
                try:
                    next(running[number])
                except StopIteration as end:
                    results[number] = end.value
                turns[number] += 1
                if len(results) == len(parts):
                    break
        return tuple(results[number] for number in range(len(parts)))

    @contextmanager
    def running(self, block: Block) -> Iterator[None]:
        """Return a context in which a call of ``block`` takes a sequence of the parts' inputs and returns a tuple of
        their outputs. This holds also when backward recomputes the block.
        """

        def body(xs: Sequence[T], *of_pass: Any) -> tuple[T, ...]:
            return self.through([block], xs)

        block.body = body  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del block.body

    @contextmanager
    def _attending(self, blocks: Sequence[Block]) -> Iterator[Enter]:
        """Yield what prepares attention for a part's turn."""
        if self.enter is not None:
            yield self.enter
            return
        if all(part.last - part.first == self.tokens for part in self.weave.parts):
            yield lambda part: None
            return
        layers = [block.attention for block in blocks]
        before = [layer.attend for layer in layers]
        kept = [PartKeys(self.tokens) for _ in layers]

        def enter(part: TokenPart) -> None:
            for keys in kept:
                keys.part = part

        try:
            for layer, keys in zip(layers, kept, strict=True):
                layer.attend = keys
            yield enter
        finally:
            for layer, attend in zip(layers, before, strict=True):
                layer.attend = attend


def part_steps(block: Block, x: T, inputs: PartInputs, columns: int) -> Steps:
    """Compute ``block`` for a part of the tokens, as a generator that yields while the part's tokens travel.

    ``x``: this rank's share of the part, ``[rows, tokens/tp, embed]``; ``inputs``: what else the block reads.
    ``columns``: number of pieces in which the last products are computed. The generator yields three times in attention
    and three times in the feed-forward: when tokens travel to its products, before the last product, and when this
    product's results travel.
    """
    mesh, (rope, starts, seen) = block.mesh, inputs
    normed = block.attention_norm(x)
    coming = start_gather(normed, mesh)
    yield
    whole = coming.wait()
    early = block.ffn.early(normed, whole, seen)
    with drawing(rope[2:]):
        inner = block.attention.attended(whole, rope, starts)
    yield
    with drawing(rope[2:]):
        leaving = start_columns(block.attention, inner, "wo", columns)
    yield
    y = wait_columns(leaving)
    with drawing(rope[2:]):
        x = block.added(x, y, "attention")
    normed = block.ffn_norm(x)
    if not isinstance(block.ffn, FeedForward):
        y = yield from _drawing_steps(block.ffn.steps(normed, seen, early), rope[2:])
        with drawing(rope[2:]):
            return block.added(x, y)
    coming = start_gather(normed, mesh)
    yield
    with drawing(rope[2:]):
        inner = block.ffn.activated(coming.wait())
    yield
    with drawing(rope[2:]):
        leaving = start_columns(block.ffn, inner, "down", columns)
    yield
    y = wait_columns(leaving)
    with drawing(rope[2:]):
        return block.added(x, y)


def _drawing_steps(steps: Steps, draws: tuple[T, ...]) -> Steps:
    """Run the generator ``steps`` with the random bits ``draws`` of its part, and other parts' turns without them."""
    while True:
        with drawing(draws):
            try:
                next(steps)
            except StopIteration as end:
                return end.value
        yield


def start_columns(
    module: Projections, inner: T, name: str, pieces: int
) -> list[Pending | Arrived]:
    """Project ``inner`` ``[batch, seq, in]`` with the weight ``name`` of ``module``, and start to sum the results over
    ``tp``. Each of up to ``pieces`` ranges of their channels travels while the next range is computed.
    """
    return [
        start_scatter(y, module.mesh)
        for y in projected_columns(module, inner, name, pieces)
    ]


def projected_columns(module: Projections, x: T, name: str, pieces: int) -> Iterator[T]:
    """Yield the projection of ``x`` ``[batch, seq, in]`` with the weight ``name`` in up to ``pieces`` ranges of
    channels, ``[batch, seq, channels]`` each, as soon as each is computed. A weight that has an adapter, or that is
    stored in another form, gives one range of all channels.
    """
    whole = module.products.get((name,)) or module.adapter or module.beside
    if pieces == 1 or whole or name in module.own_rows:
        yield module.project(x, name)[0]
        return
    for rows in getattr(module, name).tensor_split(pieces):
        yield project(x, rows)[0]


def wait_columns(leaving: Sequence[Pending | Arrived]) -> T:
    """Wait for the sums ``leaving``, which :func:`start_columns` has started; return this rank's tokens, ``[batch,
    seq/tp, out]``.
    """
    pieces = [each.wait() for each in leaving]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)


def part_inputs(
    part: TokenPart,
    rope: tuple[T, ...],
    cu_seqlens: T,
    seen: RouterPass | None,
    rows: int,
) -> PartInputs:
    """Return the inputs of the layers for one part of the tokens, cut out of the inputs of the whole pass.

    ``part``: the tokens of the part. ``rows``: number of rows of the whole pass. ``rope``, ``cu_seqlens``, ``seen``:
    cosines and sines, where documents begin, and where routers record their counts, for the whole pass.
    """
    at = slice(part.top, part.bottom), slice(part.first, part.last)
    turned = [each[:, *at] for each in rope[:2]]
    draws = [each[at] for each in rope[2:]]
    # of whole rows, which cp may cut
    whole = int(cu_seqlens[-1]) // rows
    lo, hi = part.top * whole, part.bottom * whole
    starts = cu_seqlens[(cu_seqlens >= lo) & (cu_seqlens <= hi)] - lo
    counted = None
    if seen is not None:
        own = slice(part.top, part.bottom)
        documents, positions = (
            each.unflatten(0, (rows, -1))[own].flatten()
            for each in (seen.documents, seen.positions)
        )
        counted = replace(
            seen,
            documents=documents,
            positions=positions,
            own={},
            chosen={},
            dropped={},
        )
    return PartInputs((*turned, *draws), starts, counted)


def part_ends(ends: T, part: TokenPart) -> T:
    """Return the boundaries of texts within a part of a row: ascending indices ``[boundaries]``, counted from the
    part's first token. They begin with 0 and end with the part's number of tokens. The pass must have a single row.

    ``ends``: the boundaries of texts in the whole row: the index of each text's first token, and at last the number of
    all tokens. ``part``: the tokens of the row that the part has.
    """
    return (ends.clamp(part.first, part.last) - part.first).unique()


def add_up_counts(seen: RouterPass, of_parts: Sequence[RouterPass]) -> None:
    """Record in ``seen`` the counts of the whole pass: the sums of the counts that routers have recorded in
    ``of_parts``, one for each part of the pass.
    """
    for name in ("own", "chosen", "dropped"):
        counts = [getattr(each, name) for each in of_parts]
        for layer in counts[0]:
            getattr(seen, name)[layer] = torch.stack([c[layer] for c in counts]).sum(0)
