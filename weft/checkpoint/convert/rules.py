"""Table of foreign tensors: the Weft tensor that a name means, and how shards form that tensor."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from weft.errors import WeftError
from weft.recipe import ModelShape
from weft.shapes.foreign_names import (
    DEEPSEEK,
    FUSED,
    GGUF,
    HUGGING_FACE,
    MEGATRON,
    META,
    MIXTRAL,
    inside_layer,
)

#: Rows are read and put into place this many bytes at a time.
CHUNK = 16 << 20


@dataclass(frozen=True)
class Shard:
    """Part of a tensor, as one rank of another program has stored it.

    ``shape`` and ``dtype``: shape and type of this part. ``read(lo, hi)`` reads its rows ``lo:hi`` on demand.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class RowsCopy:
    """Copy of rows of one stored shard to a region of the logical tensor (the whole tensor as Weft's model has it).

    ``shard``: index of the shard; ``lo``, ``hi``: range of its rows, ``hi`` excluded; ``to``: slices that select the
    region in the logical tensor.
    """

    shard: int
    lo: int
    hi: int
    to: tuple[slice | int, ...] = (slice(None),)


Sizes = Sequence[tuple[int, ...]]
ShardLayout = Callable[[Sizes, ModelShape, int], Iterator[RowsCopy]]


def replicated(shards: Sizes, shape: ModelShape, part: int) -> Iterator[RowsCopy]:
    """Yield the :class:`RowsCopy` that reads a tensor which every rank stored whole, with equal values.

    Only the first shard is read. ``shards``: shapes of the stored shards. ``shape`` and ``part`` have no effect.
    """
    yield RowsCopy(0, 0, shards[0][0])


def averaged(shards: Sizes, shape: ModelShape, part: int) -> Iterator[RowsCopy]:
    """Yield a :class:`RowsCopy` of each shard of a tensor which every rank stored whole, but with different values.

    The reader takes the mean of the copies. ``shards``: shapes of the stored shards. ``shape`` and ``part`` have no
    effect.
    """
    for i, size in enumerate(shards):
        yield RowsCopy(i, 0, size[0])


def column_parallel(shards: Sizes, shape: ModelShape, part: int) -> Iterator[RowsCopy]:
    """Yield copies that concatenate the shards along dimension 0, as for the weight of a column-parallel layer.

    ``shards``: shapes of the stored shards. ``shape`` and ``part`` have no effect.
    """
    at = 0
    for i, size in enumerate(shards):
        yield RowsCopy(i, 0, size[0], (slice(at, at + size[0]),))
        at += size[0]


def row_parallel(shards: Sizes, shape: ModelShape, part: int) -> Iterator[RowsCopy]:
    """Yield copies that concatenate the shards along dimension 1, as for the weight of a row-parallel layer.

    ``shards``: shapes of the stored shards. ``shape`` and ``part`` have no effect.
    """
    at = 0
    for i, size in enumerate(shards):
        yield RowsCopy(i, 0, size[0], (slice(None), slice(at, at + size[1])))
        at += size[1]


def padded(shards: Sizes, shape: ModelShape, part: int) -> Iterator[RowsCopy]:
    """Yield copies that concatenate the shards along dimension 0, without the padding at the end.

    ``shards``: shapes of the stored shards. ``shape``: the model; rows from its vocabulary size ``shape.vocab`` on are
    padding. ``part`` has no effect.
    """
    at = 0
    for i, size in enumerate(shards):
        rows = max(0, min(size[0], shape.vocab - at))
        yield RowsCopy(i, 0, rows, (slice(at, at + rows),))
        at += size[0]


