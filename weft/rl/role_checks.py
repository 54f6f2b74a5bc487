"""Checks that the roles of a run of reinforcement learning fit the run, before a process is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.parallel.build import check_fits
from weft.recipe.roles_section import (
    OF_THE_POLICY,
    CriticRole,
    ReferenceRole,
    RewardRole,
)
from weft.rl.ray_places import check_ray
from weft.rl.reward_servers import served_folder
from weft.rl.role_devices import check_device
from weft.train.own_critic import critic_optimizer, critic_shape, named_critic

if TYPE_CHECKING:
    from weft.checkpoint.weights import Pretrained
    from weft.recipe.roles_section import RolloutRole
    from weft.rl.rl_phases import RlPhases


def check_roles(job: RlPhases) -> None:
    """Check that the settings of ``[roles]`` fit the run.

    Raises :class:`UsageError` for the first that does not, such as a layout of another number of processes.
    """
    _check_critic(job)
    _check_reference(job)
    _check_placement(job)
    _check_devices(job.roles.rollout, job.roles.placement)
    _check_reward(job)


def _check_critic(job: RlPhases) -> None:
    """Check the settings of a critic with layers of its own, if there is one.

    Raises :class:`UsageError` if its optimizer, its model or its processes do not fit the run.
    """
    role = job.roles.critic
    if not role.is_apart:
        return
    if unfit := sorted(role.optimizer.keys() & OF_THE_POLICY.keys() - {"groups"}):
        raise UsageError(
            f"roles.critic.optimizer.{unfit[0]} is about how steps of the policy are taken; leave it out"
        )
    optimizer = critic_optimizer(job.recipe)
    check_tokens("roles.critic.model", named_critic(job.recipe), job)
    shape, train = critic_shape(job.shape, job.recipe), job.recipe.train
    if not role.elsewhere:
        if (role.layout, role.device, role.threads) != (Layout(), "cpu", 0):
            raise UsageError(
                "roles.critic.layout, device and threads are about processes of its own; set roles.critic.ranks, or "
                "leave them out"
            )
        check_fits(shape, job.recipe.layout, train)
        return
    _check_process_layout("critic", role, "pp", "island")
    check_fits(shape, role.process_layout, train, optimizer)
    if job.roles.placement == "local":
        check_device("roles.critic.device", role.device, role.ranks)


def _check_process_layout(
    name: str, role: ReferenceRole | CriticRole, *without: str
) -> None:
    """Raise :class:`UsageError` unless the layout of ``role`` has as many ranks as it has processes, and none along the
    axes ``without``. ``name``: name of the role in the recipe.
    """
    layout = role.process_layout
    if layout.world != role.ranks or layout.size(*without) > 1:
        raise UsageError(
            f"roles.{name}.layout = {role.layout} does not divide a model over roles.{name}.ranks = {role.ranks} "
            f"processes; give a layout of as many ranks, without {' and '.join(without)}"
        )
    if layout.placement == "moving" or layout.skip:
        raise UsageError(
            f"roles.{name}.layout = {role.layout} changes from step to step, which only the policy's can; leave "
            "placement and skip out of it"
        )


def check_tokens(setting: str, model: Pretrained | None, job: RlPhases) -> None:
    """Raise :class:`UsageError` if the tokens of ``model`` are not those of the run. ``setting``: what has named it."""
    if model is None:
        return
    own = model.tokenizer()
    if (
        model.shape.vocab != job.shape.vocab
        or own is None
        or not own.has_ids_of(job.corpus.tokenizer)
    ):
        raise UsageError(
            f"{setting} = {model.name!r} has other tokens than this run; name a model with the same tokenizer"
        )


def _check_reference(job: RlPhases) -> None:
    """Check the settings of a reference model in processes of its own, if there is one.

    Raises :class:`UsageError` if it does not fit the run.
    """
    role, rl = job.roles.reference, job.rl
    if not role.elsewhere and role != ReferenceRole(layout=role.layout):
        raise UsageError(
            "[roles.reference] is about processes of its own; set roles.reference.ranks, or leave it out"
        )
    if not (role.elsewhere or role.has_own_layout):
        return
    if not job.loss.needs_reference:
        raise UsageError(
            f"[roles.reference] is set, and the loss of rl.method = {rl.method!r} has no reference model; set "
            "rl.loss.kl and kl_weight, or leave it out"
        )
    if role.has_own_layout:
        _check_reference_layout(job)
        return
    _check_process_layout("reference", role, "pp", "island")
    if rl.start.steps and not role.model:
        raise UsageError(
            f"rl.start.steps = {rl.start.steps} makes the policy after these steps the reference model, which only the "
            "ranks that train have; name one as roles.reference.model, or leave roles.reference.ranks out"
        )
    if job.shape.kind:
        raise UsageError(
            f"roles.reference.ranks is for Weft's own models, and model.kind = {job.shape.kind!r} is a plugin's; leave "
            "it out"
        )
    named = job.named_reference
    if named is not None and named.shape.output == "score":
        raise UsageError(
            f"roles.reference.model = {role.model!r} is a reward model, which writes no text; name one that does"
        )
    check_tokens("roles.reference.model", named, job)
    check_fits(named.shape if named else job.shape, role.process_layout)
    if job.roles.placement == "local":
        check_device("roles.reference.device", role.device, role.ranks)


def _check_reference_layout(job: RlPhases) -> None:
    """Check that the ranks that train can keep the reference model under a layout of its own.

    Raises :class:`UsageError` if they cannot.
    """
    layout, ranks = job.roles.reference.layout, job.recipe.layout.world
    if layout.world != ranks or layout.size("island") > 1:
        raise UsageError(
            f"roles.reference.layout = {layout} is over {layout.world} ranks, and {ranks} train; give a layout of as "
            "many ranks, without island, or set roles.reference.ranks for processes of its own"
        )
    if layout.placement == "moving" or layout.skip:
        raise UsageError(
            f"roles.reference.layout = {layout} changes from step to step, which only the policy's can; leave "
            "placement and skip out of it"
        )
    if job.shape.kind or job.recipe.memory.away:
        raise UsageError(
            "roles.reference.layout keeps a second model of Weft's own on the device, and model.kind is a plugin's or "
            "[memory] keeps tensors elsewhere; leave one of them out"
        )
    check_fits(job.shape, layout, job.recipe.train)


def _check_placement(job: RlPhases) -> None:
    """Check that Ray can place the processes of roles, if it shall. Raises :class:`UsageError` if it cannot."""
    roles = job.roles
    if roles.placement == "local":
        return
    names = ("rollout", "reference", "critic")
    if not any(getattr(roles, name).ranks for name in names):
        raise UsageError(
            "roles.placement = 'ray' is about processes of roles, and there are none; set roles.rollout.ranks, "
            "roles.reference.ranks or roles.critic.ranks, or leave it out"
        )
    for name in names:
        device = getattr(roles, name).device
        if ":" in device:
            raise UsageError(
                f"roles.{name}.device = {device!r} names a GPU, and with roles.placement = 'ray' Ray chooses it; use "
                "'cuda'"
            )
    check_ray()


def _check_devices(role: RolloutRole, placement: str) -> None:
    """Check where processes that write answers compute. Raises :class:`UsageError` if there is no such device."""
    if not role.device:
        return
    if not role.ranks:
        raise UsageError(
            f"roles.rollout.device = {role.device!r} is about processes that only write; set roles.rollout.ranks, or "
            "leave it out"
        )
    if role.invariant and role.device != "cpu":
        raise UsageError(
            f"roles.rollout.invariant is for CPUs, and roles.rollout.device = {role.device!r}; use 'cpu'"
        )
    if placement == "local":
        check_device("roles.rollout.device", role.device, 1)


def _check_reward(job: RlPhases) -> None:
    """Check the settings of servers of reward models. Raises :class:`UsageError` if the run has no use for them."""
    role = job.roles.reward
    if not role.ranks and role == RewardRole():
        return
    if not role.ranks:
        raise UsageError(
            "[roles.reward] is about processes of its own; set roles.reward.ranks = 1, or leave it out"
        )
    if not any(map(served_folder, job.rewarded)):
        raise UsageError(
            "roles.reward.ranks = 1 serves reward models, and no [[tasks]] has reward = 'reward-model' with a folder "
            "as its model; leave it out"
        )
    check_device("roles.reward.device", role.device, 1)
