"""The reference model of reinforcement learning on the policy's ranks, under a layout of its own.

Checkpoints hold it under the names that it has as a slot of the policy's parameters
(:mod:`weft.parallel.reference_weights`), so that a run can go on with either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from weft.layout.mesh import Mesh, from_all
from weft.parallel.build import Built, parallelize
from weft.parallel.reference_weights import REFERENCE

if TYPE_CHECKING:
    from collections.abc import Collection

    from weft.layout.parts import Part
    from weft.models.values import Values
    from weft.parallel.state import Held, State
    from weft.recipe import ModelShape, Recipe

#: Its place beside the policy's state: before the names of its tensors in checkpoints, as before those of slots.
BESIDE = "optimizer"


class ReferenceState:
    """The tensors of a reference model that checkpoints hold: those that learn in the policy.

    ``whole``: the state of the model. ``kept``: names of the parameters that learn in the policy. ``learning``: none of
    its parameters learns here.
    """

    learning: tuple[Held, ...] = ()

    def __init__(self, whole: State, kept: Collection[str]) -> None:
        self.whole, self.kept = whole, frozenset(kept)

    def settle(self) -> None:
        """Do nothing, because the tensors never change."""

    def parts(self) -> dict[str, Part]:
        """Return this rank's part of every tensor by name, as slots are named."""
        return {
            f"{REFERENCE}.{h.name}": h.part(h.local)
            for h in self.whole.held
            if h.name in self.kept
        }


class ReferenceBeside(NamedTuple):
    """A reference model under its own ``mesh``: what is ``built`` there, and the ``state`` that checkpoints hold."""

    built: Built
    mesh: Mesh
    state: ReferenceState


def build_reference(
    policy: State, shape: ModelShape, mesh: Mesh, recipe: Recipe, values: Values | None
) -> ReferenceBeside:
    """Build the reference model on the ranks of ``mesh`` under the layout ``roles.reference.layout``. Collective.

    ``policy``, ``shape``: state and shape of the policy. ``values``: initial values; None: seeded ones.
    """
    assert recipe.roles is not None
    own = Mesh.create(recipe.roles.reference.layout, mesh.device)
    train = recipe.train.model_copy(update={"freeze": ("*",)})
    # as wide as the policy's, so that a slot can take its tensors over after a loss of ranks
    built = parallelize(
        shape, own, train, values, recipe.data.seq_len, summed=False, narrow=False
    )
    learning = from_all({h.name for h in policy.learning}, mesh.step_group)
    return ReferenceBeside(
        built, own, ReferenceState(built.state, set().union(*learning))
    )


def reference_beside(policy: State) -> ReferenceBeside | None:
    """Return the reference model with a layout of its own beside the policy with the state ``policy``; None if there is
    none.
    """
    beside = policy.beside.get(BESIDE)
    return beside if isinstance(beside, ReferenceBeside) else None