def qkv(shards: Sizes, shape: ModelShape, part: int) -> Iterator[RowsCopy]:
    """Yield copies that extract the rows of q, k or v from Megatron's fused weight.

    The fused weight has, for each key/value head, the rows of its query heads, then of its key, then of its value.
    ``shards``: shapes of the stored shards; ``shape``: the model; ``part``: 0 for q, 1 for k, 2 for v.
    """
    assert shape.kv_heads and shape.head_dim
    group = shape.heads // shape.kv_heads
    first, count = ((0, group), (group, 1), (group + 1, 1))[part]
    stride, first, count, at = (
        (group + 2) * shape.head_dim,
        first * shape.head_dim,
        count * shape.head_dim,
        0,
    )
    for i, size in enumerate(shards):
        for begin in range(0, size[0] - stride + 1, stride):
            yield RowsCopy(
                i, begin + first, begin + first + count, (slice(at, at + count),)
            )
            at += count
        if size[0] % stride:
            yield RowsCopy(i, 0, size[0])  # which fits nowhere


def gate_up(shards: Sizes, shape: ModelShape, part: int) -> Iterator[RowsCopy]:
    """Yield copies that extract the rows of gate or up from a fused weight.

    Each shard holds some rows of gate, then as many rows of up. ``shards``: shapes of the stored shards; ``part``: 0
    for gate, 1 for up. ``shape`` has no effect.
    """
    at = 0
    for i, size in enumerate(shards):
        half = size[0] // 2
        yield RowsCopy(i, part * half, (part + 1) * half, (slice(at, at + half),))
        at += half


def stacked_experts(shards: Sizes, shape: ModelShape, part: int) -> Iterator[RowsCopy]:
    """Yield copies that stack the shards, each the weight of one expert, to a tensor ``[experts, ...]``.

    ``shards``: shapes of the stored shards. ``shape`` and ``part`` have no effect.
    """
    for i, size in enumerate(shards):
        yield RowsCopy(i, 0, size[0], (i,))


def fused_experts(shards: Sizes, shape: ModelShape, part: int) -> Iterator[RowsCopy]:
    """Yield one copy of a whole shard: the gate or up weights of all experts of a layer.

    Transformers 5 fuses gate and up of all experts into one tensor in memory. The only shard here is one half of this
    tensor, gate or up. ``shards``: the shard's shape. ``shape`` and ``part`` have no effect.
    """
    return replicated(shards, shape, part)


@dataclass(frozen=True)
class NameRule:
    """Rule for reading a foreign tensor, that is, a tensor of another program's checkpoint.

    Attributes:
        ``names``: Weft's names of the tensors that the foreign tensor holds, without the number of the layer.
        ``layout``: function that yields the copies by which the stored shards form one of these tensors.
        ``pairs``: whether the rows of q and k are in Meta's order. In this order the two elements of a head that RoPE
            rotates together are neighbours. In the order of Hugging Face and Weft they are half a head apart.
    """

    names: tuple[str, ...]
    layout: ShardLayout
    pairs: bool = False


#: The parameters that ranks cut in rows of the vocabulary, in rows and in columns.
VOCABULARY = r"embedding\.table|head"
COLUMN = r"attention\.[wb][qkv]|ffn\.(?:gate|up)"
ROW = r"attention\.wo|ffn\.down"


def _rule(ours: str, theirs: str, rotates: bool = False) -> NameRule:
    """``rotates``: the program whose name it is has queries and keys in Meta's order."""
    layouts = {VOCABULARY: padded, COLUMN: column_parallel, ROW: row_parallel}
    layout = next((k for p, k in layouts.items() if re.fullmatch(p, ours)), replicated)
    pairs = rotates and ours in ("attention.wq", "attention.wk")
    return NameRule((ours,), stacked_experts if "{}" in theirs else layout, pairs)


def _table() -> dict[str, NameRule]:
    """Return the rule for each name of Hugging Face, GGUF, torchtitan, Megatron-core and Weft."""
    meta = {theirs: ours for ours, theirs in GGUF.items()} | META
    rules = {
        theirs.removeprefix("model."): _rule(ours, theirs)
        for names in (DEEPSEEK, MIXTRAL, HUGGING_FACE)
        for ours, theirs in names.items()
    }
    own = (*HUGGING_FACE, *GGUF, "ffn.router.load")
    rules |= {theirs: _rule(ours, theirs, True) for theirs, ours in meta.items()}
    rules |= {theirs: _rule(ours, theirs) for theirs, ours in MEGATRON.items()}
    rules |= {name: _rule(name, name) for name in own}
    layouts = (qkv, qkv, gate_up, fused_experts, fused_experts)
    fused = zip(FUSED.items(), layouts, strict=True)
    return rules | {theirs: NameRule(ours, layout) for (theirs, ours), layout in fused}


