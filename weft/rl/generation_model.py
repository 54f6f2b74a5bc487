"""The model with which ranks generate between two training steps, filled from the state that they train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import xxhash

from weft.errors import UsageError, nearest
from weft.generate.leader import check_layout, of_parameters
from weft.layout.dims import Box, Logical, Tensor
from weft.layout.mesh import Mesh, from_all
from weft.layout.parts import NAMES
from weft.memory.heap import use_huge_pages
from weft.models.packed_copies import PackedCopies
from weft.models.products import NARROW
from weft.parallel.build import parallelize
from weft.parallel.state import Held, State
from weft.recipe import ModelShape, Train
from weft.rl.generation_groups import computed_boxes, generation_groups, mesh_of_members
from weft.rl.weight_moves import BUCKET, WeightMover, WeightsMoved
from weft.rl.weight_plan import weight_plan

if TYPE_CHECKING:
    from weft.layout.layout import Layout
    from weft.models.transformer import Transformer

T = torch.Tensor

#: Bytes of weights from which on huge pages are worth the time of moving to them.
LARGE = 64 << 20

#: Forms of the weights with which a policy can generate.
WEIGHTS = ("float", NARROW)


class GenerationModel:
    """Copy of the policy for generation, beside the training state on the same ranks. Collective over these ranks.

    Every ``layout.world`` ranks generate with a model of their own, under ``layout``. A tensor shares its memory with
    the training state if the rank holds it as a whole there, in the same type and not in a file. All other elements are
    copied, from other ranks if necessary (:mod:`weft.rl.weight_moves`). After an update of the state, call
    :meth:`refresh` before the next generation step, because shared tensors have changed already and copied ones have
    not.

    Arguments:
        ``shape``: the policy's shape.
        ``mesh``: the ranks that train.
        ``layout``: layout of the ranks that generate together.
        ``state``: the training state.
        ``train``: section of the recipe, for its data type.
        ``weights``: "bfloat16" to generate with all weights and the cache in bfloat16, or "float" for the type of the
            training state.
        ``bucket``: largest number of bytes of messages that a rank holds at a time.

    Raises :class:`UsageError` for a layout under which the model cannot generate.

    Attributes:
        ``model``: the model for :class:`weft.generate.engine.Engine`. Its parameters have no values before the first
            :meth:`refresh`.
        ``mesh``: the ranks that generate together with this rank.
        ``leads``: whether this rank runs the engine of its group; the others call
            :func:`weft.generate.leader.follow_leader`, which returns when the engine rests, so that all can train.
        ``group``, ``groups``: number of this rank's group, and number of groups.
        ``version``: version of the model's weights; -1: it has none yet.
        ``shared``: names of the parameters that share their memory with the state.
        ``copies``: packed copies of the weights, while answers are written (:meth:`GenerationTurns.writing`).
    """

    def __init__(
        self, shape: ModelShape, mesh: Mesh, layout: Layout, state: State, train: Train, weights: str = "float",
        bucket: int = BUCKET,
    ) -> None:  # fmt: skip
        check_layout(layout, shape)
        check_weights(weights, shape, layout)
        if layout.sum or layout.tp_shares == "auto":
            raise UsageError(
                "sum and tp_shares = 'auto' are for the ranks of weft generate and serve, which measure when they "
                "start; leave them out of roles.rollout.layout"
            )
        self.training, self.state, self.bucket = mesh, state, bucket
        self.mesh, self.group, self.groups = generation_place(
            shape, mesh, layout, state
        )
        self.model, self.held = model_to_fill(shape, self.mesh, train, weights)
        self.copies = PackedCopies(self.model)
        self.leads = self.mesh.step_group is None or self.mesh.step_group.rank() == 0
        self.version = -1
        self.shared: frozenset[str] = frozenset()
        self._movers: dict[bool, WeightMover] = {}

    def refresh(self, version: int) -> WeightsMoved:
        """Give the model the newest weights of the training state, which are version ``version``. All ranks must call
        it.

        Postponed updates are run first, and experts that were moved to other ranks are moved back. Only the first call
        moves frozen parameters; later calls move the parameters that learn, which with an adapter are the adapter
        alone. The caller must call :meth:`weft.generate.engine.Engine.weights_changed` afterwards. Returns the bytes
        and seconds of the move.
        """
        self.state.bring_home()
        self.state.settle()
        first = self.version < 0
        trained = {h.name: h for h in self.state.held}
        self._share(trained)
        if first not in self._movers:
            self._movers[first] = self._mover(trained, first)
        sources = {name: {h.box: h.local} for name, h in trained.items()}
        moved = self._movers[first].move(sources, targets_of(self.held))
        self.version = version
        return moved

    def fingerprint(self) -> str:
        """Return a hash of all weights that the model has now. Collective over the ranks that generate together.

        Pass it to :meth:`weft.generate.engine.Engine.weights_changed`. Cache blocks that are kept outside the engine
        are then used only by engines with the same weights. Reading all weights takes about as long as copying them.
        """
        whole = xxhash.xxh3_128(f"{self.mesh.layout}".encode())
        for h in sorted(self.held, key=lambda held: held.name):
            whole.update(f"{h.name} {h.box}".encode())
            values = h.parameter.data.cpu().contiguous().flatten().view(torch.uint8)
            whole.update(values.numpy().data)
        parts = from_all(whole.hexdigest(), self.mesh.step_group)
        return xxhash.xxh3_128_hexdigest(" ".join(parts).encode())

    def _share(self, trained: Mapping[str, Held]) -> None:
        """Let parameters have the memory of the state's tensors where these are the same elements."""
        rests = self.state.tiers.places.get("weights") == "file"
        pairs = [(own, trained[own.name]) for own in self.held if own.name in trained]
        alike = [(own, h) for own, h in pairs if not rests and is_shareable(h, own)]
        for own, h in alike:
            own.parameter.data = h.local
        shared = frozenset(own.name for own, _ in alike)
        if shared != self.shared:
            self._movers.clear()
        self.shared = shared

    def _mover(self, trained: Mapping[str, Held], first: bool) -> WeightMover:
        """Agree with the other ranks on what is moved: everything at first, later what changes in training."""
        tensors = {
            h.name: Tensor(h.logical.shape, NAMES[h.parameter.dtype]) for h in self.held
        }
        held = {name: [h.box] for name, h in trained.items() if first or changes(h)}
        needed = {h.name: [h.box] for h in self.held if h.name not in self.shared}
        group = self.training.step_group
        everyones = from_all((tensors, held, needed), group)
        known: dict[str, Tensor] = {}
        for of_rank, _, _ in everyones:
            known |= of_rank
        moving = {name for _, of_rank, _ in everyones for name in of_rank}
        wanted = [
            {n: boxes for n, boxes in of_rank.items() if n in moving}
            for _, _, of_rank in everyones
        ]
        rank = group.rank() if group is not None else 0
        plan = weight_plan(
            known, [of_rank for _, of_rank, _ in everyones], wanted, rank
        )
        return WeightMover(plan, known, group, self.training.device, self.bucket)


