"""Passes whose microbatches hop between islands: the gradient phase of a step, and the wire between its stages.

A value goes to the next stage in its own island, and from there to the rank at the same place in the island that the
route names. Its gradient goes back in the same way. A rank computes as many microbatches as without routes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch

from weft.errors import WeftError
from weft.layout.boundary import step_sum
from weft.schedule.pipeline_wire import Wire
from weft.techniques.phases.routed_stages.drawn_routes import DrawnRoutes
from weft.train.step import PhaseFiller, nonzero_weight, share_of_weight

if TYPE_CHECKING:
    from weft.data.batch import Batch
    from weft.parallel.pipeline import Pipeline
    from weft.schedule.actions import Value
    from weft.sync.streams import Streams
    from weft.train.phases import AgreePhase
    from weft.train.step import StepContext
    from weft.train.step_values import StepInput

T = torch.Tensor

#: What a stage reads of a batch that is not its own island's; the last stage reads all, and others leave out the rest.
READ_BY_ALL = ("positions", "cu_seqlens", "draws")
READ_BY_LAST = (*READ_BY_ALL, "labels", "documents", "weights")


class RoutedWire:
    """A pipeline's wire that sends values on to other islands as ``routes`` says.

    ``wire``: the transfers inside this island; ``streams``: the connections to this rank's place in other islands.
    ``routes`` (attribute): the routes of the present step; None: values stay in their island, as in evaluation, and the
    wire does the same as ``wire``.
    """

    def __init__(self, wire: Wire, streams: Streams) -> None:
        self.wire, self.streams = wire, streams
        self.routes: DrawnRoutes | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wire, name)

    def take(self, value: Value, source: int, purpose: str) -> Any:
        """Receive ``value`` of this island's own pipeline, and exchange it for the value that this rank is to compute
        with. First wait for it from rank ``source`` of this island, and send it to the island where its route goes
        on. Then return the value that arrives from another island. Without ``routes`` nothing is exchanged.
        ``purpose``: what the transfer is counted as.
        """
        payload: T = self.wire.take(value, source, purpose)
        if self.routes is None:
            return payload
        island, m = self.streams.island, value.microbatch
        if value.name == "act":
            goes = self.routes.target(value.stage + 1, island, m)
            comes = self.routes.source(value.stage + 1, island, m)
        else:
            goes = self.routes.source(value.stage, island, m)
            comes = self.routes.target(value.stage, island, m)
        if goes == island:
            return payload
        tag = f"{self.routes.step}/{value.name}/{value.stage}/{m}"
        self.streams.send(goes, tag, payload.detach().cpu().contiguous().flatten())
        other = self.streams.receive(comes, tag, payload.dtype)
        return other.view(payload.shape).to(payload.device)


class RoutedStages(PhaseFiller):
    """Fills the gradient phase: a pipeline whose stages compute microbatches of several islands.

    ``context``: the model, state and mesh of the run. ``streams``: the connections to the other islands. ``seed``: seed
    of the routes.
    """

    def __init__(self, context: StepContext, streams: Streams, seed: int) -> None:
        pipeline = cast("Pipeline | None", context.model.pipeline)
        assert pipeline is not None
        self.context, self.streams, self.seed = context, streams, seed
        self.steps, self.pipeline = context.begun, pipeline
        self.stage = context.mesh.rank("pp")
        self.is_last = self.stage == context.mesh.size("pp") - 1
        wire = pipeline.here.wire
        assert wire is not None
        self.wire = RoutedWire(wire, streams)
        pipeline.here = replace(pipeline.here, wire=self.wire)  # type: ignore[arg-type]

    def gradients(self, given: StepInput, agree: AgreePhase) -> T:
        own, mesh = given.batches, self.context.mesh
        routes = DrawnRoutes(self.streams.islands, self.seed, self.steps)
        weight = step_sum(share_of_weight(own, mesh), mesh)
        total = nonzero_weight(agree.beyond(weight))
        origins = [
            routes.origin(self.stage, self.streams.island, m) for m in range(len(own))
        ]
        every = self.exchanged(own, total, origins, routes)
        batches = [batch for batch, _ in every]
        totals = self.in_order_of_losses([total for _, total in every])
        self.wire.routes = routes
        try:
            loss = self.pipeline.accumulate(batches, lambda: next(totals))
            self.streams.flush()
        finally:
            self.wire.routes = None
        self.steps += 1
        return loss

    def in_order_of_losses(self, totals: Sequence[T]) -> Iterator[T]:
        """Iterate over ``totals``, the numbers by which the losses of the microbatches are divided, in the order in
        which this rank computes these losses.
        """
        table = self.pipeline.table(len(totals))
        order = [a.microbatch for a in table.ranks[self.stage] if a.kind == "F"]
        return chain(totals[m] for m in order)

    def exchanged(
        self,
        own: Sequence[Batch],
        total: T,
        origins: Sequence[int],
        routes: DrawnRoutes,
    ) -> list[tuple[Batch, T]]:
        """Send this island's batches to the islands whose stage computes them; return those that this rank computes.

        Each batch comes with the number by which its loss is divided. ``own``: this island's batches, one for each
        microbatch; ``total``: the number by which the losses of this island's batches are divided; ``origins``: for
        each microbatch, the island of the batch that this rank computes; ``routes``: the routes of the step. The bytes
        count as control messages.
        """
        island, names = (
            self.streams.island,
            READ_BY_LAST if self.is_last else READ_BY_ALL,
        )
        for m, batch in enumerate(own):
            there = next(
                i
                for i in range(self.streams.islands)
                if routes.origin(self.stage, i, m) == island
            )
            if there != island:
                self._send(there, f"{routes.step}/batch/{m}", batch, total, names)
        every = [
            (batch, total)
            if origin == island
            else self._receive(origin, f"{routes.step}/batch/{m}", batch, names)
            for m, (batch, origin) in enumerate(zip(own, origins, strict=True))
        ]
        self.streams.flush()
        return every

    def _send(
        self, island: int, tag: str, batch: Batch, total: T, names: Sequence[str]
    ) -> None:
        shape = torch.tensor([*batch.tokens.shape, float(total)], dtype=torch.float64)
        self.streams.send(island, tag, shape, control=True)
        for name in names:
            values = getattr(batch, name)
            flat = torch.empty(0) if values is None else values.cpu().flatten()
            self.streams.send(island, f"{tag}/{name}", flat.contiguous(), control=True)

    def _receive(
        self, island: int, tag: str, like: Batch, names: Sequence[str]
    ) -> tuple[Batch, T]:
        *shape, total = self.streams.receive(island, tag, torch.float64).tolist()
        if shape != [*like.tokens.shape]:
            rows, length = map(int, shape)
            raise WeftError(
                f"island {island} has microbatches of {rows} rows of {length} tokens, and island {self.streams.island} "
                f"of {' rows of '.join(map(str, like.tokens.shape))}: with sync.routes = 'random' all must be alike; "
                "set sync.routes = 'own'"
            )
        values: dict[str, Any] = {}
        for name in names:
            raw = self.streams.receive(island, f"{tag}/{name}", torch.uint8)
            values[name] = _as_in_a_batch(name, raw, like) if len(raw) else None
        # tokens are read by the first stage alone, where the batch is the island's own
        batch = replace(like, samples=(), **values)
        return batch, torch.tensor(
            total, dtype=torch.float64, device=self.context.mesh.device
        )


def _as_in_a_batch(name: str, raw: T, like: Batch) -> T:
    """Return the bytes ``raw`` as the tensor ``name`` of a batch of the same shape as ``like``."""
    if name == "cu_seqlens":
        return raw.view(torch.int32)
    size, kind = len(raw) // like.tokens.numel(), torch.int64
    if name == "weights":
        kind = torch.float32 if size == 4 else torch.float64
    return raw.view(kind).view(like.tokens.shape)
