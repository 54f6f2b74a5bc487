"""Attention backends: how new tokens attend to the keys and values in blocks of a paged cache.

``gathered`` copies the blocks that a call reads one behind the other, unless they lie so already, and runs PyTorch's
attention on the copy. It works for everything. ``fixed`` goes share by share through the keys of texts with few new
tokens, and subtracts one fixed maximum from the scores of all shares (:mod:`weft.models.split_keys`). ``measured``
takes for each shape the fastest of all (:mod:`weft.models.measured_attention`). Two others read the blocks where they
lie: on GPUs ``paged``, with a kernel of Triton (:mod:`weft.models.paged_kernel`), and on the CPU ``native``, with a
kernel in C for texts with few new tokens (:mod:`weft.models.native_kernel`). Each declares by
:attr:`AttentionBackend.takes` what it can do. What it does not take is computed by ``gathered``: latent attention,
float64 where a kernel knows it not, and passes that no batch may change. Texts that see cached tokens of other texts,
or blocks of other engines, are not attended to by a backend at all (:mod:`weft.models.paged`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from weft.errors import UsageError, nearest
from weft.models.invariant import is_invariant
from weft.models.invariant_kernels import hiding_bias
from weft.models.query_tiles import FEW_ROWS, TileBatch, tile_spans, tokens_of_tile
from weft.models.queued_copy import queued_copy
from weft.models.spans import (
    SHORT,
    Span,
    SpanBatch,
    attend_batch,
    attend_span,
    batch_spans,
    seen_blocks,
)
from weft.models.split_keys import ShortSpans, attend_short
from weft.models.triton_use import TYPES, runs_triton

if TYPE_CHECKING:  # the kernel's module is for steps of generation, not for what trains
    from weft.models.native_kernel import TokenBatch

T = torch.Tensor

#: The widest head whose tiles fit into the shared memory of a multiprocessor.
WIDEST = 256


class DecodeRows(NamedTuple):
    """The texts of a step in which each computes one token, as tensors on the device. Row ``i`` of the pass is text
    ``i``.

    ``tables``: cache blocks of each text, int32 ``[texts, blocks]``, padded. ``places``: number of tokens before the
    new one in its text, int32 ``[texts]``.
    """

    tables: T
    places: T


class MeasuredPiece(NamedTuple):
    """Attention of some new tokens that one call computes, with the backend that was measured as fastest for it.
    ``backend``: the backend. ``piece``: description of these tokens and their cache blocks, as the backend's function
    ``group`` has returned it.
    """

    backend: "AttentionBackend"
    piece: "BackendPiece"


#: What one call of a backend computes.
BackendPiece: TypeAlias = (
    "SpanBatch | Span | TileBatch | TokenBatch | ShortSpans | MeasuredPiece"
)


class SpanKeys(NamedTuple):
    """The keys and values that the new tokens of a text (a span) see, ``[tokens, kv_heads, width]`` each.

    ``before``: the number of the text's first tokens that are left out, because no token of the span sees them.
    """

    keys: T
    values: T
    before: int


@dataclass(frozen=True)
class AttentionBackend:
    """A way to attend to keys and values in cache blocks.

    The cache of a layer is a tensor ``[parts, blocks, size, kv_heads, width]``. A window is the number of tokens that a
    token sees, itself included; 0: all.

    Attributes:
        ``name``: the name by which an engine asks for the backend.
        ``takes``: function that returns whether the backend supports a cache. Its arguments are a tensor of the
            queries' type, the cache, and the number of elements of a value.
        ``group``: function that returns a list of pieces of work, one for each call of ``attend``. Its arguments are
            texts' new tokens, the cache, the window, and a tensor like the queries ``[..., heads, width]``.
        ``group_rows``: function that returns the one piece of work of a decode step, and copies nothing from or to the
            host. Its arguments are the step's texts, the cache, the window, and a tensor like the queries.
        ``attend``: function that computes a piece of work and writes its results. Its arguments are the queries of all
            new tokens ``[tokens, heads, width]``, the cache, the piece, the window, and the tensor for the results,
            ``[tokens, heads, value elements]``.
        ``needs``: what a model and a machine need for it, in words.
    """

    name: str
    takes: Callable[[T, T, int], bool]
    group: Callable[[Sequence[Span], T, int, T], Sequence[BackendPiece]]
    group_rows: Callable[[DecodeRows, T, int, T], BackendPiece]
    attend: Callable[[T, T, BackendPiece, int, T], None]
    needs: str = "nothing"


def gather_blocks(store: T, blocks: T) -> tuple[T, T]:
    """Return the cached keys and values of several texts: ``[texts, tokens, kv_heads, width]`` each.

    ``store``: the cache of a layer; ``blocks``: numbers of the blocks of each text, ``[texts, blocks]``.
    """
    # [texts * blocks, size, kv_heads, width]; one part can be both
    parts = [part.index_select(0, blocks.flatten()) for part in store]
    gathered = [part.unflatten(0, blocks.shape).flatten(1, 2) for part in parts]
    return gathered[0], gathered[-1]


def read_span(store: T, span: Span, window: int) -> SpanKeys:
    """Return the keys and values that any token of ``span`` sees.

    ``store``: the cache of a layer; ``window``: the number of tokens that a token sees, itself included; 0: all.
    """
    size = store.shape[2]
    end = span.past + span.last - span.first
    first, last = seen_blocks(span, size, window)
    table = span.table[first:last]
    # side by side: nothing is copied
    if all(b - a == 1 for a, b in pairwise(table)):
        rows = store[:, table[0] : table[-1] + 1]
    else:
        rows = store[:, queued_copy(table, store.device)]
    tokens = rows.flatten(1, 2)[:, : end - first * size]
    return SpanKeys(tokens[0], tokens[-1], first * size)


def _group_gathered(
    spans: Sequence[Span], store: T, window: int, q: T
) -> Sequence[BackendPiece]:
    group = q.shape[-2] // store.shape[3]
    return batch_spans(spans, store.shape[2], window, q, group)


def _rows_gathered(rows: DecodeRows, store: T, window: int, q: T) -> BackendPiece:
    texts, blocks = rows.tables.shape
    group = q.shape[-2] // store.shape[3]
    keys = torch.arange(blocks * store.shape[2], device=q.device)
    # [texts, 1, 1, keys]
    bias = hiding_bias(rows.places[:, None], keys[None], window, q)[:, None, None]
    return SpanBatch(
        slice(0, texts), (texts, 1), rows.tables, bias.expand(-1, -1, group, -1)
    )


def _attend_gathered(q: T, store: T, piece: BackendPiece, window: int, out: T) -> None:
    width = out.shape[-1]  # cached values may be padded to more
    if isinstance(piece, SpanBatch):
        queries = q[piece.rows].view(*piece.shape, *q.shape[1:])
        attended = attend_batch(queries, *gather_blocks(store, piece.blocks), piece)
        if isinstance(piece.rows, slice):
            attended = attended.flatten(0, 1)
        out[piece.rows] = attended[..., :width]
        return
    assert isinstance(piece, Span)
    keys, values, before = read_span(store, piece, window)
    at = slice(piece.first, piece.last)
    attended = attend_span(q[at], keys, values, piece.past - before, window)
    out[at] = attended[..., :width]


GATHERED = AttentionBackend(
    "gathered",
    lambda q, store, width: True,
    _group_gathered,
    _rows_gathered,
    _attend_gathered,
)


def _takes_paged(q: T, store: T, width: int) -> bool:
    plain = store.shape[0] == 2 and store.shape[-1] == q.shape[-1] == width <= WIDEST
    alike = q.dtype == store.dtype and q.dtype in TYPES
    return plain and alike and not is_invariant()


def _group_paged(
    spans: Sequence[Span], store: T, window: int, q: T
) -> Sequence[BackendPiece]:
    return tile_spans(spans, window, q.shape[-2] // store.shape[3], q.device)


def _rows_paged(rows: DecodeRows, store: T, window: int, q: T) -> BackendPiece:
    texts, blocks = rows.tables.shape
    numbers = torch.arange(texts, dtype=torch.int32, device=q.device)
    most = blocks * store.shape[2]
    return TileBatch(
        rows.tables,
        numbers,
        torch.ones_like(numbers),
        rows.places,
        numbers,
        tokens_of_tile(FEW_ROWS, q.shape[-2] // store.shape[3]),
        min(most, window) if window else most,
    )


def _attend_paged(q: T, store: T, piece: BackendPiece, window: int, out: T) -> None:
    from weft.models.paged_kernel import attend_tiles  # Triton: only where it is used

    assert isinstance(piece, TileBatch)
    attend_tiles(q, store, piece, window, out)


PAGED = AttentionBackend(
    "paged",
    _takes_paged,
    _group_paged,
    _rows_paged,
    _attend_paged,
    f"layers with keys and values in 16 or 32 bits and heads of at most {WIDEST} elements",
)


def _takes_native(q: T, store: T, width: int) -> bool:
    plain = store.shape[0] == 2 and store.shape[-1] == q.shape[-1] == width
    plain = plain and q.dtype == store.dtype == torch.float32
    if not plain or q.device.type != "cpu" or is_invariant():
        return False
    from weft.models.native_kernel import has_kernel

    group = q.shape[-2] // store.shape[3]
    return store[0].is_contiguous() and has_kernel(width, group, store.shape[2])


def _group_native(
    spans: Sequence[Span], store: T, window: int, q: T
) -> Sequence[BackendPiece]:
    """PyTorch's attention is quicker for many tokens of a text, which all read the same keys."""
    from weft.models.native_kernel import batch_tokens

    few = [span for span in spans if span.last - span.first <= SHORT]
    pieces: list[BackendPiece] = [batch_tokens(few)] if few else []
    return pieces + [span for span in spans if span.last - span.first > SHORT]