def use_huge_copies(copies: PackedCopies) -> None:
    """Move ``copies``, which are in use, and all other large memory of this process to huge pages, the second time that
    copies were made. What the process keeps for good is there by then, and later copies get the memory of earlier ones.
    For small models it does not pay.
    """
    size = sum(p.nbytes for p in copies.model.parameters())
    if copies.renewed == 2 and size >= LARGE:
        use_huge_pages()


class ModelToFill(NamedTuple):
    """A model whose parameters have no values yet, and this rank's parameters, each with its box (part) of the whole
    tensor (``held``).
    """

    model: Transformer
    held: list[Held]


def model_to_fill(
    shape: ModelShape, mesh: Mesh, train: Train, weights: str = "float"
) -> ModelToFill:
    """Build this rank's part of a policy for generation, with parameters of zero, which :func:`targets_of` gives to
    fill.

    ``shape``: the policy's shape. ``mesh``: the ranks that generate together. ``train``: section of the recipe, for the
    type of the trained parameters. ``weights``: "float" for this type (float64 or float32), or "bfloat16". Raises
    :class:`UsageError` for a model that does not generate in bfloat16.
    """
    check_weights(weights, shape, mesh.layout)
    dtype = "float64" if train.dtype == "float64" else "float32"
    # without what learns, no process groups are made for gradients; not all ranks would be in equally many
    train = Train(dtype=dtype, freeze=["*"])
    model, state = parallelize(shape, mesh, train, _no_values, summed=False)
    if weights == NARROW:
        model.to(torch.bfloat16)
    return ModelToFill(model, state.held)


