"""Experts that rest in a file or in the host's memory while a model runs, and are read when tokens choose them.

Slots in memory hold the experts of all layers that were used last (:mod:`weft.memory.records`). Reads begin as soon as
a router has chosen: beside attention where the router stands before it (SmallThinker, Song et al. 2025). A router that
stands after attention is asked with the input of attention: it will choose most of the experts that it then names,
which are read in the order of its confidence; a wrong guess is cancelled if its read has not begun. When a layer has
chosen, the next layer's router is asked about the input of this one (Eliseev & Mazur 2023): the experts that it is
surest of are read while this layer computes. With so many tokens that they choose nearly all experts (a long prompt),
all that it names are read: slots are then the ring of sections that SE-MoE moves through a model (Shen et al. 2022).
Experts that are in memory compute while others are read.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch

from weft.errors import UsageError, WeftError
from weft.memory.records import Records, Slots
from weft.memory.tier_file import TierFile, page_buffer
from weft.models.experts import (
    Experts,
    Mixture,
    Stacks,
    expert_counts,
    forward_piece,
    sizes_of,
)
from weft.models.module import Module
from weft.models.router import Choice, Router
from weft.models.transformer import Transformer
from weft.models.values import Values

T = torch.Tensor

#: Bytes of experts in memory at a time while a model is loaded; at least one expert.
LOADED = 256 << 20

#: The share of a token's experts, the surest first, that are read a layer early: others are often wrong.
SURE = 1 / 3

#: What generation computes in.
DTYPE = torch.float32


class RecordMemory(Protocol):
    """Interface of memory on the device into which records (the weights of one expert each) are read.

    ``records``: the store of all records; ``counts``: how many records were used, awaited and read.
    """

    records: Records
    counts: Counter[str]

    def using(self, records: Sequence[int]) -> Iterator[list[tuple[int, T]]]:
        """Yield the records with the numbers ``records`` in groups, as soon as they are in memory.

        A group is a list of pairs: a record's number, and its memory, which may be used until the next group is
        requested (:meth:`weft.memory.records.Slots.using`).
        """


class SlottedExperts(Experts):
    """Experts of one layer whose weights are read into the device's memory when tokens choose them.

    The weights of each expert are a record, a piece of a file or of the host's memory. A slot is memory of the device
    for one record. ``experts``: the layer's former experts, which this module replaces; ``slots``: the slots, which all
    layers share; ``first``: number of the record of the layer's first expert, and the others follow; ``stored``: dtype
    of the weights in the records.
    """

    def __init__(
        self, experts: Experts, slots: RecordMemory, first: int, stored: torch.dtype
    ) -> None:
        Module.__init__(self, experts.mesh)
        self.activation = experts.activation
        self.slots = slots
        self.first = first
        self.stored = stored
        self.shapes = [logical.local_shape[1:] for logical in experts.logical.values()]
        self.views: dict[int, list[T]] = {}  # by where a slot's memory begins

    def forward(
        self, rows: T, counts: T, lent: object = (), stacks: Stacks | None = None
    ) -> T:
        """Compute as :class:`Experts` does with all experts on this rank, bit for bit, one expert at a time.

        ``rows``: tokens ordered by expert, ``[rows, embed]``; ``counts``: number of rows of each expert, ``[experts]``.
        ``lent`` and ``stacks`` have no effect.
        """
        sizes = sizes_of(counts, len(rows))
        chosen = [self.first + e for e, size in enumerate(sizes) if size]
        places = {
            self.first + e: slice(end - sizes[e], end)
            for e, end in enumerate(accumulate(sizes))
        }
        self.slots.counts["used"] += len(chosen)
        out = torch.empty_like(rows)
        for some in self.slots.using(chosen):
            for record, memory in some:
                weights = [w.to(DTYPE) for w in self._matrices(memory)]
                x, y = rows[places[record]], out[places[record]]
                forward_piece(x, counts, self.activation, weights, (None, None, y))
        return out

    def _matrices(self, memory: T) -> list[T]:
        """Return an expert's weights in a slot's memory: views, made once."""
        place = memory.data_ptr()
        if place not in self.views:
            self.views[place] = matrices(memory, self.stored, self.shapes)
        return self.views[place]


def matrices(record: T, dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> list[T]:
    """Return views of the bytes ``record`` (uint8) as matrices of ``dtype``, which lie there one after another.

    ``shapes``: the shape of each matrix.
    """
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = record.view(dtype)[: sum(sizes)].split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class RestingExperts:
    """All experts of a model, which rest in a file or in the host's memory while the model generates.

    ``folder``: folder of the file, or None for the host's memory; ``share``: share of the experts that have slots in
    the device's memory; ``ahead``: whether experts that a router will probably choose are read before they are needed.
    """

    slots: Slots
    _seen: T

    def __init__(self, folder: Path | None, share: float, ahead: bool = True) -> None:
        self.share, self.ahead = share, ahead
        self.file = None if folder is None else TierFile(folder, called="--experts-in")
        self.lines = [self.file.note] if self.file and self.file.note else []

    def lift(self, model: Transformer, values: Values) -> None:
        """Store the experts of ``model`` outside the device's memory, and replace them by modules that read an expert
        when it is chosen.

        Each expert's values become a record, a piece of the file or of the host's memory. A slot is memory of the
        device into which a record is read. ``model``: its parameters must not be allocated yet. ``values``: function
        that reads the values of a parameter. Records keep the type that these values have, and the values are widened
        in use, because bfloat16 is half as many bytes to read as float32. Raises :class:`UsageError` if the model has
        no experts.
        """
        blocks = blocks_with_experts(model)
        mixtures = [cast(Mixture, b.ffn) for b in blocks]
        device = model.mesh.device
        stored = stored_experts(mixtures, values, self.file, device)
        count = stored.records.count
        self.slots = Slots(stored.records, round(self.share * count), device)
        replace_experts(mixtures, stored, self.slots)
        if self.ahead:
            self._listen(blocks)

    def report(self) -> str:
        """Return a line of text with three counts of experts: used by tokens, waited for, and read."""
        counts = self.slots.counts
        size = self.slots.records.size
        slots = self.slots
        where = "the host's memory" if self.file is None else self.file.folder
        return (
            f"tokens used {counts['used']:,} experts and waited for {counts['awaited']:,}; {counts['read']:,} were "
            f"read from {where}, {counts['read'] * size / 1e6:,.1f} MB; memory has room for {slots.count:,} of "
            f"{slots.records.count:,}, {slots.count * size / 1e6:,.1f} MB"
        )

    def _listen(self, blocks: Sequence[Any]) -> None:
        """Register hooks that begin to read the experts that routers choose or will choose."""
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            block.register_forward_pre_hook(self._before)
            block.ffn.router.register_forward_hook(
                partial(self._chosen, block.ffn.experts.first, following)
            )

    def _before(self, block: Any, given: tuple[T, ...]) -> None:
        self._seen = given[0]
        if not block.ffn.shape.router_early:
            self.slots.choose(self._guess(block, given[0]))

    def _chosen(
        self, first: int, following: Any, router: Router, given: object, choice: Choice
    ) -> None:
        self.slots.choose(_records(first, router, choice.ids))
        if following is not None:
            few = choice.ids.numel() < following.ffn.router.count
            self.slots.expect(self._guess(following, self._seen, SURE if few else 1))

    def _guess(self, block: Any, x: T, share: float = 1) -> list[int]:
        """Return the records that a block's router would choose for ``x``, which is not yet its whole input.

        ``share``: the share of each token's choices that counts, the surest first.
        """
        norm = block.attention_norm if block.ffn.shape.router_early else block.ffn_norm
        router = block.ffn.router
        # Its forward alone: nobody who listens to the router is to hear of this.
        ids = router.forward(norm.forward(x).flatten(0, 1), None).ids
        surest = ids[:, : max(1, round(share * ids.shape[1]))]
        return _records(block.ffn.experts.first, router, surest)


def blocks_with_experts(model: Transformer) -> list[Any]:
    """Return the blocks of ``model`` that have a mixture of experts. Raises :class:`UsageError` if there are none."""
    blocks = [b for b in model.blocks.values() if isinstance(b.ffn, Mixture)]
    if not blocks:
        raise UsageError(
            "this model has no experts that could rest elsewhere; leave out --experts-in"
        )
    return blocks


class StoredExperts(NamedTuple):
    """The experts of all layers, stored as records: one record of bytes per expert.

    ``records``: the store, in which a layer's experts are consecutive; ``firsts``: index of the first record of each
    layer with experts, and at last the number of all records; ``dtype``: data type of the stored weights.
    """

    records: Records
    firsts: Sequence[int]
    dtype: torch.dtype


def stored_experts(
    mixtures: Sequence[Mixture],
    values: Values,
    file: TierFile | None,
    device: torch.device,
) -> StoredExperts:
    """Store the experts of ``mixtures``, the layers with experts, in a file or in the host's memory, and return them.

    ``values``: function that reads the values of a parameter; ``file``: the file, or None for the host's memory;
    ``device``: where records are read to. Raises :class:`WeftError` for weights of several types.
    """
    firsts = [0, *accumulate(mixture.router.count for mixture in mixtures)]
    (some,) = _experts(mixtures[0], values, 0, 1)
    size = sum(weight.nbytes for weight in some)
    records = Records(firsts[-1], size, file, device)
    stored = StoredExperts(records, firsts, some[0].dtype)
    for mixture, first in zip(mixtures, firsts, strict=False):
        _fill(mixture, values, first, stored)
    return stored


def replace_experts(
    mixtures: Sequence[Mixture], stored: StoredExperts, slots: RecordMemory
) -> None:
    """Replace the experts of ``mixtures`` by modules that take the weights of an expert from ``slots``.

    ``stored``: the experts of all mixtures, as :func:`stored_experts` returns them.
    """
    for mixture, first in zip(mixtures, stored.firsts, strict=False):
        mixture.experts = SlottedExperts(mixture.experts, slots, first, stored.dtype)


def _fill(mixture: Mixture, values: Values, first: int, stored: StoredExperts) -> None:
    """Store a layer's experts, some at a time."""
    records, dtype, count = stored.records, stored.dtype, mixture.router.count
    some, buffer = max(1, LOADED // records.size), page_buffer(records.size)
    for start in range(0, count, some):
        loaded = _experts(mixture, values, start, min(count, start + some))
        for e, expert in enumerate(loaded, first + start):
            shapes = [tuple(weight.shape) for weight in expert]
            parts = matrices(buffer, dtype, shapes)
            for part, weight in zip(parts, expert, strict=True):
                if torch.promote_types(dtype, weight.dtype) != dtype:
                    raise WeftError(
                        f"experts are stored in {dtype} and in {weight.dtype}; leave out --experts-in"
                    )
                part.copy_(weight)
            records.write(e, buffer)


def _experts(
    mixture: Mixture, values: Values, start: int, end: int
) -> list[tuple[T, ...]]:
    """Return the matrices of experts ``start:end`` of a layer, as they are stored."""
    path = f"blocks.{mixture.router.layer}.ffn.experts."
    stacks = mixture.experts.logical.items()
    matrices = (
        values(path + name, logical, ((start, end), *logical.box[1:]))
        for name, logical in stacks
    )
    return [*zip(*matrices, strict=True)]


def _records(first: int, router: Router, ids: T) -> list[int]:
    """Return the records of the chosen experts ``ids``, the most chosen first, and of equals the surest choice first.

    ``first``: the record of the layer's first expert.
    """
    if len(ids) == 1:
        return [first + e for e in ids[0].tolist()]
    counts, most = expert_counts(ids, router.count), ids.shape[-1]
    place = torch.arange(most, device=counts.device).expand_as(ids).flatten()
    surest = torch.full_like(counts, most).scatter_reduce(
        0, ids.flatten(), place.to(counts.dtype), "amin"
    )
    often = (counts * (most + 1) - surest).argsort(descending=True, stable=True)[
        : int(counts.count_nonzero())
    ]
    return [first + e for e in often.tolist()]
