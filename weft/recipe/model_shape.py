"""The section ``[model]``: a decoder-only transformer in numbers."""

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from weft.recipe.adapter import Adapter
from weft.registry import Registered, find, names
from weft.section import Section


class RopeScaling(Section):
    """Rescaling of the frequencies of rotary position embedding, for longer sequences than the model was trained on.

    ``kind`` selects the method: that of Llama 3 (section 3.4 of its report), ``linear``, or ``yarn`` (Peng et al.
    2023). Each method reads only some of the other settings.
    """

    kind: Literal["llama3", "linear", "yarn"] = Field(
        "llama3",
        description=(
            "How frequencies are changed. 'linear': all are divided by 'factor'; 'llama3' and 'yarn': only low "
            "frequencies are, and settings below say for each of these kinds which frequencies are low."
        ),
    )
    factor: PositiveFloat = Field(
        1.0,
        description=(
            "How many times longer texts may become: the number by which frequencies are divided. For kind = "
            "'linear' it is the only setting."
        ),
    )
    low_freq_factor: PositiveFloat = Field(
        1.0,
        description=(
            "For kind = 'llama3': frequencies with a wavelength above original_max_position / low_freq_factor "
            "tokens are divided by 'factor'."
        ),
    )
    high_freq_factor: PositiveFloat = Field(
        4.0,
        description=(
            "For kind = 'llama3': frequencies with a wavelength below original_max_position / high_freq_factor "
            "tokens stay as they are. Between this limit and that of low_freq_factor the change grows gradually."
        ),
    )
    original_max_position: PositiveInt = Field(
        8192,
        description="Longest text, in tokens, that the model was first trained on. kind = 'linear' does not use it.",
    )
    beta_fast: PositiveFloat = Field(
        32.0,
        description=(
            "For kind = 'yarn': frequencies that make more turns than this within original_max_position tokens stay "
            "as they are."
        ),
    )
    beta_slow: PositiveFloat = Field(
        1.0,
        description=(
            "For kind = 'yarn': frequencies that make fewer turns than this within original_max_position tokens are "
            "divided by 'factor'. Between this limit and beta_fast the change grows gradually."
        ),
    )
    attention_factor: float = Field(
        0.0,
        ge=0,
        description=(
            "For kind = 'yarn': number by which rotated queries and keys are multiplied. 0: it is computed as 0.1 "
            "ln(factor) + 1, or from mscale and mscale_all_dim if both are above 0."
        ),
    )
    mscale: float = Field(
        0.0,
        ge=0,
        description=(
            "For kind = 'yarn' and attention_factor = 0: number m in the numerator of (0.1 m ln(factor) + 1) / (0.1 "
            "n ln(factor) + 1), by which rotated queries and keys are multiplied; n is mscale_all_dim (DeepSeek). "
            "0: the formula is not used."
        ),
    )
    mscale_all_dim: float = Field(
        0.0,
        ge=0,
        description=(
            "For kind = 'yarn': number n in the denominator of (0.1 m ln(factor) + 1) / (0.1 n ln(factor) + 1), by "
            "which rotated queries and keys are multiplied if attention_factor is 0; m is mscale. With latent "
            "attention, all scores are also multiplied by (0.1 n ln(factor) + 1) squared (DeepSeek). 0: neither."
        ),
    )


