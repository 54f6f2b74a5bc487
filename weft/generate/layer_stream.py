"""Sending what a request's layers remember to another engine while a pass still computes the layers after them.

Of a prompt that one engine computes for another (roles as in DistServe, 2401.09670, and CloudMatrix384, 2506.12708),
only the last layer's keys and values are left to send when the pass over its last tokens ends. They are sent by tokens
and layers, each once, so that the bytes are those of the formula.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from weft.generate.block_contents import tensor_bytes
from weft.generate.request import Generation
from weft.models.paged import KeyValuePages, Pages

T = torch.Tensor

#: Function of the number of a layer, the index in the text of the first token, and the layer's cached values of that
#: token and of those behind it: ``[parts, tokens, heads, width]``. There are two parts, keys and values, or a single
#: one with latent attention.
TakeLayer = Callable[[int, int, T], None]


class LayerStream:
    """Calls ``take`` with the keys and values of new tokens of ``request``, as soon as a layer has computed them.
    Another engine can thus receive them while later layers still compute. ``pages``: the cache of each layer. ``take``:
    function that gets them (:data:`TakeLayer`).

    Attributes:
        ``sent``: for each layer, how many of the text's first tokens were given to ``take``.
    """

    def __init__(
        self, pages: Sequence[Pages], request: Generation, take: TakeLayer
    ) -> None:
        self.pages, self.request, self.take = pages, request, take
        self.sent = [0] * len(pages)

    @property
    def whole(self) -> int:
        """Number of the text's first tokens whose keys and values have been sent for all layers."""
        return min(self.sent)

    def send(self, layer: int, end: int) -> None:
        """Call ``take`` with the keys and values in ``layer`` of the text's first ``end`` tokens, without those that
        were sent before.
        """
        first, store = self.sent[layer], self.pages[layer].store
        size, table = self.pages[layer].size, self.request.table
        lies_here = all(block >= 0 for block in table[first // size : -(-end // size)])
        if first >= end or store is None or len(table) * size < end or not lies_here:
            return
        places = token_places(table, size, first, end).to(store.device)
        self.take(layer, first, store.flatten(1, 2).index_select(1, places).cpu())
        self.sent[layer] = end

    def send_all(self, end: int) -> None:
        """Call :meth:`send` for all layers, to send what earlier calls have not sent of the text's first ``end``
        tokens.
        """
        for layer in range(len(self.pages)):
            self.send(layer, end)


def can_stream(pages: Sequence[Pages]) -> bool:
    """Return whether a :class:`LayerStream` can send the cache of all layers: each must cache keys and values of
    tokens, and none a recurrent state of the whole text. ``pages``: the cache of each layer.
    """
    return all(isinstance(each, KeyValuePages) for each in pages)


@contextmanager
def streaming(ends: Sequence[tuple[LayerStream, int]]) -> Iterator[None]:
    """Return a context of one forward pass, in which each layer sends its new keys and values as soon as they are
    computed. ``ends``: pairs of a stream, and the number of tokens that its text has computed after the pass.
    """

    def written(layer: int) -> None:
        for stream, end in ends:
            stream.send(layer, end)

    pages = ends[0][0].pages if ends else ()
    try:
        for number, each in enumerate(pages):
            each.written = partial(written, number)
        yield
    finally:
        for each in pages:
            each.written = None


def token_places(table: Sequence[int], size: int, first: int, end: int) -> T:
    """Return the indices of a text's tokens ``first`` to ``end - 1`` among the tokens of all cache blocks: int64
    ``[tokens]``. ``table``: numbers of the text's blocks; ``size``: tokens of a block.
    """
    begin = first // size
    blocks = torch.tensor(table[begin : -(-end // size)], dtype=torch.int64)
    # [blocks, size]
    places = blocks[:, None] * size + torch.arange(size)
    return places.flatten()[first - begin * size : end - begin * size]


@torch.inference_mode()
def write_layer(page: Pages, places: T, values: T) -> None:
    """Write keys and values of tokens, which a :class:`LayerStream` has sent, to ``page``, the cache of a layer, whose
    memory must reach as far. ``places``: indices of the tokens (:func:`token_places`). ``values``: ``[parts, tokens,
    heads, width]``.
    """
    store = page.store
    assert store is not None
    at = places.to(store.device)
    for kept, each in zip(store, values.to(store.device), strict=True):
        kept.flatten(0, 1).index_copy_(0, at, each)


def joined_layers(layers: Sequence[T], blocks: int, size: int) -> bytes:
    """Return the keys and values of a text's tokens as bytes. First come ``blocks`` full cache blocks of ``size``
    tokens, each with all its layers, in the order of :mod:`weft.generate.block_contents`. Then follow, layer by layer,
    the tokens behind these blocks. ``layers``: for each layer its keys and values ``[parts, tokens, heads, width]``.
    """
    middle = blocks * size
    full = [x[:, :middle].unflatten(1, (blocks, size)).transpose(0, 1) for x in layers]
    rows = torch.cat([x.flatten(1).view(torch.uint8) for x in full], 1)
    rest = [x[:, middle:].flatten().view(torch.uint8) for x in layers]
    return b"".join(tensor_bytes(x) for x in (rows, *rest) if x.numel())
