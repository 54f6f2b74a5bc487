"""Products of the passes that wrote answers, in place of those of the forward pass that learns from them.

All that backward needs beside products is computed: norms, rotations, attention. Loss and gradients are those of a pass
that multiplies itself, up to the roundings of other kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from weft.generate.written_passes import ROOT, WrittenPasses
from weft.models.known_block import BlockProducts, KnownBlock
from weft.models.lean_block import is_plain
from weft.models.policy_loss import PolicyObjective
from weft.models.projections import Projections
from weft.models.transformer import Block
from weft.recipe.conflicts import AskedRecipe
from weft.recipe.step_techniques import asked_techniques
from weft.rl.generation_model import LARGE
from weft.rl.log_probabilities import token_log_probabilities

if TYPE_CHECKING:
    from weft.data.batch import Batch
    from weft.data.policy_rows import PolicySample
    from weft.layout.mesh import Mesh
    from weft.models.transformer import Transformer
    from weft.parallel.build import Built
    from weft.rl.generation_model import GenerationModel
    from weft.rl.rl_phases import RlPhases

T = torch.Tensor

#: Largest difference of log-probabilities between sampler and trainer that roundings explain; the second one in types
#: of 16 bits.
ROUNDINGS, NARROW_ROUNDINGS = 1e-2, 0.5

#: So many answers are compared with passes that multiply again.
COMPARED = 4


def takes_known_products(
    job: RlPhases, built: Built, generation: GenerationModel
) -> bool:
    """Return whether updates can take the products of the passes that wrote their answers.

    They can if the very weights that are trained write the answers, on one device and for one update, and if that is
    one forward pass of plain blocks, whose activations all stay in memory. ``built``: the model that is trained, and
    its state. ``generation``: the model that writes.
    """
    recipe, model, mesh = job.recipe, built.model, generation.training
    _, passes = recipe.rows_per_pass(mesh.layout)
    alone = mesh.layout.world == 1 and mesh.device.type == "cpu"
    once = job.updates_per_phase == 1 and not job.rl.staleness and passes == 1
    here = not (job.roles.rollout.elsewhere or job.roles.rollout.invariant)
    if not (job.rl.known_products and alone and once and here):
        return False
    if sum(p.nbytes for p in model.parameters()) < LARGE:
        return False
    # which may compute several passes, or with other weights
    changed = any(asked_techniques(AskedRecipe(**dict(recipe))))
    if changed or recipe.train.compile or job.shape.adapter is not None:
        return False
    same = len(generation.shared) == len(generation.held)
    plain = all(
        is_plain(block) and block.recompute == "none" for block in model.blocks.values()
    )
    apart = any(
        module.elsewhere or len(module.quantized) or module.products
        for module in model.modules()
        if isinstance(module, Projections)
    )
    hooks = model.hooks
    whole = hooks.saver is None and isinstance(hooks.objective, PolicyObjective)
    return same and plain and whole and not apart and model.woven is None


class SamplerMismatch(NamedTuple):
    """Absolute difference of log-probabilities between the passes that wrote answers and those that multiply again:
    its ``mean`` over written tokens, and the largest (``most``).
    """

    mean: float
    most: float


def sampler_mismatch(
    built: Built, mesh: Mesh, samples: Sequence[PolicySample], temperature: float
) -> SamplerMismatch:
    """Compute the log-probabilities of ``samples`` without known products, on one device, and compare them with those
    of the sampler. ``temperature``: number by which logits are divided.
    """
    texts = [(s.ids.tolist(), s.learns.tolist()) for s in samples]
    room = sum(len(s.ids) for s in samples)
    own = token_log_probabilities(
        built.model, built.state, mesh, texts, room=room, temperature=temperature
    )
    apart = [
        np.abs(computed - s.sampler)[s.learns]
        for computed, s in zip(own, samples, strict=True)
        if s.sampler is not None
    ]
    all_apart = np.concatenate([*apart, np.zeros(0)])
    if not len(all_apart):
        return SamplerMismatch(0.0, 0.0)
    return SamplerMismatch(float(all_apart.mean()), float(all_apart.max()))


def most_mismatch(dtype: torch.dtype) -> float:
    """Return the largest difference of log-probabilities that roundings of ``dtype`` explain."""
    return ROUNDINGS if dtype in (torch.float32, torch.float64) else NARROW_ROUNDINGS


class KeptRows(NamedTuple):
    """The rows of a batch's tokens among the results of passes, int64 ``[tokens]``: of products, and of logits, where
    -1 stands for a token without any.
    """

    products: T
    logits: T


def kept_rows(passes: WrittenPasses, batch: Batch) -> KeptRows | None:
    """Return where ``passes`` have the tokens of ``batch``; None if one of them is not there."""
    if len(batch.tokens) != 1 or batch.documents is None or passes.lost:
        return None
    if not passes.rows or int(batch.documents.min()) < 0:  # padding
        return None
    ids, shared = batch.tokens[0].tolist(), batch.cu_seqlens.dim() > 1
    edges = (batch.cu_seqlens[0] if shared else batch.cu_seqlens).tolist()
    parents = batch.cu_seqlens[1].tolist() if shared else [-1] * len(edges)
    nodes = list[int]()
    for (first, end), parent in zip(pairwise(edges), parents, strict=False):
        before = ROOT if parent < 0 else nodes[edges[parent + 1] - 1]
        path = passes.tree.look_up(before, ids[first:end])
        if path is None:
            return None
        nodes += path
    rows = [passes.rows.get(node, -1) for node in nodes]
    if min(rows) < 0 or len(rows) != len(ids):
        return None
    logits = [passes.logit_rows.get(node, -1) for node in nodes]
    return KeptRows(torch.tensor(rows), torch.tensor(logits))


def give_known_products(
    model: Transformer, passes: WrittenPasses, batch: Batch
) -> bool:
    """Let the next forward pass of ``model``, over ``batch``, take its products from ``passes``. Return whether it
    will: not if a token of the batch is not there.
    """
    take_back_products(model)
    rows, objective = kept_rows(passes, batch), model.hooks.objective
    if rows is None:
        return False
    assert isinstance(objective, PolicyObjective)
    for block in model.blocks.values():
        assert isinstance(block, Block)
        block.lean = KnownBlock(block, partial(taken, block, passes, rows.products))
    objective.known_logits = partial(
        known_logits, passes, rows.logits, objective.temperature
    )
    if model.shape.tied and model.embedding.table.requires_grad:
        # the output layer's gradient of the table is there before it
        model.embedding.lookup = partial(_looked_up_once, model)
    return True


def taken(block: Block, passes: WrittenPasses, at: T) -> BlockProducts:
    """Return what ``passes`` have of the products of ``block`` for the rows ``at``, int64 ``[tokens]``, and let them
    forget it.
    """
    return BlockProducts(
        *(
            passes.take(module.path, names, at)
            for module in (block.attention, block.ffn)
            for names in module.TOGETHER
        )
    )


def take_back_products(model: Transformer) -> None:
    """Let passes of ``model`` compute their products themselves again."""
    for block in model.blocks.values():
        if isinstance(block, Block):
            block.lean = None
    model.embedding.lookup = F.embedding
    if isinstance(model.hooks.objective, PolicyObjective):
        model.hooks.objective.known_logits = None


def _looked_up_once(model: Transformer, tokens: T, table: T) -> T:
    """Look up the rows ``tokens`` of ``table``, as :class:`_FewRows` does, and let later passes do so as usual."""
    model.embedding.lookup = F.embedding
    return _FewRows.apply(tokens, table)


class _FewRows(torch.autograd.Function):
    """Rows of a table, whose gradient has no more rows than were looked up. It is added to one of the whole table."""

    @staticmethod
    def forward(ctx: Any, tokens: T, table: T) -> T:
        ctx.save_for_backward(tokens)
        ctx.shape = table.shape
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[None, T]:
        (tokens,) = ctx.saved_tensors
        index, rows = tokens.flatten()[None], grad.flatten(0, -2)
        return None, torch.sparse_coo_tensor(
            index, rows, ctx.shape, check_invariants=False
        )


def known_logits(
    passes: WrittenPasses, at: T, temperature: float, tokens: T | None
) -> T | None:
    """Return the logits of some tokens, divided by ``temperature``: ``[rows, vocab]``; None if one of them has none.

    ``at``: the row of each token of the batch among the logits of ``passes``, or -1. ``tokens``: indices of the tokens;
    None: all of them.
    """
    chosen = at if tokens is None else at[tokens]
    if not passes.has_logits() or not len(chosen) or int(chosen.min()) < 0:
        return None
    logits = passes.take_logits(chosen)
    return logits if temperature == 1 else logits.div_(temperature)
