"""Contents of cache blocks as bytes, in an order that does not depend on how the model is cut over ranks.

A block's bytes are those of its layers, first layer first: keys, then values, ``[tokens, kv_heads, head_dim]`` each;
latent vectors; or a recurrent state. So blocks can go to another engine, to host memory or to a file, and an engine
whose ranks hold other heads, layers or tokens can take them (:class:`LayerPart`). Of a block that is not full, only the
leading tokens are taken, so that keys and values are ``2 * layers * kv_heads * head_dim`` elements a token.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from weft.layout.dims import part
from weft.layout.placement import cut_range
from weft.models.latent import LatentAttention
from weft.models.paged import Pages, StatePages
from weft.models.transformer import Attention, Block, Transformer

T = torch.Tensor


@dataclass(frozen=True)
class LayerPart:
    """The part of every cache block that one rank holds in one layer.

    Attributes:
        ``layer``: number of the layer in the model.
        ``dtype``: type of the values.
        ``parts``: 2 for keys and values, 1 for latent vectors or a recurrent state.
        ``heads``: numbers of the heads, in their order in the rank's cache.
        ``shape``: shape of one head's values for a token, or of one head's state.
        ``first``: index within the block of the first token that the rank holds.
        ``every``: step from each token that the rank holds to the next; 1: it holds all from ``first`` on. 0: the rank
            holds no tokens, but one recurrent state for the whole block.
    """

    layer: int
    dtype: torch.dtype
    parts: int
    heads: tuple[int, ...]
    shape: tuple[int, ...]
    first: int = 0
    every: int = 1

    def own_tokens(self, tokens: int) -> range:
        """Return which of a block's first ``tokens`` tokens this part holds, as indices within the block."""
        return range(self.first, tokens, self.every)

    def extents(self, tokens: int) -> tuple[int, ...]:
        """Return the shape of this part of a block's first ``tokens`` tokens: ``[parts, tokens, heads, ...]``, or
        ``[parts, heads, ...]`` of a state.
        """
        own = (len(self.own_tokens(tokens)),) if self.every else ()
        return (self.parts, *own, len(self.heads), *self.shape)

    def nbytes(self, tokens: int) -> int:
        """Return how many bytes the first ``tokens`` tokens of a cache block take in this part."""
        return prod(self.extents(tokens)) * self.dtype.itemsize

    @property
    def form(self) -> list[Any]:
        """This part as a value that JSON can write; :meth:`of` reads it."""
        name = str(self.dtype).removeprefix("torch.")
        heads, shape = list(self.heads), list(self.shape)
        return [self.layer, name, self.parts, heads, shape, self.first, self.every]

    @classmethod
    def of(cls, form: Sequence[Any]) -> "LayerPart":
        """Build a part from the JSON value ``form``, which :attr:`form` has returned."""
        layer, name, parts, heads, shape, first, every = form
        dtype = getattr(torch, name)
        return cls(layer, dtype, parts, tuple(heads), tuple(shape), first, every)


def layer_parts(
    model: Transformer, pages: Iterable[Pages], ranks: int = 1, rank: int = 0
) -> list[LayerPart]:
    """Return a description of the part of every cache block that this rank holds, one :class:`LayerPart` per layer of
    ``model``. ``pages``: the caches of the layers, which must be allocated already. ``ranks``: number of ranks that
    share the tokens of a block. ``rank``: this rank's place among them.
    """
    layers = [(int(i), b) for i, b in model.blocks.items() if isinstance(b, Block)]
    held = []
    for (layer, block), page in zip(layers, pages, strict=True):
        assert page.store is not None
        parts, _, *rest = page.store.shape
        state = isinstance(page, StatePages)
        shape = tuple(rest[1:] if state else rest[2:])
        if state:
            heads = state_heads(model, ranks, rank)
        else:
            heads = key_heads(block.attention)
        cut = (0, 0) if state else (rank, ranks)
        held.append(LayerPart(layer, page.store.dtype, parts, heads, shape, *cut))
    return held


def state_heads(model: Transformer, ranks: int, rank: int) -> tuple[int, ...]:
    """Return the numbers of the query heads of ``model`` whose recurrent states this rank holds.

    ``ranks``: number of ranks over which the states are divided. ``rank``: this rank's place among them.
    """
    mesh = model.mesh
    own = range(*cut_range(model.shape.heads, mesh.layout, ("tp",), mesh.rank("tp")))
    return tuple(own[slice(*part(len(own), ranks, rank))])


def key_heads(attention: Attention | LatentAttention) -> tuple[int, ...]:
    """Return the numbers of the key/value heads that this rank caches in the layer ``attention``. Latent vectors count
    as one head.
    """
    if isinstance(attention, LatentAttention):
        return (0,)
    own = range(attention.kv_first, attention.kv_last)
    index = attention.kv_index
    return tuple(own if index is None else (own[i] for i in index))


def whole_parts(held: Iterable[LayerPart]) -> list[LayerPart]:
    """Return one part per layer that stands for all ranks together: all heads and all tokens of a block. ``held``: the
    parts of all ranks.
    """
    layers: dict[int, LayerPart] = {}
    for each in held:
        heads = range(1 + max(*each.heads, *_heads_of(layers.get(each.layer))))
        layers[each.layer] = LayerPart(
            each.layer,
            each.dtype,
            each.parts,
            tuple(heads),
            each.shape,
            0,
            int(each.every > 0),
        )
    return [layers[layer] for layer in sorted(layers)]


