"""Routes as one process sees them: the whole models of all islands, and no messages.

It is the reference for islands whose microbatches hop: a microbatch passes the layers of one model after those of
another, and autograd finds the way back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from weft.schedule.stages import assign_stages, make_table
from weft.techniques.phases.routed_stages.drawn_routes import DrawnRoutes
from weft.train.step import PhaseFiller, nonzero_weight

if TYPE_CHECKING:
    from weft.data.batch import Batch
    from weft.layout.mesh import Mesh
    from weft.train.phases import AgreePhase
    from weft.train.setup import Job
    from weft.train.step import StepContext
    from weft.train.step_values import StepInput

T = torch.Tensor


class SimulatedRoutes:
    """Computes the gradients of all islands of ``job`` in this process, where each island is a whole model on one
    device.

    ``meshes``: the mesh of each island. ``job`` (attribute): the same job, with as many microbatches on one device as
    in a pipeline.
    """

    def __init__(self, job: Job, meshes: Sequence[Mesh]) -> None:
        recipe = job.recipe
        rows, self.passes = recipe.rows_per_pass(recipe.layout)
        alike = recipe.train.model_copy(update={"micro_batch": rows})
        recipe = recipe.model_copy(update={"train": alike})
        self.job = dataclasses.replace(job, recipe=recipe)
        self.loaders = [self.job.loader(job.corpus.train, mesh) for mesh in meshes]
        table = make_table(recipe.layout, self.passes, job.shape, recipe.data.seq_len)
        stages = assign_stages(job.shape, recipe.layout, table, recipe.data.seq_len)
        self.layers = [stage.layers for stage in stages]
        #: By island, once it is built.
        self.contexts: dict[int, StepContext] = {}
        self.losses: list[T] = []

    def join(self, context: StepContext) -> PhaseFiller:
        """Add the island of ``context`` to the simulation. Return the object that fills the gradient phase of the
        island's steps.
        """
        self.contexts[context.mesh.island] = context
        return SimulatedIsland(self, context)

    def run(self, step: int) -> None:
        """Run forward and backward of all islands' microbatches of ``step``. Add up the losses for each island: those
        of the microbatches whose last stage the island computes.
        """
        train, count = self.job.recipe.train, len(self.contexts)
        loaded = [loader.step(step * train.batch) or [] for loader in self.loaders]
        totals = [torch.tensor(sum(b.label_weight for b in own)) for own in loaded]
        routes = DrawnRoutes(count, train.seed, step)
        self.losses = [torch.zeros((), dtype=torch.float64) for _ in range(count)]
        for context in self.contexts.values():
            context.state.begin_pass(last=True)
        for origin, (own, total) in enumerate(zip(loaded, totals, strict=True)):
            for index, batch in enumerate(own):
                end, loss = self._pass(batch, origin, index % self.passes, routes)
                share = loss / nonzero_weight(total.double())
                share.backward()
                self.losses[end] += share.detach()

    def _pass(
        self, batch: Batch, origin: int, microbatch: int, routes: DrawnRoutes
    ) -> tuple[int, T]:
        """Run a batch of island ``origin`` forward; return the island of its last stage, and its summed loss."""
        at, model = origin, self.contexts[origin].model
        x: Any = model.embedded_batch(batch)
        rope = model.shared(batch, x.dtype)
        x = model.entered(x, rope)
        for stage, layers in enumerate(self.layers):
            at = routes.sources(stage, microbatch).index(at)
            model = self.contexts[at].model
            x = model.run_blocks(layers, x, rope, batch.cu_seqlens)
        return at, model.loss(model.norm(model.settled(x)), batch)


class SimulatedIsland(PhaseFiller):
    """Fills the gradient phase of a simulated island. Island 0 is the first in each step, and computes the gradients of
    all islands.

    ``of``: the simulation; ``context``: the model, state and mesh of this island.
    """

    def __init__(self, of: SimulatedRoutes, context: StepContext) -> None:
        self.of, self.island, self.steps = of, context.mesh.island, context.begun

    def gradients(self, given: StepInput, agree: AgreePhase) -> T:
        if self.island == 0:
            self.of.run(self.steps)
        self.steps += 1
        return self.of.losses[self.island]
