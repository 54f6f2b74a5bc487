"""Weights for generation only: joined, packed for the CPU's kernels, rounded, in few bits, or without their zeros.

A model with such weights (:func:`read_only`) can only generate, because its parameters are gone. Weights that multiply
the same input become one product, and adapters are merged into them.

The operators are private to PyTorch, which has no public name for products with packed or quantised weights on the CPU
(torch.compile and torchao call the same ones). No other file of Weft calls them.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import nn

from weft.errors import UsageError, nearest
from weft.models.adapters import merged
from weft.models.fused import ONEDNN, has_usual_sizes, times
from weft.models.invariant import is_invariant
from weft.models.projections import Projections
from weft.models.sparse_weights import (
    ROUNDED,
    SPARSE,
    Sparse,
    SparseWord,
    read_sparse_word,
)
from weft.models.transformer import Transformer
from weft.registry import find

T = torch.Tensor
mkldnn, onednn, aten = torch.ops.mkldnn, torch.ops.onednn, torch.ops.aten

#: The name of the output layer's weight, also where it is the embedding's table.
OUTPUT = "output"

#: Weights of a row that share a scale in four bits.
GROUP = 32

#: Rows of a weight that become float32 together, and products of two codes that float32 adds up exactly.
TILE_OUT, EXACT = 256, 1024

#: Products of a code with an unsigned byte that float32 adds up exactly.
EXACT_UNSIGNED = 512


class Packed(nn.Module):
    """A weight ``[out, in]`` in its own precision, stored in the order that oneDNN's kernel reads if that kernel
    supports it. ``pack``: whether the order may be changed; False: the weight is used where it lies.
    """

    def __init__(self, weight: T, pack: bool = True) -> None:
        super().__init__()
        self.nbytes, self.weight = weight.nbytes, weight.contiguous()
        quick = weight.dtype == torch.float32 or (
            weight.dtype == torch.bfloat16 and mkldnn._is_mkldnn_bf16_supported()
        )
        on_cpu = ONEDNN and weight.device.type == "cpu"
        self.packed = pack and on_cpu and has_usual_sizes(weight) and quick
        if self.packed:
            self.weight = mkldnn._reorder_linear_weight(self.weight, None)

    def forward(self, x: T) -> T:
        """Multiply ``x`` ``[..., in]`` with the packed weight: return ``[..., out]``."""
        if self.packed:
            return packed_product(x, self.weight)
        return times(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


def packed_product(x: T, weight: T) -> T:
    """Multiply ``x`` ``[..., in]`` with a weight that :class:`Packed` has packed: ``[..., out]``."""
    return mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")


def packed_sum(x: T, weight: T, plus: T) -> T:
    """Multiply ``x`` ``[..., in]`` with a weight that :class:`Packed` has packed, and add ``plus`` ``[..., out]``."""
    return mkldnn._linear_pointwise.binary(x, plus, weight, None, "add")


class KernelOfBytes:
    """oneDNN's product of rows of unsigned bytes with a weight of signed bytes. A call maps ``[rows, in]`` to ``[rows,
    out]`` in float32.

    Each unsigned byte stands for its value minus 128. ``codes``: the weight, ``[out, in]``; ``part``: elements of a row
    that are multiplied at once, None: all. The products of parts are added up as integers.
    """

    def __init__(self, codes: T, part: int | None = None) -> None:
        self.part = part or codes.shape[1]
        parts = codes.split(self.part, dim=1)
        self.codes = [onednn.qlinear_prepack(part.contiguous(), None) for part in parts]
        self.ones = torch.ones(len(codes))
        self.zeros = torch.zeros(len(codes), dtype=torch.int32)

    def __call__(self, rows: T) -> T:
        """Map ``[rows, in]`` to ``[rows, out]`` in float32."""
        if len(self.codes) == 1:
            return self._product(rows, self.codes[0])
        parts = zip(rows.split(self.part, dim=1), self.codes, strict=True)
        total = torch.zeros(())
        for i, (part, codes) in enumerate(parts):
            product = self._product(part.contiguous(), codes).int()
            total = product if not i else total.add_(product)
        return total.float()

    def _product(self, rows: T, codes: T) -> T:
        output = (1.0, 0, torch.float32)  # scale, zero point, type
        product: T = onednn.qlinear_pointwise(
            rows, 1.0, 128, codes, self.ones, self.zeros, None, *output, "none", [], ""
        )
        return product


def times_codes(rows: T, codes: T) -> T:
    """Multiply ``rows`` ``[rows, in]`` with ``codes`` ``[out, in]`` as :class:`KernelOfBytes` does, on any CPU.

    Tiles of the weight are converted to float32, one at a time. Products of two bytes are below 2^14, and a tile adds
    up :data:`EXACT` of them. Each sum is thus an integer below 2^24, which float32 holds exactly in any order of
    additions.
    """
    signed = rows.float().sub_(128)
    sums = torch.empty(len(rows), len(codes))
    for out in range(0, len(codes), TILE_OUT):
        tile, total = codes[out : out + TILE_OUT], torch.zeros(0)
        for first in range(0, codes.shape[1], EXACT):
            at = slice(first, first + EXACT)
            part = signed[:, at] @ tile[:, at].float().t()
            total = part.int() if not first else total.add_(part.int())
        sums[:, out : out + TILE_OUT] = total
    return sums


@cache
def has_kernel_of_bytes(part: int | None = None) -> bool:
    """Return whether :class:`KernelOfBytes` multiplies bytes exactly on this machine.

    ``part``: elements of a row that the kernel multiplies at once, None: all.

    The function tries products whose exact results are known, because the CPU's properties do not tell. Without VNNI,
    oneDNN adds pairs of products in 16 bits, and a virtual machine may hide VNNI from PyTorch. On a CPU with AMX,
    oneDNN rounded sums that can pass 2^24, from 519 elements of a row on.
    """
    drawn = torch.Generator().manual_seed(0)
    try:
        for inner in (64, 700, 2048):
            codes = 127 - torch.randint(14, (64, inner), generator=drawn)
            codes[1::2] *= -1
            codes = codes.to(torch.int8)
            rows = 255 - torch.randint(14, (33, inner), generator=drawn)
            rows = rows.to(torch.uint8)
            kernel = KernelOfBytes(codes, part)
            inputs = [rows[:n] for n in (1, 3, 33)]
            if not all(torch.equal(kernel(x), times_codes(x, codes)) for x in inputs):
                return False
        return True
    except (
        RuntimeError,
        AttributeError,
        NotImplementedError,
    ):  # a PyTorch without oneDNN, or of another kind of CPU
        return False


def kernel_of(codes: T) -> Callable[[T], T]:
    """Return a function that multiplies rows of unsigned bytes with ``codes`` without rounding: the fastest one of this
    machine.

    ``codes``: the weight, ``[out, in]``, of signed bytes.
    """
    for part in (None, EXACT_UNSIGNED):
        if has_kernel_of_bytes(part):
            return KernelOfBytes(codes, part)
    return partial(times_codes, codes=codes)


class Int8(nn.Module):
    """A weight of 8-bit integers with one scale per row; each element of the input becomes a sum of two integers.

    The second integer is for the remainder. With one integer per input element, as in LLM.int8 and ZeroQuant, a token's
    few large elements leave too few levels for the others: SmolLM2-135M's perplexity grew by 4 %. The second integer
    costs a second row, but the weight is read once.

    Sums of integers are exact, so that a row's result does not depend on other rows. The scales are applied outside the
    kernel: inside it, the order of multiplications would depend on the number of rows. A CPU whose kernel rounds large
    sums multiplies parts of a row, and a CPU without such a kernel adds up the same integers in float32
    (:func:`times_codes`); both get the same bits.
    """

    def __init__(self, weight: T) -> None:
        super().__init__()
        scales = weight.float().abs().amax(1).clamp_min(1e-30) / 127
        codes = (weight.float() / scales[:, None]).round().to(torch.int8)
        self.nbytes = codes.nbytes + scales.nbytes
        self.scales = scales / 127
        self.times = kernel_of(codes)
        self.first, self.second = torch.tensor(128.5), torch.tensor(1.5)

    def forward(self, x: T) -> T:
        """Multiply ``x`` ``[..., in]`` with the weight of 8-bit integers: return ``[..., out]`` in the type of
        ``x``.
        """
        rows = x.flatten(0, -2).float()
        largest = torch.linalg.vector_norm(
            rows, float("inf"), -1, keepdim=True
        ).clamp_min(1e-30)
        # 128 stands for zero, as CPUs multiply signed by unsigned bytes. A half is added, as conversion cuts off; what
        # it cuts off, less that half, is the second number.
        first = torch.addcdiv(self.first, rows, largest, value=127)
        second = torch.add(self.second, first.frac(), alpha=254)
        both = torch.cat((first, second)).to(torch.uint8)
        coarse, fine = self.times(both).tensor_split(2)
        y = coarse.add_(fine, alpha=1 / 254).mul_(largest).mul_(self.scales)
        return y.to(x.dtype).unflatten(0, x.shape[:-1])


class Int4(nn.Module):
    """A weight in four bits, with a scale and an offset for each :data:`GROUP` elements of a row.

    Inputs are converted to bfloat16.
    """

    def __init__(self, weight: T) -> None:
        super().__init__()
        groups = weight.float().unflatten(1, (-1, GROUP))  # [out, groups, 32]
        low, high = groups.aminmax(dim=-1, keepdim=True)
        scales = ((high - low) / 15).clamp_min(1e-30)
        codes = ((groups - low) / scales).round().clamp(0, 15).flatten(1).int()
        # A code stands for (code - 8) * scale + offset.
        # [groups, out, 2]
        both = torch.cat((scales, low + 8 * scales), -1).transpose(0, 1)
        self.codes = aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self.scales = both.bfloat16().contiguous()
        self.nbytes = self.codes.nbytes + self.scales.nbytes

    def forward(self, x: T) -> T:
        """Multiply ``x`` ``[..., in]`` with the weight in four bits: return ``[..., out]``."""
        rows = x.flatten(0, -2).bfloat16()
        return (
            aten._weight_int4pack_mm_for_cpu(rows, self.codes, GROUP, self.scales)
            .to(x.dtype)
            .unflatten(0, x.shape[:-1])
        )


#: The form in which all weights and activations, and the cache, are bfloat16.
NARROW = "bfloat16"

#: A weight in one of its forms.
Form = Packed | Int8 | Int4 | Sparse

#: Forms of weights by name. Weights without their zeros have further words, with a share
#: (:func:`weft.models.sparse_weights.read_sparse_word`).
FORMS: dict[str, type[Form]] = {
    "float": Packed,
    NARROW: Packed,
    "int8": Int8,
    "int4": Int4,
    SPARSE: Sparse,
}


def form_of(word: str, weight: T) -> Form:
    """Convert ``weight`` to the form that ``word`` names, and return it as a module that multiplies with it: ``float``,
    ``bfloat16``, ``int8``, ``int4`` or ``sparse``. With ``int4``, a weight whose sizes the four-bit kernel does not
    support stays in floating point.
    """
    if sparse := read_sparse_word(word):
        return Sparse(weight, sparse.narrow)
    fits = weight.shape[0] % 16 == 0 and weight.shape[1] % GROUP == 0
    return FORMS["float" if word == "int4" and not fits else word](weight)


#: Function that returns a weight in the form of a word, as :func:`form_of` does. Its other argument lists the names of
#: the parameters that are concatenated to the weight.
Forming = Callable[[str, Sequence[str], T], Form]


def new_form(word: str, names: Sequence[str], weight: T) -> Form:
    """Return ``weight`` in the form ``word`` (:func:`form_of`).

    ``names``: names of the parameters that are concatenated to the weight; they have no effect here.
    """
    return form_of(word, weight)


def read_only(
    model: Transformer, word: str = "float", forming: Forming = new_form
) -> int:
    """Convert the weights of ``model`` for generation only, to the form ``word``. Returns their size in bytes.

    ``word``: ``float``, ``bfloat16``, ``int8``, ``int4`` or ``sparse:SHARE``. With ``sparse:SHARE`` the elements of
    smallest magnitude, this share of each weight, are set to zero first; the output layer keeps all elements.
    ``forming``: function that converts one weight (:data:`Forming`). The converted weights are those of attention,
    dense feed-forwards and the output layer; the embedding stays, except that with ``bfloat16`` all parameters get this
    type. Weights that have been converted before stay as they are. Returns 0 if nothing is converted. Raises
    :class:`UsageError` if the model or the device does not support the form.
    """
    sparse = read_sparse_word(word)
    if sparse is None and word not in FORMS:
        every = (*FORMS, "sparse:SHARE")
        raise UsageError(f"weights cannot be {word!r}; {nearest(word, every, True)}")
    narrow, shape = word == NARROW, model.shape
    plain = not (shape.kv_rank or shape.mixtures)
    if narrow and (
        shape.kind
        or not (plain and model.mesh.layout.world == 1 and not _is_quantized(model))
    ):
        raise UsageError(
            "weights in bfloat16 are for dense models with plain attention on one rank; leave them as they are"
        )
    on_cpu = model.mesh.device.type == "cpu"
    if word not in ("float", NARROW) and not (plain and on_cpu):
        raise UsageError(
            f"weights in {word} are for dense models with plain attention on the CPU; leave them as they are"
        )
    if sparse and sparse.share and model.mesh.layout.world > 1:
        raise UsageError(
            f"weights {word} are pruned on one rank; prune the model with weft prune, and give --weights {SPARSE}"
        )
    if narrow:
        model.to(torch.bfloat16)
    prune, output = _pruning(sparse), word
    if sparse:  # the output layer keeps all its elements
        output = f"{SPARSE}:{ROUNDED}" if sparse.narrow else "float"
    if model.mesh.device.type not in ("cpu", "cuda") or model.shape.kind:
        return 0
    size = 0
    for module in model.modules():
        if not isinstance(module, Projections) or module.elsewhere:
            continue
        # which are few bits already
        if not (word == "float" and module.quantized):
            size += join_products(module, partial(forming, word), prune)
    # a stage of a pipeline has no output layer
    if not hasattr(model, "norm") or model.logits is not None:
        return size
    head = forming(output, [OUTPUT], model.output.detach())
    model.logits = partial(multiplied, product=head)
    if not model.shape.tied:
        del model.head
    return size + head.nbytes


def join_products(
    module: Projections,
    form: Callable[[Sequence[str], T], Form | None],
    prune: Callable[[T], T] | None = None,
    keep: bool = False,
) -> int:
    """Let ``module`` multiply with another form of its weights. Weights that multiply the same input become one
    product, with adapters merged into them. Weights that have been converted before stay as they are. Return the bytes
    of all new products.

    ``form``: function that converts a weight, as :data:`Forming` does but for its first argument; if it returns None,
    the weight stays as it is. ``prune``: function that prunes each weight first; None: none is pruned. ``keep``:
    whether the module keeps the parameters, too.
    """
    size = 0
    for names in module.TOGETHER:
        if names in module.products:
            continue
        weights = [module.own(name, merged(module, name).detach()) for name in names]
        if prune is not None:
            weights = [*map(prune, weights)]
        joined = torch.cat(weights) if len(names) > 1 else weights[0]
        product = form([module.inside(name) for name in names], joined)
        if product is None:
            continue
        module.products[names] = SplitProduct(product, [*map(len, weights)])
        size += product.nbytes
        if not keep:
            module.forget(*names)
    return size


def _pruning(sparse: SparseWord | None) -> Callable[[T], T] | None:
    """Return a function that prunes a weight as ``sparse`` asks for; None if nothing is pruned."""
    if sparse is None or not sparse.share:
        return None
    magnitude, share = find("pruner", "magnitude").implementation(), sparse.share
    return lambda weight: weight * magnitude.kept(weight, None, share)


def _is_quantized(model: Transformer) -> bool:
    """Return whether weights of ``model`` are stored in few bits already."""
    every = (m for m in model.modules() if isinstance(m, Projections))
    return any(len(module.quantized) for module in every)


def multiplied(x: T, product: nn.Module) -> T:
    """Return ``product(x)`` for ``x`` ``[..., in]``.

    Within :func:`weft.models.invariant.invariant` the product is computed in tiles of rows, so that a row's result does
    not depend on other rows.
    """
    if is_invariant():
        from weft.models.invariant_kernels import by_tiles

        return by_tiles(product, x.flatten(0, -2)).unflatten(0, x.shape[:-1])
    y: T = product(x)
    return y


class SplitProduct:
    """Function that computes the products of an input with several weights by one call of ``product``, a module that
    multiplies with their concatenation. ``sizes``: output elements of each weight, by which the result is split along
    its last dimension.
    """

    def __init__(self, product: nn.Module, sizes: list[int]) -> None:
        self.product, self.sizes = product, sizes

    def __call__(self, x: T) -> tuple[T, ...]:
        """Multiply ``x`` ``[..., in]`` with all weights; return one tensor ``[..., size]`` for each size."""
        return torch.split_with_sizes(multiplied(x, self.product), self.sizes, -1)
