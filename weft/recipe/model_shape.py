"""The section ``[model]``: a decoder-only transformer in numbers."""

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from weft.recipe.adapter import Adapter
from weft.section import Section


class RopeScaling(Section):
    """Rotary frequencies, scaled: as in Llama 3 (its report, 3.4), ``linear``, or ``yarn`` (Peng et al. 2023)."""

    kind: Literal["llama3", "linear", "yarn"] = Field(
        "llama3", description="The rule by which frequencies are scaled."
    )
    factor: PositiveFloat = Field(
        1.0,
        description="How many times longer the context becomes; 'linear' uses this alone.",
    )
    low_freq_factor: PositiveFloat = Field(
        1.0,
        description="Llama 3: wavelengths above the original length divided by this are "
        "stretched.",
    )
    high_freq_factor: PositiveFloat = Field(
        4.0,
        description="Llama 3: wavelengths below the original length divided by this are "
        "kept.",
    )
    original_max_position: PositiveInt = Field(
        8192, description="Length that the model was trained for before."
    )
    beta_fast: PositiveFloat = Field(
        32.0,
        description="yarn: frequencies with more turns than this in the original length are "
        "kept.",
    )
    beta_slow: PositiveFloat = Field(
        1.0, description="yarn: frequencies with fewer turns than this are stretched."
    )
    attention_factor: float = Field(
        0.0,
        ge=0,
        description="yarn: factor of rotated queries and keys; 0: it follows from 'factor'.",
    )
    mscale: float = Field(
        0.0,
        ge=0,
        description="yarn: with mscale_all_dim, the attention factor is the ratio of what "
        "both give.",
    )
    mscale_all_dim: float = Field(
        0.0,
        ge=0,
        description="yarn: see mscale; with latent attention it scales all scores "
        "(DeepSeek).",
    )


