"""Layers and output layer for passes of few rows, by a kernel in C that is compiled where it runs.

A pass that gives some texts a token each reads every weight once, and multiplies it with few rows. The kernel
(``row_layers.c``) reads the weights where they lie: no packed copy of them has to be made after each update. It runs
through all layers without returning to Python, in the threads that PyTorch's own operators have. A compiler makes it
once per machine and shape of a head (:mod:`weft.models.native_library`). Where there is none, and for passes that it
does not know, layers run as usual.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from weft.models.fused import times
from weft.models.invariant import is_invariant
from weft.models.lean_block import is_plain
from weft.models.native_kernel import LANES, WIDEST, batch_tokens
from weft.models.native_library import pointer_to, threaded_library
from weft.models.paged import KeyValuePages
from weft.models.transformer import Attention, Block, Transformer

T = torch.Tensor

SOURCE = Path(__file__).with_suffix(".c")

#: Numbers of rows for which the kernel is compiled: a pass takes the smallest that holds its rows. Registers of 256
#: bits have no room for more than 32.
WIDE = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
ROWS = (16, 32, 64) if WIDE else (16, 32)

#: Sizes of weights must be multiples of this.
UNIT = 16

#: Bytes of weights from which on the kernel pays: small models take as long to call as to compute.
LARGE = 64 << 20

#: The products of a layer, as their module in the block and the names of their weights.
PRODUCTS = (
    ("attention", ("wq", "wk", "wv")),
    ("attention", ("wo",)),
    ("ffn", ("gate", "up")),
    ("ffn", ("down",)),
)


class ProductKeeper(Protocol):
    """Interface of objects that keep what products make of the rows of passes."""

    def keep(self, path: str, names: tuple[str, ...], y: T) -> None:
        """Keep the results ``y`` ``[rows, out]`` of the product with the weights ``names`` of the module ``path``,
        joined if there are several weights.
        """

    def room(self, path: str, names: tuple[str, ...], rows: int, out: int) -> T:
        """Return the memory ``[rows, out]`` to which the caller writes such results instead. The last of the rows may
        be of no token.
        """

    def drop(self, why: str) -> None:
        """Keep nothing, and forget what was kept. ``why``: the reason."""


class FewRowsPass(ctypes.Structure):
    """A pass through layers, as the kernel reads it (``Pass`` in C)."""

    _fields_ = [
        ("layers", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "rows", "embed", "kv_heads", "ffn", "blocks")),
        *((name, ctypes.c_void_p) for name in ("slots", "tables", "tokens", "texts", "places", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("x", "shared", "own")),
        ("own_step", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]  # fmt: skip


class FewRowsProduct(ctypes.Structure):
    """A product of few rows with a weight, as the kernel reads it (``Product`` in C)."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "y", "own")),
        ("inner", ctypes.c_int64),
        ("out", ctypes.c_int64),
    ]


@cache
def rows_kernel(width: int, group: int, size: int, rows: int) -> ctypes.CDLL | None:
    """Compile the kernel for passes of at most ``rows`` rows, one of :data:`ROWS`. Returns None if this machine has no
    compiler, or if PyTorch has no threads that the kernel can share.

    ``width``: elements of a head. ``group``: query heads that share a key head. ``size``: tokens of a cache block.
    """
    sizes = {"ROWS": rows, "WIDTH": width, "GROUP": group, "SIZE": size}
    macros = [f"-D{name}={value}" for name, value in sizes.items()]
    library = threaded_library(SOURCE, *macros)
    if library is not None:
        library.weft_layers.restype = library.weft_rows_product.restype = None
    return library


def serves(model: Transformer, rows: int) -> bool:
    """Return whether the kernel can compute the layers of ``model`` for passes of ``rows`` rows on this machine, and
    pays.
    """
    shape, device = model.shape, model.mesh.device
    if device.type != "cpu" or not 0 < rows <= ROWS[-1] or shape.adapter is not None:
        return False
    if sum(p.nbytes for p in model.parameters()) < LARGE:
        return False
    blocks = plain_blocks(model)
    if model.woven is not None or shape.kind or not blocks:
        return False
    sizes = set[int]()
    for block in blocks:
        if attention_of(block).window or attention_of(block).base:
            return False
        for part, names in PRODUCTS:
            module = getattr(block, part)
            if module.elsewhere or len(module.quantized):
                return False
            for name in names:
                weight = getattr(module, name)
                if weight.dtype != torch.float32 or not weight.is_contiguous():
                    return False
                sizes |= {*weight.shape}
    attention = attention_of(blocks[0])
    width, group = attention.head_dim, sharing_heads(attention)
    fits = all(n % UNIT == 0 for n in sizes) and width % LANES == 0 and width <= WIDEST
    # passes in which some texts have ended have fewer rows
    sizes_of_rows = [n for n in ROWS if n <= compiled_rows(rows)]
    return fits and all(rows_kernel(width, group, UNIT, n) is not None for n in sizes_of_rows)  # fmt: skip


