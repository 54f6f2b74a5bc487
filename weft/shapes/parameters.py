"""The table of parameters: every parameter of a model in the order of a forward pass.

Modules make their weights from the table, the planner counts it, and foreign names are those of its rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import count
from math import prod
from typing import Any, Literal, NamedTuple

from weft.layout.axes import CUTS
from weft.plugins import build_plugin_model
from weft.recipe import Adapter, ModelShape, VocabularyWeight
from weft.shapes.dim import Dim
from weft.shapes.untrainable import has_gate

#: Parts of parameters' names between a module and the adapter of a weight, or the stored form of a weight.
ADAPTERS, QUANTIZED = ".adapters.", ".quantized."
#: Parameters with a row for each token, by PEFT's names; and parameters that train the rows of some tokens.
VOCABULARY = {"embed_tokens": "embedding.table", "lm_head": "head"}
ROWS = {
    "embed_tokens": "embedding.adapters.table.rows",
    "lm_head": "outputs.adapters.head.rows",
}
#: The output of a critic that shares a policy's trunk, which only training needs.
VALUE_HEAD = "value_head"
#: Statistics of experts' loads that routers keep and no gradient changes.
STATISTICS = ("router.bias", "router.load")
#: Elements of a weight in four bits that share a scale, and scales that share a mean and a step.
BLOCK, SCALES = 64, 256


class Parameter(NamedTuple):
    """A row of the parameter table, from which modules, planner and export take all facts about one parameter.

    Attributes:
        ``name``, ``dims``: name and dimensions.
        ``step``: index in the order of a forward pass; parameters with the same input have the same step.
        ``std``: standard deviation of the initial values; None: all ones, 0: all zeros.
        ``products``: the number of the parameter's elements that each token is multiplied with.
        ``kind``: what it is. ``vector``: a norm, a bias, or another small parameter; ``matrix``: a weight; ``expert``:
            the stacked weights of experts; ``adapter``: a part of an adapter; ``statistic``: a router's record of
            loads, which has no gradient; ``stored``: bytes of a quantised weight, which cannot learn.
        ``weight``: for the codes of a quantised weight, the dimensions ``[out, in]`` of the weight; else empty.
    """

    name: str
    dims: tuple[Dim, ...]
    step: int
    std: float | None = None
    products: int = 0
    kind: Literal["vector", "matrix", "expert", "adapter", "statistic", "stored"] = (
        "vector"
    )
    weight: tuple[Dim, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(dim.size for dim in self.dims)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_bytes(self) -> bool:
        return self.kind == "stored"


#: Parameters by name.
Table = Mapping[str, Parameter]


def is_target(pattern: str, path: str) -> bool:
    """Return whether ``pattern``, with wildcards as in file names, matches the weight ``path``.

    A path is a parameter's name, such as ``blocks.3.attention.wq``. The pattern must match the whole path or its last
    part. It may name the last part as Weft or as Hugging Face does (``wq``, ``q_proj``).
    """
    # which a run without an adapter does not need
    from weft.shapes.foreign_names import projection_name

    names = path.rpartition(".")[2], projection_name(path), path
    return any(fnmatchcase(name, pattern) for name in names)


def _matching(patterns: Mapping[str, Any], path: str, default: Any) -> Any:
    """Return the value of the first of ``patterns`` that names the weight ``path``."""
    return next((v for p, v in patterns.items() if is_target(p, path)), default)


def adapter_rank(adapter: Adapter, path: str) -> int:
    """Return the rank of the adapter of the weight ``path``, such as ``blocks.3.attention.wq``.

    It is that of the first matching pattern in ``adapter.rank_pattern``, else ``adapter.rank``.
    """
    return _matching(adapter.rank_pattern, path, adapter.rank)


def adapter_alpha(adapter: Adapter, path: str) -> float:
    """Return ``alpha`` of the adapter of the weight ``path``, such as ``blocks.3.attention.wq``.

    It is that of the first matching pattern in ``adapter.alpha_pattern``, else ``adapter.alpha``.
    """
    return _matching(adapter.alpha_pattern, path, adapter.alpha)


def adapter_scale(adapter: Adapter, path: str) -> float:
    """Return the factor by which the output of the adapter of the weight ``path`` is multiplied.

    It is alpha divided by the rank, or by the rank's square root for a rank-stabilised adapter (rsLoRA). ``path``: name
    of the weight, such as ``blocks.3.attention.wq``.
    """
    rank = adapter_rank(adapter, path)
    divisor = rank**0.5 if adapter.rank_stabilised else rank
    return adapter_alpha(adapter, path) / divisor


def whole_weights(shape: ModelShape) -> list[str]:
    """Return the names of the weights that are trained whole beside an adapter: embedding, output layer, or both.

    The list is empty without an adapter. A critic's output is always trained.
    """
    if not shape.adapter:
        return []
    whole = [VOCABULARY[name] for name in shape.adapter.whole]
    return [*whole, VALUE_HEAD] if shape.value_head else whole


def without_critic(shape: ModelShape) -> ModelShape:
    """Return ``shape`` without the output of a critic, which only training needs."""
    return shape.model_copy(update={"value_head": False}) if shape.value_head else shape


def row_tokens(shape: ModelShape, weight: VocabularyWeight) -> tuple[int, ...]:
    """Return the ids of the tokens whose rows of ``weight`` an adapter trains; empty if it trains no single rows.

    ``weight``: embedding or output layer, by PEFT's name. An output layer that is tied to the embedding has no rows of
    its own.
    """
    adapter = shape.adapter
    if adapter is None or adapter.tokens == "new" or weight not in adapter.tokens_of:
        return ()
    if weight == "lm_head" and (shape.tied or shape.output == "score"):
        return ()
    return adapter.tokens


def of_adapter(name: str, shape: ModelShape) -> bool:
    """Return whether the parameter ``name`` belongs to the adapter, and not to the base model."""
    return ADAPTERS in name or name in whole_weights(shape)


def projections(shape: ModelShape) -> Iterator[str]:
    """Yield the names of all weights that can have an adapter, such as ``blocks.3.attention.wq``."""
    for row in parameters(shape.model_copy(update={"adapter": None})):
        module = row.name.split(".")[2:-1]
        if row.kind == "matrix" and module in (["attention"], ["ffn"]):
            yield row.name


def learns(name: str, shape: ModelShape, frozen: Sequence[str]) -> bool:
    """Return whether the parameter ``name`` is trained.

    With an adapter, only the adapter's parameters are trained. ``frozen``: patterns of names; a parameter that matches
    one is not trained.
    """
    if name.endswith(STATISTICS) or (shape.adapter and not of_adapter(name, shape)):
        return False
    return not any(fnmatchcase(name, pattern) for pattern in frozen)


def parameters(model: ModelShape, vocab: int = 0) -> list[Parameter]:
    """Return the rows of the parameter table of a model.

    ``vocab``: size of the tokenizer, if the model leaves it open. The order of computation in a plugin's model is not
    known. There each parameter gets a step of its own, and each token is assumed to be multiplied with every matrix
    once.
    """
    if own := model.architecture:
        table: list[Parameter] = own.parameters(model)
        return table
    if model.kind:
        return _of_plugin(model, model.vocab or vocab)
    rows = ParameterRows(model)
    scores = model.output == "score"
    entries = Dim("vocab", model.vocab or vocab)
    rows.vocabulary("embed_tokens", entries)
    for layer in range(model.layers):
        rows.block(layer)
    rows.norm("norm", rows.embed)
    if not model.tied:
        rows.vocabulary("lm_head", Dim("score", 1) if scores else entries)
    if model.value_head:
        about: dict[str, Any] = {"kind": "vector", "products": model.embed}
        rows.add(VALUE_HEAD, Dim("score", 1), rows.embed, std=rows.std, **about)
    return rows.rows


def layer_table(model: ModelShape, layer: int) -> Table:
    """Return the rows of the parameter table for the layer with index ``layer``, by name."""
    rows = ParameterRows(model)
    rows.block(layer)
    return {row.name: row for row in rows.rows}


def whole_table(model: ModelShape) -> Table:
    """Return the rows of the parameter table for all parameters of ``model``, by name."""
    return {row.name: row for row in parameters(model)}


def outer_table(model: ModelShape) -> Table:
    """Return the rows of the parameter table for the parameters of ``model`` that are in no layer, by name."""
    return whole_table(model.model_copy(update={"layers": 0}))


def _of_plugin(model: ModelShape, vocab: int) -> list[Parameter]:
    named = build_plugin_model(model, vocab).named_parameters()
    return [
        Parameter(
            f"net.{name}",
            tuple(Dim(f"d{i}", size) for i, size in enumerate(values.shape)),
            step,
            products=values.numel() * (values.dim() > 1),
        )
        for step, (name, values) in enumerate(named)
    ]


class ParameterRows:
    """Collects the rows of a model's parameter table (:class:`Parameter`), in the order of a forward pass."""

    def __init__(self, model: ModelShape) -> None:
        self.model = model
        self.rows = list[Parameter]()
        self.steps = count()
        self.embed, self.std = Dim("embed", model.embed), model.init_std
        # of what is added to the residual stream
        self.out_std = model.init_std / (2 * max(model.layers, 1)) ** 0.5

    def add(self, name: str, *dims: Dim, step: int | None = None, **about: Any) -> None:
        """Add a row for the parameter ``name`` with dimensions ``dims``.

        With two dimensions or more it is a matrix, with whose elements each token is multiplied; otherwise a vector.
        ``about`` may set these and other fields of :class:`Parameter`. ``step``: index in the order of the forward
        pass; None: the next one.
        """
        if len(dims) > 1:
            used = prod(dim.size for dim in dims)
            about = {"kind": "matrix", "products": used} | about
        step = next(self.steps) if step is None else step
        self.rows.append(Parameter(name, dims, step, **about))

    def norm(self, path: str, dim: Dim) -> None:
        self.add(f"{path}.scale", dim)

    def vocabulary(self, weight: VocabularyWeight, entries: Dim) -> None:
        name, step = VOCABULARY[weight], next(self.steps)
        about: dict[str, Any] = {"products": 0} if weight == "embed_tokens" else {}
        self.add(name, entries, self.embed, step=step, std=self.std, **about)
        if tokens := row_tokens(self.model, weight):
            learning = Dim("tokens", len(tokens))
            about = {"std": 0, "kind": "adapter", "products": 0}
            self.add(ROWS[weight], learning, self.embed, step=step, **about)

    def block(self, layer: int) -> None:
        model, path = self.model, f"blocks.{layer}"
        self.norm(f"{path}.attention_norm", self.embed)
        (self.latent if model.kv_rank else self.attention)(layer, f"{path}.attention")
        if model.norm_after:
            self.norm(f"{path}.attention_out_norm", self.embed)
        self.norm(f"{path}.ffn_norm", self.embed)
        if experts := model.experts_of(layer):
            self.mixture(f"{path}.ffn", experts)
        elif model.small_ffn:
            self.feed_forward(f"{path}.ffn.big", model.ffn or 0, None)
            self.feed_forward(f"{path}.ffn.small", model.small_ffn, None)
        else:
            self.feed_forward(f"{path}.ffn", model.ffn or 0, model.adapter)
        if model.norm_after:
            self.norm(f"{path}.ffn_out_norm", self.embed)

    def attention(self, layer: int, path: str) -> None:
        model, width = self.model, self.model.head_dim or 0
        heads, of_head = Dim("heads", model.heads, width), Dim("head_dim", width)
        kv = Dim("kv_heads", model.kv_heads or 0, width)
        adapter = model.adapter
        self.projected(path, {"wq": heads, "wk": kv, "wv": kv}, self.embed, adapter)
        if model.qkv_bias:
            for name, dim in (("bq", heads), ("bk", kv), ("bv", kv)):
                self.add(f"{path}.{name}", dim, std=0)
        if model.qk_norm:
            self.norm(f"{path}.q_norm", of_head)
            self.norm(f"{path}.k_norm", of_head)
        if model.mixer_of(layer) != "softmax":
            self.norm(f"{path}.o_norm", of_head)
        self.projected(path, {"wo": self.embed}, heads, adapter)

    def latent(self, layer: int, path: str) -> None:
        """Add the rows of latent attention: weights that make the latent vectors, their norms, and weights that make
        heads.

        ``layer``: index of the layer; ``path``: prefix of the parameters' names.
        """
        model = self.model
        plain = self.model.head_dim or 0
        adapter = self.model.adapter
        queries = Dim("heads", model.heads, model.score_width)
        q_rank, kv_rank = Dim("q_rank", model.q_rank), Dim("kv_rank", model.kv_rank)
        latent = {"wkv_a": Dim("latent", model.kv_rank + model.rope_dim)}
        first = {"wq_a": q_rank} if model.q_rank else {"wq": queries}
        self.projected(path, first | latent, self.embed, adapter)
        if model.q_rank:
            self.norm(f"{path}.q_a_norm", q_rank)
            self.projected(path, {"wq_b": queries}, q_rank, adapter)
        self.norm(f"{path}.kv_a_norm", kv_rank)
        both = Dim("heads", model.heads, plain + model.value_dim)
        self.projected(path, {"wkv_b": both}, kv_rank, adapter)
        values = Dim("heads", model.heads, model.value_dim)
        self.projected(path, {"wo": self.embed}, values, adapter)

    def feed_forward(self, path: str, width: int, adapter: Adapter | None) -> None:
        hidden = Dim("ffn", width)
        into = dict.fromkeys(self.into_hidden, hidden)
        self.projected(path, into, self.embed, adapter)
        self.projected(path, {"down": self.embed}, hidden, adapter)

    @property
    def into_hidden(self) -> tuple[str, ...]:
        """Names of the weights that compute a feed-forward's hidden units from its input."""
        return ("gate", "up") if has_gate(self.model) else ("up",)

    def mixture(self, path: str, experts: int) -> None:
        """Add the rows of a mixture of experts: router, experts and shared experts.

        ``path``: prefix of the parameters' names; ``experts``: number of experts, of which each token is multiplied
        with some only.
        """
        model = self.model
        embed = self.embed
        first = next(self.steps)
        expert, hidden = Dim("expert", experts), Dim("ffn", model.expert_ffn or 0)
        self.add(f"{path}.router.table", expert, embed, step=first, std=self.std)
        kept = {"bias": model.router == "sigmoid", "load": model.balance == "step"}
        for name in filter(kept.__getitem__, kept):
            name = f"{path}.router.{name}"
            self.add(name, expert, step=first, std=0, kind="statistic")
        chosen = model.experts_per_token * hidden.size * embed.size
        about: dict[str, Any] = {"products": chosen, "kind": "expert"}
        into = about | {"step": first, "std": self.std}
        for name in self.into_hidden:
            self.add(f"{path}.experts.{name}", expert, hidden, embed, **into)
        about["std"] = self.out_std
        self.add(f"{path}.experts.down", expert, embed, hidden, **about)
        if not model.shared_experts:
            return
        if model.shared_mix != "add":
            share = Dim("share", 1 if model.shared_mix == "gate" else 2)
            about = {"step": first, "std": self.std, "kind": "vector"}
            self.add(f"{path}.shared_gate", share, embed, **about)
        self.feed_forward(f"{path}.shared", model.shared_experts * hidden.size, None)

    def projected(
        self, path: str, weights: Mapping[str, Dim], into: Dim, adapter: Adapter | None
    ) -> None:
        """Add rows for weights ``[out, in]`` with the same input, and for their adapters.

        ``path``: prefix of the names; ``weights``: dimension ``out`` of each weight, by name; ``into``: their
        dimension ``in``. ``adapter``: the adapter's settings; None without one.
        """
        first, second = next(self.steps), next(self.steps)
        for name, out in weights.items():
            weight = f"{path}.{name}"
            if adapter is not None and adapter.quantizes:
                self.stored(f"{path}{QUANTIZED}{name}", out, into, first)
            else:
                std = self.out_std if name in ("wo", "down") else self.std
                self.add(weight, out, into, step=first, std=std)
            if adapter is None or not any(
                is_target(target, weight) for target in adapter.targets
            ):
                continue
            rank = Dim("rank", adapter_rank(adapter, weight))
            beside = f"{path}{ADAPTERS}{name}"
            # The variance of the uniform values that LoRA and PEFT begin with.
            std = (3 * into.size) ** -0.5
            self.add(f"{beside}.a", rank, into, step=first, std=std, kind="adapter")
            self.add(f"{beside}.b", out, rank, step=second, std=0, kind="adapter")
            if adapter.kind == "dora":
                self.add(f"{beside}.magnitude", out, step=second, kind="adapter")

    def stored(self, path: str, out: Dim, into: Dim, step: int) -> None:
        """Add the rows of a weight ``[out, in]`` that is stored in four bits.

        Its elements are packed along the dimension that no mesh axis cuts. ``path``: the weight's name; ``out``,
        ``into``: its two dimensions. ``step``: index in the order of the forward pass.
        """
        rows, along = (into, out) if is_turned(out) else (out, into)
        blocks = Dim("blocks", -(-along.size // BLOCK))
        common = Dim("scale_blocks", -(-rows.size * blocks.count // SCALES))
        about: dict[str, Any] = {
            "step": step, "std": 0, "kind": "stored", "products": 0,
        }  # fmt: skip
        used = about | {"products": out.size * into.size, "weight": (out, into)}
        self.add(f"{path}.codes", rows, Dim("pairs", -(-along.size // 2)), **used)
        self.add(f"{path}.scales", rows, blocks, **about)
        self.add(f"{path}.about", common, Dim("mean_and_step", 8), **about)


def is_turned(out: Dim) -> bool:
    """Return whether the quantised form of a weight ``[out, in]`` is stored transposed, as ``[in, out]``.

    It is if ``out`` is a dimension that no axis of the mesh ever cuts.
    """
    return out.name not in CUTS


def parameter_count(model: ModelShape, vocab: int) -> int:
    """Return the number of the model's parameters without adapters and statistics; a tied embedding counts once.

    ``vocab``: size of the tokenizer, if the model leaves it open.
    """
    base = parameters(model.model_copy(update={"adapter": None}), vocab)
    return sum(row.numel for row in base if row.kind != "statistic")


def learning_count(model: ModelShape, vocab: int, freeze: Sequence[str] = ()) -> int:
    """Return the number of the model's parameters that are trained.

    ``vocab``: size of the tokenizer, if the model leaves it open; ``freeze``: patterns of names of parameters that are
    not trained.
    """
    return sum(
        p.numel for p in parameters(model, vocab) if learns(p.name, model, freeze)
    )
