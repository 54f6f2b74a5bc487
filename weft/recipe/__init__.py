"""The typed recipe: a TOML file plus ``section.key=value`` overrides becomes validated, frozen objects.

The same classes build a recipe in Python::

    Recipe(model=ModelShape(layers=4), layout=Layout(shard=2, tp=2), train=Train(steps=100))
"""

import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from weft.errors import UsageError, WeftError
from weft.layout.layout import BATCH_AXES, Layout
from weft.plugins import check, load_plugins
from weft.recipe.compressor_word import compressor_word
from weft.recipe.conflicts import Asked, refuse
from weft.recipe.shipped import find_recipe, shipped_recipes
from weft.recipe.toml import read_toml
from weft.recipe.validation import OneLine, validated

Dtype = Literal["float64", "float32", "bfloat16"]
#: Weft's own kinds of sources, losses that compare pairs of answers, and trackers; plugins bring others.
SOURCES = (
    "stdlib",
    "text",
    "jsonl",
    "parquet",
    "huggingface",
    "tokens",
    "chat",
    "preference",
    "feedback",
)
#: Kinds whose records are conversations, and those of them that are pairs of answers.
CONVERSATIONS, ANSWER_PAIRS = (
    ("chat", "preference", "feedback"),
    ("preference", "feedback"),
)
PAIR_LOSSES = (
    "dpo",
    "dpo-norm",
    "ipo",
    "robust",
    "hinge",
    "simpo",
    "orpo",
    "kto",
    "reward",
)
TRACKERS = ("tensorboard", "wandb", "mlflow")
#: Weights with a row for each token, as PEFT calls them.
VocabularyWeight = Literal["embed_tokens", "lm_head"]
#: Who speaks in a conversation.
Role = Literal["system", "developer", "user", "assistant", "tool"]

#: Where runs go, each in a folder of its own.
RUNS = Path("runs")
#: The value of ``checkpoint.levels.to`` that means a folder in this host's memory.
MEMORY = "memory"


class Section(BaseModel, metaclass=OneLine):
    """Base of every section: unknown keys are errors and values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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


class Adapter(Section):
    """Low-rank adapters that are trained in place of the model's weights, which are frozen.

    ``kind``: ``lora`` (Hu et al. 2021), ``dora``, which also learns the norms of the weights' rows (Liu et al. 2024),
    or ``qlora``: beside weights in four bits (Dettmers et al. 2023).
    ``targets`` are weights by name (``wq`` or ``q_proj``, ``*``) or path (``blocks.3.attention.*``). What an adapter
    adds is multiplied by ``alpha / rank``, or by ``alpha / sqrt(rank)`` if ``rank_stabilised`` (Kalajdzievski 2023).
    ``rank_pattern`` and ``alpha_pattern``: other values for weights by name or path, of which the first that fits
    counts. ``dropout``: this share of what an adapter reads is set to zero while it learns.
    ``whole``: of embedding and output layer, which learn all of their weight. ``tokens``: ids whose rows learn there,
    or ``new``, those by which ``model.vocab`` is larger than in the model to start from; ``tokens_of``: in which.
    """

    kind: Literal["lora", "dora", "qlora"] = "lora"
    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    targets: tuple[str, ...] = Field(("*",), min_length=1)
    rank_stabilised: bool = False
    rank_pattern: dict[str, PositiveInt] = {}
    alpha_pattern: dict[str, PositiveFloat] = {}
    dropout: float = Field(0.0, ge=0, lt=1)
    whole: tuple[VocabularyWeight, ...] = ()
    tokens: tuple[int, ...] | Literal["new"] = ()
    tokens_of: tuple[VocabularyWeight, ...] = ("embed_tokens", "lm_head")

    @field_validator("tokens")
    @classmethod
    def _in_order(cls, given: Any) -> Any:
        if given != "new" and any(token < 0 for token in given):
            raise ValueError(f"{min(given)} is the id of no token; ids count from 0")
        return given if given == "new" else tuple(sorted(set(given)))

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if both := [
            name for name in self.whole if self.tokens and name in self.tokens_of
        ]:
            raise ValueError(
                f"{both[0]} is in whole and in tokens_of, and learns all rows or some; leave out one"
            )
        return self

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @property
    def quantizes(self) -> bool:
        return self.kind == "qlora"


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
    settings: dict[str, Any] = {}
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


class Source(Section):
    """One corpus. ``kind`` says how to read ``path`` (a file, a folder or a glob; none for ``stdlib``).

    ``tokens`` reads memory-mapped token ids (see ``weft.data.tokens``); ``huggingface`` a dataset saved to disk;
    ``chat`` conversations, of which only the assistant's words are learned (docs/chat.md): ``form`` is their form, if
    it is not to be seen from each record, ``field`` the messages' name, if it is none of the usual. Of the form
    ``docstrings`` are questions about Python code, without ``path`` about the standard library. ``preference`` reads
    pairs of answers, ``chosen`` and ``rejected``, and ``feedback`` answers with a ``label`` each (docs/preference.md).
    Any other kind is a plugin's, which is called with ``path`` and ``settings``.

    Of conversations and pairs ``columns`` says what the data's own names mean: ``{ ask = "prompt", note = "" }``, where
    nothing leaves a column out, and ``dialogue.speaker`` is a field of the turns in ``dialogue``; ``roles`` says who
    speaks: ``{ Teacher = "user" }``. ``on_error``: a record that cannot be read ends the run (``stop``), or is left out
    and counted (``skip``).
    """

    kind: str = "stdlib"
    path: str | None = None
    field: str = "text"
    weight: PositiveFloat = 1.0
    settings: dict[str, Any] = {}
    form: Literal[
        "auto", "messages", "prompt", "sharegpt", "alpaca", "adp", "atif", "docstrings"
    ] = "auto"
    columns: dict[str, str] = {}
    roles: dict[str, Role] = {}
    on_error: Literal["stop", "skip"] = "stop"

    @property
    def skips(self) -> bool:
        """Whether records that cannot be read are left out."""
        return self.on_error == "skip"

    @field_validator("kind")
    @classmethod
    def _records(cls, kind: str) -> str:
        """Files of records are read by their names' endings, so that all of them are of one kind."""
        return "jsonl" if kind in ("json", "csv", "tsv") else kind

    @model_validator(mode="after")
    def _path(self) -> Self:
        if (self.columns or self.roles) and self.kind not in CONVERSATIONS:
            name = "columns" if self.columns else "roles"
            raise ValueError(
                f"{name} are of kinds 'chat', 'preference' and 'feedback', which read all files of records; of kind "
                f"{self.kind!r} set 'field'"
            )
        if (
            self.kind in SOURCES
            and self.kind != "stdlib"
            and self.form != "docstrings"
            and not self.path
        ):
            raise ValueError(f"a source of kind {self.kind!r} needs 'path'")
        if (
            self.kind in ANSWER_PAIRS
            and self.field != type(self).model_fields["field"].default
        ):
            raise ValueError(
                f"field is of other kinds; name the columns of pairs: columns = {{ {self.field} = 'chosen' }}"
            )
        if self.kind in ANSWER_PAIRS and self.form not in ("auto", "docstrings"):
            raise ValueError(
                f"a source of kind {self.kind!r} has one form; leave out 'form'"
            )
        return self


