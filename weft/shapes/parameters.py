"""Every parameter of a model in the order of a forward pass: shape, whether it learns, and share of the products.

Without PyTorch, as the planner reads it too. A test holds the list against the modules' own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import count
from math import prod
from typing import NamedTuple

from weft.plugins import made_model
from weft.recipe import Adapter, ModelShape, VocabularyWeight
from weft.shapes.foreign_names import projection_name
from weft.shapes.untrainable import has_gate

#: In the names of parameters, what stands between a module and a weight's adapter, or the stored form of a weight.
ADAPTERS, QUANTIZED = ".adapters.", ".quantized."
#: The parameters with a row for each token, by what PEFT calls them; and where rows of some tokens learn beside them.
VOCABULARY = {"embed_tokens": "embedding.table", "lm_head": "head"}
ROWS = {
    "embed_tokens": "embedding.adapters.table.rows",
    "lm_head": "outputs.adapters.head.rows",
}
#: What routers keep of the loads of their experts, which no gradient changes.
STATISTICS = ("router.bias", "router.load")
#: Of a weight in four bits: elements that share a scale, and scales that share a mean and a step.
BLOCK, SCALES = 64, 256


class Parameter(NamedTuple):
    """A parameter's name and shape, and its ``step``: its place in a forward pass; equal where the input is the same.

    ``products``: how many weights each token is multiplied with. ``is_bytes``: a stored form, which cannot learn.
    """

    name: str
    shape: tuple[int, ...]
    step: int
    products: int = 0
    is_bytes: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)


def is_target(pattern: str, path: str) -> bool:
    """Whether ``pattern`` names the weight ``path``, as in ``blocks.3.attention.wq``.

    By its last part, as Weft or as Hugging Face calls it (``wq``, ``q_proj``), or by its whole path.
    """
    name = path.rpartition(".")[2]
    return any(
        fnmatchcase(known, pattern) for known in (name, projection_name(path), path)
    )


def adapter_rank(adapter: Adapter, path: str) -> int:
    """The rank of the adapter of the weight ``path``."""
    return next(
        (rank for p, rank in adapter.rank_pattern.items() if is_target(p, path)),
        adapter.rank,
    )


def adapter_alpha(adapter: Adapter, path: str) -> float:
    """The ``alpha`` of the adapter of the weight ``path``."""
    return next(
        (alpha for p, alpha in adapter.alpha_pattern.items() if is_target(p, path)),
        adapter.alpha,
    )


def adapter_scale(adapter: Adapter, path: str) -> float:
    """What the output of the adapter of the weight ``path`` is multiplied by."""
    rank = adapter_rank(adapter, path)
    return adapter_alpha(adapter, path) / (
        rank**0.5 if adapter.rank_stabilised else rank
    )


def whole_weights(shape: ModelShape) -> list[str]:
    """The parameters with a row for each token that an adapter learns whole."""
    return [VOCABULARY[name] for name in shape.adapter.whole] if shape.adapter else []


def row_tokens(shape: ModelShape, weight: VocabularyWeight) -> tuple[int, ...]:
    """The tokens whose rows of ``weight`` learn; none of an output layer that is the embedding, where these count."""
    adapter = shape.adapter
    if adapter is None or adapter.tokens == "new" or weight not in adapter.tokens_of:
        return ()
    return (
        ()
        if weight == "lm_head" and (shape.tied or shape.output == "score")
        else adapter.tokens
    )


def of_adapter(name: str, shape: ModelShape) -> bool:
    """Whether the parameter ``name`` is the adapter's, and not the base's."""
    return ADAPTERS in name or name in whole_weights(shape)


def projections(shape: ModelShape) -> Iterator[str]:
    """The paths of all weights that can have an adapter."""
    for layer in range(shape.layers):
        queries = ("wq_a", "wq_b") if shape.q_rank else ("wq",)
        names = (
            (*queries, "wkv_a", "wkv_b", "wo")
            if shape.kv_rank
            else ("wq", "wk", "wv", "wo")
        )
        yield from (f"blocks.{layer}.attention.{name}" for name in names)
        if not shape.experts_of(layer):
            yield from (f"blocks.{layer}.ffn.{name}" for name in ("gate", "up", "down"))


def learns(name: str, shape: ModelShape, frozen: Sequence[str]) -> bool:
    """Whether the parameter ``name`` is trained: with an adapter that alone, and nothing that ``frozen`` matches."""
    is_base = (
        shape.adapter is not None and not of_adapter(name, shape)
    ) or name.endswith(STATISTICS)
    return not is_base and not any(fnmatchcase(name, pattern) for pattern in frozen)


def parameters(model: ModelShape, vocab: int = 0) -> Iterator[Parameter]:
    """All of them; ``vocab``: of the tokenizer, if the model leaves it to that.

    Of a plugin's model nobody knows which input they read, nor how often: each has a place of its own, and matrices are
    taken to multiply every token once.
    """
    if model.kind:
        made = made_model(model.kind, model.settings, model.vocab or vocab)
        for step_of, (name, values) in enumerate(made.named_parameters()):
            yield Parameter(
                f"net.{name}",
                tuple(values.shape),
                step_of,
                values.numel() * (values.dim() > 1),
            )
        return
    step, table = count(), (model.vocab or vocab, model.embed)
    first = next(step)
    yield Parameter("embedding.table", table, first)
    if tokens := row_tokens(model, "embed_tokens"):
        yield Parameter(ROWS["embed_tokens"], (len(tokens), model.embed), first)
    for layer in range(model.layers):
        yield from _block(model, layer, step)
    yield Parameter("norm.scale", (model.embed,), next(step))
    if not model.tied:
        table = (1, model.embed) if model.output == "score" else table
        last = next(step)
        yield Parameter("head", table, last, prod(table))
        if tokens := row_tokens(model, "lm_head"):
            yield Parameter(ROWS["lm_head"], (len(tokens), model.embed), last)


def _block(model: ModelShape, layer: int, step: Iterator[int]) -> Iterator[Parameter]:
    assert model.ffn
    attention, ffn, d = f"blocks.{layer}.attention", f"blocks.{layer}.ffn", model.embed

    def scale(name: str, size: int = d) -> Parameter:
        return Parameter(f"{name}.scale", (size,), next(step))

    yield scale(f"{attention}_norm")
    yield from (_latent if model.kv_rank else _attention)(
        model, layer, attention, scale, step
    )
    if model.norm_after:
        yield scale(f"{attention}_out_norm")
    yield scale(f"{ffn}_norm")
    if model.experts_of(layer):
        yield from _mixture(model, ffn, model.experts_of(layer), step)
    else:
        yield from _feed_forward(model, ffn, model.ffn, step)
    if model.norm_after:
        yield scale(f"{ffn}_out_norm")


def _attention(
    model: ModelShape,
    layer: int,
    attention: str,
    scale: Callable[[str, int], Parameter],
    step: Iterator[int],
) -> Iterator[Parameter]:
    assert model.kv_heads and model.head_dim
    d, q, kv = (
        model.embed,
        model.heads * model.head_dim,
        model.kv_heads * model.head_dim,
    )
    yield from _projected(
        model, attention, {"wq": (q, d), "wk": (kv, d), "wv": (kv, d)}, step
    )
    if model.qkv_bias:
        yield from (
            Parameter(f"{attention}.b{n}", (size,), next(step))
            for n, size in zip("qkv", (q, kv, kv), strict=True)
        )
    if model.qk_norm:
        yield from (scale(f"{attention}.{n}_norm", model.head_dim) for n in "qk")
    if model.mixer_of(layer) != "softmax":
        yield scale(f"{attention}.o_norm", model.head_dim)
    yield from _projected(model, attention, {"wo": (d, q)}, step)


def _latent(
    model: ModelShape,
    layer: int,
    attention: str,
    scale: Callable[[str, int], Parameter],
    step: Iterator[int],
) -> Iterator[Parameter]:
    """Of latent attention: what makes the latent vectors, their norms, and what makes heads of them."""
    d, q, latent = (
        model.embed,
        model.heads * model.score_width,
        model.kv_rank + model.rope_dim,
    )
    first = {"wq_a": (model.q_rank, d)} if model.q_rank else {"wq": (q, d)}
    yield from _projected(model, attention, first | {"wkv_a": (latent, d)}, step)
    if model.q_rank:
        yield scale(f"{attention}.q_a_norm", model.q_rank)
        yield from _projected(model, attention, {"wq_b": (q, model.q_rank)}, step)
    yield scale(f"{attention}.kv_a_norm", model.kv_rank)
    made = model.heads * ((model.head_dim or 0) + model.value_dim)
    yield from _projected(model, attention, {"wkv_b": (made, model.kv_rank)}, step)
    yield from _projected(
        model, attention, {"wo": (d, model.heads * model.value_dim)}, step
    )


def _feed_forward(
    model: ModelShape, path: str, width: int, step: Iterator[int]
) -> Iterator[Parameter]:
    hidden = {name: (width, model.embed) for name in _into_hidden(model)}
    yield from _projected(model, path, hidden, step)
    yield from _projected(model, path, {"down": (model.embed, width)}, step)


def _into_hidden(model: ModelShape) -> tuple[str, ...]:
    """The weights that hidden units are made with."""
    return ("gate", "up") if has_gate(model) else ("up",)


def _mixture(
    model: ModelShape, path: str, count: int, step: Iterator[int]
) -> Iterator[Parameter]:
    """Router, experts and what sees all tokens; a token goes through some experts only."""
    now, width, d = next(step), model.expert_ffn or 0, model.embed
    yield Parameter(f"{path}.router.table", (count, d), now, count * d)
    for name, kept in (
        ("bias", model.router == "sigmoid"),
        ("load", model.balance == "step"),
    ):
        if kept:
            yield Parameter(f"{path}.router.{name}", (count,), now)
    each = model.experts_per_token * width * d
    for name in _into_hidden(model):
        yield Parameter(f"{path}.experts.{name}", (count, width, d), now, each)
    yield Parameter(f"{path}.experts.down", (count, d, width), next(step), each)
    if model.shared_experts:
        if model.shared_mix != "add":
            rows = 1 if model.shared_mix == "gate" else 2
            yield Parameter(f"{path}.shared_gate", (rows, d), now, rows * d)
        plain = model.model_copy(update={"adapter": None})
        yield from _feed_forward(
            plain, f"{path}.shared", model.shared_experts * width, step
        )


def _projected(
    model: ModelShape,
    path: str,
    weights: Mapping[str, tuple[int, int]],
    step: Iterator[int],
) -> Iterator[Parameter]:
    """Weights ``[out, in]`` of one input, and their adapters."""
    adapter, first, second = model.adapter, next(step), next(step)
    for name, (out, into) in weights.items():
        if adapter is not None and adapter.quantizes:
            # Along the dimension that no axis cuts.
            rows, width = (
                (into, out) if name in ("wo", "down", "wq_a", "wkv_a") else (out, into)
            )
            stored, blocks = f"{path}{QUANTIZED}{name}", -(-width // BLOCK)
            yield Parameter(
                f"{stored}.codes",
                (rows, -(-width // 2)),
                first,
                out * into,
                is_bytes=True,
            )
            yield Parameter(f"{stored}.scales", (rows, blocks), first, is_bytes=True)
            yield Parameter(
                f"{stored}.about",
                (-(-rows * blocks // SCALES), 8),
                first,
                is_bytes=True,
            )
        else:
            yield Parameter(f"{path}.{name}", (out, into), first, out * into)
        if adapter is not None and any(
            is_target(target, f"{path}.{name}") for target in adapter.targets
        ):
            low, beside = (
                adapter_rank(adapter, f"{path}.{name}"),
                f"{path}{ADAPTERS}{name}",
            )
            yield Parameter(f"{beside}.a", (low, into), first, low * into)
            yield Parameter(f"{beside}.b", (out, low), second, low * out)
            if adapter.kind == "dora":
                yield Parameter(f"{beside}.magnitude", (out,), second)


def learning_count(model: ModelShape, vocab: int, freeze: Sequence[str] = ()) -> int:
    """How many parameters are trained."""
    return sum(
        p.numel for p in parameters(model, vocab) if learns(p.name, model, freeze)
    )
