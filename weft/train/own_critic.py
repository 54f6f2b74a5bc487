"""A critic with layers of its own, trained beside the policy of reinforcement learning on the same ranks.

It is a model that scores texts: its output at a token is the sum of the rewards that it predicts to follow (Schulman et
al. 2017, 1707.06347). It learns from the batches of the policy, with an optimizer of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from weft.errors import UsageError, WeftError
from weft.models.hooks import Hooks
from weft.models.policy_loss import PolicyObjective
from weft.parallel.build import Built, parallelize
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


def add_rl_states(
    state: State, shape: ModelShape, mesh: Mesh, recipe: Recipe, values: Values | None
) -> None:
    """Add what reinforcement learning keeps beside the policy, as the recipe asks: the reference model's weights as a
    slot of every parameter (unless it is in processes of its own), and a critic that has layers of its own. Collective.

    ``state``, ``shape``: the policy's. ``values``: the initial values of the policy; None: seeded ones, or those of a
    checkpoint that is loaded later.
    """
    assert recipe.rl is not None
    loss, roles = recipe.rl.policy_loss, recipe.roles
    if loss.needs_reference and not (roles and roles.reference.elsewhere):
        from weft.parallel.reference_weights import add_reference

        add_reference(state)
    if loss.needs_values and roles and roles.critic.is_apart:
        state.beside[CRITIC] = _build_critic(shape, mesh, recipe, values)


def critic_of(state: State) -> Built | None:
    """Return the critic with layers of its own beside the policy with the state ``state``; None if there is none."""
    critic: Built | None = state.beside.get(CRITIC)
    return critic


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


def _build_critic(
    policy: ModelShape, mesh: Mesh, recipe: Recipe, values: Values | None
) -> Built:
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
class CriticStep(Step):
    """A training step of a policy, and of a critic with layers of its own.

    Attributes:
        ``critic``: the step of the critic alone.
        ``optimizer``: settings of the critic's optimizer, which give its learning rates.
        ``begun``: number of steps of the run that were taken before.
        ``start``: number of steps at the beginning of the run in which the critic does not learn.
        ``steps``: number of steps after these.
        ``skipped_in_a_row``: number of the critic's updates that were left out since the last one that was not.
        ``lines``: lines about them that were not printed yet.
    """

    critic: Step = None  # type: ignore[assignment]
    optimizer: Optimizer = None  # type: ignore[assignment]
    begun: int = 0
    start: int = 0
    steps: int = 0
    skipped_in_a_row: int = 0
    lines: list[str] = field(default_factory=list)

    def take(
        self, batches: Sequence[Batch], lr: float, stop: bool = False
    ) -> list[StepResult]:
        # supervised batches have no rewards that could be predicted
        if all(batch.rollout is not None for batch in batches):
            step = max(0, self.begun - self.start)
            # which resuming counts again in the same way
            self.critic.state.updates = step
            rate = learning_rate(self.optimizer, step, self.steps)
            for result in self.critic.take(batches, rate):
                self._count(result)
        self.begun += 1
        return super().take(batches, lr, stop)

    def news(self) -> list[str]:
        lines, self.lines = self.lines, []
        return [*super().news(), *lines]

    def _count(self, result: StepResult) -> None:
        """Count an update of the critic that was left out.

        Raises :class:`WeftError` after as many in a row as end a run when the policy's are left out.
        """
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
        if not result.skipped:
            return
        if self.skipped_in_a_row >= MOST_SKIPPED:
            raise WeftError(
                f"the critic's loss or gradient norm were not finite in {self.skipped_in_a_row} steps in a row, which "
                f"changed nothing in it; ended at step {self.begun}: lower lr in roles.critic.optimizer, or look at "
                "the rewards and the weights it began with"
            )
        self.lines.append(
            f"the critic's loss or gradient norm was not finite in step {self.begun + 1}: it has not learned from it"
        )


def with_critic(step: Step, context: StepContext, recipe: Recipe) -> Step:
    """Return a training step that also trains the critic beside the policy. If the critic's loss or gradient norm is
    not finite, its parameters stay as they are.

    ``step``: the step of the policy. ``context``: the policy's model, state and mesh, and functions to call.
    """
    critic, inspect = critic_of(context.state), context.inspect
    assert critic is not None and recipe.rl is not None
    named = None if inspect is None else partial(_inspect_critic, inspect)
    own = StepContext(
        critic.model, critic.state, context.mesh, context.before_update, named
    )
    optimizer = critic_optimizer(recipe)
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
    )


def _inspect_critic(
    inspect: Callable[[dict[str, torch.Tensor]], None], grads: dict[str, torch.Tensor]
) -> None:
    """Call ``inspect`` with the gradients ``grads`` of a critic, under the names that checkpoints give its tensors."""
    inspect({f"{CRITIC}.{name}": grad for name, grad in grads.items()})
