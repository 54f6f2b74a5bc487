"""Microbatches that pass the pipelines of several islands at random: ``sync.routes = "random"``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.refusal import Rule
from weft.registry import register
from weft.train.phases import Phase
from weft.train.step_technique import StepTechnique

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.layout.mesh import Mesh
    from weft.recipe import Recipe
    from weft.techniques.phases.routed_stages.simulated_routes import SimulatedRoutes
    from weft.train.setup import Job
    from weft.train.step import PhaseFiller, StepContext


@register(
    "phases",
    "routed-stages",
    rules=(
        Rule(
            "routes without islands", "layout", lambda a: a.layout.island == 1,
            "sync.routes = 'random' leads microbatches through the pipelines of several islands, and there is one",
            "set layout.island above 1 or leave it out",
        ),
        Rule(
            "routes without stages", "layout", lambda a: a.layout.pp == 1,
            "sync.routes = 'random' chooses an island for each stage of a pipeline, and layout.pp is 1",
            "set layout.pp above 1 or leave it out",
        ),
        Rule(
            "routes over several stages of a rank", "layout",
            lambda a: a.layout.pp > 1 and (a.chunks > 1 or a.layout.schedule == "dualpipe"),
            "sync.routes = 'random' gives a rank the batches of one stage, and with layout.schedule = "
            "{0.layout.schedule!r} a rank has several stages", "use a schedule of one stage, as '1f1b' or 'zb-h1'",
        ),
        Rule(
            "routes with shares of the vocabulary", "layout",
            lambda a: a.layout.vocab_barriers > 0 or a.layout.skip > 0,
            "sync.routes = 'random' needs microbatches that pass one stage after another on ranks of their own",
            "leave layout.vocab_barriers and layout.skip out",
        ),
        Rule(
            "routes of other models", "model",
            lambda a: bool(a.model.kind) or bool(a.model.experts),
            "sync.routes = 'random' sends positions and labels of texts to other islands, and model.kind or "
            "model.experts need more of a batch", "leave one of them out",
        ),
        Rule(
            "routes of answers", "loss",
            lambda a: a.loss.of_pairs or a.loss.scores,
            "sync.routes = 'random' sends labels and their weights to other islands, and loss.kind = {0.loss.kind!r} "
            "reads more", "leave one of them out",
        ),
    ),
    title="NoLoCo's random routes: each microbatch passes a pipeline stage of an island drawn for it",
    paper="Kolehmainen et al. 2025",
    recipe=(
        "islands.toml --layout island=3,pp=2 --set sync.update=noloco --set sync.routes=random --set "
        "sync.compress=none"
    ),
    proof="tests/techniques/test_routed_stages.py",
    figure="equal to a simulation to 1e-10; bytes as the formula says",
)  # fmt: skip
class RoutedStagesTechnique(StepTechnique):
    """Lets the stages of an island compute microbatches of other islands, which are drawn at random in every step
    (Kolehmainen et al. 2025).
    """

    fills = Phase.GRADIENTS
    does = "sync.routes = 'random' leads microbatches through stages of other islands"
    instead = ", or set sync.routes = 'own'"

    def fill(self, context: StepContext, recipe: Recipe) -> PhaseFiller | None:
        if context.presence is None:
            return None
        from weft.techniques.phases.routed_stages.island_routes import RoutedStages

        return RoutedStages(context, context.presence.streams, recipe.train.seed)

    def simulated(self, job: Job, meshes: Sequence[Mesh]) -> SimulatedRoutes:
        """Return the simulation of all islands in one process, with which ``weft verify`` compares a run.

        ``meshes``: the mesh of each island, of one device.
        """
        from weft.techniques.phases.routed_stages.simulated_routes import (
            SimulatedRoutes,
        )

        return SimulatedRoutes(job, meshes)