def _rows_native(rows: DecodeRows, store: T, window: int, q: T) -> BackendPiece:
    from weft.models.native_kernel import TokenBatch

    numbers = torch.arange(len(rows.tables), dtype=torch.int32)
    keys = int(rows.places.max()) + 1
    return TokenBatch(
        rows.tables.contiguous(), numbers, numbers, rows.places.contiguous(), keys
    )


def _attend_native(q: T, store: T, piece: BackendPiece, window: int, out: T) -> None:
    from weft.models.native_kernel import TokenBatch, attend_tokens

    if isinstance(piece, TokenBatch):
        attend_tokens(q, store, piece, window, out)
    else:
        _attend_gathered(q, store, piece, window, out)


NATIVE = AttentionBackend(
    "native",
    _takes_native,
    _group_native,
    _rows_native,
    _attend_native,
    "Linux, a C compiler, and layers with keys and values in float32 and heads of a multiple of 16 elements",
)


def _takes_fixed(q: T, store: T, width: int) -> bool:
    plain = store.shape[0] == 2 and store.shape[-1] == q.shape[-1] == width
    if not plain or q.dtype != store.dtype or is_invariant():
        return False
    return q.device.type == "cpu" or _runs_tiles(q)


def _runs_tiles(q: T) -> bool:
    """Whether the kernel of tiles, with a fixed maximum, can compute queries like ``q``."""
    return runs_triton(q.device) and q.dtype in TYPES and q.shape[-1] <= WIDEST