def targets_of(held: Sequence[Held]) -> dict[str, dict[Box, T]]:
    """Return the tensors of the parameters ``held`` by name and box, so that the caller can fill them in place."""
    return {h.name: {h.box: h.parameter.data} for h in held}


def changes(held: Held) -> bool:
    """Return whether a training step may change ``held``, by its gradient or as a statistic such as a router's bias."""
    return held.learns or held.logical.everywhere


def is_shareable(trained: Held, own: Held) -> bool:
    """Return whether a parameter of the generation model can use the memory of a tensor in the training state.

    It can if ``trained``, in the state, and ``own``, of the model, are the same elements of the same type on the same
    device.
    """
    local, parameter = trained.local, own.parameter
    alike = (trained.box, local.dtype, local.device) == (
        own.box,
        parameter.dtype,
        parameter.device,
    )
    return alike and trained.rows is None and local.is_contiguous()


def _no_values(name: str, logical: Logical, box: Box) -> T:
    return torch.zeros(())


class GenerationPlace(NamedTuple):
    """Where a rank generates: the ``mesh`` of its group of ranks, number of its ``group``, and number of ``groups``."""

    mesh: Mesh
    group: int
    groups: int


def generation_place(
    shape: ModelShape, mesh: Mesh, layout: Layout, state: State
) -> GenerationPlace:
    """Return the mesh of the ranks with which this rank generates under ``layout``, and the number of their group.

    Collective over the ranks of ``mesh``, which train ``state``. Raises :class:`UsageError` if they cannot be divided
    into groups of this layout.
    """
    if mesh.layout.world % layout.world:
        raise UsageError(
            f"{mesh.layout.world} ranks train, and {layout.world} would generate together under {layout}; "
            "give a layout whose number of ranks divides those that train"
        )
    rank = 0 if mesh.step_group is None else mesh.step_group.rank()
    if layout.world == 1:
        return GenerationPlace(Mesh.single(mesh.device), rank, mesh.layout.world)
    cut = of_parameters(layout)
    held = from_all({h.name: [h.box] for h in state.held}, mesh.step_group)
    needed = [computed_boxes(shape, cut, rank) for rank in range(cut.world)]
    chosen, members, _ = generation_groups(cut, held, needed)
    (group,) = (i for i, ranks in enumerate(members) if rank in ranks)
    own = mesh_of_members(chosen, mesh.device, members)
    return GenerationPlace(own, group, len(members))


def usual_weights(shape: ModelShape, layout: Layout, train: Train, gpu: bool) -> str:
    """Return the form of the weights with which a policy generates if its recipe does not say: bfloat16 where GPUs
    train and write, training computes in bfloat16, and the model permits it; else the type in which weights are kept in
    training.

    ``shape``: the policy's shape. ``layout``: layout of the ranks that generate together. ``train``: section of the
    recipe. ``gpu``: whether GPUs train and write.
    """
    # other mixers sum up a state, in which roundings of bfloat16 add up
    plain = all(shape.mixer_of(i) == "softmax" for i in range(shape.layers))
    fast = gpu and plain and train.dtype == NARROW
    return NARROW if fast and _serves_narrow(shape, layout) else "float"


def _serves_narrow(shape: ModelShape, layout: Layout) -> bool:
    """Whether a policy can generate with weights in bfloat16."""
    quantized = shape.adapter is not None and shape.adapter.kind == "qlora"
    plain = not (shape.kind or shape.kv_rank or shape.mixtures or quantized)
    return plain and layout.world == 1


def check_weights(weights: str, shape: ModelShape, layout: Layout) -> None:
    """Check that a policy can generate with weights in the form ``weights`` ("float" or "bfloat16").

    ``shape``: the policy's shape. ``layout``: layout of the ranks that generate together. Raises :class:`UsageError` if
    it cannot.
    """
    if weights not in WEIGHTS:
        raise UsageError(
            f"a policy cannot generate with weights {weights!r}; {nearest(weights, WEIGHTS, True)}"
        )
    if weights == NARROW and not _serves_narrow(shape, layout):
        raise UsageError(
            "weights in bfloat16 are for dense models with plain attention on one rank; leave them as they are"
        )
