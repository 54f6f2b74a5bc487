"""A critic with layers of its own, trained beside the policy of reinforcement learning on the same ranks.

It is a model that scores texts: its output at a token is the sum of the rewards that it predicts to follow (Schulman et
al. 2017, 1707.06347). It learns from the batches of the policy, with an optimizer of its own. Where it is trained in
other processes (:mod:`weft.rl.critic_processes`), only a copy for checkpoints is here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from weft.errors import UsageError, WeftError
from weft.models.hooks import Hooks
from weft.models.policy_loss import PolicyFigures, PolicyObjective
from weft.parallel.build import Built, parallelize
from weft.train.critic_copy import CopiedState, CriticCopy
from weft.train.rule_optimizer import RuleOptimizer, learning_rate
from weft.train.step import Step, StepContext, plain_step
from weft.train.step_values import MOST_SKIPPED

if TYPE_CHECKING:
    from weft.checkpoint.weights import Pretrained
    from weft.data.batch import Batch
    from weft.layout.mesh import Mesh
    from weft.models.values import Values
    from weft.parallel.state import State
    from weft.recipe import ModelShape, Optimizer, Recipe
    from weft.train.step_values import StepResult

#: The critic's name beside the policy's state, and before the names of its tensors in checkpoints.
CRITIC = "critic"


def critic_of(state: State) -> Built | None:
    """Return the critic with layers of its own that is trained beside the policy with the state ``state``; None if
    there is none on these ranks.
    """
    critic = state.beside.get(CRITIC)
    return critic if isinstance(critic, Built) else None


def copied_critic(state: State) -> CopiedState | None:
    """Return the copy of a critic that is trained in other processes, beside the policy with the state ``state``; None
    if there is no such critic.
    """
    critic = state.beside.get(CRITIC)
    return critic.state if isinstance(critic, CriticCopy) else None


def critic_shape(policy: ModelShape, recipe: Recipe) -> ModelShape:
    """Return the shape of a critic with layers of its own: that of ``policy`` or of the model that
    ``roles.critic.model`` names, with an output of one number.
    """
    named = named_critic(recipe)
    shape = named.shape if named else policy
    change = {"output": "score", "tied": False, "value_head": False, "adapter": None}
    return shape.model_copy(update=change)


def named_critic(recipe: Recipe) -> Pretrained | None:
    """Open the model that ``roles.critic.model`` names; None if the recipe names none.

    Raises :class:`WeftError` as :func:`named_model` does.
    """
    name = recipe.roles.critic.model if recipe.roles else ""
    return named_model("roles.critic.model", name)


def named_model(setting: str, name: str) -> Pretrained | None:
    """Open the model ``name`` that the setting named ``setting`` has; None if ``name`` is empty.

    Raises :class:`WeftError` if it cannot be read, has no weights, or has an adapter.
    """
    if not name:
        return None
    from weft.checkpoint.weights import open_pretrained

    try:
        model = open_pretrained(name)
    except WeftError as error:
        raise type(error)(f"{setting}: {error}") from None
    if model.values is None or model.shape.adapter is not None or model.shape.kind:
        raise UsageError(
            f"{setting} = {name!r} has no weights of a whole transformer; name a folder with some"
        )
    return model


def critic_optimizer(recipe: Recipe) -> Optimizer:
    """Return the settings of the critic's optimizer: those of ``[optimizer]``, with what ``roles.critic.optimizer``
    replaces.
    """
    assert recipe.roles is not None
    return recipe.roles.critic.optimizer_settings(recipe.optimizer)


def build_critic(
    policy: ModelShape, mesh: Mesh, recipe: Recipe, values: Values | None
) -> Built:
    """Build a critic with layers of its own on this rank of ``mesh``. Collective.

    ``policy``: shape of the policy. ``values``: initial values of the policy; None: seeded ones, or those of a
    checkpoint that is loaded later.
    """
    assert recipe.rl is not None
    assert recipe.roles is not None
    shape = critic_shape(policy, recipe)
    # a named critic has weights also where model.from is a configuration without any
    named = bool(recipe.roles.critic.model)
    if named or values is not None or recipe.model.origin is None:
        values = _first_values(shape, recipe)
    objective = PolicyObjective(recipe.rl.policy_loss, recipe.rl.temperature)
    return parallelize(
        shape,
        mesh,
        recipe.train.model_copy(update={"freeze": ()}),
        values,
        recipe.data.seq_len,
        hooks=Hooks(objective=objective),
        optimizer=RuleOptimizer(critic_optimizer(recipe), mesh),
    )


def _first_values(shape: ModelShape, recipe: Recipe) -> Values | None:
    """Return the values with which a critic of a new run begins; None: seeded ones."""
    from weft.checkpoint.weights import starting_values

    assert recipe.roles is not None
    name = recipe.roles.critic.model or recipe.model.origin
    origin = recipe.model.model_copy(update={"origin": name})
    return starting_values(recipe.model_copy(update={"model": origin}), shape)


@dataclass
class SkippedUpdates:
    """Counts the updates of a critic that were left out.

    ``in_a_row``: their number since the last one that was not. ``lines``: lines about them that were not printed yet.
    """

    in_a_row: int = 0
    lines: list[str] = field(default_factory=list)

    def count(self, skipped: bool, begun: int) -> None:
        """Count an update. ``skipped``: whether it was left out. ``begun``: number of steps of the run before it.

        Raises :class:`WeftError` after as many in a row as end a run when the policy's are left out.
        """
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if not skipped:
            return
        if self.in_a_row >= MOST_SKIPPED:
            raise WeftError(
                f"the critic's loss or gradient norm were not finite in {self.in_a_row} steps in a row, which "
                f"changed nothing in it; ended at step {begun}: lower lr in roles.critic.optimizer, or look at "
                "the rewards and the weights it began with"
            )
        self.lines.append(
            f"the critic's loss or gradient norm was not finite in step {begun + 1}: it has not learned from it"
        )

    def news(self) -> list[str]:
        """Return the lines to print that are new since the last call."""
        lines, self.lines = self.lines, []
        return lines


@dataclass
class CriticStep(Step):
    """A training step of a policy, and of a critic with layers of its own.

    Attributes:
        ``critic``: the step of the critic alone.
        ``optimizer``: settings of the critic's optimizer, which give its learning rates.
        ``begun``: number of steps of the run that were taken before.
        ``start``: number of steps at the beginning of the run in which the critic does not learn.
        ``steps``: number of steps after these.
        ``skipped``: counts the critic's updates that were left out.
        ``figures``: figures of the critic, to which the time of its steps is added.
    """

    critic: Step = None  # type: ignore[assignment]
    optimizer: Optimizer = None  # type: ignore[assignment]
    begun: int = 0
    start: int = 0
    steps: int = 0
    skipped: SkippedUpdates = field(default_factory=SkippedUpdates)
    figures: PolicyFigures = field(default_factory=PolicyFigures)

    def take(
        self, batches: Sequence[Batch], lr: float, stop: bool = False
    ) -> list[StepResult]:
        # supervised batches have no rewards that could be predicted
        if all(batch.rollout is not None for batch in batches):
            step, since = max(0, self.begun - self.start), time.perf_counter()
            # which resuming counts again in the same way
            self.critic.state.updates = step
            rate = learning_rate(self.optimizer, step, self.steps)
            for result in self.critic.take(batches, rate):
                self.skipped.count(result.skipped, self.begun)
            self.figures.seconds += time.perf_counter() - since
        self.begun += 1
        return super().take(batches, lr, stop)

    def news(self) -> list[str]:
        return [*super().news(), *self.skipped.news()]


def with_critic(step: Step, context: StepContext, recipe: Recipe) -> Step:
    """Return a training step that also trains the critic beside the policy, if it is on these ranks. If the critic's
    loss or gradient norm is not finite, its parameters stay as they are.

    ``step``: the step of the policy. ``context``: the policy's model, state and mesh, and functions to call.
    """
    critic, inspect = critic_of(context.state), context.inspect
    if critic is None:
        return step
    assert recipe.rl is not None
    named = None if inspect is None else partial(_inspect_critic, inspect)
    own = StepContext(
        critic.model, critic.state, context.mesh, context.before_update, named
    )
    optimizer, objective = critic_optimizer(recipe), critic.model.hooks.objective
    assert isinstance(objective, PolicyObjective)
    start = recipe.rl.start.steps
    return CriticStep(
        step.state,
        step.gradients,
        step.agree,
        step.update,
        step.after,
        step.fillers,
        step.clip,
        critic=plain_step(own, optimizer.clip),
        optimizer=optimizer,
        begun=context.begun,
        start=start,
        steps=recipe.train.steps - start,
        figures=objective.figures,
    )


def _inspect_critic(
    inspect: Callable[[dict[str, torch.Tensor]], None], grads: dict[str, torch.Tensor]
) -> None:
    """Call ``inspect`` with the gradients ``grads`` of a critic, under the names that checkpoints give its tensors."""
    inspect({f"{CRITIC}.{name}": grad for name, grad in grads.items()})