class Chat(Section):
    """How sources of kind ``chat`` become tokens (docs/chat.md).

    ``template``: a file with a Jinja template, or the template; the tokenizer's own if left out. ``learn``: from the
    assistant's turns, the ``last`` of them, ``all`` tokens, or the turns of a list of roles. ``truncation``: what
    becomes of conversations longer than ``data.seq_len``. ``pack``: rows hold several whole conversations. ``control``:
    names of special tokens in somebody's words become these tokens. ``variables`` are handed to the template; ``date``
    (2026-01-31) is what it takes for today. ``reasoning``: of turns that the ``template`` leaves it out of, it is not
    learned, or the conversation is ``split`` into samples that each end with the turns of one question.
    """

    template: str = ""
    learn: Literal["assistant", "last", "all"] | tuple[Role, ...] = "assistant"
    truncation: Literal["keep_start", "keep_end", "drop", "error"] = "keep_start"
    pack: bool = True
    control: bool = False
    variables: dict[str, Any] = {}
    date: str = Field("", pattern=r"^(\d{4}-\d\d-\d\d)?$")
    reasoning: Literal["template", "split"] = "template"


class Data(Section):
    """What is read and in which order. ``epochs = 0`` repeats for ever; otherwise the run ends with the data, or after
    ``train.steps`` if these are given and fewer.

    Keys of a source may stand here themselves, where there is one source only; ``columns``, ``roles`` and ``on_error``
    also beside ``sources``, for all of these.

    ``tokenizer`` is ``bytes``, a path to a ``tokenizer.json`` (or a folder with one), or ``train:N``: a byte-level
    BPE of N entries trained on the corpus itself. Left out, it is that of ``model.from``, or else ``bytes``.

    ``validation``: the share of the documents that is held out for validation, or the path of a file, folder or glob
    with others, which is read as the (first) source is.

    ``bos``: whether texts begin with the tokenizer's BOS token, documents as well as prompts and questions. ``auto``:
    if its post-processor says so. ``prompts``: as ``auto``, but documents begin without, as in runs of before there was
    this setting. Conversations begin as the chat template writes them.
    """

    sources: tuple[Source, ...] = Field((Source(),), min_length=1)
    tokenizer: str = ""
    seq_len: int = Field(256, gt=0, lt=2**31)
    seed: int = 0
    epochs: int = Field(0, ge=0)
    validation: float | str = 0.02
    cache: Path | None = None
    bos: bool | Literal["auto", "prompts"] = "auto"
    chat: Chat = Chat()

    @property
    def held_out(self) -> float:
        """The share of the sources' documents that is held out for validation."""
        return 0.0 if isinstance(self.validation, str) else self.validation

    @field_validator("validation")
    @classmethod
    def _share_or_path(cls, given: float | str) -> float | str:
        if given == "" or not (isinstance(given, str) or 0 <= given < 1):
            raise ValueError(
                "it should be a share of the documents, below 1, or the path of a file with others"
            )
        return given

    @model_validator(mode="before")
    @classmethod
    def _one_source(cls, given: Any) -> Any:
        """``kind``, ``path`` and the like as those of the only source."""
        own = (
            {key: given[key] for key in given if key in Source.model_fields}
            if isinstance(given, dict)
            else {}
        )
        shared = {
            key: value
            for key, value in own.items()
            if key in ("columns", "roles", "on_error")
        }
        if (
            own
            and own == shared
            and all(
                isinstance(source, dict) for source in given.get("sources", (None,))
            )
        ):
            return {k: v for k, v in given.items() if k not in own} | {
                "sources": [shared | s for s in given["sources"]]
            }
        if own and "sources" in given:
            key = next(iter(own))
            raise ValueError(
                f"data.{key} stands beside data.sources; set data.sources = [{{ {key} = ... }}] to replace these"
            )
        return (
            {key: given[key] for key in given if key not in own} | {"sources": [own]}
            if own
            else given
        )