def plain_blocks(model: Transformer) -> list[Block]:
    """Return the blocks of ``model``, in order; none if one of them is not plain
    (:func:`weft.models.lean_block.is_plain`).
    """
    blocks = [b for b in model.blocks.values() if isinstance(b, Block) and is_plain(b)]
    return blocks if len(blocks) == len(model.blocks) else []


def attention_of(block: Block) -> Attention:
    """Return the attention of a plain ``block``."""
    assert isinstance(block.attention, Attention)
    return block.attention


def sharing_heads(attention: Attention) -> int:
    """Return how many query heads of ``attention`` share a key head."""
    return len(attention.wq) // len(attention.wk)


def compiled_rows(rows: int) -> int:
    """Return the number of rows of the kernel that computes passes of ``rows`` rows."""
    return next(n for n in ROWS if n >= rows)


class RowLayers:
    """Runs the layers of ``model`` by the kernel in passes of at most as many rows as it has registers for
    (:class:`weft.models.token_parts.LayerRunner`). Other passes run block after block. :func:`serves` says for which
    models this is possible. The weights are read where they lie, so that they may change between passes, but not move.

    ``keeper``: keeps what the products make of the rows; None: nothing does.
    """

    def __init__(self, model: Transformer, keeper: ProductKeeper | None = None) -> None:
        self.blocks = plain_blocks(model)
        self.keeper = keeper
        attention, ffn = attention_of(self.blocks[0]), self.blocks[0].ffn
        self.width, self.group = attention.head_dim, sharing_heads(attention)
        self.kv_heads = len(attention.wk) // self.width
        self.ffn, self.eps = len(ffn.gate), self.blocks[0].attention_norm.eps
        self.weights = [weights_of(block) for block in self.blocks]
        # room for what threads share, and for each of them
        self.room: dict[str, T] = {}

    def run(
        self, model: Transformer, layers: Sequence[int], x: Any, rope: tuple[T, ...], cu_seqlens: T, seen: Any,
        enter: Any = None,
    ) -> Any:  # fmt: skip
        """Run the blocks ``layers`` on ``x`` ``[1, rows, embed]``, and return the output of the last. The arguments are
        those of :meth:`weft.models.transformer.Transformer.run_blocks`.
        """
        pages = self._pages(layers, x)
        if pages is not None:
            rows = compiled_rows(x.shape[1])
            kernel = rows_kernel(self.width, self.group, pages[0].size, rows)
            if kernel is not None:
                return self._computed(kernel, rows, layers, pages, x, rope)
        for i in layers:
            x = model.run_block(i, x, rope, cu_seqlens, seen)
        return x

    def _pages(self, layers: Sequence[int], x: T) -> list[KeyValuePages] | None:
        """Return the cache of each of ``layers``, if the kernel can compute the pass ``x`` with it, else None."""
        fits = x.dtype == torch.float32 and len(x) == 1 and 0 < x.shape[1] <= ROWS[-1]
        if not fits or is_invariant() or not torch.is_inference_mode_enabled():
            return None
        pages = list[KeyValuePages]()
        for i in layers:
            attention, ffn = attention_of(self.blocks[i]), self.blocks[i].ffn
            own = attention.attend
            if type(own) is not KeyValuePages or own.selector is not None:
                return None
            if own.written or attention.beside or ffn.beside:
                return None
            pages.append(own)
        if not pages or len(pages[0].reading.slots) != x.shape[1]:
            return None
        spans = pages[0].reading.spans
        plain = all(not span.context and min(span.table) >= 0 for span in spans)
        return pages if plain else None

    def _computed(
        self,
        kernel: ctypes.CDLL,
        rows: int,
        layers: Sequence[int],
        pages: Sequence[KeyValuePages],
        x: T,
        rope: tuple[T, ...],
    ) -> T:
        """Run the kernel. ``rows``: rows for which it was compiled. ``pages``: the cache of each of ``layers``."""
        count, embed = x.shape[1:]
        reading, shape = pages[0].reading, (pages[0].size, self.kv_heads, self.width)
        batch = batch_tokens(reading.spans)
        stores = [each.room(reading.blocks, x, 2, shape) for each in pages]
        # which must be there until the kernel has ended
        kept = [self._kept(i, rows, embed) for i in layers]
        pointers = [
            pointer
            for i, store, places in zip(layers, stores, kept, strict=True)
            for pointer in (
                *self.weights[i],
                store.data_ptr(),
                store.data_ptr() + 4 * store.stride(0),
                *([each.data_ptr() for each in places] or [0] * len(PRODUCTS)),
            )
        ]
        table = (ctypes.c_int64 * len(pointers))(*pointers)
        stream = x.new_zeros(rows, embed)
        stream[:count] = x[0]
        heads = self.group * self.kv_heads * self.width
        joined = heads + 2 * self.kv_heads * self.width
        threads = torch.get_num_threads()
        own_step = rows * max(embed, heads) + heads // self.width * batch.keys
        shared = self._room("shared", rows * (2 * heads + 2 * self.ffn + joined + embed))  # fmt: skip
        own = self._room("own", threads * own_step)
        cos, sin = (each[0].contiguous() for each in rope[:2])
        given = [reading.slots, *batch[:4], cos, sin, stream, shared, own]
        sizes = (len(layers), count, embed, self.kv_heads, self.ffn, batch.tables.shape[1])  # fmt: skip
        pointed = [pointer_to(each) for each in given]
        scales = self.eps, self.width**-0.5
        numbers = FewRowsPass(ctypes.addressof(table), *sizes, *pointed, own_step, *scales)  # fmt: skip
        kernel.weft_layers(ctypes.byref(numbers), threads)
        return stream[None, :count]

    def _kept(self, layer: int, rows: int, embed: int) -> list[T]:
        """Return the memory that keeps what each product of a layer makes of ``rows`` rows; empty if nothing does."""
        if self.keeper is None:
            return []
        joined = (self.group + 2) * self.kv_heads * self.width
        sizes, block = (joined, embed, 2 * self.ffn, embed), self.blocks[layer]
        return [
            self.keeper.room(getattr(block, part).path, names, rows, out)
            for (part, names), out in zip(PRODUCTS, sizes, strict=True)
        ]

    def _room(self, name: str, size: int) -> T:
        """Return room for ``size`` numbers, the same each time unless it was too small."""
        if name not in self.room or self.room[name].numel() < size:
            self.room[name] = torch.zeros(size)
        return self.room[name]


