"""A view that only loses or gains whole replicas: its layout is known at once, and the model of a rank stays.

Ranks of other layouts look for the best layout among all, and build a model for it (:mod:`weft.resilience.layouts`).
Where only ``dp`` changes, each rank that goes on computes with the same part of the model as before, beside fewer or
more replicas. Its groups are edited (:mod:`weft.net.kept_groups`); the model and its state, which is filled from the
copies in memory in either case, get the new groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.layout.axes import LIVE_AXES
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.parallel.build import Built
from weft.parallel.replicated import Parcels, ReplicaUnit
from weft.parallel.state import Unit
from weft.recipe import ModelShape, Recipe
from weft.recipe.conflicts import AskedRecipe, refuse_conflicts
from weft.recipe.step_techniques import asked_techniques
from weft.train.recorder import Recorder
from weft.train.setup import Job


def recipe_of_replicas(recipe: Recipe, shape: ModelShape, ranks: int) -> Recipe | None:
    """Return ``recipe`` with another number of replicas (``dp``), such that its layout has exactly ``ranks`` ranks.

    Returns None if no number of replicas does it, or if a rule forbids the layout. ``shape``: shape of the model, with
    all its layers.
    """
    layout = recipe.layout
    of_replica = layout.world // layout.dp
    if layout.dp == 1 or ranks % of_replica or layout.island > 1:
        return None
    try:
        other = Layout(**layout.model_dump() | {"dp": ranks // of_replica})
        edited = recipe.model_copy(update={"layout": other})
        refuse_conflicts(AskedRecipe(**dict(edited), shape=shape))
    except ValueError:
        return None
    return edited


@dataclass
class KeptModel:
    """The model and state of a rank, kept from one view to the next so that they need not be built again.

    Attributes:
        ``recipe``: the recipe with which they were built.
        ``mesh``: the mesh on which they were built; :meth:`edit` changes it.
        ``built``: the model and its state.
        ``parcels``: sums the gradients over the replicas.
    """

    recipe: Recipe
    mesh: Mesh
    built: Built
    parcels: Parcels

    def fits(self, recipe: Recipe, mesh: Mesh) -> bool:
        """Return whether the kept model can be used on ``mesh``: this rank holds the same part of the model there, with
        the same groups inside a replica.

        ``recipe``: the recipe of the new view.
        """
        before, inside = self.mesh, [axis for axis in LIVE_AXES if axis != "dp"]
        same = recipe.layout.model_copy(update={"dp": before.layout.dp})
        return (
            self.recipe == recipe.model_copy(update={"layout": same})
            and mesh.device_mesh is not None
            and all(before.rank(axis) == mesh.rank(axis) for axis in inside)
            and all(before.group(axis) is mesh.group(axis) for axis in inside)
        )

    def edit(self, recipe: Recipe, mesh: Mesh, recorder: Recorder) -> Built:
        """Connect the kept model and state to the process groups of ``mesh``. Returns the model and the state.

        Gradients and postponed updates of an unfinished step are discarded.

        ``recipe``: the recipe of the new view. ``recorder``: records the passes of the next steps.
        """
        model, state = self.built
        self.recipe = recipe
        self.mesh.become(mesh)
        self.parcels.regroup(mesh.group("dp"))
        model.hooks = replace(model.hooks, passed=recorder.passes)
        state.clear_gradients()
        state.due.clear()
        for held in state.held:
            held.placement = at = mesh.place.hold(held.logical)
            held.slots = {
                name: replace(part, replica=at.replica, replicas=at.replicas)
                for name, part in held.slots.items()
            }
        return self.built


def kept_model(job: Job, mesh: Mesh, built: Built) -> KeptModel | None:
    """Return ``built`` as a model that :meth:`KeptModel.edit` can connect to new process groups; None if it cannot.

    It cannot if there is a single replica, or if the state is sharded or rests off the device. It also cannot with
    pipeline stages, ``train.compile`` or a technique of the step, because these may go on using the old groups.
    """
    recipe, state = job.recipe, built.state
    units = [unit for unit in state.units if isinstance(unit, ReplicaUnit)]
    plain = all(type(unit) in (ReplicaUnit, Unit) for unit in state.units)
    asked = AskedRecipe(**dict(recipe), shape=job.shape)
    if (
        not units
        or not plain
        or type(built.model) is not Transformer
        or mesh.layout.balance
        or recipe.train.compile
        or recipe.memory.away
        or state.beside
        or any(asked_techniques(asked))
    ):
        return None
    return KeptModel(recipe, mesh, built, units[0].parcels)
