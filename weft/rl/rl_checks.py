"""Checks that the settings of a run of reinforcement learning fit together, before anything is started."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from weft.errors import UsageError
from weft.models.invariant import TILE
from weft.parallel.build import check_fits
from weft.recipe.reward_settings import RewardSettings
from weft.recipe.roles_section import OF_THE_POLICY, ReferenceRole, RewardRole
from weft.rl.ray_places import check_ray
from weft.rl.reward_servers import served_folder
from weft.rl.role_devices import check_device
from weft.train.own_critic import critic_optimizer, critic_shape, named_critic

if TYPE_CHECKING:
    from weft.checkpoint.weights import Pretrained
    from weft.recipe import Recipe
    from weft.recipe.roles_section import RolloutRole
    from weft.rl.rl_phases import RlPhases

#: Advantages that compare an answer with the others of its group.
WITHIN_GROUPS = ("group", "batch", "none", "leave-one-out")


def check_alike(recipe: Recipe, role: RolloutRole) -> None:
    """Check that generation and training can compute the same bits, as ``roles.rollout.invariant`` asks.

    ``role``: the recipe's section ``[roles.rollout]``. Raises :class:`UsageError` if the recipe's layout, type or
    sequence length does not allow it.
    """
    layout = recipe.layout
    cut = layout.size("tp", "cp", "pp") > 1 or role.layout.world > 1 or role.elsewhere
    if cut or recipe.train.dtype == "bfloat16" or recipe.data.seq_len % TILE:
        raise UsageError(
            "roles.rollout.invariant needs a model that is whole on every rank of training, in float32, with a "
            f"data.seq_len that {TILE} divides, and these ranks writing; leave it out"
        )


def check_rl(job: RlPhases) -> None:
    """Check that settings of ``[rl]``, ``[train]``, ``[[tasks]]`` and ``[roles]`` fit together.

    Raises :class:`UsageError` for the first contradiction, such as a batch that is not a multiple of the group size.
    """
    recipe, rl = job.recipe, job.rl
    batch = recipe.train.batch
    if rl.group == 1 and job.loss.advantage in WITHIN_GROUPS:
        raise UsageError(
            f"rl.group = 1 leaves nothing to compare an answer with, and rl.method = {rl.method!r} compares it with "
            "others of its group; use at least 2"
        )
    if not rl.batch and batch % rl.group:
        raise UsageError(
            f"train.batch = {batch} answers are no whole groups of rl.group = {rl.group}; make the batch a multiple "
            "of it"
        )
    role = job.roles.rollout
    if role.invariant:
        check_alike(recipe, role)
    if rl.staleness and not role.elsewhere:
        raise UsageError(
            f"rl.staleness = {rl.staleness} lets answers be written while others are learned from, and the ranks of "
            "training do both in turn; set roles.rollout.ranks, or leave it out"
        )
    if rl.staleness and rl.redraw:
        raise UsageError(
            "rl.redraw asks for other questions within a phase, and with rl.staleness those of later phases are asked "
            "already; leave one of them out"
        )
    if rl.staleness and not job.answers_at_once:
        raise UsageError(
            "a task has answers of several turns, which are not written ahead; leave rl.staleness out"
        )
    if role.elsewhere and role.layout.world > 1:
        raise UsageError(
            f"roles.rollout.layout = {role.layout} is about the ranks of training, and with roles.rollout.ranks or "
            "listen other processes write; leave one of them out"
        )
    if role.address and role.address[1] > 65535:
        raise UsageError(
            f"roles.rollout.listen = {role.listen!r} has no port below 65536; give HOST:PORT"
        )
    if role.listen and not os.environ.get("WEFT_SECRET"):
        raise UsageError(
            f"roles.rollout.listen = {role.listen!r} lets engines of other hosts join that know the run's secret; set "
            "WEFT_SECRET here and there"
        )
    _check_critic(job)
    _check_reference(job)
    _check_placement(job)
    _check_devices(role, job.roles.placement)
    _check_reward(job)
    if job.answers * rl.epochs % batch:
        raise UsageError(
            f"a rollout phase has rl.batch x rl.group = {job.answers} answers, which {rl.epochs} epochs do not divide "
            f"into updates of train.batch = {batch}; change one of them"
        )
    for table, task in zip(job.rewarded, job.questions.tasks, strict=True):
        chooses = table.own(RewardSettings).curriculum
        if chooses and rl.staleness:
            raise UsageError(
                "tasks.curriculum = true waits for the answers of each rollout phase, and with rl.staleness = "
                f"{rl.staleness} the next questions are asked before; set it to 0, or leave curriculum out"
            )
        if chooses and task.levels < 2:
            raise UsageError(
                f"tasks.curriculum = true, and {table.reward!r} has a single level; raise its settings or leave "
                "curriculum out"
            )


def _check_critic(job: RlPhases) -> None:
    """Check the settings of a critic with layers of its own, if there is one.

    Raises :class:`UsageError` if its optimizer or its model does not fit the policy's.
    """
    role = job.roles.critic
    if not role.is_apart:
        return
    if unfit := sorted(role.optimizer.keys() & OF_THE_POLICY.keys() - {"groups"}):
        raise UsageError(
            f"roles.critic.optimizer.{unfit[0]} is about how steps of the policy are taken; leave it out"
        )
    critic_optimizer(job.recipe)
    check_tokens("roles.critic.model", named_critic(job.recipe), job)
    check_fits(critic_shape(job.shape, job.recipe), job.recipe.layout, job.recipe.train)


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
    if not role.elsewhere:
        if role != ReferenceRole():
            raise UsageError(
                "[roles.reference] is about processes of its own; set roles.reference.ranks, or leave it out"
            )
        return
    if not job.loss.needs_reference:
        raise UsageError(
            f"roles.reference.ranks = {role.ranks}, and the loss of rl.method = {rl.method!r} has no reference model; "
            "set rl.loss.kl and kl_weight, or leave it out"
        )
    if role.process_layout.world != role.ranks or role.layout.size("pp", "island") > 1:
        raise UsageError(
            f"roles.reference.layout = {role.layout} does not divide a model over roles.reference.ranks = {role.ranks} "
            "processes; give a layout of as many ranks, without pp and island"
        )
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


def _check_placement(job: RlPhases) -> None:
    """Check that Ray can place the processes of roles, if it shall. Raises :class:`UsageError` if it cannot."""
    roles = job.roles
    if roles.placement == "local":
        return
    if not (roles.rollout.ranks or roles.reference.ranks):
        raise UsageError(
            "roles.placement = 'ray' is about processes of roles, and there are none; set roles.rollout.ranks or "
            "roles.reference.ranks, or leave it out"
        )
    for name in ("rollout", "reference"):
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