def weights_of(block: Block) -> list[int]:
    """Return the addresses of the weights of ``block``, in the order of ``Layer`` in C; 0 for a bias that it lacks."""
    attention, ffn = attention_of(block), block.ffn
    biases = [attention.bq, attention.bk, attention.bv] if attention.bias else []
    first = [block.attention_norm.scale, attention.wq, attention.wk, attention.wv]
    last = [attention.wo, block.ffn_norm.scale, ffn.gate, ffn.up, ffn.down]
    of_biases = [each.data_ptr() for each in biases] or [0, 0, 0]
    return [
        *(each.data_ptr() for each in first),
        *of_biases,
        *(each.data_ptr() for each in last),
    ]


class RowOutput:
    """Multiplies few rows with the output layer's ``weight`` ``[vocab, embed]`` by the kernel that is compiled for the
    heads of the model: of ``width`` elements, ``group`` query heads for a key head.
    """

    def __init__(self, weight: T, width: int, group: int) -> None:
        self.weight, self.width, self.group = weight, width, group

    def __call__(self, x: T) -> T:
        """Multiply ``x`` ``[1, rows, embed]``: return ``[1, rows, vocab]``."""
        flat = x.flatten(0, -2)
        count, (out, inner) = len(flat), self.weight.shape
        fits = 0 < count <= ROWS[-1] and x.dtype == torch.float32
        rows = compiled_rows(count) if fits else 0
        kernel = rows_kernel(self.width, self.group, UNIT, rows) if fits else None
        if kernel is None or is_invariant() or x.requires_grad:
            return times(flat, self.weight).unflatten(0, x.shape[:-1])
        columns = flat.new_zeros(rows, inner)
        columns[:count] = flat
        y = flat.new_empty(rows, out)
        threads = torch.get_num_threads()
        own = flat.new_empty(threads * rows * inner)
        pointed = [pointer_to(each) for each in (columns, self.weight, y, own)]
        numbers = FewRowsProduct(*pointed, inner, out)
        kernel.weft_rows_product(ctypes.byref(numbers), threads)
        return y[:count].unflatten(0, x.shape[:-1])
