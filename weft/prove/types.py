"""Proof by types that a layout computes what one device computes, without any device.

:mod:`weft.prove.equality` proves it by numbers.
"""

import dataclasses
import linecache
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import spmd_types as spmd
import torch
from spmd_types.checker import typecheck
from torch import nn
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from weft.data.batch import Batch, PairedRows, Pairs
from weft.data.batch_rollout import blank_numbers
from weft.errors import UsageError
from weft.layout import boundary
from weft.layout.axes import DATA_AXES, MODEL_AXES
from weft.layout.boundary import (
    BY_DATA,
    SAME,
    I,
    P,
    R,
    V,
    declare,
    gradient_types,
    parameter_types,
    state_types,
)
from weft.layout.dims import Logical
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.answer_loss import Objective
from weft.models.hooks import Hooks
from weft.models.policy_loss import PolicyObjective
from weft.models.token_objective import TokenObjective
from weft.models.transformer import Transformer
from weft.net.groups import fake_rank
from weft.parallel.build import check_fits, connect, resident_state
from weft.parallel.state import State
from weft.recipe import Loss, Memory, ModelShape, Optimizer, PolicyLoss, Train
from weft.train.setup import hooks_of
from weft.train.step import reduced_gradients


@dataclass(frozen=True)
class TypeFault:
    """A fault that the type check of distributed tensors has found in a layout's computation, such as a sum over ranks
    that is missing.

    ``file``, ``line``, ``code``: place and text of the innermost line of code outside of the type checker. ``message``:
    the reason.
    """

    file: str
    line: int
    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.code}\n    {self.message}"


def check_types(
    shape: ModelShape,
    layout: Layout,
    train: Train,
    optimizer: Optimizer | None = None,
    loss: Loss | None = None,
    memory: Memory | None = None,
    policy: PolicyLoss | None = None,
) -> TypeFault | None:
    """Check a whole training step of ``layout`` by types, in this process alone, for any number of ranks.

    Returns the first fault, or None if there is none. ``shape``: the model. ``policy``: the policy loss of the step;
    None: a loss by ``loss``. All other arguments are sections of the recipe. Raises :class:`UsageError` for a model
    with ``model.kind``, whose types are not known.

    Tensors are on the meta device and collectives in a fake process group, so neither memory nor ranks are needed.
    The code that shards the state is not run: its results are taken to have the types that it promises. Pipeline
    stages exchange tensors of a single type, so one stage stands for all stages. One island stands for all islands.
    """
    check_fits(shape, layout, train, optimizer, memory)
    if shape.kind:
        raise UsageError(f"types are known of Weft's models of tokens, and model.kind = {shape.kind!r} is another; "
                         "prove it by numbers: leave out --types")  # fmt: skip
    kinds = [
        (shape.mixer_of(i), shape.experts_of(i), shape.is_ladder(i))
        for i in range(shape.layers)
    ]
    # Layers of a kind are alike: enough of the first layers to have each kind, at least two, stand for all.
    few = max(min(2, len(kinds)), 1 + max(kinds.index(kind) for kind in kinds))
    experts = shape.experts[:few] if isinstance(shape.experts, tuple) else shape.experts
    shape = shape.model_copy(update={"layers": few, "experts": experts})
    # rows of tokens are looked up by numbers that have no type; they are proven by values
    if shape.adapter:
        adapter = shape.adapter.model_copy(update={"tokens": ()})
        shape = shape.model_copy(update={"adapter": adapter})
    layout = layout.inside.model_copy(update={"pp": 1})
    with fake_rank(0, layout.world) if layout.world > 1 else nullcontext():
        meta = torch.device("meta")
        mesh = dataclasses.replace(Mesh.create(layout, "cpu"), device=meta)
        hooks = hooks_of(loss or Loss(), shape.vocab)
        if policy is not None:
            hooks = Hooks(objective=PolicyObjective(policy))
        model = Transformer(shape, mesh, train.loss_chunk, hooks=hooks)
        model.freq = model.freq.to("meta")
        connect(model, mesh, train.recompute)
        _type_saved_inputs()
        try:
            state = resident_state(model, mesh)
            batch = _meta_batch(mesh, hooks.objective, shape.dropout > 0)
            if mesh.device_mesh is None:
                reduced_gradients(model, state, [batch], mesh)
                return None
            with spmd.set_current_mesh(mesh.device_mesh), typecheck():
                ids = batch.tokens, batch.labels, batch.positions, batch.documents
                columns = vars(batch.rollout).values() if batch.rollout else ()
                for numbers in filter(torch.is_tensor, (*ids, *columns, batch.draws)):
                    declare(numbers, mesh, **BY_DATA)
                declare(model.freq, mesh, **SAME)
                declare(batch.cu_seqlens, mesh, **BY_DATA | {"cp": R})
                with _on_every_module(shape, mesh):
                    reduced_gradients(model, _typed(state, mesh), [batch], mesh)
        except spmd.SpmdTypeError as error:
            return _locate(error)
    return None


