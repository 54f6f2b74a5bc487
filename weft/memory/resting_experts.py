"""Experts that rest in a file or in the host's memory while a model runs, and come when tokens choose them.

Slots in memory hold those of all layers that were used last (:mod:`weft.memory.records`). As soon as a router has
chosen, reads begin: beside attention where it stands before that (SmallThinker, Song et al. 2025). One that stands
after it is asked, before, about what attention adds to; most that it then names it will choose, the surest first, and
what it does not choose is given up where it has not begun to come. When a layer has chosen, the next one's router is
asked about what this one was given (as Eliseev & Mazur 2023 do): what it is surest of is read while this one computes,
and all that it names where tokens are so many that they choose nearly all, as a long prompt's: slots are then the ring
of sections that SE-MoE moves through a model (Shen et al. 2022). What is there is computed while the rest comes.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

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
from weft.models.transformer import Block, Transformer
from weft.models.values import Values

T = torch.Tensor

#: Bytes of experts that are in memory at a time while a model is loaded; at least one expert.
LOADED = 256 << 20

#: The share of a token's experts that a router is surest of and that are read a layer early: more are often wrong.
SURE = 1 / 3

#: What generation computes in.
DTYPE = torch.float32


class SlottedExperts(Experts):
    """In the place of a layer's stack of experts: the weights of each come from ``slots``, the first's by ``first``."""

    def __init__(
        self, experts: Experts, slots: Slots, first: int, stored: torch.dtype
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
        """As of :class:`Experts`, whose experts are all this rank's own, to the last bit: one expert at a time."""
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
                place = places[record]
                forward_piece(
                    rows[place],
                    counts,
                    self.activation,
                    weights,
                    (None, None, out[place]),
                )
        return out

    def _matrices(self, memory: T) -> list[T]:
        """An expert's weights in a slot's memory: views, made once."""
        place = memory.data_ptr()
        if place not in self.views:
            self.views[place] = matrices(memory, self.stored, self.shapes)
        return self.views[place]


def matrices(record: T, dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> list[T]:
    """Those that lie one after the other in a record's bytes."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = record.view(dtype)[: sum(sizes)].split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class RestingExperts:
    """All experts of a model, at rest in a file in ``folder`` or, without one, in the host's memory.

    So many as ``share`` of them have ``slots`` in the device's memory. Without ``ahead`` none is read before its use.
    """

    slots: Slots
    _seen: T

    def __init__(self, folder: Path | None, share: float, ahead: bool = True) -> None:
        self.share, self.ahead = share, ahead
        self.file = None if folder is None else TierFile(folder, called="--experts-in")

    def lift(self, model: Transformer, values: Values) -> None:
        """Put slots in the place of the experts of a model that has no memory yet, and bring ``values`` to their rest.

        They rest as they are stored: half as many bytes are read of bfloat16, which is widened when it is used.
        """
        blocks = [
            b
            for b in model.blocks.values()
            if isinstance(b, Block) and isinstance(b.ffn, Mixture)
        ]
        mixtures = [b.ffn for b in blocks if isinstance(b.ffn, Mixture)]
        if not mixtures:
            raise UsageError(
                "this model has no experts that could rest elsewhere; leave out --experts-in"
            )
        firsts = [0, *accumulate(mixture.router.count for mixture in mixtures)]
        (some,) = _experts(mixtures[0], values, 0, 1)
        stored = some[0].dtype
        device = model.mesh.device
        count = firsts[-1]
        records = Records(
            count, sum(weight.nbytes for weight in some), self.file, device
        )
        self.slots = Slots(records, round(self.share * count), device)
        for mixture, first in zip(mixtures, firsts, strict=False):
            self._fill(mixture, values, first, stored)
            mixture.experts = SlottedExperts(mixture.experts, self.slots, first, stored)
        if self.ahead:
            self._listen(blocks)

    def _fill(
        self, mixture: Mixture, values: Values, first: int, stored: torch.dtype
    ) -> None:
        """Bring a layer's experts to where they rest, some at a time."""
        records, count = self.slots.records, mixture.router.count
        some, buffer = max(1, LOADED // records.size), page_buffer(records.size)
        for start in range(0, count, some):
            for e, expert in enumerate(
                _experts(mixture, values, start, min(count, start + some)),
                first + start,
            ):
                parts = matrices(
                    buffer, stored, [tuple(weight.shape) for weight in expert]
                )
                for part, weight in zip(parts, expert, strict=True):
                    if torch.promote_types(stored, weight.dtype) != stored:
                        raise WeftError(
                            f"experts are stored in {stored} and in {weight.dtype}; leave out --experts-in"
                        )
                    part.copy_(weight)
                records.write(e, buffer)

    def report(self) -> str:
        """What has been read, in a line."""
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
        """Begin to read what the router of a block will choose or has chosen, and what the following one is to."""
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
        """What a block's router would choose of ``x``, which is not yet all that it will be given.

        ``share``: of each token's choices only the surest, so many.
        """
        norm = block.attention_norm if block.ffn.shape.router_early else block.ffn_norm
        router = block.ffn.router
        # Its forward alone: nobody who listens to the router is to hear of this.
        ids = router.forward(norm.forward(x).flatten(0, 1), None).ids
        return _records(
            block.ffn.experts.first,
            router,
            ids[:, : max(1, round(share * ids.shape[1]))],
        )


def _experts(
    mixture: Mixture, values: Values, start: int, end: int
) -> list[tuple[T, ...]]:
    """The matrices of these experts of a layer, as they are stored."""
    path = f"blocks.{mixture.router.layer}.ffn.experts."
    stacks = mixture.experts.logical.items()
    matrices = (
        values(path + name, logical, ((start, end), *logical.box[1:]))
        for name, logical in stacks
    )
    return [*zip(*matrices, strict=True)]


def _records(first: int, router: Router, ids: T) -> list[int]:
    """Those of the chosen experts ``ids``: what most tokens chose first, and of equals what one was the surest of.

    ``first`` is that of the layer's first expert.
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