TABLE = _table()
#: The parameters that are in no layer.
OUTSIDE = ("embedding.table", "norm.scale", "head")
#: What begins the names of experts in forms that are not read.
UNKNOWN_EXPERTS = r"(?:mlp\.experts|feed_forward\.experts|moe|block_sparse_moe|ffn_(?:gate|up|down)_exps)\..*"
EXPERTS_RULE = NameRule((), stacked_experts)

#: Tensors that follow from the configuration, or hold no weights.
DERIVED = r".*_extra_state(?:/.*)?|.*rotary_emb\.inv_freq|.*freqs_cis|(?:.*\.)?(?:rope_freqs\.weight|rope\.cache)"


@dataclass(frozen=True)
class TensorSource:
    """Source of a logical tensor (the whole tensor as Weft's model has it) in a checkpoint of another program.

    Attributes:
        ``name``: name of the foreign tensor, which may hold several logical tensors.
        ``shards``: stored shards of the foreign tensor.
        ``rule``: how the shards form the logical tensors.
        ``part``: number of this logical tensor among ``rule.names``.
    """

    name: str
    shards: Sequence[Shard]
    rule: NameRule
    part: int

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored elements."""
        return self.shards[0].dtype


def rule_and_names(name: str) -> tuple[NameRule, tuple[str, ...]] | None:
    """Return the rule for a tensor of another program's checkpoint, and Weft's names of the tensors that it holds.

    ``name``: the other program's name. Returns None for a tensor that holds no weights, such as rotary frequencies.
    Raises :class:`WeftError` for an unknown name.
    """
    if re.fullmatch(DERIVED, name):
        return None
    layer, inside = inside_layer(name)
    rule = TABLE.get(inside)
    if rule is not None and bool(layer) != (rule.names[0] in OUTSIDE):
        before = f"blocks.{layer}." if layer else ""
        return rule, tuple(before + inner for inner in rule.names)
    if layer and re.fullmatch(UNKNOWN_EXPERTS, inside):
        raise _unread(name)
    raise WeftError(f"tensor {name} is of no model that Weft knows")


def own_source(name: str, shard: Shard) -> TensorSource:
    """Return the source of a tensor that is stored whole in ``shard`` under Weft's own ``name``."""
    return TensorSource(name, [shard], NameRule((name,), replicated), 0)


def _unread(name: str) -> WeftError:
    return WeftError(
        f"tensor {name} is of experts in a form that Weft does not read; save them as a Hugging Face folder"
    )


def sources_by_name(
    stored: Mapping[str, Sequence[Shard]], averages: Sequence[str] = ()
) -> dict[str, TensorSource]:
    """Return the source of each of Weft's tensors in a checkpoint of another program, by Weft's name.

    ``stored``: shards of each stored tensor, by the other program's name. ``averages``: regular expressions for names
    of tensors that every rank stored with other values, so that the mean of the copies is used. Raises
    :class:`WeftError` for an unknown tensor, two tensors with one Weft name, or a missing expert.
    """
    if any("pre_feedforward_layernorm" in name for name in stored):
        raise WeftError(
            "Gemma 3 is read from Hugging Face's folders and GGUF files only; save it as one of these"
        )
    sources: dict[str, TensorSource] = {}
    experts: dict[str, dict[int, tuple[str, Sequence[Shard]]]] = defaultdict(dict)
    for name, shards in stored.items():
        if (translated := rule_and_names(name)) is None:
            continue
        rule, names = translated
        if rule.layout in (stacked_experts, fused_experts) and len(shards) > 1:
            raise _unread(name)
        if rule.layout is stacked_experts:
            experts[names[0]][int(re.findall(r"\.(\d+)\.", name)[-1])] = name, shards
            continue
        if rule.layout is fused_experts:
            for part, ours in enumerate(names):
                rows = _rows_of_experts(shards[0], part, len(names))
                sources[ours] = TensorSource(name, [rows], rule, 0)
            continue
        if rule.layout is replicated and any(
            re.match(pattern, name) for pattern in averages
        ):
            rule = NameRule(rule.names, averaged)
        for part, ours in enumerate(names):
            if ours in sources:
                raise WeftError(
                    f"tensors {sources[ours].name} and {name} are both {ours}"
                )
            sources[ours] = TensorSource(name, shards, rule, part)
    for ours, shards_by_expert in experts.items():
        if missing := set(range(max(shards_by_expert))) - shards_by_expert.keys():
            raise WeftError(
                f"expert {min(missing)} of {ours} is missing; the checkpoint is not whole"
            )
        in_order = [shards_by_expert[number] for number in sorted(shards_by_expert)]
        sources[ours] = TensorSource(
            in_order[0][0], [shards[0] for _, shards in in_order], EXPERTS_RULE, 0
        )
    return sources


