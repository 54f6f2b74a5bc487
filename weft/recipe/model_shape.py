"""The section ``[model]``: a decoder-only transformer in numbers."""

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from weft.recipe.adapter import Adapter
from weft.section import Section


class RopeScaling(Section):
    """Scaling of rotary frequencies: of Llama 3 (its report, section 3.4), ``linear``, or ``yarn`` (Peng et al. 2023).

    ``linear`` uses ``factor`` alone. The last five are for yarn: frequencies with more than ``beta_fast`` turns in the
    original length are kept, those with fewer than ``beta_slow`` are stretched. Rotated queries and keys are multiplied
    by ``attention_factor``, which follows from ``factor`` if it is 0; with ``mscale`` and ``mscale_all_dim`` it is the
    ratio of the factors that these give, and with latent attention the latter scales all scores (DeepSeek).
    """

    kind: Literal["llama3", "linear", "yarn"] = "llama3"
    factor: PositiveFloat = 1.0
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_max_position: PositiveInt = 8192
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    attention_factor: float = Field(0.0, ge=0)
    mscale: float = Field(0.0, ge=0)
    mscale_all_dim: float = Field(0.0, ge=0)


class ModelShape(Section):
    """A decoder-only transformer.

    ``from`` (in Python ``origin``) names a model to start from, which then defines every field here: a Hugging Face or
    Weft folder, a GGUF file, or an id of the Hugging Face hub; from a ``config.json`` alone, weights are initialised
    anew. ``vocab = 0`` means the size of the tokenizer's vocabulary, or of that model's; a larger one than that grows
    embedding and output layer by rows that are the mean of the old ones. ``kind``: a plugin's model (docs/plugins.md),
    which is built with ``settings`` and has none of the other fields.

    ``mixer``: ``softmax`` attention, ``linear`` attention, or ``retention`` (linear with decay). With the last two,
    ``softmax_every = n`` keeps softmax attention in every n-th layer (a hybrid; 0: in none).

    ``window``: a token sees this many tokens, including itself (0: all), except in every ``full_every``-th layer, which
    sees all; ``window_theta`` is ``rope_theta`` of windowed layers. The following are for Gemma 3: scores divided by
    the root of ``query_dim`` instead of ``head_dim``, embeddings multiplied by the root of ``embed``
    (``scaled_embedding``), and norms after attention and feed-forward as well as before (``norm_after``).
    ``rope_interleaved``: neighbouring elements of a head rotate together, instead of elements half a head apart.

    ``kv_rank``: latent attention (DeepSeek-V2). Keys and values of all heads are computed from one vector of this
    width, which together with a rotated key of ``rope_dim`` is all that generation caches. Queries are computed from a
    vector of ``q_rank`` (0: directly). ``head_dim`` is the width of the part of a head's query that is not rotated,
    ``value_dim`` that of its values.

    ``experts``: a layer has this many feed-forwards of width ``expert_ffn``, and each token goes through
    ``experts_per_token`` of them; a list gives the number for each layer (0: dense). The first ``first_dense`` layers
    are dense, and so are all but every ``moe_every``-th. ``shared_experts`` of that width see all tokens;
    ``shared_mix`` says how their output is added: as it is (``add``), through a sigmoid ``gate`` (Qwen2-MoE), or with
    what is left of the experts' share (``residual``, PR-MoE, Rajbhandari et al. 2022).
    ``router``: a token's experts are those with the largest logits, weighted by the softmax of these (``post-softmax``,
    Mixtral) or of all logits (``pre-softmax``), or those with the largest sigmoid plus a bias, which moves by
    ``bias_rate`` each step towards equal loads (``sigmoid``, DeepSeek-V3). ``router_norm`` makes the weights add up to
    1, ``router_scale`` multiplies them. A token chooses only from the ``router_top_groups`` best of ``router_groups``
    groups of experts. ``router_early``: the router reads the input of attention (SmallThinker).
    ``capacity``: in training an expert takes from each document at most this many times its mean share of the choices,
    the earliest first; the others are dropped (0: none).
    ``balance_loss`` and ``z_loss`` are added to the training loss. The first is the mean over documents of how unequal
    the loads are: of each layer (``balance = "sequence"``), against the loads of the whole previous step (``step``), or
    of all layers together and not divided by ``experts_per_token`` (``huggingface``).
    ``output``: ``tokens`` of the vocabulary, or the ``score`` of a reward model; ``loss.kind`` sets it.
    """

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    origin: str | None = Field(None, alias="from")
    kind: str = ""
    settings: dict[str, Any] = Field({})
    vocab: int = Field(0, ge=0)
    layers: int = Field(4, gt=0, le=100_000)
    embed: PositiveInt = 256
    heads: PositiveInt = 4
    kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    ffn: PositiveInt | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    tied: bool = False
    norm_eps: PositiveFloat = 1e-5
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: RopeScaling | None = None
    init_std: PositiveFloat = 0.02
    mixer: Literal["softmax", "linear", "retention"] = "softmax"
    softmax_every: int = Field(0, ge=0)
    window: int = Field(0, ge=0)
    full_every: int = Field(0, ge=0)
    window_theta: PositiveFloat | None = None
    query_dim: PositiveFloat | None = None
    activation: Literal["silu", "gelu", "relu"] = "silu"
    scaled_embedding: bool = False
    norm_after: bool = False
    rope_interleaved: bool = False
    kv_rank: int = Field(0, ge=0)
    q_rank: int = Field(0, ge=0)
    rope_dim: int = Field(0, ge=0)
    value_dim: int = Field(0, ge=0)
    experts: PositiveInt | Literal[0] | tuple[int, ...] = 0
    experts_per_token: PositiveInt = 2
    shared_experts: int = Field(0, ge=0)
    shared_mix: Literal["add", "gate", "residual"] = "add"
    expert_ffn: PositiveInt | None = None
    first_dense: int = Field(0, ge=0)
    moe_every: PositiveInt = 1
    router: Literal["post-softmax", "pre-softmax", "sigmoid"] = "post-softmax"
    router_norm: bool = False
    router_scale: PositiveFloat = 1.0
    router_groups: PositiveInt = 1
    router_top_groups: PositiveInt = 1
    router_early: bool = False
    capacity: float = Field(0.0, ge=0)
    bias_rate: float = Field(1e-3, ge=0)
    balance: Literal["sequence", "step", "huggingface"] = "sequence"
    balance_loss: float = Field(0.0, ge=0)
    z_loss: float = Field(0.0, ge=0)
    output: Literal["tokens", "score"] = "tokens"
    adapter: Adapter | None = None

    def experts_of(self, layer: int) -> int:
        """Experts of this layer; 0 if its feed-forward is dense."""
        if isinstance(self.experts, tuple):
            return self.experts[layer]
        return (
            self.experts
            if layer >= self.first_dense and (layer + 1) % self.moe_every == 0
            else 0
        )

    @property
    def mixtures(self) -> dict[int, int]:
        """The layers with experts, and how many they have."""
        return {
            layer: count
            for layer in range(self.layers)
            if (count := self.experts_of(layer))
        }

    @property
    def rotated(self) -> int:
        """The elements of a head's queries and keys that rotary embedding turns."""
        return self.rope_dim if self.kv_rank else self.head_dim or 0

    @property
    def score_width(self) -> int:
        """The width of a head's queries and keys."""
        return (
            (self.head_dim or 0) + self.rope_dim if self.kv_rank else self.head_dim or 0
        )

    def mixer_of(self, layer: int) -> str:
        every = self.softmax_every
        return "softmax" if every and (layer + 1) % every == 0 else self.mixer

    def window_of(self, layer: int) -> int:
        """Tokens that a token of this layer sees at most; 0 for all."""
        return (
            0 if self.full_every and (layer + 1) % self.full_every == 0 else self.window
        )

    @model_validator(mode="before")
    @classmethod
    def _named_before(cls, tree: Any) -> Any:
        """Recipes in checkpoints of before 0.8 say ``weights`` or ``config`` where ``from`` is said now."""
        if not isinstance(tree, dict) or not tree.keys() & {"config", "weights"}:
            return tree
        rest = {
            key: value
            for key, value in tree.items()
            if key not in ("config", "weights")
        }
        weights, config = tree.get("weights"), tree.get("config")
        if config and not str(config).endswith(".json"):
            config = f"{config}/config.json"
        given = weights or config
        return rest | ({"from": str(given)} if given else {})

    @model_validator(mode="after")
    def _own(self) -> Self:
        others = self.model_fields_set - {
            "kind",
            "settings",
            "vocab",
            "origin",
            "kv_heads",
            "head_dim",
            "ffn",
        }
        fields = type(self).model_fields
        if self.kind and (
            named := sorted(
                name for name in others if getattr(self, name) != fields[name].default
            )
        ):
            raise ValueError(
                f"{named[0]} is of Weft's own models, not of kind {self.kind!r}; put it into settings"
            )
        if self.settings and not self.kind:
            raise ValueError("settings are those of a plugin's model; name it as kind")
        return self

    @model_validator(mode="after")
    def _fill(self) -> Self:
        """Derive fields that were left out, once, so that no reader of a shape has to."""
        derived = {
            "kv_heads": self.heads if self.kv_rank else self.kv_heads or self.heads,
            "head_dim": (head_dim := self.head_dim or max(1, self.embed // self.heads)),
            # SwiGLU at 8/3 of the width, rounded up to a multiple of 32.
            "ffn": self.ffn or -(-8 * self.embed // 3 // 32) * 32,
        }
        if self.kv_rank:  # a third of the queries is rotated, as in DeepSeek
            derived["rope_dim"] = self.rope_dim or max(2, head_dim // 4 * 2)
            derived["value_dim"] = self.value_dim or head_dim
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        if self.heads % derived["kv_heads"]:
            raise ValueError(
                f"heads = {self.heads} must be a multiple of kv_heads = {derived['kv_heads']}"
            )
        if self.rotated % 2:
            name = "rope_dim" if self.kv_rank else "head_dim"
            raise ValueError(
                f"{name} = {self.rotated} must be even for rotary position embedding"
            )
        self._check_experts()
        return self

    def _check_experts(self) -> None:
        """Refuse experts that no router could choose from."""
        if self.experts:
            object.__setattr__(self, "expert_ffn", self.expert_ffn or self.ffn)
        if isinstance(self.experts, tuple):
            if len(self.experts) != self.layers:
                raise ValueError(
                    f"experts has {len(self.experts)} entries for layers = {self.layers}; give one each"
                )
            if (self.first_dense, self.moe_every) != (0, 1):
                raise ValueError(
                    "a list of experts says which layers are dense; leave out first_dense and moe_every"
                )
        elif self.experts and not self.mixtures:
            raise ValueError(
                f"experts = {self.experts} are in none of layers = {self.layers} with first_dense = {self.first_dense} "
                f"and moe_every = {self.moe_every}; lower these, or leave out experts"
            )
        if (
            self.balance == "huggingface"
            and self.balance_loss
            and len(set(self.mixtures.values())) > 1
        ):
            raise ValueError(
                "balance = 'huggingface' adds up layers, which must have equally many experts"
            )
        groups, best, k = (
            self.router_groups,
            self.router_top_groups,
            self.experts_per_token,
        )
        if best > groups:
            raise ValueError(
                f"router_top_groups = {best} is more than the router_groups = {groups}; use {groups}"
            )
        for count in set(self.mixtures.values()):
            if count < 0 or count % groups:
                raise ValueError(
                    f"{count} experts do not make router_groups = {groups} equal groups; use a divisor"
                )
            if k > count // groups * best:
                raise ValueError(
                    f"experts_per_token = {k} is more than the {count // groups * best} experts that a token can "
                    "choose from; lower it, or raise experts or router_top_groups"
                )