class Loss(Section):
    """The training loss (docs/preference.md).

    ``cross-entropy`` of the labels; or, on pairs of answers of which one is preferred, ``dpo`` (Rafailov et al. 2023),
    ``dpo-norm`` (of averages over tokens, Rafailov et al. 2024), ``ipo`` (Azar et al. 2023), ``robust`` (Chowdhury et
    al. 2024), ``hinge`` (Zhao et al. 2023), ``simpo`` (Meng et al. 2024), ``orpo`` (Hong et al. 2024)
    and ``reward``, which trains a model with a scalar head to score answers (Bradley & Terry 1952).

    ``beta`` multiplies the difference of the two answers, and for ``orpo`` the odds ratio's part of the loss;
    ``label_smoothing`` is the assumed share of pairs with swapped labels; ``margin`` is by how much ``simpo`` and
    ``reward`` want the chosen answer ahead. ``reference``: the model that the other losses keep close to; by default
    the one from which the run starts. ``kto`` (Ethayarajh et al. 2024) learns from answers that are each good or bad
    (data of kind ``feedback``), which it counts ``desirable`` and ``undesirable`` times.

    Any other kind is a plugin's (docs/plugins.md), which is called with ``settings``.
    """

    kind: str = "cross-entropy"
    settings: dict[str, Any] = {}
    beta: PositiveFloat = 0.1
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    margin: float = 0.0
    reference: str | None = None
    desirable: PositiveFloat = 1.0
    undesirable: PositiveFloat = 1.0

    @property
    def of_pairs(self) -> bool:
        return self.kind in PAIR_LOSSES

    @property
    def is_own(self) -> bool:
        """Whether a plugin computes it."""
        return self.kind not in ("cross-entropy", *PAIR_LOSSES)


class ParameterGroup(Section):
    """Settings for the parameters whose names match ``match`` (with ``*`` and ``?``).

    ``lr`` multiplies the learning rate; ``weight_decay`` replaces the optimizer's.
    """

    match: str
    lr: float = Field(1.0, ge=0)
    weight_decay: float | None = Field(None, ge=0)


class Optimizer(Section):
    """How parameters are updated.

    The learning rate rises to ``lr`` in ``warmup`` steps, or in that share of the run if it is below 1. Left out, the
    warm-up takes a tenth of the run, and at most 100 steps. After it, ``schedule``: ``cosine``, ``linear``, ``wsd``
    (stable, and a linear decay at the end; Hu et al. 2024) or ``constant``. Both end where the run does: at
    ``train.steps``, or where ``data.epochs`` are over.

    ``estimate``: how gradients are computed; ``zeroth-order`` estimates them from the losses at two points, ``epsilon``
    times a random direction away, without backward and unclipped (MeZO, Malladi et al. 2023). ``pairs``: each of two
    ranks along ``dp`` evaluates one of the points, on the same sequences (DistZO2, Wang et al. 2025). ``kind``:
    ``adamw`` (Loshchilov & Hutter 2019), ``sgd``, ``lion`` (Chen et al. 2023), ``adafactor`` (Shazeer & Stern 2018),
    ``muon`` (Jordan et al. 2024), ``galore`` (Zhao et al. 2024) or ``natural-galore`` (Das 2024). The last three update
    the matrices of blocks, and AdamW the rest. ``state``: the type of AdamW's moments; ``block``: elements of a row
    that share a scale in 8 or 4 bits. ``momentum`` is for Muon. ``rank``, ``refresh`` (updates between two sets of
    directions), ``scale`` and ``history`` (past gradients of ``natural-galore``) are for GaLore. ``ema``: decay of a
    moving average of the parameters that is kept beside them; 0 keeps none. ``use_ema``: validate, sample and export
    this average instead of the parameters. ``in_backward``: every block is updated as soon as backward has its
    gradients, which are then freed (LOMO, Lv et al. 2023); needs ``clip = 0``.
    """

    estimate: Literal["backward", "zeroth-order"] = "backward"
    epsilon: PositiveFloat = 1e-3
    pairs: bool = False
    kind: Literal[
        "adamw", "sgd", "lion", "adafactor", "muon", "galore", "natural-galore"
    ] = "adamw"
    state: Literal["float32", "bfloat16", "8bit", "4bit"] = "float32"
    block: PositiveInt = 256
    momentum: float = Field(0.95, ge=0, lt=1)
    rank: PositiveInt = 128
    refresh: PositiveInt = 200
    scale: PositiveFloat = 0.25
    history: PositiveInt = 4
    ema: float = Field(0.0, ge=0, lt=1)
    use_ema: bool = False
    in_backward: bool = False
    groups: tuple[ParameterGroup, ...] = ()
    lr: PositiveFloat = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: float = Field(0.1, ge=0)
    clip: float = Field(
        1.0, ge=0, description="global gradient norm; 0 turns clipping off"
    )
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup: int | float | None = Field(None, ge=0)
    decay: int = Field(
        0,
        ge=0,
        description="steps of the final decay of 'wsd', at most all after warm-up; 0: a fifth of all",
    )
    min_lr: float = Field(0.1, ge=0, le=1, description="floor as a fraction of lr")
    post_validation: bool = Field(
        False,
        description="pipelines: update at once, check the global norm a step later",
    )

    @field_validator("warmup")
    @classmethod
    def _steps_or_share(cls, warmup: int | float | None) -> int | float | None:
        if not isinstance(warmup, float) or 0 < warmup < 1:
            return warmup
        if not warmup.is_integer():
            raise ValueError(
                "it should be a whole number of steps, or a share of the run below 1"
            )
        return int(warmup)