def _rows_of_experts(shard: Shard, part: int, parts: int) -> Shard:
    """Return one part of a tensor ``[experts, parts * rows, width]`` as ``[experts, rows, width]``."""
    count, rows, width = shard.shape
    first, size = part * rows // parts, rows // parts
    return Shard(
        (count, size, width),
        shard.dtype,
        lambda lo, hi: shard.read(lo, hi)[:, first : first + size],
    )


def logical_tensor(
    source: TensorSource,
    size: Sequence[int],
    shape: ModelShape,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Read a logical tensor (the whole tensor as Weft's model has it) from a checkpoint of another program.

    ``source``: the shards in that checkpoint, and the rule by which they form the tensor; ``size``: shape of the
    tensor; ``shape``: shape of the model; ``dtype``: the type to convert to, or None for the stored type. Raises
    :class:`WeftError` if the stored shards do not form the tensor exactly, or copies that must be equal differ.
    """
    sizes = [shard.shape for shard in source.shards]
    copies = list(source.rule.layout(sizes, shape, source.part))
    out = torch.empty(*size, dtype=dtype or source.dtype)
    shards = ", ".join(str(list(shard)) for shard in sizes)
    misfit = WeftError(
        f"tensor {source.name} is stored as {shards}, which does not form {list(size)}; the configuration is of "
        "another model"
    )
    replicas = len(copies) if source.rule.layout is averaged else 1
    if replicas > 1:
        out.zero_()
    written = 0
    for copy in copies:
        try:
            target = out[copy.to]
        except IndexError:
            raise misfit from None
        if tuple(target.shape) != (copy.hi - copy.lo, *sizes[copy.shard][1:]):
            raise misfit
        _fill(target, source.shards[copy.shard], copy, replicas)
        written += target.numel()
    if written != out.numel() * replicas:
        raise misfit
    if source.rule.layout is replicated:
        for other in source.shards[1:]:
            if not torch.equal(other.read(0, size[0]).to(out.dtype), out):
                raise WeftError(
                    f"tensor {source.name} should be the same on every rank but is not"
                )
    if source.rule.pairs and not (shape.qk_norm or shape.qkv_bias):
        # [pairs, 2, embed] -> [2, pairs, embed]
        for head in out.split(shape.head_dim or 1):
            head.copy_(head.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1))
    return out


def _fill(target: torch.Tensor, shard: Shard, copy: RowsCopy, replicas: int) -> None:
    """Read the rows of ``copy`` into ``target``, some at a time; with several ``replicas`` add the rows' share of the
    mean instead."""
    rows = max(1, CHUNK // max(1, prod(shard.shape[1:]) * shard.dtype.itemsize))
    for lo in range(copy.lo, copy.hi, rows):
        hi = min(lo + rows, copy.hi)
        place, values = target[lo - copy.lo : hi - copy.lo], shard.read(lo, hi)
        if replicas > 1:
            place += values.to(target.dtype) / replicas
        else:
            place.copy_(values)