class ModelShape(Section):
    """A decoder-only transformer. Fields that are left out follow from the others."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    origin: str | None = Field(
        None,
        alias="from",
        description="Model to start from, which then defines all fields: a Hugging Face or "
        "Weft folder, a GGUF file or an id of the hub; of a config.json alone, "
        "weights are initialised anew.",
    )
    kind: str = Field(
        "",
        description="A plugin's model (docs/reference/extension-kinds.md), which has none of the fields but "
        "'settings' and 'vocab'.",
    )
    settings: dict[str, Any] = Field(
        {}, description="Keywords that a plugin's model is called with."
    )
    vocab: int = Field(
        0,
        ge=0,
        description="Size of the vocabulary; 0: the tokenizer's, or that of 'from', whose "
        "embedding a larger one grows by rows that are the mean of the old "
        "ones.",
    )
    layers: int = Field(4, gt=0, le=100_000, description="Number of layers.")
    embed: PositiveInt = Field(256, description="Width of the residual stream.")
    heads: PositiveInt = Field(4, description="Heads of queries.")
    kv_heads: PositiveInt | None = Field(
        None, description="Heads of keys and values; left out: as many as 'heads'."
    )
    head_dim: PositiveInt | None = Field(
        None,
        description="Width of a head; with latent attention, of the part of a query that is "
        "not rotated. Left out: embed / heads.",
    )
    ffn: PositiveInt | None = Field(
        None,
        description="Hidden width of the feed-forward; left out: 8/3 of embed, rounded up "
        "to a multiple of 32.",
    )
    qk_norm: bool = Field(False, description="Norms of queries and keys in each head.")
    qkv_bias: bool = Field(
        False, description="Biases of the projections to queries, keys and values."
    )
    tied: bool = Field(
        False, description="The output layer shares the embedding's weights."
    )
    norm_eps: PositiveFloat = Field(
        1e-5, description="Added to the mean square in norms."
    )
    rope_theta: PositiveFloat = Field(
        10_000.0, description="Base of rotary frequencies."
    )
    rope_scaling: RopeScaling | None = Field(
        None, description="Scaling of rotary frequencies, for longer contexts."
    )
    init_std: PositiveFloat = Field(
        0.02, description="Standard deviation of initial weights."
    )
    mixer: Literal["softmax", "linear", "retention"] = Field(
        "softmax",
        description="What mixes tokens: softmax attention, linear attention, or retention "
        "(linear with decay).",
    )
    softmax_every: int = Field(
        0,
        ge=0,
        description="With another mixer, every n-th layer keeps softmax attention (a "
        "hybrid); 0: none does.",
    )
    window: int = Field(
        0, ge=0, description="Tokens that a token sees, including itself; 0: all."
    )
    full_every: int = Field(
        0, ge=0, description="With a window, every n-th layer sees all tokens."
    )
    window_theta: PositiveFloat | None = Field(
        None, description="rope_theta of windowed layers, if it differs."
    )
    query_dim: PositiveFloat | None = Field(
        None,
        description="Scores are divided by the root of this instead of head_dim (Gemma 3).",
    )
    activation: Literal["silu", "gelu", "relu"] = Field(
        "silu", description="Activation of the feed-forward's gate."
    )
    scaled_embedding: bool = Field(
        False, description="Embeddings are multiplied by the root of embed (Gemma 3)."
    )
    norm_after: bool = Field(
        False,
        description="Norms after attention and feed-forward as well as before (Gemma 3).",
    )
    rope_interleaved: bool = Field(
        False,
        description="Neighbouring elements of a head rotate together, instead of elements "
        "half a head apart.",
    )
    kv_rank: int = Field(
        0,
        ge=0,
        description="Latent attention (DeepSeek-V2): width of the vector from which keys "
        "and values of all heads are computed, which generation caches; 0: "
        "none.",
    )
    q_rank: int = Field(
        0,
        ge=0,
        description="Latent attention: width of the vector from which queries are computed; "
        "0: directly.",
    )
    rope_dim: int = Field(
        0,
        ge=0,
        description="Latent attention: width of the rotated key that all heads share.",
    )
    value_dim: int = Field(
        0, ge=0, description="Latent attention: width of a head's values."
    )
    experts: PositiveInt | Literal[0] | tuple[int, ...] = Field(
        0,
        description="Feed-forwards of width expert_ffn in a layer; a list gives the number "
        "for each layer (0: dense).",
    )
    experts_per_token: PositiveInt = Field(
        2, description="Experts that each token goes through."
    )
    shared_experts: int = Field(0, ge=0, description="Experts that see all tokens.")
    shared_mix: Literal["add", "gate", "residual"] = Field(
        "add",
        description="How the output of shared experts is added: as it is, through a sigmoid "
        "gate (Qwen2-MoE), or with what is left of the experts' share (PR-MoE, "
        "Rajbhandari et al. 2022).",
    )
    expert_ffn: PositiveInt | None = Field(
        None, description="Hidden width of an expert; left out: ffn."
    )
    first_dense: int = Field(0, ge=0, description="The first so many layers are dense.")
    moe_every: PositiveInt = Field(1, description="All but every n-th layer are dense.")
    router: Literal["post-softmax", "pre-softmax", "sigmoid"] = Field(
        "post-softmax",
        description="Experts by the largest logits, weighted by the softmax of these "
        "(Mixtral) or of all logits, or by the largest sigmoid plus a bias that "
        "learns (DeepSeek-V3).",
    )
    router_norm: bool = Field(False, description="A token's weights add up to 1.")
    router_scale: PositiveFloat = Field(1.0, description="Factor of a token's weights.")
    router_groups: PositiveInt = Field(
        1, description="Groups of experts; a token chooses only from the best of them."
    )
    router_top_groups: PositiveInt = Field(
        1, description="Groups that a token may choose from."
    )
    router_early: bool = Field(
        False, description="The router reads the input of attention (SmallThinker)."
    )
    capacity: float = Field(
        0.0,
        ge=0,
        description="In training an expert takes from a document at most this many times "
        "its mean share of choices, the earliest first; 0: all.",
    )
    bias_rate: float = Field(
        1e-3,
        ge=0,
        description="How much the bias of a sigmoid router moves in a step towards equal "
        "loads.",
    )
    balance: Literal["sequence", "step", "huggingface"] = Field(
        "sequence",
        description="What balance_loss compares: loads of a layer in a document, with those "
        "of the whole previous step, or of all layers together (not divided by "
        "experts_per_token).",
    )
    balance_loss: float = Field(
        0.0, ge=0, description="Weight of the loss for unequal loads of experts."
    )
    z_loss: float = Field(
        0.0, ge=0, description="Weight of the loss for large router logits."
    )
    output: Literal["tokens", "score"] = Field(
        "tokens",
        description="What the model gives: logits of tokens, or the score of a reward "
        "model; loss.kind sets it.",
    )
    adapter: Adapter | None = Field(
        None,
        description="Adapter of the model in 'from'; a new one is the recipe's own section.",
    )

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
