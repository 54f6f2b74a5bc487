"""A pipeline's passes cut at the exchanges of experts, so that other microbatches compute while rows travel.

The kinds are those of :mod:`weft.schedule.exchange`. Rows are sent at the end of the part before the exchange, and
waited for at the beginning of the next part. Actions between the two in the table run meanwhile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.layout.layout import Layout
from weft.models.drawing import drawing
from weft.models.feed_forward import FeedForward
from weft.models.fused import Tape, deferred
from weft.models.graph_parts import GraphPart, Steps, current_part, read, running
from weft.models.router import RouterPass
from weft.models.transformer import Block
from weft.schedule.actions import Action, ScheduleError, Table
from weft.schedule.exchange import Beside, with_exchanges
from weft.schedule.execute import Op
from weft.schedule.lower import SEND
from weft.schedule.stages import Stage
from weft.schedule.validate import validate

T = torch.Tensor

#: What takes turns with a microbatch's pass, by ``layout.overlap``.
TURNS = {"passes": Beside.OTHER_PASS, "pairs": Beside.SAME_PASS}


def layer_stages(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return stages of one layer each, for the layers of ``stages`` in their order.

    The first stage also holds the embedding, and the last one the norm and head at the model's end.
    """
    layers = [i for stage in stages for i in stage.layers]
    return tuple(
        Stage(range(i, i + 1), i == layers[0], i == layers[-1]) for i in layers
    )


def with_turns(table: Table, stages: Sequence[Stage], layout: Layout) -> Table:
    """Cut the schedule ``table`` so that one microbatch computes while tokens of another travel to experts and back.

    Each layer becomes a stage. Each pass of a layer is cut at two places: where its tokens are sent to the experts, and
    where the results are sent back. Then parts of the passes of two microbatches alternate, as ``layout.overlap`` says.
    If alternating would make ranks wait for each other in a circle, as with too few microbatches, the passes are cut
    and do not alternate. ``stages``: the stages that ``table`` names, before the cut.
    """
    layers = [len(stage.layers) for stage in stages]
    try:
        cut = with_exchanges(table, layers, TURNS[layout.overlap])
        validate(cut)
        return cut
    except ScheduleError:
        return with_exchanges(table, layers)


def block_steps(
    block: Block, x: T, rope: tuple[T, ...], cu_seqlens: T, seen: RouterPass | None
) -> Steps:
    """Run forward of ``block`` without recomputation, as a generator, so that other work can run during transfers.

    The other arguments are those of :meth:`Block.forward`. The generator yields where a mixture of experts sends rows
    to other ranks, and never without a mixture. Its return value is the block's output.
    """
    x, early = block.after_attention(x, rope, cu_seqlens, seen)
    before, normed = current_part(), block.ffn_norm(x)
    if not isinstance(block.ffn, FeedForward):
        y = yield from block.ffn.steps(normed, seen, early)
    else:
        with drawing(rope[2:]):
            y = block.ffn(normed)
    with drawing(rope[2:]):
        return block.added(read(x, before), y)


@dataclass(eq=False)
class LayerPass:
    """A microbatch's pass through a layer with experts, in parts: it pauses at each exchange of tokens.

    Attributes:
        ``steps``: generator that runs one part of forward at a time.
        ``leaf``: the layer's input as a leaf of the autograd graph, in whose ``grad`` backward leaves the input's
            gradient. None in the first layer, behind the embedding.
        ``tape``: where weight gradients are postponed to; None if they are not.
        ``end``: function that computes the layer's output from what ``steps`` returns.
        ``parts``: the parts of the autograd graph so far; backward takes them from the end.
        ``result``: the layer's output, None until forward is complete.
    """

    steps: Steps
    leaf: T | None
    tape: Tape | None
    end: Callable[[T], T]
    parts: list[GraphPart] = field(default_factory=list)
    result: T | None = None

    def go_on(self) -> None:
        """Run forward up to the next exchange of tokens or to its end; do nothing if it has ended."""
        if self.result is None:
            self.parts.append(GraphPart())
            with running(self.parts[-1]), deferred(self.tape):
                try:
                    next(self.steps)
                except StopIteration as end:
                    self.result = self.end(end.value)

    def output(self) -> T:
        """Run the parts of forward that have not run yet, and return the layer's output."""
        while self.result is None:
            self.go_on()
        return self.result

    def begin_back(self, grad: T | None) -> None:
        """Run backward of the last part; ``grad``: the gradient of the layer's output, None if the output is a loss."""
        self.parts.pop()
        # not so in first layers in which nothing learns
        if self.output().requires_grad:
            torch.autograd.backward(self.output(), grad)

    def go_back(self) -> None:
        """Run the next part of backward, if any remains. Parts run in the reverse of the order of forward."""
        if self.parts:
            self.parts.pop().backward()


def layer_ops(
    begin: Callable[[Action, Sequence[T]], LayerPass], table: Table, rank: int
) -> dict[str, Op]:
    """Return, for each kind of action, the function that runs such actions in a schedule cut by :func:`with_turns`.

    ``begin``: function that makes a new :class:`LayerPass` from an action and the values that the action reads, without
    running any part of the pass. ``table``: the schedule; ``rank``: the rank whose actions are run. An action's result
    for a later action of the same pass on this rank is the :class:`LayerPass` itself. A result for another rank is a
    tensor.
    """
    travels = {a.reads[0] for a in table.ranks[rank] if a.kind == SEND}

    def attention(a: Action, reads: Sequence[Any]) -> list[Any]:
        inputs = [x.output() if isinstance(x, LayerPass) else x for x in reads]
        layer = begin(a, inputs)
        layer.go_on()
        layer.go_on()  # its rows set out
        return [layer]

    def experts(a: Action, reads: Sequence[Any]) -> list[Any]:
        reads[0].go_on()  # and their results set out
        return [reads[0]] * len(a.writes)

    def combine(a: Action, reads: Sequence[Any]) -> list[Any]:
        layer = reads[0]
        if a.stage == table.paths[a.microbatch][-1]:
            layer.output()
        return [
            layer.output().detach() if value in travels else layer for value in a.writes
        ]

    def combine_back(a: Action, reads: Sequence[Any]) -> list[Any]:
        *grads, layer = reads
        # at the end gradients set out
        layer.begin_back(grads[0] if grads else None)
        return [layer]

    def experts_back(a: Action, reads: Sequence[Any]) -> list[Any]:
        reads[0].go_back()
        return [reads[0]]

    def attention_back(a: Action, reads: Sequence[Any]) -> list[Any]:
        layer = reads[0]
        layer.go_back()
        layer.go_back()
        grad = None if layer.leaf is None else layer.leaf.grad
        values = {"grad": grad, "tape": layer.tape}
        return [values[value.name] for value in a.writes]

    def under_way(a: Action, reads: Sequence[Any]) -> list[Any]:
        return list(reads)

    return {
        "Fa": attention, "Fd": under_way, "Fx": experts, "Fc": combine, "Bc": combine_back, "Bx": experts_back,
        "Ix": experts_back, "Bd": under_way, "Ba": attention_back, "Ia": attention_back,
    }  # fmt: skip
