"""Generation over several ranks, for prompts that are too long for one (Long-VITA, Shen et al. 2025, 2502.05177).

Every rank has the whole model. The prompt is cut over ``cp`` by the attention tables of training, in blocks of unequal
lengths, so that nothing is padded; keys and values stay where they were computed. Of the prompt one position's logits
are evaluated, on the rank that has it. Then every rank computes each new token: it attends to its part of the cache,
and parts are merged by their log-sum-exp. With ``ep`` experts are spread over the same ranks: tokens of the prompt go
to theirs as in training, and of each new token every rank adds up what its own experts make of it.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from weft.errors import UsageError
from weft.generate.cache import ROOM, attending
from weft.layout.layout import AXES, Layout
from weft.layout.mesh import Mesh
from weft.layout.placement import Place
from weft.models.attention import Segment, attend_forward, join, wide
from weft.models.experts import Mixture
from weft.models.transformer import Transformer
from weft.parallel.build import check_fits
from weft.parallel.context import across
from weft.parallel.context.tables import build
from weft.parallel.experts.connect import connect, connect_experts
from weft.parallel.experts.dispatch import Everywhere
from weft.parallel.units import all_gather
from weft.recipe import ModelShape

T = torch.Tensor

#: The ways to experts on other ranks that take any number of tokens from each.
SENDS = ("all-to-all", "per-rank")


def check_spread(layout: Layout, shape: ModelShape | None = None) -> None:
    """Raises :class:`UsageError` for layouts and models (None: not known yet) that generation cannot be spread by."""
    if other := [axis for axis in AXES if axis != "cp" and layout.size(axis) > 1]:
        raise UsageError(f"generation can be spread over cp only, not over {other[0]}; use --layout cp={layout.world}")
    if layout.ep not in (1, layout.cp) or (layout.ep > 1 and layout.dispatch not in SENDS):
        raise UsageError(f"generation spreads experts over all ranks of cp, by {' or '.join(SENDS)}, as they have "
                         f"unequal parts of a prompt; use --layout cp={layout.cp},ep={layout.cp}")  # fmt: skip
    if layout.cp > 1 and layout.head_ranks > 1:
        raise UsageError("generation does not exchange heads (Ulysses); use a table, such as layout.context = 'zigzag'")
    if shape is None:
        return
    if layout.cp > 1 and any(shape.mixer_of(i) != "softmax" for i in range(shape.layers)):
        raise UsageError(
            "generation over cp is for softmax layers; a linear one keeps one small state, so leave out --layout"
        )
    if layout.cp > 1 and shape.window:
        raise UsageError(
            "generation over cp is for layers that see all tokens, and this model's see the last "
            f"{shape.window}, which one rank can hold; leave out --layout"
        )
    if layout.ep > 1:
        check_fits(shape, _of_experts(layout))


def _of_experts(layout: Layout) -> Layout:
    """What generation under ``layout`` is to a model's parameters: all of them are on each rank, but for experts."""
    return Layout(dp=layout.cp, ep=layout.ep, dispatch=layout.dispatch)


def mesh_of_rank(layout: Layout, device: str) -> Mesh:
    """Where this rank's model stands."""
    if layout.ep == 1:
        return Mesh.single(device)
    alike = _of_experts(layout)
    place, ranks = Place.of(alike, dist.get_rank()), dist.group.WORLD
    assert ranks is not None
    return Mesh(alike, torch.device(device), place, _group={"exchange": ranks})