@contextmanager
def _on_every_module(shape: ModelShape, mesh: Mesh) -> Iterator[None]:
    """Return a context in which a token's path decides between big and small feed-forwards, so that both are typed."""
    if not shape.small_ffn:
        yield
        return
    from weft.models.routed_depth import on_paths

    paths = torch.zeros(shape.layers, 1, 1, dtype=torch.int64, device="meta")
    declare(paths, mesh, **SAME)
    with on_paths(paths):
        yield


@cache
def _type_saved_inputs() -> None:
    """Type the inputs that a recomputed block saves, by an operator that PyTorch before 2.13 has.

    The operator's result carries no values. The rule of spmd_types gives the result a type, and does not say what the
    rules of spmd_types demand of every operator: that the inputs do not affect the result's value.
    """
    saver = getattr(checkpoint, "_NoopSaveInputs", None)
    if saver is None:
        return
    usual = saver.spmd_typecheck

    def rule(result: torch.Tensor, *, args: Any) -> None:
        spmd.rules.ignore(*filter(torch.is_tensor, tree_leaves(args)))
        usual(result, args=args)

    saver.spmd_typecheck = staticmethod(rule)


def _typed(state: State, mesh: Mesh) -> State:
    """Declare the types of ``state``: of its parameters, and of gradients by the contract of units that share state."""

    def reduced_gradient(
        logical: Logical,
    ) -> Callable[[nn.Parameter], torch.Tensor | None]:
        def gradient(parameter: nn.Parameter) -> torch.Tensor | None:
            grad = parameter.grad
            assert grad is not None
            declare(grad, mesh, **gradient_types(logical))
            for axis in DATA_AXES:
                if mesh.size(axis) > 1 and gradient_types(logical)[axis] is P:
                    grad = spmd.all_reduce(grad, mesh.group(axis), dst=I)
                    # each rank keeps its rows of the sum
                    if state_types(logical)[axis] is V:
                        grad = spmd.mutate_type(grad, mesh.group(axis), src=I, dst=V)
            return grad

        return gradient

    for h in state.held:
        declare(h.parameter, mesh, **parameter_types(h.logical))
        h.gradient = reduced_gradient(h.logical)
    return state


def _meta_batch(mesh: Mesh, objective: Objective | None, drops: bool) -> Batch:
    """Make a batch on the meta device: two rows, each rank with its share of the tokens.

    The rows are a pair of answers or two sampled answers if ``objective`` is a loss of such. ``drops``: whether tokens
    have random bits for dropout.
    """
    of_policy = isinstance(objective, TokenObjective)
    of_pairs = objective is not None and not of_policy
    local = 2 * mesh.size(*MODEL_AXES) * (2 if mesh.size("cp") > 1 else 1)
    length = local * mesh.size("cp")
    tokens, labels, positions, documents = torch.empty(
        4, 2, local, dtype=torch.long, device="meta"
    ).unbind()
    edges = torch.tensor([0, length, 2 * length], dtype=torch.int32)
    pairs = Pairs.listed(np.ones(1), np.zeros(1))
    paired = PairedRows(pairs, np.arange(2), mesh.rank("cp") == 0) if of_pairs else None
    rollout = blank_numbers(2, local).each(lambda x: x.to("meta"))
    return _MetaBatch(
        tokens,
        labels,
        positions,
        edges,
        documents=documents,
        paired=paired,
        rollout=rollout if of_policy else None,
        draws=tokens if drops else None,
    )


class _MetaBatch(Batch):
    @property
    def real_tokens(self) -> int:
        return self.labels.numel()

    document_tokens = real_tokens

    @property
    def label_weight(self) -> float:
        return 1.0 if self.rollout is not None else super().label_weight


def _locate(error: BaseException) -> TypeFault:
    """Return the innermost frame outside of the type checker, PyTorch and boundaries, whose caller is at fault."""
    libraries = (
        str(Path(spmd.__file__).parent),
        str(Path(torch.__file__).parent),
        boundary.__file__,
    )
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith(libraries)
    ]
    file, line = frames[-1].filename, frames[-1].lineno or 0
    code = linecache.getline(file, line).strip()
    return TypeFault(file, line, code, str(error).strip().splitlines()[0])