class Train(Section):
    """One training run.

    ``steps``: the run ends after so many; left out, 100, or where ``data.epochs`` are over. Of the two the earlier end
    counts. ``batch`` counts sequences per step over all ranks; ``micro_batch`` per rank and pass.
    """

    steps: int = Field(100, ge=0, description="0: as many as data.epochs need")
    batch: int = Field(8, gt=0, le=10_000_000)
    micro_batch: int | None = Field(None, gt=0, le=10_000_000)
    dtype: Dtype = "float32"
    recompute: Literal["none", "selective", "full"] = "none"
    compile: bool = False
    freeze: tuple[str, ...] = Field(
        (), description="patterns of parameters that do not learn, e.g. 'embedding.*'"
    )
    loss_chunk: PositiveInt = 1024
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(
        0,
        ge=0,
        description="threads per rank; 0 divides the cores among the local ranks",
    )
    timeout: PositiveInt = Field(
        600, description="seconds a rank waits for the others in a collective"
    )

    @model_validator(mode="before")
    @classmethod
    def _offload(cls, tree: Any) -> Any:
        """Older recipes say ``offload`` for what stands in ``[memory]`` now."""
        if not isinstance(tree, dict) or "offload" not in tree:
            return tree
        kinds: dict[str, tuple[str, ...]] = {
            "none": (),
            "optimizer": ("weights",),
            "activations": ("activations",),
        }
        if now := kinds.get(str(tree["offload"]), ("weights", "activations")):
            said = " and ".join(f"memory.{kind} = 'host'" for kind in now)
            raise ValueError(f"offload = {tree['offload']!r} is now {said}")
        return {key: value for key, value in tree.items() if key != "offload"}


#: Where tensors can rest while they are not in use, the nearest first.
PLACES = ("device", "host", "file")
Place = Literal["device", "host", "file"]


class Memory(Section):
    """Where tensors rest while they are not in use: on the ``device``, in the ``host``'s memory, or in a ``file``.

    ``weights``: the rank's own rows of the parameters, in full precision. They are updated where they rest, or on the
    host if that is a file (ZeRO-Offload, Ren et al. 2021). ``gradients``, once reduced, and the optimizer's ``moments``
    rest with the weights by default; moments may be further away. ``activations``: what backward needs of the first
    ``blocks`` blocks of every pass; 0 takes as many as transfers can hide, by a profile of passes. ``folder`` is where
    the files are. They have no names, and disappear with the run however it ends. ``speculate``: which units are
    updated during backward, before the global norm decides about clipping, and undone if it clips (SuperOffload, Lian
    et al. 2025): "all", or with "even" as many as balance a step's transfers. ``alternate``: with weights and moments
    on the host, this share of the units is updated on the device meanwhile (Deep Optimizer States, Maurya et al. 2024);
    "auto": the fastest share, by rates measured in the first steps. ``buffer``: MiB of weights from a file that stay in
    memory from forward to backward, beyond what a step needs in any case.
    """

    weights: Place = "device"
    gradients: Literal["", "device", "host", "file"] = ""
    moments: Literal["", "device", "host", "file"] = ""
    activations: Place = "device"
    blocks: int = Field(
        0,
        ge=0,
        description="how many blocks' activations leave; 0: as many as travel hidden",
    )
    folder: str = "."
    buffer: int = Field(
        0,
        ge=0,
        description="MiB of weights from files that stay from forward to backward",
    )
    speculate: Literal["none", "even", "all"] = "none"
    alternate: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = 0.0

    def place_of(self, kind: str) -> str:
        """Where weights, gradients, moments or activations rest."""
        return getattr(self, kind) or self.weights

    def distance(self, kind: str) -> int:
        return PLACES.index(self.place_of(kind))

    @property
    def away(self) -> dict[str, str]:
        """Where weights, gradients, moments and activations rest, for those that do not rest on the device."""
        kinds = ("weights", "gradients", "moments", "activations")
        return {kind: self.place_of(kind) for kind in kinds if self.distance(kind)}

    @property
    def offloads_state(self) -> bool:
        return self.weights != "device"

    @property
    def offloads_activations(self) -> bool:
        return self.activations != "device"

    @field_validator("folder")
    @classmethod
    def _local(cls, folder: str) -> str:
        if "://" in folder:  # which would be a folder of that name, here
            raise ValueError("it should be a folder of this computer, on a local disk")
        return folder

    @model_validator(mode="after")
    def _together(self) -> Self:
        refuse(Asked(memory=self), "memory")
        return self


