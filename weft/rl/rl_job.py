"""The job of a run of reinforcement learning: its loaders, in which a model writes, or known answers stand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from weft.generate.sampling import Sampling
from weft.layout.mesh import from_all
from weft.models.invariant import invariant
from weft.models.policy_loss import PolicyObjective
from weft.rl.generation_model import GenerationModel, usual_weights
from weft.rl.generation_turns import open_turns
from weft.rl.local_rollouts import LocalRollouts
from weft.rl.open_places import close_places, open_places, run_host
from weft.rl.phase_curricula import PhaseCurricula
from weft.rl.recorded_loader import RecordedLoader
from weft.rl.reward_workers import reward_workers
from weft.rl.rl_loader import RlLoader
from weft.rl.rl_phases import RlPhases
from weft.train.own_critic import copied_critic

if TYPE_CHECKING:
    from weft.data.order import Order
    from weft.layout.mesh import Mesh
    from weft.net.endpoint import Address
    from weft.parallel.build import Built
    from weft.recipe import Task
    from weft.recipe.roles_section import RolloutRole
    from weft.rl.critic_processes import CriticProcesses
    from weft.rl.remote_rollouts import RemoteSettings
    from weft.rl.role_places import RolePlace
    from weft.rl.rollout import RolloutSource
    from weft.train.step_loader import RunRecords

#: Most answers that are written at a time by one engine.
AT_A_TIME = 256
#: More groups than an update learns from, whose questions are drawn again and whose answers have turns.
MANY = 1 << 20


@dataclass(frozen=True)
class RlJob(RlPhases):
    """A checked recipe of reinforcement learning with its tasks opened; it creates the loaders of a run."""

    def loader(self, order: Order, mesh: Mesh) -> RecordedLoader:  # type: ignore[override]
        """Return a loader of reference answers in place of sampled ones, with which ``weft verify`` compares layouts.

        ``mesh``: this rank's position among the ranks. ``order`` is not used.
        """
        return RecordedLoader(self, mesh)

    def training_loader(
        self, mesh: Mesh, built: Built, recorder: RunRecords, interrupted: Callable[[], bool], stack: ExitStack,
        kept: dict[str, Any],
    ) -> RlLoader:  # fmt: skip
        """Return the loader whose batches are answers that the policy writes. All ranks must call it.

        ``built``: the model that is trained, and its state. ``recorder``: writes the run's records. ``interrupted``:
        function that returns whether this rank is asked to end the run. ``stack``: closes the loader's processes when
        the run ends. ``kept``: JSON values that checkpoints keep, and that the loader changes in place.
        """
        recipe, rl = self.recipe, self.rl
        role = self.roles.rollout
        gpu = mesh.device.type == "cuda" and role.device != "cpu"
        weights = role.weights or usual_weights(
            self.shape, role.layout, recipe.train, gpu
        )
        generation = GenerationModel(
            self.shape, mesh, role.layout, built.state, recipe.train, weights
        )
        most = min(AT_A_TIME, -(-self.answers // generation.groups))
        generation.refresh(built.state.updates)
        generation.copies.rows = most
        alike = self.roles.rollout.invariant
        tokens = (most + 1) * (recipe.data.seq_len + 16)
        turns = open_turns(generation, tokens, most, alike)
        stack.enter_context(invariant(alike))
        local = LocalRollouts(
            turns.engine,
            Sampling(temperature=rl.temperature, tempered=True),
            rl.tokens,
            self.questions.stops,
            interrupted,
        )
        lines = deque[str]()
        # each is closed as soon as it exists, also where a later one cannot be opened
        stack.callback(local.close)
        stack.callback(close_places, self.roles)
        if not role.elsewhere:
            rollouts: RolloutSource = local
        else:
            # what a run without it does not wait for
            from weft.rl.rollout_processes import open_remote_rollouts

            by_ray = self.roles.placement == "ray"
            rollouts = open_remote_rollouts(
                mesh,
                built.state,
                self.shape,
                self._remote_settings(weights),
                role.ranks,
                lines.append,
                role.threads,
                recipe.train.timeout,
                interrupted,
                self._address(mesh),
                # Ray gives GPUs to processes
                "" if by_ray and role.device != "cpu" else role.device,
                partial(self._rollout_places, role),
            )
            stack.callback(rollouts.close)
            while lines:  # where others can join
                recorder.event(lines.popleft())
        rewarded: Sequence[Task] = self.rewarded
        if self.roles.reward.ranks:
            from weft.rl.reward_servers import RewardServers

            servers = RewardServers(
                rewarded, self.roles.reward, mesh, recipe.train.timeout, interrupted
            )
            stack.callback(servers.close)
            rewarded = servers.tasks
        workers = []
        for task in rewarded:
            scoring = reward_workers(task, recipe.train.seed, recipe.plugins)
            stack.callback(scoring.close)
            workers.append(scoring)
        reference = None
        if self.loss.needs_reference and self.roles.reference.elsewhere:
            from weft.rl.reference_processes import ReferenceProcesses

            reference = ReferenceProcesses(self, mesh, interrupted)
            stack.callback(reference.close)
        critic = self._critic_processes(mesh, built, interrupted, stack)
        return RlLoader(
            self, mesh, built, recorder, turns, local, rollouts, workers, interrupted,
            lambda: built.state.updates, PhaseCurricula.of_job(self, kept), lines,
            reference, critic,
        )  # fmt: skip

    def _address(self, mesh: Mesh) -> Address | None:
        """Return where engines in other processes reach the first rank, with port 0 for any port; None: only those of
        its host do. Collective.
        """
        role, group = self.roles.rollout, mesh.step_group
        if role.address or self.roles.placement == "local":
            return role.address
        leads = group is None or group.rank() == 0
        (host, *_) = from_all(run_host(self.roles) if leads else "", group)
        return host, 0

    def _critic_processes(
        self,
        mesh: Mesh,
        built: Built,
        interrupted: Callable[[], bool],
        stack: ExitStack,
    ) -> CriticProcesses | None:
        """Start the processes of a critic that is in some, and return them. The arguments are those of
        :meth:`training_loader`.
        """
        copy = copied_critic(built.state)
        if copy is None:
            return None
        from weft.rl.critic_processes import CriticProcesses

        objective = built.model.hooks.objective
        assert isinstance(objective, PolicyObjective)
        critic = CriticProcesses(self, mesh, interrupted, copy, objective.figures)
        stack.callback(critic.close)
        return critic

    def _rollout_places(self, role: RolloutRole, host: str) -> list[RolePlace]:
        """Return the places of processes that write answers, from which the run is reached at ``host``; none: here."""
        if self.roles.placement == "local":
            return []
        wait = self.recipe.train.timeout
        return open_places(
            self.roles, host, role.ranks, role.device, role.threads, wait
        )

    def _remote_settings(self, weights: str) -> RemoteSettings:
        """Return how engines in other processes write the answers. ``weights``: the form of their weights."""
        from weft.rl.remote_rollouts import RemoteSettings

        recipe, rl = self.recipe, self.rl
        most = -(-self.answers // max(1, self.roles.rollout.ranks))
        most = max(rl.group, min(AT_A_TIME, most))
        return RemoteSettings(
            bound=rl.staleness,
            batch=self.asked,
            group=rl.group,
            most=rl.tokens,
            spare=0 if rl.staleness else MANY,
            stops=frozenset(self.questions.stops),
            how=Sampling(temperature=rl.temperature, tempered=True),
            requests=most,
            cache=(most + 1) * (recipe.data.seq_len + 16),
            dtype=recipe.train.dtype,
            weights=weights,
            delta=self.roles.rollout.delta,
            invariant=self.roles.rollout.invariant,
            patience=recipe.train.timeout,
            stall=recipe.train.timeout,
        )