def _heads_of(layer: LayerPart | None) -> tuple[int, ...]:
    return layer.heads if layer else (0,)


def tensor_bytes(x: T) -> memoryview:
    """Return the bytes of ``x``, which must be in the host's memory."""
    return memoryview(x.contiguous().flatten().view(torch.uint8).numpy().data).cast("B")


def tensor_of(payload: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> T:
    """Return the tensor of type ``dtype`` and shape ``shape`` whose bytes are ``payload``, without a copy."""
    if not len(payload):
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(payload, dtype=dtype).view(tuple(shape))


def bytes_of(parts: Iterable[LayerPart], tokens: int) -> int:
    """Return how many bytes the first ``tokens`` tokens of a cache block take in all of ``parts`` together."""
    return sum(each.nbytes(tokens) for each in parts) if tokens else 0


@torch.inference_mode()
def read_pages(
    pages: Sequence[Pages],
    parts: Sequence[LayerPart],
    table: Sequence[int],
    tokens: int,
) -> T:
    """Copy the first ``tokens`` tokens of each cache block in ``table`` to the host. Return uint8 ``[blocks, bytes]``.

    ``pages``: the cache of each layer. ``parts``: what each layer's cache holds of a block.
    """
    values = []
    for page, each in zip(pages, parts, strict=True):
        assert page.store is not None
        # [blocks, parts, ...]
        blocks = page.store[:, list(table)].transpose(0, 1)
        if each.every:
            blocks = blocks[:, :, : len(each.own_tokens(tokens))]
        values.append(blocks.cpu())
    return _joined(values, len(table))


@torch.inference_mode()
def write_pages(
    pages: Sequence[Pages],
    parts: Sequence[LayerPart],
    table: Sequence[int],
    tokens: int,
    rows: T,
) -> None:
    """Write ``rows``, which :func:`read_pages` has returned, to the first ``tokens`` tokens of the cache blocks in
    ``table``.

    ``pages``: the cache of each layer. ``parts``: what each layer's cache holds of a block.
    """
    if not table:
        return
    for page, each, values in zip(
        pages, parts, _split(rows, parts, tokens), strict=True
    ):
        store = page.room(max(table) + 1)
        values = values.transpose(0, 1).to(store.device)
        if each.every:
            own = len(each.own_tokens(tokens))
            store[:, list(table), :own] = values
        else:
            store[:, list(table)] = values
        page.loaded(table)


def gather_parts(
    whole: Sequence[LayerPart],
    shares: Iterable[tuple[Sequence[LayerPart], T]],
    tokens: int,
    blocks: int,
) -> T:
    """Join what all ranks hold of ``blocks`` cache blocks; return uint8 ``[blocks, bytes]`` of the whole model.

    ``whole``: layers of the whole model, from :func:`whole_parts`. ``shares``: for each rank, its parts and what
    :func:`read_pages` has returned there. ``tokens``: number of leading tokens of each block.
    """
    layers = {
        each.layer: torch.empty((blocks, *each.extents(tokens)), dtype=each.dtype)
        for each in whole
    }
    for parts, rows in shares:
        for each, values in zip(parts, _split(rows, parts, tokens), strict=True):
            layers[each.layer][_own(each, tokens)] = values
    return _joined([layers[each.layer] for each in whole], blocks)


def cut_parts(
    whole: Sequence[LayerPart], rows: T, tokens: int, parts: Sequence[LayerPart]
) -> T:
    """Cut one rank's part out of the cache blocks ``rows`` of the whole model. ``rows`` and the result are uint8
    ``[blocks, bytes]``. ``whole``: layers of the whole model, from :func:`whole_parts`. ``parts``: what each layer of
    the rank holds. ``tokens``: number of leading tokens of each block.
    """
    values = _split(rows, whole, tokens)
    layers = {each.layer: x for each, x in zip(whole, values, strict=True)}
    own = [layers[each.layer][_own(each, tokens)] for each in parts]
    return _joined(own, len(rows))


def _own(each: LayerPart, tokens: int) -> tuple[slice | list[int], ...]:
    """Where a part is in the whole layer ``[blocks, parts, tokens, heads, ...]``."""
    every = slice(None)
    if not each.every:
        return every, every, list(each.heads)
    return every, every, slice(each.first, tokens, each.every), list(each.heads)


def _split(rows: T, parts: Iterable[LayerPart], tokens: int) -> list[T]:
    """The layers of blocks, ``[blocks, parts, ...]`` each."""
    values, at = [], 0
    for each in parts:
        end = at + each.nbytes(tokens)
        raw = rows[:, at:end].contiguous().view(each.dtype)
        values.append(raw.view(len(rows), *each.extents(tokens)))
        at = end
    return values


def _joined(values: Sequence[T], blocks: int) -> T:
    """The bytes of layers that are ``[blocks, ...]`` each."""
    raw = [x.flatten(1).view(torch.uint8) for x in values]
    return torch.cat(raw, 1) if raw else torch.empty(blocks, 0, dtype=torch.uint8)
