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
            "Method of rescaling. 'linear' divides all frequencies by 'factor'; 'llama3' and "
            "'yarn' divide only low frequencies, each with its own settings below."
        ),
    )
    factor: PositiveFloat = Field(
        1.0,
        description=(
            "How many times longer texts can become: frequencies of the rotation are divided "
            "by this number. 'linear' has no other setting."
        ),
    )
    low_freq_factor: PositiveFloat = Field(
        1.0,
        description=(
            "llama3: divide a frequency fully by 'factor' if its wavelength is longer than "
            "original_max_position / low_freq_factor tokens."
        ),
    )
    high_freq_factor: PositiveFloat = Field(
        4.0,
        description=(
            "llama3: keep a frequency if its wavelength is shorter than original_max_position"
            " / high_freq_factor tokens. Between the two limits it is partly divided."
        ),
    )
    original_max_position: PositiveInt = Field(
        8192,
        description=(
            "Text length in tokens that the model was first trained on. 'linear' does not use"
            " it."
        ),
    )
    beta_fast: PositiveFloat = Field(
        32.0,
        description=(
            "yarn: keep frequencies that make more turns than this within "
            "original_max_position tokens."
        ),
    )
    beta_slow: PositiveFloat = Field(
        1.0,
        description=(
            "yarn: divide frequencies fully by 'factor' that make fewer turns than this "
            "within original_max_position tokens. Between the two limits they are partly "
            "divided."
        ),
    )
    attention_factor: float = Field(
        0.0,
        ge=0,
        description=(
            "yarn: number by which rotated queries and keys are multiplied. 0: g(mscale) / "
            "g(mscale_all_dim) if both are above 0, else g(1), where g(m) = 0.1 m ln(factor) "
            "+ 1."
        ),
    )
    mscale: float = Field(
        0.0,
        ge=0,
        description=(
            "yarn: m in the numerator of the formula that 'attention_factor' gives. It has an"
            " effect only if mscale_all_dim is above 0 and attention_factor is 0."
        ),
    )
    mscale_all_dim: float = Field(
        0.0,
        ge=0,
        description=(
            "yarn: second of two numbers from which attention_factor follows if it is 0. It is "
            "then g(mscale) / g(mscale_all_dim), where g(m) = 0.1 m ln(factor) + 1. If "
            "mscale_all_dim or mscale is 0, attention_factor is g(1) instead. With latent "
            "attention all scores are also multiplied by g(mscale_all_dim) squared (DeepSeek)."
        ),
    )