class Validation(Section):
    """How the loss on ``data.validation`` is measured, and what follows from it (docs/training.md).

    ``keep_best``: the checkpoint of the lowest loss is kept beside the newest ones, is called ``best`` in the run's
    folder, and is what ``checkpoint.export`` exports.
    """

    every: int = Field(
        50, ge=0, description="steps between validations; 0 turns them off"
    )
    batches: int = Field(
        4, ge=0, description="of train.batch sequences; 0: all there are"
    )
    keep_best: bool = False
    patience: int = Field(
        0,
        ge=0,
        description="validations without a lower loss that end the run; 0: it never ends so",
    )

    @model_validator(mode="after")
    def _happens(self) -> Self:
        if not self.every and (self.keep_best or self.patience):
            name = "keep_best" if self.keep_best else "patience"
            raise ValueError(
                f"{name} waits for validations, and every = 0 turns them off; set validation.every"
            )
        return self


class Task(Section):
    """A file of questions that the model is asked before the first step, every so many, and at the end.

    docs/evaluation.md has the file's form. ``chat``: prompts are what a user says, and the chat template is applied.
    """

    path: str
    name: str = Field(
        "", pattern=r"^[\w.-]*$", description="in records; the file's if left out"
    )
    every: int = Field(
        0,
        ge=0,
        description="steps between; 0 asks at the beginning and at the end alone",
    )
    chat: bool = False
    limit: int = Field(0, ge=0, description="the first so many questions; 0 for all")


class Level(Section):
    """One place for checkpoints with a cadence of its own.

    ``to``: "" (the run folder's ``checkpoints``), a folder, ``s3://bucket/prefix``, or "memory" (this host's /dev/shm).
    """

    to: str = ""
    every: int = Field(
        0, ge=0, description="steps between checkpoints; 0 saves only at the end"
    )
    keep: PositiveInt = 2


class Checkpoint(Level):
    """``levels``, fastest first, instead of ``to``, ``every`` and ``keep``; the last gets the final checkpoint.

    ``on_error``: when a save in the background fails, the run goes on with a warning or stops at the next save.
    ``export``: what the run's folder gets at the end for other programs, in ``export``: the ``model`` as Hugging Face's
    transformers reads it, with an adapter merged into it, or the ``adapter`` as PEFT does.
    """

    export: Literal["", "model", "adapter"] = ""
    on_error: Literal["warn", "stop"] = "warn"
    levels: tuple[Level, ...] = ()

    @property
    def all_levels(self) -> tuple[Level, ...]:
        return self.levels or (Level(to=self.to, every=self.every, keep=self.keep),)

    @model_validator(mode="after")
    def _places(self) -> Self:
        from weft.checkpoint.s3 import open_storage

        if self.levels and (self.to, self.every, self.keep) != ("", 0, 2):
            raise ValueError(
                "give every level its own to, every and keep, or leave checkpoint.levels out"
            )
        found = [level.to for level in self.all_levels]
        for to in found:
            try:
                open_storage(to)
            except (
                UsageError
            ) as error:  # without the value, which may have a credential in it
                raise ValueError(str(error)) from None
        if len({to.rstrip("/") for to in found}) < len(found):
            raise ValueError("two levels have the same 'to'")
        if found[-1] == MEMORY:
            raise ValueError(
                f"{MEMORY!r} does not outlast the run; add a level after it that does"
            )
        if any(not level.every for level in self.levels[:-1]):
            raise ValueError(
                "all levels but the last, which gets the final checkpoint, need 'every'"
            )
        return self


#: How many replicas a rule of ``resilience.aggregate`` needs: (for each faulty one, and so many more).
REPLICAS_NEEDED = {
    "flag": (2, 1), "krum": (2, 3), "multi-krum": (2, 3), "bulyan": (4, 3), "geometric-median": (2, 1),
    "trimmed-mean": (2, 1),
}  # fmt: skip


class Observe(Section):
    """``trackers``: who gets the records: ``tensorboard``, ``wandb``, ``mlflow``, or a plugin's.

    By default TensorBoard does if its package is installed.
    """

    every: PositiveInt = 1
    trackers: tuple[str, ...] = Field(
        default_factory=lambda: ("tensorboard",) * bool(find_spec("tensorboard"))
    )
    split_every: int = Field(
        25,
        ge=0,
        description="steps between profiled steps for the time split; 0 turns it off",
    )
    trace: int = Field(
        0, ge=0, description="number of steps to write as a Chrome/Perfetto trace"
    )