def _group_fixed(
    spans: Sequence[Span], store: T, window: int, q: T
) -> Sequence[BackendPiece]:
    if _runs_tiles(q):
        return _group_paged(spans, store, window, q)
    few = [span for span in spans if span.last - span.first <= SHORT]
    pieces: list[BackendPiece] = [ShortSpans(few)] if few else []
    return pieces + [span for span in spans if span.last - span.first > SHORT]


def _rows_fixed(rows: DecodeRows, store: T, window: int, q: T) -> BackendPiece:
    by_rows = _rows_paged if _runs_tiles(q) else _rows_gathered
    return by_rows(rows, store, window, q)


def _attend_fixed(q: T, store: T, piece: BackendPiece, window: int, out: T) -> None:
    if isinstance(piece, TileBatch):
        from weft.models.paged_kernel import attend_tiles_fixed

        attend_tiles_fixed(q, store, piece, window, out)
    elif isinstance(piece, ShortSpans):
        attend_short(q, store, piece.spans, window, out)
    else:
        _attend_gathered(q, store, piece, window, out)


FIXED = AttentionBackend(
    "fixed",
    _takes_fixed,
    _group_fixed,
    _rows_fixed,
    _attend_fixed,
    "layers with keys and values, and on a GPU the package triton",
)

#: All backends by name.
BACKENDS = {backend.name: backend for backend in (GATHERED, PAGED, NATIVE, FIXED)}

#: Names of the backend that chooses among these: by the times that are known, or measured anew.
MEASURED, REMEASURED = "measured", "remeasured"


def check_attention(name: str, invariant: bool, ranks: bool) -> None:
    """Raise :class:`UsageError` if ``name`` is not "" or the name of a backend, or if that backend cannot be used with
    the other options.

    ``invariant``: whether no result may depend on the batch. ``ranks``: whether a model is cut over several ranks.
    """
    if name and name not in (*BACKENDS, MEASURED, REMEASURED):
        known = (*BACKENDS, MEASURED, REMEASURED)
        raise UsageError(
            f"there is no attention {name!r}; {nearest(name, known, True)}"
        )
    if name in ("", GATHERED.name):
        return
    for option, given in (("--invariant", invariant), ("--layout", ranks)):
        if given:
            raise UsageError(
                f"--attention {name} is for one rank, without --invariant; leave out {option}"
            )