class KeyValues:
    """Keys and values of the first ``tokens`` tokens of each row, in memory that grows by at least an eighth."""

    def __init__(self) -> None:
        self.tokens = 0
        self.store: T | None = None  # [2, rows, room, kv_heads, head_dim]

    def append(self, *new: T) -> tuple[T, ...]:
        """Keep ``new``, ``[rows, new tokens, kv_heads, head_dim]`` each; returns those of all tokens."""
        first, end = new[0], self.tokens + new[0].shape[1]
        if self.store is None or end > self.store.shape[2]:
            grown = first.new_empty(len(new), len(first), end + max(ROOM, self.tokens // 8), *first.shape[2:])
            if self.store is not None:
                grown[:, :, : self.tokens] = self.store[:, :, : self.tokens]
            self.store = grown
        kept = self.store[:, :, :end].unbind()
        for all_tokens, each in zip(kept, new, strict=True):
            all_tokens[:, self.tokens :] = each
        self.tokens = end
        return kept


class SharedCache:
    """One layer's keys and values, each token's on one of the ranks; called in place of the layer's attention.

    The first call has the prompt, cut as by the attention table ``scheme`` over ``peers`` (this rank is
    ``peers[index]``) into blocks of ``lengths`` tokens. Later ones have one new token, which the ranks keep in turn.
    """

    def __init__(self, scheme: str, peers: Sequence[int], index: int, lengths: Sequence[int]) -> None:
        self.where = (scheme, peers, index, lengths)
        self.past = KeyValues()
        self.following: int | None = None  # tokens that came after the prompt; None before it

    def __call__(self, q: T, k: T, v: T, cu_seqlens: T) -> T:
        """``[1, tokens, heads or kv_heads, head_dim]``: own part of the prompt, or the new token on every rank."""
        if self.following is None:
            self.past.append(k, v)
            self.following = 0
            return across(q, k, v, cu_seqlens, *self.where)
        _, peers, index, _ = self.where
        mine = self.following % len(peers) == index
        self.following += 1
        return self._attend(q, *self.past.append(*((k, v) if mine else (k[:, :0], v[:, :0]))))

    def _attend(self, q: T, k: T, v: T) -> T:
        """Attention of one new token to the keys and values of all ranks, of which ``k`` and ``v`` are here."""
        # Without a mask the query heads that share a key head are so many queries: [group, kv_heads, head_dim].
        queries = q[0, 0].unflatten(0, (k.shape[2], -1)).transpose(0, 1).contiguous()
        mine = queries.new_zeros(*queries.shape[:2], queries.shape[2] + 1, dtype=wide(q.dtype))  # out beside its lse
        mine[..., -1] = -torch.inf
        if k.shape[1]:
            out, lse = attend_forward(queries, k[0], v[0], [Segment(0, len(queries), 0, k.shape[1], False)])
            mine[..., :-1], mine[..., -1] = out, lse
        parts = mine.new_empty(len(self.where[1]), *mine.shape)
        all_gather(parts.flatten(0, 1), mine, group=None)
        total, logs = parts[0, ..., :-1], parts[0, ..., -1]
        for part in parts[1:]:  # in the same order on all ranks, which so get the same bits
            join(total, logs, part[..., :-1], part[..., -1])
        return total.transpose(0, 1).reshape(q.shape).to(q.dtype)


class SpreadReader:
    """Reads tokens of one sequence on all ranks of the default process group; every rank calls every method."""

    def __init__(self, model: Transformer, layout: Layout) -> None:
        check_spread(layout, model.shape)
        if not dist.is_initialized() or dist.get_world_size() != layout.cp:
            raise UsageError(f"generation under {layout} needs {layout.cp} ranks that are started together")
        self.model, self.rank = model, dist.get_rank()
        self.scheme, self.owners = layout.context, build(layout.context, layout.cp).owners
        blocks = sum(map(len, self.owners))
        self.root = next(r for r, owned in enumerate(self.owners) if blocks - 1 in owned)  # has the prompt's end
        self.caches: list[SharedCache] = []
        self.past = 0
        self.mixtures = [m for m in model.modules() if isinstance(m, Mixture) and layout.ep > 1]
        connect_experts(model, model.mesh)

    def read(self, ids: list[int]) -> T | None:
        """The prompt, later one new token. Logits ``[vocab]`` of the last one, on one rank and None on the others."""
        mine = list(range(self.past, self.past + len(ids))) if self.caches else self._start(len(ids))
        device = self.model.mesh.device
        tokens = torch.tensor([[ids[i - self.past] for i in mine]], dtype=torch.int64, device=device)
        positions = torch.tensor([mine], dtype=torch.int64, device=device)
        documents = torch.tensor([0, len(ids)], dtype=torch.int32)
        with attending(self.model, self.caches):
            logits = self.model(
                tokens, positions, documents, only=slice(-1, None) if self.rank == self.root else slice(0)
            )
        if not self.past:  # tokens that follow are the same on all ranks
            for mixture in self.mixtures:
                connect(mixture, Everywhere, Counter())
        self.past += len(ids)
        return logits[0, 0] if self.rank == self.root else None

    def agree(self, chosen: int | None) -> int:
        """On every rank, the id that the rank with the logits has chosen; the others give None."""
        agreed = torch.tensor([0 if chosen is None else chosen], device=self.model.mesh.device)
        dist.broadcast(agreed, self.root)
        return int(agreed)

    def _start(self, tokens: int) -> list[int]:
        """Make empty caches for a prompt; returns the positions in it that this rank reads."""
        count = sum(map(len, self.owners))
        edges = [tokens * b // count for b in range(count + 1)]
        lengths, peers = [b - a for a, b in pairwise(edges)], list(range(len(self.owners)))
        self.caches = [SharedCache(self.scheme, peers, self.rank, lengths) for _ in self.model.blocks]
        return [i for b in self.owners[self.rank] for i in range(edges[b], edges[b + 1])]