class ModelShape(Section):
    """The architecture of a decoder-only transformer. Fields that are left out are derived from the others."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    origin: str | None = Field(
        None,
        alias="from",
        description=(
            "Pretrained model to start from, which then sets all other fields: a Hugging Face "
            "or Weft folder, a GGUF file or an id of the Hugging Face hub (owner/name). A path "
            "to a config.json takes the shape alone, with new random weights."
        ),
    )
    kind: str = Field(
        "",
        description=(
            "'diffusion': a transformer that makes images or videos from noise (docs/how-to/images.md). "
            "'mlp': a network that maps arrays to arrays, for [stream]. Any other value: a model that a "
            "plugin registered (docs/reference/extension-kinds.md), with which only 'settings' and 'vocab' "
            "can be set here. Empty: a transformer that writes tokens."
        ),
    )
    settings: dict[str, Any] = Field(
        {},
        description="Keyword arguments for a plugin's model; settings of kind 'diffusion' (docs/how-to/images.md).",
    )
    inputs: dict[str, tuple[PositiveInt, ...]] = Field(
        {},
        description=(
            "For a model that learns from simulations ([stream]): names and shapes of its input arrays, such as { "
            "parameters = [3] }. If not set: the model reads tokens."
        ),
    )
    outputs: dict[str, tuple[PositiveInt, ...]] = Field(
        {},
        description=(
            "For a model that learns from simulations ([stream]): names and shapes of the arrays that it "
            "predicts."
        ),
    )
    vocab: int = Field(
        0,
        ge=0,
        description=(
            "Number of tokens in the vocabulary; 0: as many as the tokenizer, or the model in "
            "'from', has. A larger number adds embedding rows to the model in 'from', each the "
            "mean of its old rows."
        ),
    )
    layers: int = Field(
        4, gt=0, le=100_000, description="Number of transformer layers."
    )
    embed: PositiveInt = Field(
        256,
        description="Width of the model: elements of the vector that represents a token (d_model).",
    )
    heads: PositiveInt = Field(4, description="Number of attention heads.")
    kv_heads: PositiveInt | None = Field(
        None,
        description=(
            "Number of heads for keys and values; fewer than 'heads' is grouped-query attention. If not set: as many "
            "as 'heads'."
        ),
    )
    head_dim: PositiveInt | None = Field(
        None,
        description=(
            "Width of one attention head. If not set: embed / heads. With latent attention (kv_rank): width of the "
            "part that is not rotated."
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
            "Hidden width of a second, small feed-forward network in each layer (Duo-LLM). In training each "
            "token randomly uses the big network, the small one or none in each layer; outside of training "
            "every token uses the big ones. 0: no second network."
        ),
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Share of the values that is set to zero at random in training, of embeddings and of what each "
            "attention and each feed-forward adds to the residual stream."
        ),
    )
    qk_norm: bool = Field(
        False, description="Normalise the queries and keys of each head."
    )
    qkv_bias: bool = Field(
        False, description="Add a bias to the projections for queries, keys and values."
    )
    tied: bool = Field(
        False,
        description="Share one weight between the embedding and the output layer.",
    )
    norm_eps: PositiveFloat = Field(
        1e-5,
        description="Small number added to the mean square in RMS norms, against division by zero.",
    )
    rope_theta: PositiveFloat = Field(
        10_000.0,
        description=(
            "Base of the frequencies of rotary position embeddings. Models for longer texts use "
            "larger ones."
        ),
    )
    rope_scaling: RopeScaling | None = Field(
        None,
        description=(
            "Rescaling of rotary position embeddings, for texts longer than the model was trained on. If not set: "
            "none."
        ),
    )
    init_std: PositiveFloat = Field(
        0.02, description="Standard deviation of the random initial weights."
    )
    mixer: Literal["softmax", "linear", "retention"] = Field(
        "softmax",
        description=(
            "Attention of the layers: softmax, linear attention, or retention (linear attention "
            "with decay)."
        ),
    )
    softmax_every: int = Field(
        0,
        ge=0,
        description=(
            "In a model whose mixer is linear or retention: every n-th layer has softmax "
            "attention instead. 0: no layer."
        ),
    )
    window: int = Field(
        0,
        ge=0,
        description=(
            "Sliding-window attention: number of latest tokens that each token attends to, "
            "itself included; 0: all."
        ),
    )
    full_every: int = Field(
        0,
        ge=0,
        description=(
            "In a model with a window: every n-th layer attends to all tokens. 0: all layers "
            "have the window."
        ),
    )
    window_theta: PositiveFloat | None = Field(
        None,
        description="rope_theta of the layers with a window. If not set: the same as in other layers.",
    )
    query_dim: PositiveFloat | None = Field(
        None,
        description=(
            "Divide attention scores by the square root of this number (Gemma 3). If not set: by the square root of "
            "head_dim."
        ),
    )
    activation: Literal["silu", "gelu", "relu"] = Field(
        "silu", description="Activation function in the feed-forward network."
    )
    scaled_embedding: bool = Field(
        False,
        description="Multiply token embeddings by the square root of 'embed' (Gemma 3).",
    )
    norm_after: bool = Field(
        False,
        description=(
            "Add a norm after attention and one after the feed-forward network, besides the "
            "norms before them (Gemma 3)."
        ),
    )
    residual: Literal["standard", "ladder"] = Field(
        "standard",
        description=(
            "Input of attention and feed-forward networks. 'standard': the sum of all earlier outputs; 'ladder': the "
            "sum without the latest output, so that the ranks of layout.tp can exchange this output while they "
            "compute (Ladder Residual)."
        ),
    )
    ladder_from: int = Field(
        0,
        ge=0,
        description=(
            "With residual = 'ladder': index of the first layer with residual = 'ladder'; earlier layers "
            "are 'standard'."
        ),
    )
    rope_interleaved: bool = Field(
        False,
        description=(
            "Which elements of a head rotary embedding rotates as a pair: neighbours (true), "
            "or elements half a head apart (false). It must match the pretrained weights."
        ),
    )
    kv_rank: int = Field(
        0,
        ge=0,
        description=(
            "Latent attention (DeepSeek-V2): width of the compressed vector from which all keys "
            "and values are computed; 0: ordinary attention. Generation caches only that "
            "vector."
        ),
    )
    q_rank: int = Field(
        0,
        ge=0,
        description=(
            "Latent attention: width of the compressed vector from which queries are computed; "
            "0: queries are not compressed."
        ),
    )
    rope_dim: int = Field(
        0,
        ge=0,
        description=(
            "Latent attention: width of the rotated part of each key. All heads share this part. 0: half of head_dim."
        ),
    )
    value_dim: int = Field(
        0,
        ge=0,
        description="Latent attention: width of each head's values; 0: head_dim.",
    )
    experts: PositiveInt | Literal[0] | tuple[int, ...] = Field(
        0,
        description=(
            "Mixture of experts: number of experts in each layer; 0: dense layers without "
            "experts. A list gives the number for each layer."
        ),
    )
    experts_per_token: PositiveInt = Field(
        2, description="Number of experts that process each token (top-k)."
    )
    shared_experts: int = Field(
        0,
        ge=0,
        description="Number of experts that process every token, besides those that the router chooses.",
    )
    shared_mix: Literal["add", "gate", "residual"] = Field(
        "add",
        description=(
            "How the output of shared experts is combined with that of the chosen ones. "
            "'add': added; 'gate': multiplied by a learned sigmoid of the token, then added "
            "(Qwen2-MoE); 'residual': the two are mixed by weights that add up to 1, a "
            "learned softmax of the token (PR-MoE)."
        ),
    )
    expert_ffn: PositiveInt | None = Field(
        None, description="Hidden width of one expert. If not set: the same as 'ffn'."
    )
    first_dense: int = Field(
        0, ge=0, description="Number of layers at the beginning that have no experts."
    )
    moe_every: PositiveInt = Field(
        1,
        description="Put experts into every n-th layer only; the others are dense. 1: into all layers.",
    )
    router: Literal["post-softmax", "pre-softmax", "sigmoid"] = Field(
        "post-softmax",
        description=(
            "How the weights of a token's experts are computed. 'post-softmax': softmax over "
            "the chosen experts' logits (Mixtral); 'pre-softmax': softmax over all logits; "
            "'sigmoid': sigmoid of each logit, and a learned bias takes part in the choice "
            "(DeepSeek-V3)."
        ),
    )
    router_norm: bool = Field(
        False,
        description="Rescale each token's expert weights so that they add up to 1.",
    )
    router_scale: PositiveFloat = Field(
        1.0,
        description="Factor on the router's weights, by which outputs of a token's experts are multiplied.",
    )
    router_groups: PositiveInt = Field(
        1,
        description=(
            "Number of groups that experts are divided into. A token first picks its "
            "router_top_groups best groups, then experts from these. 1: one group with all "
            "experts."
        ),
    )
    router_top_groups: PositiveInt = Field(
        1,
        description=(
            "Number of groups from which each token can pick experts (see router_groups)."
        ),
    )
    router_early: bool = Field(
        False,
        description=(
            "Feed the router with the input of the layer's attention instead of its output "
            "(SmallThinker)."
        ),
    )
    capacity: float = Field(
        0.0,
        ge=0,
        description=(
            "Largest number of tokens of one document that an expert processes in training, as a multiple of its "
            "number if all experts got equally many. Further tokens skip this expert. 0: no limit."
        ),
    )
    bias_rate: float = Field(
        1e-3,
        ge=0,
        description=(
            "By how much a step raises or lowers the bias with which a 'sigmoid' router keeps"
            " experts equally loaded."
        ),
    )
    balance: Literal["sequence", "step", "huggingface"] = Field(
        "sequence",
        description=(
            "Over which tokens balance_loss counts the load of experts: those of one document"
            " ('sequence'), of the whole previous step ('step'), or of one document in all "
            "layers together, as transformers does ('huggingface')."
        ),
    )
    balance_loss: float = Field(
        0.0,
        ge=0,
        description="Weight of the extra loss that keeps experts equally loaded; 0: none.",
    )
    z_loss: float = Field(
        0.0,
        ge=0,
        description="Weight of the extra loss that keeps router logits small; 0: none.",
    )
    output: Literal["tokens", "score"] = Field(
        "tokens",
        description=(
            "What the model computes: logits of the next token, or one score for a reward "
            "model. loss.kind = 'reward' sets it."
        ),
    )
    value_head: bool = Field(
        False,
        description=(
            "Give the model a second output beside the logits: a critic's prediction of the "
            "rewards that follow a token. rl.method = 'ppo' sets it."
        ),
    )
    adapter: Adapter | None = Field(
        None,
        description=(
            "Adapter that the model in 'from' was saved with; Weft sets it. A new adapter "
            "belongs in the section [adapter]."
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
        """Number of experts by layer, for those layers that have experts."""
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
        """Return whether each part of a layer reads the residual stream without the output of the part just before
        it.

        Its sum over ``tp`` can then travel while that part computes (``model.residual``).
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
