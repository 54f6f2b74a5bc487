"""A pipeline's passes cut at the exchanges of experts, so that other microbatches compute while rows travel.

The kinds are those of :mod:`weft.schedule.exchange`. Rows set out where the part before them ends, and are waited for
where the next one begins: what stands between the two in the table runs meanwhile.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.layout.layout import Layout
from weft.models.fused import Tape, deferred
from weft.models.graph_parts import GraphPart, Steps, running
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
    """A stage for each layer; the model's ends are with the first and the last."""
    layers = [i for stage in stages for i in stage.layers]
    return tuple(
        Stage(range(i, i + 1), i == layers[0], i == layers[-1]) for i in layers
    )


def with_turns(table: Table, stages: Sequence[Stage], layout: Layout) -> Table:
    """``table`` of these ``stages``, layer by layer and cut at the exchanges.

    Where ranks would wait for each other in a circle, for want of microbatches, passes take no turns.
    """
    layers = [len(stage.layers) for stage in stages]
    try:
        found = with_exchanges(table, layers, TURNS[layout.overlap])
        validate(found)
        return found
    except ScheduleError:
        return with_exchanges(table, layers)


class LayerPass:
    """A microbatch's pass through a layer. ``leaf``: its input; ``end`` makes its output of what the steps return."""

    def __init__(
        self, steps: Steps, leaf: T | None, tape: Tape | None, end: Callable[[T], T]
    ) -> None:
        self.steps, self.leaf, self.tape, self.end = steps, leaf, tape, end
        self.parts: list[GraphPart] = []
        self.made: T | None = None

    def go_on(self) -> None:
        """Run the next part, if one is left."""
        if self.made is None:
            self.parts.append(GraphPart())
            with running(self.parts[-1]), deferred(self.tape):
                try:
                    next(self.steps)
                except StopIteration as end:
                    self.made = self.end(end.value)

    def output(self) -> T:
        """What comes out, after all parts that have not been run."""
        while self.made is None:
            self.go_on()
        return self.made

    def begin_back(self, grad: T | None) -> None:
        """Go back through the last part; ``grad``: the output's gradient, None of a loss."""
        self.parts.pop()
        # not so in first layers in which nothing learns
        if self.output().requires_grad:
            torch.autograd.backward(self.output(), grad)

    def go_back(self) -> None:
        """Go back through the part before, if there is one."""
        if self.parts:
            self.parts.pop().backward()


def layer_ops(
    begin: Callable[[Action, Sequence[T]], LayerPass], table: Table, rank: int
) -> dict[str, Op]:
    """What runs the parts of the passes that ``begin`` begins. Every value but what leaves the rank is the pass."""
    travels = {a.reads[0] for a in table.ranks[rank] if a.kind == SEND}

    def attention(a: Action, reads: Sequence[Any]) -> list[Any]:
        found = begin(
            a, [one.output() if isinstance(one, LayerPass) else one for one in reads]
        )
        found.go_on()
        found.go_on()  # its rows set out
        return [found]

    def experts(a: Action, reads: Sequence[Any]) -> list[Any]:
        reads[0].go_on()  # and what they make of them
        return [reads[0]] * len(a.writes)

    def combine(a: Action, reads: Sequence[Any]) -> list[Any]:
        if a.stage == table.paths[a.microbatch][-1]:
            reads[0].output()
        return [
            reads[0].output().detach() if value in travels else reads[0]
            for value in a.writes
        ]

    def combine_back(a: Action, reads: Sequence[Any]) -> list[Any]:
        *grads, found = reads
        # whose end lets gradients set out
        found.begin_back(grads[0] if grads else None)
        return [found]

    def experts_back(a: Action, reads: Sequence[Any]) -> list[Any]:
        reads[0].go_back()
        return [reads[0]]

    def attention_back(a: Action, reads: Sequence[Any]) -> list[Any]:
        found = reads[0]
        found.go_back()
        found.go_back()
        made = {
            "grad": found.leaf if found.leaf is None else found.leaf.grad,
            "tape": found.tape,
        }
        return [made[value.name] for value in a.writes]

    def under_way(a: Action, reads: Sequence[Any]) -> list[Any]:
        return list(reads)

    return {
        "Fa": attention, "Fd": under_way, "Fx": experts, "Fc": combine, "Bc": combine_back, "Bx": experts_back,
        "Ix": experts_back, "Bd": under_way, "Ba": attention_back, "Ia": attention_back,
    }  # fmt: skip
