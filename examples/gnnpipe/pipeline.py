"""GNNPipe (Chen, Chen & Qian 2023): the layers of a graph network over ranks, chunks of its nodes flowing through."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.modelled import replay
from examples.gnnpipe.model import GNN, Graph, columns_used, mean_matrix
from examples.gnnpipe.table import BACKWARD, FORWARD, chunk_order, graph_table
from weft.schedule.actions import Action, Table, Value
from weft.schedule.execute import execute
from weft.schedule.lower import links
from weft.schedule.partition import partition
from weft.schedule.pipeline_wire import Wire
from weft.schedule.validate import validate

T = torch.Tensor


class GraphPipeline:
    """Trains ``model`` on ``graph``, cut into ``chunks`` ranges of nodes, over ``ranks`` stages.

    With ``group``, this process is one of its ranks and computes that stage only; without, it replays all stages: the
    reference, equal to the last bit. Every rank holds the graph's edges. Neighbours in chunks to which the epoch has
    not come yet count with their embeddings of the epoch before, as constants; in the first epoch they add nothing to
    the mean, except at the first layer, whose inputs never change. With one chunk, all is exact. ``seed``: of a new
    order of the chunks every epoch; None: always as numbered.
    """

    def __init__(
        self, model: GNN, graph: Graph, chunks: int, ranks: int, group: dist.ProcessGroup | None = None,
        seed: int | None = 0,
    ) -> None:  # fmt: skip
        self.graph, self.ranks, self.group, self.seed, self.epochs = (
            graph,
            ranks,
            group,
            seed,
            0,
        )
        self.stages = partition([1.0] * len(model.layers), ranks)
        held = range(len(model.layers)) if group is None else self.stages[group.rank()]
        self.layers: dict[int, nn.Module] = {i: model.layers[i] for i in held}
        nodes, self.dtype = len(graph.labels), graph.features.dtype
        self.chunks = [
            range(nodes * c // chunks, nodes * (c + 1) // chunks) for c in range(chunks)
        ]
        # of what travels
        shapes: list[tuple[int, ...]] = [
            (len(cut), model.hidden) for cut in self.chunks
        ]
        self.wire = (
            None
            if group is None
            else Wire(
                group,
                graph.labels.device,
                spec=lambda v: [(shapes[v.microbatch], self.dtype)],
            )
        )
        matrices = [
            [mean_matrix(graph, targets, sources) for sources in self.chunks]
            for targets in self.chunks
        ]
        #: Chunk -> the chunks in which it has neighbours -> their part in its mean.
        self.near = [
            {e: m for e, m in enumerate(row) if m.values().numel()} for row in matrices
        ]
        #: The same of the first layer, with the nodes whose features are needed: only these are looked up.
        self.sources = [
            {e: columns_used(m) for e, m in row.items()}
            for row in self.near
            if 0 in held
        ]
        #: Inputs of the layers but the first, by layer and chunk, in the epoch before and in this one.
        self.past: dict[tuple[int, int], T] = {}
        self.fresh: dict[tuple[int, int], T] = {}
        self.losses: dict[int, T] = {}
        self.logits: dict[int, T] = {}
        self.whole = (
            self if chunks == 1 else GraphPipeline(model, graph, 1, ranks, group)
        )

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of the layers that this process computes."""
        return (p for layer in self.layers.values() for p in layer.parameters())

    def epoch(self) -> T:
        """Add one epoch's gradients to ``.grad``; returns the mean loss of the training nodes, equal on all ranks."""
        order = chunk_order(len(self.chunks), self.epochs, self.seed)
        self._run(graph_table(self.ranks, order, dict(enumerate(self.near))))
        self.past, self.fresh, self.epochs = self.fresh, {}, self.epochs + 1
        return self._sum([self.losses[c] for c in sorted(self.losses)])

    @torch.no_grad()
    def accuracy(self) -> float:
        """Share of the test nodes that the model, with no stale input, gets right; equal on all ranks."""
        self.whole._run(graph_table(self.ranks, [0], backward=False))
        right = [y.argmax(1) == self.graph.labels for y in self.whole.logits.values()]
        return float(
            self._sum([r[~self.graph.train].to(self.dtype).mean() for r in right])
        )

    def _sum(self, shares: Sequence[T]) -> T:
        total = torch.stack([torch.zeros((), dtype=self.dtype), *shares]).sum()
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return total

    def _run(self, table: Table) -> None:
        lowered, ops = (
            validate(table),
            {FORWARD: self._forward, BACKWARD: self._backward},
        )
        if self.group is None or self.wire is None:
            replay(table, ops)
        else:
            self.wire.connect(links(lowered))
            execute(lowered, self.group.rank(), ops, self.wire)

    def _forward(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        stage, chunk, got = (
            a.stage,
            a.microbatch,
            dict(zip(a.reads, reads, strict=True)),
        )
        cut = self.chunks[chunk]
        x = (
            got[Value("act", stage - 1, chunk)]
            if stage
            else self.graph.features[torch.arange(cut.start, cut.stop)]
        )
        earlier = {
            value.microbatch: inputs
            for value, inputs in got.items()
            if value.name == "layer_in"
        }
        # layer, current inputs by chunk, output
        tape: list[tuple[int, dict[int, T], T]] = []
        for i, layer in enumerate(self.stages[stage]):
            # Every layer begins with a leaf: its gradient gets what later chunks send back, then backward goes on.
            x = x.detach().requires_grad_(layer > 0 and torch.is_grad_enabled())
            current: dict[int, T] = {}
            mean = torch.zeros_like(x)  # [nodes of the chunk, width]
            if not layer:
                for other, (used, matrix) in self.sources[chunk].items():
                    mean = (
                        mean
                        + matrix @ self.graph.features[used + self.chunks[other].start]
                    )
            else:
                self.fresh[layer, chunk] = x.detach()
                current = {chunk: x} | {
                    other: inputs[i] for other, inputs in earlier.items()
                }
                for other, matrix in self.near[chunk].items():
                    h = (
                        current[other]
                        if other in current
                        else self.past.get((layer, other))
                    )
                    mean = mean if h is None else mean + matrix @ h
            x = self.layers[layer](x, mean)
            tape.append((layer, current, x))
        if stage == self.ranks - 1:
            self.logits[chunk], nodes = x.detach(), slice(cut.start, cut.stop)
            # which the loss ignores
            labels = self.graph.labels[nodes].where(self.graph.train[nodes], -100)
            loss = (
                nn.functional.cross_entropy(x, labels, reduction="sum")
                / self.graph.train.sum()
            )
            self.losses[chunk], tape[-1] = loss.detach(), (*tape[-1][:2], loss)
        made = {
            "act": x.detach(),
            "saved": tape,
            "layer_in": [current.get(chunk) for _, current, _ in tape],
        }
        return [made[value.name] for value in a.writes]

    def _backward(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        got = {
            value.name: payload for value, payload in zip(a.reads, reads, strict=True)
        }
        # gradients by layer and chunk
        late: dict[tuple[int, int], T] = dict(got.get("late", {}))
        grad = got.get("grad")  # None at the loss
        for layer, current, y in reversed(got["saved"]):
            parameters = list(self.layers[layer].parameters())
            # features need none
            found = torch.autograd.grad(y, [*parameters, *current.values()], grad)
            for p, g in zip(parameters, found, strict=False):
                p.grad = g if p.grad is None else p.grad + g
            for other, g in zip(current, found[len(parameters) :], strict=True):
                late[layer, other] = (
                    late[layer, other] + g if (layer, other) in late else g
                )
            grad = late.pop((layer, a.microbatch), None)
        made = {"grad": grad, "late": late}
        return [made[value.name] for value in a.writes]


def volumes(graph: Graph, ranks: int, hidden: int, layers: int) -> tuple[int, int]:
    """Bytes that all ranks send in an epoch: in this pipeline, and with each rank holding an equal range of the nodes.

    Here every node passes every cut forward and backward. There, at every layer but the first (whose inputs never
    change and are kept), a rank gets each remote neighbour of its nodes once and returns one gradient for it.
    """
    source, nodes = graph.edges[0], len(graph.labels)
    home, target = graph.edges * ranks // nodes
    halo = (source * ranks + target)[home != target].unique().numel()
    row = 2 * hidden * graph.features.dtype.itemsize
    return (ranks - 1) * nodes * row, (layers - 1) * halo * row
