"""The pattern table: which of Weft's tensors a foreign tensor's name stands for, and how shards form that tensor."""

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
    """What one rank stored of a tensor. ``read(lo, hi)`` reads rows of dimension 0, and nothing is read before."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class RowsCopy:
    """Rows ``lo:hi`` of a shard are the elements ``to`` of the logical tensor."""

    shard: int
    lo: int
    hi: int
    to: tuple[slice | int, ...] = (slice(None),)


Sizes = Sequence[tuple[int, ...]]
ShardLayout = Callable[[Sizes, ModelShape, int], Iterator[RowsCopy]]


def replicated(shards: Sizes, shape: ModelShape, part: int) -> Iterator[RowsCopy]:
    """Every rank stored the whole tensor, with equal values."""
    yield RowsCopy(0, 0, shards[0][0])


def averaged(shards: Sizes, shape: ModelShape, part: int) -> Iterator[RowsCopy]:
    """Every rank stored the whole tensor, with values that have drifted apart: their mean is used."""
    for i, size in enumerate(shards):
        yield RowsCopy(i, 0, size[0])


def column(shards: Sizes, shape: ModelShape, part: int) -> Iterator[RowsCopy]:
    """The ranks' rows one after the other (the weight of a column-parallel layer)."""
    at = 0
    for i, size in enumerate(shards):
        yield RowsCopy(i, 0, size[0], (slice(at, at + size[0]),))
        at += size[0]


def row(shards: Sizes, shape: ModelShape, part: int) -> Iterator[RowsCopy]:
    """The ranks' columns one after the other (the weight of a row-parallel layer)."""
    at = 0
    for i, size in enumerate(shards):
        yield RowsCopy(i, 0, size[0], (slice(None), slice(at, at + size[1])))
        at += size[1]


def padded(shards: Sizes, shape: ModelShape, part: int) -> Iterator[RowsCopy]:
    """As :func:`column`, with rows after the vocabulary's last that no token uses."""
    at = 0
    for i, size in enumerate(shards):
        rows = max(0, min(size[0], shape.vocab - at))
        yield RowsCopy(i, 0, rows, (slice(at, at + rows),))
        at += size[0]


def qkv(shards: Sizes, shape: ModelShape, part: int) -> Iterator[RowsCopy]:
    """Part 0, 1 or 2 (q, k or v) of Megatron's fused weight.

    For each key/value head its rows are those of its query heads, then its key's, then its value's.
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
    """Part 0 or 1 (gate or up) of a fused weight, of which each rank has its share of gate, then its share of up."""
    at = 0
    for i, size in enumerate(shards):
        half = size[0] // 2
        yield RowsCopy(i, part * half, (part + 1) * half, (slice(at, at + half),))
        at += half


def expert(shards: Sizes, shape: ModelShape, part: int) -> Iterator[RowsCopy]:
    """Each shard is one expert of ``[experts, ...]``."""
    for i, size in enumerate(shards):
        yield RowsCopy(i, 0, size[0], (i,))


def fused_experts(shards: Sizes, shape: ModelShape, part: int) -> Iterator[RowsCopy]:
    """All experts of a layer in one tensor, with gate and up fused (transformers 5 in memory); see
    :func:`_rows_of_experts`."""
    return replicated(shards, shape, part)


@dataclass(frozen=True)
class NameRule:
    """How a foreign tensor is read: ``names`` of Weft's tensors in it, one or several, and the ``layout`` of each.

    ``pairs``: the rows of q or k are in Meta's order, where elements that rotate together are neighbours; in Hugging
    Face's and Weft's order they are half a head apart.
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
    layouts = {VOCABULARY: padded, COLUMN: column, ROW: row}
    layout = next((k for p, k in layouts.items() if re.fullmatch(p, ours)), replicated)
    pairs = rotates and ours in ("attention.wq", "attention.wk")
    return NameRule((ours,), expert if "{}" in theirs else layout, pairs)


def _table() -> dict[str, NameRule]:
    """The rule for each name of Hugging Face, GGUF, torchtitan, Megatron-core and Weft itself."""
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
EXPERTS_RULE = NameRule((), expert)

#: Tensors that follow from the configuration, or hold no weights.
DERIVED = r".*_extra_state(?:/.*)?|.*rotary_emb\.inv_freq|.*freqs_cis|(?:.*\.)?(?:rope_freqs\.weight|rope\.cache)"


@dataclass(frozen=True)
class TensorSource:
    """Where a logical tensor comes from: it is one ``part`` of the foreign tensor ``name``, which lies in ``shards`` as
    ``rule`` says."""

    name: str
    shards: Sequence[Shard]
    rule: NameRule
    part: int

    @property
    def dtype(self) -> torch.dtype:
        return self.shards[0].dtype


def rule_and_names(name: str) -> tuple[NameRule, tuple[str, ...]] | None:
    """The rule for a foreign name and the Weft names that it gives, or None for what holds no weights."""
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


def _unread(name: str) -> WeftError:
    return WeftError(
        f"tensor {name} is of experts in a form that Weft does not read; save them as a Hugging Face folder"
    )


def sources_by_name(
    stored: Mapping[str, Sequence[Shard]], averages: Sequence[str] = ()
) -> dict[str, TensorSource]:
    """Weft's tensors by name, each with where it comes from; ``stored``: shards by foreign name.

    ``averages``: patterns for names of tensors of which every rank has a copy of its own, so that the mean counts.
    """
    if any("pre_feedforward_layernorm" in name for name in stored):
        raise WeftError(
            "Gemma 3 is read from Hugging Face's folders and GGUF files only; save it as one of these"
        )
    made: dict[str, TensorSource] = {}
    experts: dict[str, dict[int, tuple[str, Sequence[Shard]]]] = defaultdict(dict)
    for name, shards in stored.items():
        if (translated := rule_and_names(name)) is None:
            continue
        rule, names = translated
        if rule.layout in (expert, fused_experts) and len(shards) > 1:
            raise _unread(name)
        if rule.layout is expert:
            experts[names[0]][int(re.findall(r"\.(\d+)\.", name)[-1])] = name, shards
            continue
        if rule.layout is fused_experts:
            shards = [
                _rows_of_experts(shards[0], part, len(names))
                for part in range(len(names))
            ]
            made |= {
                pattern_of_expert: TensorSource(name, [shard], rule, 0)
                for pattern_of_expert, shard in zip(names, shards, strict=True)
            }
            continue
        if rule.layout is replicated and any(
            re.match(pattern, name) for pattern in averages
        ):
            rule = NameRule(rule.names, averaged)
        for part, pattern_of_expert in enumerate(names):
            if pattern_of_expert in made:
                raise WeftError(
                    f"tensors {made[pattern_of_expert].name} and {name} are both {pattern_of_expert}"
                )
            made[pattern_of_expert] = TensorSource(name, shards, rule, part)
    for pattern_of_expert, found_experts in experts.items():
        if missing := set(range(max(found_experts))) - found_experts.keys():
            raise WeftError(
                f"expert {min(missing)} of {pattern_of_expert} is missing; the checkpoint is not whole"
            )
        in_order = [found_experts[number] for number in sorted(found_experts)]
        made[pattern_of_expert] = TensorSource(
            in_order[0][0], [shards[0] for _, shards in in_order], EXPERTS_RULE, 0
        )
    return made


def _rows_of_experts(shard: Shard, part: int, parts: int) -> Shard:
    """One part of a tensor ``[experts, parts * rows, width]``, as ``[experts, rows, width]``."""
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
    """The logical tensor of ``size``. Raises :class:`WeftError` if the shards do not form it exactly."""
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