class Resilience(Section):
    """What a run of several ranks does when one of them dies, stalls or crawls (docs/resilience.md).

    ``survive``: the others finish the step, or with islands the round; otherwise the run ends and continues from its
    last checkpoint, as do islands that synchronise in every step. Every ``snapshot_every`` steps each rank copies its
    state into another rank's memory; with 0 there are no copies, and a loss goes back to the last checkpoint.
    ``detect``: seconds after which a silent rank counts as lost. With fewer than ``min_ranks`` left the run saves and
    ends. ``actions`` on a slow rank: ``say`` names it, ``rebalance`` gives it less to do, ``leave-out`` removes it.

    ``aggregate``: how the gradients of replicas (``layout.dp``) are combined. Every rule but the mean tolerates
    ``faulty`` replicas that send anything: ``flag`` (Almasi et al. 2024), ``krum`` or ``multi-krum`` (Blanchard et al.
    2017), ``bulyan`` (El Mhamdi et al. 2018), ``geometric-median`` (Pillutla et al. 2019) or ``trimmed-mean`` (Yin et
    al. 2018).

    ``code``: replicas compute some of each other's samples, so that the sum of all gradients is known before up to
    ``stragglers`` late replicas are done (:mod:`weft.sync.coded`): by ``gradient`` coding (Tandon et al. 2017), or,
    with a step cut into ``jobs``, by one of the sequential codes (Krishnan et al. 2023), which need less redundancy:
    ``sr-sgc`` or ``m-sgc``, made for that many stragglers in any ``window`` jobs, each late for at most ``burst`` of
    them. A rank is late after 1 + ``patience`` times as long as the first.
    """

    survive: bool = True
    snapshot_every: int = Field(1, ge=0)
    detect: float = Field(1.5, gt=0)
    min_ranks: PositiveInt = 1
    actions: Literal["say", "rebalance", "leave-out"] = "say"
    aggregate: Literal[
        "mean",
        "flag",
        "krum",
        "multi-krum",
        "bulyan",
        "geometric-median",
        "trimmed-mean",
    ] = "mean"
    faulty: int = Field(0, ge=0)
    code: Literal["", "gradient", "sr-sgc", "m-sgc"] = ""
    stragglers: int = Field(0, ge=0)
    jobs: PositiveInt = 1
    burst: PositiveInt = 1
    window: int = Field(2, ge=2)
    patience: PositiveFloat = 1.0

    @property
    def replicas_needed(self) -> int:
        each, more = REPLICAS_NEEDED.get(self.aggregate, (0, 1))
        return each * self.faulty + more

    @property
    def combines(self) -> bool:
        """Whether the gradients of replicas are combined in another way than by a plain sum."""
        return self.aggregate != "mean" or bool(self.code)


#: Learning rate and momentum of the outer update, as published, by ``sync.update``.
OUTER = {
    "nesterov": (0.7, 0.9), "streaming": (0.7, 0.9), "eager": (0.7, 0.9), "co2": (1.0, 0.2), "noloco": (0.7, 0.5),
}  # fmt: skip


class Sync(Section):
    """How islands (``layout.island``) agree: docs/islands.md.

    Islands synchronise after ``every`` steps, with all others or with some (``partner``): ring neighbours, random
    pairs, or those that a ``graph`` of pairs such as [[0, 1], [1, 2]] links; partners are for ``update = "average"``,
    and ``"noloco"`` always uses pairs. ``update`` says how (:mod:`weft.sync.methods`): the ``average`` of all
    parameters; ``nesterov`` momentum on the mean difference (DiLoCo); the same for fragments in turn, whose result is
    applied ``delay`` steps later, mixed with a share ``mix`` of the local parameters (``streaming``); with the others'
    differences of the last round (``eager``, ``co2``); or in pairs (``noloco``). Where all average in every step they
    exchange gradients, and compute exactly what one island would.

    ``compress``: the compressor of what is sent: ``int8`` to ``int4``, ``topk:0.01``, ``randk:0.1``, ``powersgd:4``,
    ``sign`` or ``cocktail`` (:mod:`weft.sync.compress`); ``compress_back`` is that of what comes back, if it differs.
    The error of a message is added to the next one. With ``allocate`` each tensor has a rank, share or number of
    bits of its own, chosen anew every that many rounds for the smallest total size with no more error than one setting
    for all (L-GreCo).

    Sums go around a ring of the islands: in the order measured to be fastest, or as numbered.

    ``lr`` and ``momentum`` of the outer update default to those of its paper. For ``co2``: late differences are divided
    by ``penalty``, and no element of the momentum is above ``clip``.
    """

    every: PositiveInt = 1
    partner: Literal["all", "ring", "pairs", "graph"] = "all"
    graph: tuple[tuple[int, int], ...] = ()
    update: Literal["average", "nesterov", "streaming", "eager", "co2", "noloco"] = (
        "average"
    )
    fragments: PositiveInt = 1
    delay: int = Field(0, ge=0)
    mix: float = Field(0.5, ge=0, le=1)
    lr: PositiveFloat = 1.0
    momentum: float = Field(0.0, ge=0, lt=1)
    penalty: PositiveFloat = 1.0
    clip: PositiveFloat = 1.0
    compress: str = "none"
    compress_back: str = ""
    allocate: int = Field(0, ge=0)
    order: Literal["measured", "numbered"] = "measured"

    @model_validator(mode="after")
    def _compressors(self) -> Self:
        for field, word in (
            ("compress", self.compress),
            ("compress_back", self.compress_back),
        ):
            try:
                compressor_word(word or "none")
            except UsageError as error:
                raise ValueError(f"{field}: {error}") from None
        return self

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and tree.get("update") == "diloco":
            raise ValueError(
                "update = 'diloco': DiLoCo is update = 'nesterov', or 'streaming' with fragments"
            )
        if isinstance(tree, dict) and tree.get("update") in OUTER:
            tree = (
                dict(zip(("lr", "momentum"), OUTER[tree["update"]], strict=True)) | tree
            )
        return tree

    @property
    def of_gradients(self) -> bool:
        """Whether gradients are exchanged, before every update, so that islands compute what one would."""
        return (self.every, self.update, self.partner, self.compress) == (
            1,
            "average",
            "all",
            "none",
        )

    @property
    def in_ring(self) -> bool:
        """Whether sums of all islands go around a ring."""
        return (
            self.partner == "all"
            and self.update != "noloco"
            and self.compress.split(":")[0] in ("none", "powersgd")
        )


