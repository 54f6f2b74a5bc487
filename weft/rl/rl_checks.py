"""Checks that the settings of a run of reinforcement learning fit together, before anything is started."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from weft.errors import UsageError
from weft.models.invariant import TILE
from weft.recipe.reward_settings import RewardSettings
from weft.rl.generation_model import check_weights
from weft.rl.role_checks import check_roles

if TYPE_CHECKING:
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
    narrow = "bfloat16" in (recipe.train.dtype, role.weights)
    if cut or narrow or recipe.data.seq_len % TILE:
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
    check_weights(role.weights or "float", job.shape, role.layout)
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
    check_roles(job)
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