class ModelShape(Section):
    """The architecture of a decoder-only transformer. Fields that are left out are derived from the others."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    origin: str | None = Field(
        None,
        alias="from",
        description=(
            "Pretrained model whose weights training starts from: a Hugging Face or Weft folder, a GGUF file or an "
            "id of the Hugging Face hub (owner/name). The other settings of [model] are then those of this model. A "
            "path to a config.json takes only its settings, with new random weights. If not set: a new model."
        ),
    )
    kind: str = Field(
        "",
        description=(
            "What kind of model it is. Empty: a transformer that writes tokens; 'diffusion': a transformer that "
            "makes images or videos from noise (docs/how-to/images.md); 'mlp': a network that maps arrays to "
            "arrays, for [stream]. Any other value names a plugin's model (docs/reference/extension-kinds.md), "
            "with which only 'settings' and 'vocab' can be set here."
        ),
    )
    settings: dict[str, Any] = Field(
        {},
        description=(
            "Keyword arguments for the model of a 'kind' other than the default, such as { width = 128, depth = 3 } "
            "for 'mlp'. docs/how-to/images.md lists those of 'diffusion'."
        ),
    )
    inputs: dict[str, tuple[PositiveInt, ...]] = Field(
        {},
        description=(
            "For a model that learns from simulations ([stream]): names and shapes of its input arrays, such as { "
            "parameters = [3] }. Empty: the model reads tokens."
        ),
    )
    outputs: dict[str, tuple[PositiveInt, ...]] = Field(
        {},
        description=(
            "For a model that learns from simulations ([stream]): names and shapes of the arrays that it predicts, "
            "such as { field = [32, 32] }. Empty: the model writes tokens."
        ),
    )
    vocab: int = Field(
        0,
        ge=0,
        description=(
            "Number of tokens in the vocabulary. 0: as many as the tokenizer has, or the model in 'from'. With "
            "'from', a larger number adds rows to its embedding, for tokens that it does not know yet; each new row "
            "is the mean of the old ones."
        ),
    )
    layers: int = Field(
        4, gt=0, le=100_000, description="Number of transformer layers."
    )
    embed: PositiveInt = Field(
        256,
        description="Width of the model (d_model): number of elements of the vector that represents a token.",
    )
    heads: PositiveInt = Field(4, description="Number of attention heads.")
    kv_heads: PositiveInt | None = Field(
        None,
        description=(
            "Number of heads for keys and values. Fewer than 'heads' is grouped-query attention, with a smaller "
            "cache in generation. If not set: as many as 'heads'."
        ),
    )
    head_dim: PositiveInt | None = Field(
        None,
        description=(
            "Width of one attention head, in elements. If not set: embed / heads. With latent attention (kv_rank "
            "above 0): width of the part of a head that rotary embedding does not rotate."
        ),
    )
    ffn: PositiveInt | None = Field(
        None,
        description=(
            "Hidden width of the feed-forward network. If not set: 8/3 of 'embed', rounded up to a multiple of 32."
        ),
    )
    small_ffn: int = Field(
        0,
        ge=0,
        description=(
            "Hidden width of a second, small feed-forward network in each layer (Duo-LLM). In training, each token "
            "passes in each layer through the big network, the small one or none, at random. Outside training all "
            "tokens pass through the big networks. 0: no second network."
        ),
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Dropout rate: share of the elements that is set to zero at random in training. It applies to "
            "embeddings and to the outputs of attention and feed-forward networks. 0: no dropout."
        ),
    )
    qk_norm: bool = Field(
        False,
        description=(
            "Normalise the queries and keys of each head by an RMS norm, which keeps attention scores small (Qwen3, "
            "Gemma 3)."
        ),
    )
    qkv_bias: bool = Field(
        False, description="Add a bias to the projections for queries, keys and values."
    )
    tied: bool = Field(
        False,
        description="Use one weight matrix for both the embedding and the output layer, to save parameters.",
    )
    norm_eps: PositiveFloat = Field(
        1e-5,
        description="Small number that is added to the mean square in RMS norms, against division by zero.",
    )
    rope_theta: PositiveFloat = Field(
        10_000.0,
        description=(
            "Base (theta) of the frequencies of rotary position embedding. Models for longer texts use larger "
            "bases, such as 500000."
        ),
    )
    rope_scaling: RopeScaling | None = Field(
        None,
        description=(
            "Change of the frequencies of rotary position embedding, for texts longer than the model was first "
            "trained on. If not set: no change."
        ),
    )
    init_std: PositiveFloat = Field(
        0.02,
        description="Standard deviation of the normal distribution from which initial weights are drawn.",
    )
    mixer: Literal["softmax", "linear", "retention"] = Field(
        "softmax",
        description=(
            "Kind of attention in the layers. 'softmax': ordinary attention; 'linear': linear attention, whose time "
            "grows in proportion to the text; 'retention': linear attention in which older tokens count less and "
            "less (RetNet)."
        ),
    )
    softmax_every: int = Field(
        0,
        ge=0,
        description=(
            "For mixer = 'linear' or 'retention': every n-th layer has softmax attention instead, where n is this "
            "number. 0: no layer."
        ),
    )
    window: int = Field(
        0,
        ge=0,
        description=(
            "Sliding-window attention: number of latest tokens that each token attends to, itself included. 0: each "
            "token attends to all earlier tokens."
        ),
    )
    full_every: int = Field(
        0,
        ge=0,
        description=(
            "For models with a 'window': every n-th layer attends to all earlier tokens, where n is this number. 0: "
            "all layers have the window."
        ),
    )
    window_theta: PositiveFloat | None = Field(
        None,
        description=(
            "Base of rotary frequencies in the layers that have a sliding window, in place of rope_theta (Gemma 3). "
            "If not set: rope_theta."
        ),
    )
    query_dim: PositiveFloat | None = Field(
        None,
        description=(
            "Divide attention scores by the square root of this number (Gemma 3). If not set: by the square root of "
            "head_dim."
        ),
    )
    activation: Literal["silu", "gelu", "relu"] = Field(
        "silu",
        description="Activation function in feed-forward networks: SiLU, GELU or ReLU.",
    )
    scaled_embedding: bool = Field(
        False,
        description="Multiply token embeddings by the square root of 'embed' before the first layer (Gemma 3).",
    )
    norm_after: bool = Field(
        False,
        description=(
            "Add a norm after attention and one after the feed-forward network, besides the norms before them "
            "(Gemma 3)."
        ),
    )
    residual: Literal["standard", "ladder"] = Field(
        "standard",
        description=(
            "What attention and feed-forward networks read from the residual stream. 'standard': the sum of all "
            "earlier outputs; 'ladder': the sum without the output of the network just before, so that the ranks of "
            "layout.tp can exchange this output while they compute (Ladder Residual)."
        ),
    )
    ladder_from: int = Field(
        0,
        ge=0,
        description=(
            "For residual = 'ladder': index, from 0, of the first layer that is 'ladder'. Earlier layers are "
            "'standard', as in the pretrained model."
        ),
    )
    rope_interleaved: bool = Field(
        False,
        description=(
            "Which elements of a head rotary embedding rotates as a pair: neighbours (true), or elements half a "
            "head apart (false). Pretrained weights need the value that they were trained with."
        ),
    )
    kv_rank: int = Field(
        0,
        ge=0,
        description=(
            "Latent attention (DeepSeek-V2): number of elements of the compressed vector from which all keys and "
            "values of a token are computed. Generation caches only this vector and a small rotated key. 0: "
            "ordinary attention."
        ),
    )
    q_rank: int = Field(
        0,
        ge=0,
        description=(
            "For latent attention (kv_rank above 0): number of elements of the compressed vector from which the "
            "queries of a token are computed. 0: queries are not compressed."
        ),
    )
    rope_dim: int = Field(
        0,
        ge=0,
        description=(
            "For latent attention (kv_rank above 0): number of elements of each query and key that rotary embedding "
            "rotates; they are added to the head_dim others, and all heads share this part of the key. 0: half of "
            "head_dim."
        ),
    )
    value_dim: int = Field(
        0,
        ge=0,
        description=(
            "For latent attention (kv_rank above 0): number of elements of each head's values. 0: as many as "
            "head_dim."
        ),
    )
    experts: PositiveInt | Literal[0] | tuple[int, ...] = Field(
        0,
        description=(
            "Mixture of experts: number of experts in each layer, from which a router chooses for each token. A "
            "list gives the number for each layer. 0: an ordinary feed-forward network."
        ),
    )
    experts_per_token: PositiveInt = Field(
        2,
        description="Number of experts that the router chooses for each token (top-k).",
    )
    shared_experts: int = Field(
        0,
        ge=0,
        description="Number of experts that process every token, besides those that the router chooses.",
    )
    shared_mix: Literal["add", "gate", "residual"] = Field(
        "add",
        description=(
            "How the output of shared experts is combined with that of the chosen experts. 'add': they are added; "
            "'gate': that of shared experts is first multiplied by a learned sigmoid of the token (Qwen2-MoE); "
            "'residual': a weighted mean of both, with weights from a learned softmax of the token (PR-MoE)."
        ),
    )
    expert_ffn: PositiveInt | None = Field(
        None,
        description="Hidden width of the feed-forward network of one expert. If not set: the same as 'ffn'.",
    )
    first_dense: int = Field(
        0,
        ge=0,
        description="Number of layers at the beginning that have an ordinary feed-forward network instead of experts.",
    )
    moe_every: PositiveInt = Field(
        1,
        description=(
            "Put experts into every n-th layer only, where n is this number; the other layers have an ordinary "
            "feed-forward network. 1: experts in all layers."
        ),
    )
    router: Literal["post-softmax", "pre-softmax", "sigmoid"] = Field(
        "post-softmax",
        description=(
            "How the router computes the weights of a token's chosen experts from its logits. 'post-softmax': "
            "softmax over the logits of the chosen experts (Mixtral); 'pre-softmax': softmax over the logits of all "
            "experts; 'sigmoid': sigmoid of each logit, where the choice also depends on a bias per expert that "
            "keeps loads equal (DeepSeek-V3)."
        ),
    )
    router_norm: bool = Field(
        False,
        description=(
            "Divide the routing weights of a token's chosen experts by their sum, so that they add up to 1. "
            "'post-softmax' weights always do."
        ),
    )
    router_scale: PositiveFloat = Field(
        1.0,
        description=(
            "Number by which all routing weights are multiplied. The output of an expert is multiplied by its "
            "routing weight."
        ),
    )
    router_groups: PositiveInt = Field(
        1,
        description=(
            "Number of equal groups into which experts are divided. The router first chooses the router_top_groups "
            "best groups for a token, and then experts from these alone. 1: it chooses from all experts."
        ),
    )
    router_top_groups: PositiveInt = Field(
        1,
        description="Number of groups from which the router chooses a token's experts, if router_groups is above 1.",
    )
    router_early: bool = Field(
        False,
        description=(
            "Feed the router with the normalised input of the layer's attention instead of the feed-forward's, so "
            "that experts are known earlier (SmallThinker)."
        ),
    )
    capacity: float = Field(
        0.0,
        ge=0,
        description=(
            "Limit on the tokens of one document that an expert processes in training, as a multiple of the number "
            "that each expert would get if all got equally many. Tokens beyond it skip this expert. 0: no limit."
        ),
    )
    bias_rate: float = Field(
        1e-3,
        ge=0,
        description=(
            "For router = 'sigmoid': number that each step adds to the bias of experts with fewer tokens than the "
            "mean, and subtracts from that of experts with more. 0: biases do not change."
        ),
    )
    balance: Literal["sequence", "step", "huggingface"] = Field(
        "sequence",
        description=(
            "Tokens over which balance_loss compares the loads of experts. 'sequence': those of one document, in "
            "each layer by itself; 'step': those of the whole previous step; 'huggingface': those of one document "
            "in all layers together, as in the transformers library."
        ),
    )
    balance_loss: float = Field(
        0.0,
        ge=0,
        description=(
            "Weight of an extra loss that makes the router give all experts equally many tokens. 0: no such loss."
        ),
    )
    z_loss: float = Field(
        0.0,
        ge=0,
        description="Weight of an extra loss that keeps the router's logits small (z-loss of ST-MoE). 0: no such loss.",
    )
    output: Literal["tokens", "score"] = Field(
        "tokens",
        description=(
            "What the model computes: 'tokens', the logits of the next token, or 'score', one number for a text, as "
            "a reward model does. loss.kind = 'reward' sets 'score' by itself."
        ),
    )
    value_head: bool = Field(
        False,
        description=(
            "Give the model a second output beside the logits: a critic, which predicts the sum of the rewards that "
            "follow a token. rl.method = 'ppo' sets this by itself."
        ),
    )
    adapter: Adapter | None = Field(
        None,
        description=(
            "Adapter that the pretrained model in 'from' contains already. Weft reads it from that model; do not "
            "set it. For a new adapter use the section [adapter]."
        ),
    )

    def named(self) -> Iterator[Registered]:
        """Yield the registered architecture of the model, if ``kind`` names one that Weft brings along."""
        if self.kind in names("architecture"):
            yield find("architecture", self.kind)

    @property
    def architecture(self) -> Any:
        """The registered architecture of a model that ``kind`` names, such as "diffusion"; None for decoders and
        plugins' models.
        """
        return next((each.implementation for each in self.named()), None)

    @property
    def is_plugin(self) -> bool:
        """Whether a plugin brings the model, so that Weft knows only its parameters."""
        return bool(self.kind) and self.architecture is None

    def experts_of(self, layer: int) -> int:
        """Return the number of experts of the layer with index ``layer``; 0 for a dense layer."""
        if isinstance(self.experts, tuple):
            return self.experts[layer]
        return (
            self.experts
            if layer >= self.first_dense and (layer + 1) % self.moe_every == 0
            else 0
        )

    @property
    def mixtures(self) -> dict[int, int]:
        """Number of experts of each layer that has experts, by the layer's index."""
        return {
            layer: count
            for layer in range(self.layers)
            if (count := self.experts_of(layer))
        }

    @property
    def rotated(self) -> int:
        """Number of elements of each query and key that rotary embedding rotates."""
        return self.rope_dim if self.kv_rank else self.head_dim or 0

    @property
    def score_width(self) -> int:
        """Number of elements of each head's queries and keys, whose products are summed to attention scores."""
        return (
            (self.head_dim or 0) + self.rope_dim if self.kv_rank else self.head_dim or 0
        )

    def mixer_of(self, layer: int) -> str:
        every = self.softmax_every
        return "softmax" if every and (layer + 1) % every == 0 else self.mixer

    def is_ladder(self, layer: int) -> bool:
        """Return whether each part of a layer (attention, feed-forward) reads the residual stream without the output of
        the part before it.

        The ranks of ``tp`` can then sum that output while the part computes (``model.residual``). ``layer``: index of
        the layer.
        """
        return self.residual == "ladder" and layer >= self.ladder_from

    def window_of(self, layer: int) -> int:
        """Return the attention window of a layer in tokens; 0 if the layer attends to all tokens."""
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
            "inputs",
            "outputs",
            "vocab",
            "origin",
            "kv_heads",
            "head_dim",
            "ffn",
        }
        fields = type(self).model_fields
        if self.is_plugin and (
            named := sorted(
                name for name in others if getattr(self, name) != fields[name].default
            )
        ):
            raise ValueError(
                f"{named[0]} is of Weft's own models, not of kind {self.kind!r}; put it into settings"
            )
        if self.settings and not self.kind:
            raise ValueError(
                "settings are those of a model of some kind; name it as kind"
            )
        if bool(self.inputs) != bool(self.outputs):
            raise ValueError(
                "inputs and outputs are the arrays that a model reads and predicts; give both, or neither"
            )
        if self.inputs and not self.kind:
            raise ValueError(
                "inputs and outputs are of a model that reads arrays; name it: kind = 'mlp', or a plugin's"
            )
        if both := sorted(self.inputs.keys() & self.outputs.keys()):
            raise ValueError(f"{both[0]!r} is an input and an output; rename one")
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
        if self.small_ffn and (self.mixtures or self.adapter):
            raise ValueError(
                "small_ffn is for dense layers without an adapter; leave one of them out"
            )
        if self.heads % derived["kv_heads"]:
            raise ValueError(
                f"heads = {self.heads} must be a multiple of kv_heads = {derived['kv_heads']}"
            )
        if self.rotated % 2:
            name = "rope_dim" if self.kv_rank else "head_dim"
            raise ValueError(
                f"{name} = {self.rotated} must be even for rotary position embedding"
            )
        if self.ladder_from and (
            self.residual != "ladder"
            or (self.ladder_from >= self.layers and not self.origin)
        ):
            raise ValueError(
                f"ladder_from = {self.ladder_from} is the first ladder layer of layers = {self.layers}, with residual "
                f"= {self.residual!r}; lower it, or set residual = 'ladder'"
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