class Generate(Section):
    """What the model writes at the end of the run: after ``prompt``, or after each of ``prompts``.

    ``chat``: prompts are user messages, and the chat template is applied. ``before``: also show what the model of
    ``model.from`` writes.
    """

    prompt: str = "def "
    prompts: tuple[str, ...] = ()
    chat: bool = False
    before: bool = False
    tokens: PositiveInt = 120
    temperature: float = Field(0.8, ge=0)
    top_k: int = Field(40, ge=0)

    @property
    def all_prompts(self) -> tuple[str, ...]:
        return self.prompts or (self.prompt,)


class Use(Section):
    """A plugin's registration by name, with the ``settings`` that it is called with; a text is the name alone."""

    name: str
    settings: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given


class Recipe(Section):
    """Everything one run needs.

    ``plugins``: modules of the user's, which register what the recipe then names (docs/plugins.md); ``callbacks`` are
    such. Both end the run if they fail.
    """

    name: str = "run"
    plugins: tuple[str, ...] = ()
    callbacks: tuple[Use, ...] = ()
    model: ModelShape = ModelShape()
    adapter: Adapter | None = None
    data: Data = Data()
    layout: Layout = Layout()
    train: Train = Train()
    memory: Memory = Memory()
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()
    validation: Validation = Validation()
    tasks: tuple[Task, ...] = ()
    checkpoint: Checkpoint = Checkpoint()
    observe: Observe = Observe()
    resilience: Resilience = Resilience()
    sync: Sync = Sync()
    generate: Generate | None = None

    @model_validator(mode="after")
    def _plugged(self) -> Self:
        """Import the plugins, and look for all that they are to offer."""
        load_plugins(self.plugins)
        for use in self.callbacks:
            check("callbacks", "callback", use.name, use.settings)
        for name in self.observe.trackers:
            check("observe.trackers", "tracker", name, {}, TRACKERS)
        check(
            "loss.kind",
            "loss",
            self.loss.kind,
            self.loss.settings,
            ("cross-entropy", *PAIR_LOSSES),
        )
        if self.loss.settings and not self.loss.is_own:
            raise ValueError(
                f"loss.settings are for a plugin's loss, and loss.kind = {self.loss.kind!r} is Weft's own"
            )
        if self.model.kind:
            check("model.kind", "model", self.model.kind, self.model.settings)
        for source in self.data.sources:
            check("data.kind", "dataset", source.kind, source.settings, SOURCES)
        return self

    @model_validator(mode="after")
    def _length(self) -> Self:
        """Where ``data.epochs`` alone says how long the run is, it has no other limit."""
        if self.data.epochs and "steps" not in self.train.model_fields_set:
            object.__setattr__(
                self, "train", self.train.model_copy(update={"steps": 0})
            )
        if not (self.train.steps or self.data.epochs):
            raise ValueError(
                "train.steps = 0 is as many as data.epochs need, and these are 0; set one of the two"
            )
        return self

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.model.adapter is not None and self.model.origin is not None:
            raise ValueError(
                "model.adapter is that of model.from; a new one is the recipe's own: adapter = Adapter(...)"
            )
        asked = Asked(
            self.layout,
            train=self.train,
            optimizer=self.optimizer,
            recipe=self,
            memory=self.memory,
        )
        refuse(asked, "layout", "train", "memory", "optimizer", "recipe")
        self._check_loss()
        return self

    @property
    def survives(self) -> bool:
        """Whether the run goes on when ranks are lost."""
        return (
            self.resilience.survive
            and self.layout.world > 1
            and self.layout.island == 1
        )

    @property
    def islands_come_and_go(self) -> bool:
        """Whether the run goes on when islands are lost; not if their gradients become one in every step."""
        return (
            self.resilience.survive
            and self.layout.island > 1
            and not self.sync.of_gradients
        )

    def dealt(self, layout: Layout) -> Layout:
        """The layout as sequences are dealt out to it: with ``optimizer.pairs`` two ranks get the same sequences."""
        paired = self.optimizer.pairs and layout.dp > 1
        return layout.model_copy(update={"dp": layout.dp // 2}) if paired else layout

    def _check_loss(self) -> None:
        """Pairs of answers and a loss that compares them come together."""
        kind, pairs = (
            self.loss.kind,
            [source.kind in ANSWER_PAIRS for source in self.data.sources],
        )
        learns_judged = kind == "kto"
        others = [
            s.kind for s in self.data.sources if (s.kind == "feedback") != learns_judged
        ]
        if others and (learns_judged or "feedback" in others):
            other = others[0] if learns_judged else "feedback"
            raise ValueError(
                f"loss.kind = {kind!r} with data.kind = {other!r}: 'kto' learns from answers that "
                "are each good or bad, data.kind = 'feedback', and nothing else does"
            )
        if self.loss.of_pairs and not all(pairs):
            raise ValueError(
                f"loss.kind = {kind!r} compares pairs of answers; set data.kind = 'preference'"
            )
        if any(pairs) and not self.loss.of_pairs:
            raise ValueError(
                "data.kind = 'preference' has pairs of answers; set loss.kind = 'dpo' or the like"
            )
        if self.loss.reference is not None and (
            kind in ("simpo", "orpo", "reward") or not self.loss.of_pairs
        ):
            raise ValueError(
                f"loss.reference, but loss.kind = {kind!r} has none; leave it out"
            )
        if self.loss.label_smoothing and (
            kind in ("ipo", "hinge", "orpo", "kto") or not self.loss.of_pairs
        ):
            raise ValueError(
                f"loss.label_smoothing does nothing for loss.kind = {kind!r}; leave it out"
            )
        if self.loss.margin and kind not in ("simpo", "reward"):
            raise ValueError(
                f"loss.margin does nothing for loss.kind = {kind!r}; leave it out"
            )
        if kind == "reward" and self.generate:
            raise ValueError(
                "loss.kind = 'reward' makes a model that scores texts and writes none; leave out [generate]"
            )
        if self.model.output == "score" and kind != "reward":
            raise ValueError(
                f"model.output = 'score' is trained by loss.kind = 'reward', not by {kind!r}"
            )

    def rows_per_pass(self, layout: Layout) -> tuple[int, int]:
        """``(rows, passes)``: sequences per rank and pass, and gradient-accumulation passes per step."""
        ranks = self.dealt(layout).size(*BATCH_AXES)
        per_rank = -(-self.train.batch // ranks)
        # A pipeline wants microbatches, about twice as many as it has ranks.
        rows = min(
            self.train.micro_batch
            or max(1, per_rank // (2 * layout.pp if layout.pp > 1 else 1)),
            per_rank,
        )
        return rows, -(-per_rank // rows)


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), layout: str | None = None, origin: str | None = None,
    data: str | None = None,
) -> Recipe:  # fmt: skip
    """Read a TOML recipe: a file, or one of Weft's own by its name. An error is one line with the nearest valid choice.

    ``overrides`` are ``section.key=value``, ``layout`` is ``"shard=2,tp=2"``, as on the command line. ``origin``:
    the model to start from in the place of the recipe's, with its own tokenizer. ``data``: what to read in the place of
    the recipe's sources, as records or texts of their kind.
    """
    file = Path(path) if Path(path).is_file() else find_recipe(path)
    if file is None:
        if Path(path).is_dir():
            raise UsageError(
                f"{path} is a folder; give a recipe, which is a TOML file, or a name of 'weft recipes'"
            )
        alike = get_close_matches(Path(path).stem, shipped_recipes(), n=1)
        remedy = (
            f"did you mean {alike[0]!r}?"
            if alike
            else "see 'weft recipes', or write one with 'weft new NAME'"
        )
        raise WeftError(f"recipe {path} does not exist; {remedy}")
    if file.suffix in (".yaml", ".yml", ".json"):
        raise UsageError(
            f"{path}: recipes are TOML files; docs/coming-from.md says what settings of other programs are"
        )
    tree = read_toml(file, str(path))
    # nobody means to train what all defaults together give
    if not (tree or overrides or origin or data):
        raise UsageError(
            f"{path} is empty; 'weft new NAME' writes a recipe to edit, 'weft recipes' lists others"
        )
    if origin is not None:
        tree["model"] = {"from": origin}
        tree["data"] = {
            key: value
            for key, value in tree.get("data", {}).items()
            if key != "tokenizer"
        }
    set_keys = {item.partition("=")[0].strip() for item in overrides}
    if (
        "data.path" in set_keys
        and "data.sources" not in set_keys
        and isinstance(tree.get("data"), dict)
    ):
        # a path of the user's own is read instead of what the recipe names
        tree["data"].pop("sources", None)
    if data is not None:
        tree["data"] = _with_data(tree.get("data", {}), data)
    for item in overrides:
        _override(tree, item)
    if layout is not None:
        tree["layout"] = Layout.parse(layout, tree.get("layout", {})).model_dump()
    if isinstance(tree.get("model"), dict) and "adapter" in tree["model"]:
        raise UsageError(
            f"{path}: unknown section [model.adapter]; adapters have a section of their own, [adapter]"
        )
    tree.setdefault("name", file.stem)
    return build_recipe(tree, str(path))


def build_recipe(tree: dict[str, Any], origin: str = "recipe") -> Recipe:
    """Validate a nested dictionary into a :class:`Recipe`; one line per :class:`UsageError`."""
    return validated(Recipe, tree, origin)


def _with_data(section: dict[str, Any], path: str) -> dict[str, Any]:
    """The section ``[data]`` with ``path`` as its only source: of the kind of its first, whose files are of others."""
    first = (section.get("sources") or [section])[0]
    kind = first.get("kind", "stdlib")
    if kind == "stdlib":
        endings = {
            ".jsonl": "jsonl",
            ".json": "jsonl",
            ".csv": "csv",
            ".tsv": "tsv",
            ".parquet": "parquet",
        }
        kind = next(
            (endings[ending] for ending in Path(path).suffixes if ending in endings),
            "text",
        )
    others = {
        key: value
        for key, value in section.items()
        if key not in (*Source.model_fields, "sources")
    }
    return others | {"kind": kind, "path": path}


def _override(tree: dict[str, Any], item: str) -> None:
    """Apply one ``section.key=value``; the value is read as TOML and falls back to a plain string.

    ``section=none`` leaves a section out.
    """
    key, equals, text = item.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"--set {item!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"v = {text.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    *sections, leaf = key.strip().split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise UsageError(f"--set {item!r}: {section!r} is a value, not a section")
    if (
        value == "none"
        and isinstance(tree.get(leaf), dict | None)
        and leaf in ("adapter", "generate")
    ):
        tree.pop(leaf, None)
    else:
        tree[leaf] = value
