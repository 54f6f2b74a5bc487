"""The model that is planned for, as the few numbers that time and memory depend on."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import UsageError, WeftError, nearest
from weft.planner.machine import Num
from weft.recipe import ModelShape, Recipe, load_recipe


@dataclass(frozen=True)
class Shape:
    """A decoder; every field may be an array with one entry per row.

    ``gated``: 1 for SwiGLU (three matrices), 0 for two. ``experts`` of width ``expert_ffn``, ``top_k`` of them per
    token, and a shared one of ``shared_ffn``, in ``moe_layers`` of the layers. ``qkv``: width of the projections into
    attention where it is not ``(heads + 2 kv_heads) head_dim`` (latent attention). ``qk``: width of a head's queries
    and keys, if it is not that of its values. ``windowed``: share of the layers whose attention reaches back ``window``
    tokens. ``clamped``: 1 if experts have biases and a clamped gate (GPT-OSS), which grouped kernels do not fuse.
    """

    layers: Num
    embed: Num
    heads: Num
    kv_heads: Num
    head_dim: Num
    ffn: Num
    vocab: Num
    gated: Num = 1
    tied: Num = 0
    experts: Num = 0
    top_k: Num = 0
    expert_ffn: Num = 0
    shared_ffn: Num = 0
    moe_layers: Num = 0
    qkv: Num = 0
    qk: Num = 0
    window: Num = 0
    windowed: Num = 0
    clamped: Num = 0

    @property
    def qkv_width(self) -> Num:
        return self.qkv + (self.qkv == 0) * (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def score_dim(self) -> Num:
        """Mean of the widths of keys and values per head."""
        return (self.qk + (self.qk == 0) * self.head_dim + self.head_dim) / 2

    def reach(self, seq: Num) -> Num:
        """Twice the tokens that a token attends to, as the mean over the layers: ``seq`` without windows."""
        short = np.minimum(seq, 2 * self.window)
        return seq + self.windowed * (short - seq)

    @property
    def attention_weights(self) -> Num:
        return self.embed * (self.qkv_width + self.heads * self.head_dim)

    @property
    def dense_share(self) -> Num:
        """Share of the layers whose feed-forward is dense."""
        return 1 - self.moe_layers / self.layers

    @property
    def dense_weights(self) -> Num:
        """Per layer, averaged over the layers: attention, dense and shared feed-forward, router; no experts."""
        mlp = (2 + self.gated) * self.embed
        moe = self.shared_ffn * mlp + self.experts * self.embed
        return self.attention_weights + self.dense_share * self.ffn * mlp + (1 - self.dense_share) * moe

    @property
    def expert_weights(self) -> Num:
        """Weights of all experts, averaged over the layers."""
        return (1 - self.dense_share) * self.experts * self.expert_ffn * (2 + self.gated) * self.embed

    @property
    def active_weights(self) -> Num:
        """Per layer, what a token is multiplied with."""
        return self.dense_weights + (1 - self.dense_share) * self.top_k * self.expert_ffn * (2 + self.gated) * (
            self.embed
        )

    @property
    def table(self) -> Num:
        return self.vocab * self.embed

    @property
    def parameters(self) -> Num:
        """All parameters; norms counted, biases not."""
        layer = self.dense_weights + self.expert_weights + 2 * self.embed
        return self.layers * layer + (2 - self.tied) * self.table + self.embed

    def flops_per_token(self, seq: Num, causal: float = 0.5) -> Num:
        """Model flops of forward and backward per token; ``causal`` 1 counts the masked half of attention too."""
        attention = 4 * self.heads * self.score_dim * self.reach(seq) * causal
        return 3 * (self.layers * (2 * self.active_weights + attention) + 2 * self.table)


def _llama(layers: int, embed: int, heads: int, ffn: int, vocab: int = 128256, kv: int = 8, tied: int = 0) -> Shape:
    return Shape(layers, embed, heads, kv, embed // heads, ffn, vocab, tied=tied)


def _gpt(layers: int, embed: int, heads: int, vocab: int = 51200) -> Shape:
    return Shape(layers, embed, heads, heads, embed // heads, 4 * embed, vocab, gated=0, tied=1)


def _moe(
    layers: int, embed: int, heads: int, kv: int, vocab: int, experts: int, top_k: int, width: int, **more: Any
) -> Shape:
    moe = {"head_dim": 128, "ffn": 0, "moe_layers": layers, **more}
    return Shape(
        layers, embed, heads, kv, vocab=vocab, experts=experts, top_k=top_k, expert_ffn=width, **moe
    )  # fmt: skip


#: Shapes by name, from the papers and config.json of the models.
SHAPES: dict[str, Shape] = {
    "gpt3-175b": _gpt(96, 12288, 96),
    "gpt-22b": _gpt(48, 6144, 64),
    "gpt-530b": _gpt(105, 20480, 128),
    "gpt-1t": _gpt(128, 25600, 160),
    "llama2-7b": _llama(32, 4096, 32, 11008, 32000, 32),
    "llama2-13b": _llama(40, 5120, 40, 13824, 32000, 40),
    "llama2-70b": _llama(80, 8192, 64, 28672, 32000),
    "codellama-34b": _llama(48, 8192, 64, 22016, 32000),
    "mistral-7b": _llama(32, 4096, 32, 14336, 32000),
    "qwen2.5-7b": _llama(28, 3584, 28, 18944, 152064, 4),
    "qwen2.5-32b": _llama(64, 5120, 40, 27648, 152064),
    "qwen2.5-72b": _llama(80, 8192, 64, 29568, 152064),
    "qwen3-8b": _llama(36, 4096, 32, 12288, 151936),
    "qwen3-14b": _llama(40, 5120, 40, 17408, 151936),
    "qwen3-32b": replace(_llama(64, 5120, 64, 25600, 151936), head_dim=128),
    "llama3.2-1b": _llama(16, 2048, 32, 8192, tied=1),
    "llama3.2-3b": replace(_llama(28, 3072, 24, 8192, tied=1)),
    "llama3-8b": _llama(32, 4096, 32, 14336),
    "llama3-70b": _llama(80, 8192, 64, 28672),
    "llama3-405b": _llama(126, 16384, 128, 53248),
    "nemotron4-15b": replace(_llama(32, 6144, 48, 24576, 256000), gated=0),
    "nemotron4-340b": replace(_llama(96, 18432, 96, 73728, 256000), gated=0),
    "qwen3-30b": _moe(48, 2048, 32, 4, 151936, 128, 8, 768),
    "qwen3-235b": _moe(94, 4096, 64, 4, 151936, 128, 8, 1536),
    "gpt-oss-20b": _moe(24, 2880, 64, 8, 201088, 32, 4, 2880, head_dim=64, window=128, windowed=0.5, clamped=1),
    "gpt-oss-120b": _moe(36, 2880, 64, 8, 201088, 128, 4, 2880, head_dim=64, window=128, windowed=0.5, clamped=1),
    "mixtral-8x7b": _moe(32, 4096, 32, 8, 32000, 8, 2, 14336),
    "mixtral-8x22b": _moe(56, 6144, 48, 8, 32768, 8, 2, 16384),
    # Latent attention: 187 M weights per layer, of which the output has heads x 128.
    "deepseek-v3": _moe(
        61, 7168, 128, 128, 129280, 256, 8, 2048, ffn=18432, moe_layers=58, shared_ffn=2048, qkv=9700, qk=192
    ),
    "kimi-k2": _moe(
        61, 7168, 64, 64, 163840, 384, 8, 2048, ffn=18432, moe_layers=60, shared_ffn=2048, qkv=6000, qk=192
    ),
}  # fmt: skip


def find_shape(text: str) -> Shape | None:
    """The built-in that a free text names, e.g. ``LLAMA3_70B`` or ``Qwen3_30B_a3B``; none if there is none."""
    plain = "".join(c for c in re.sub(r"llama[-_ ]?3\.[13]", "llama3", text.lower()) if c.isalnum())
    names = {"".join(c for c in name if c.isalnum()): name for name in SHAPES}
    names["qwen330ba3b"] = "qwen3-30b"
    best = max((n for n in names if n in plain), key=len, default=None)
    return SHAPES[names[best]] if best else None


def load_shape(model: str) -> Shape:
    """From the name of a built-in, a Weft recipe (``.toml``) or a Hugging Face ``config.json`` (or its folder)."""
    path = Path(model)
    if model in SHAPES:
        return SHAPES[model]
    if path.suffix == ".toml":
        recipe = load_recipe(path)
        return shape_of(recipe.model, vocab_of(recipe))
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise WeftError(f"model {model!r} is neither a file nor built in; {nearest(model, SHAPES)}")
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from None
    return shape_from_config(config, str(path))


def vocab_of(recipe: Recipe) -> int:
    """Entries of the recipe's tokenizer, as far as its name tells."""
    kind, _, size = recipe.data.tokenizer.partition(":")
    return int(size) if kind == "train" and size.isdigit() else 257 if kind == "bytes" else 50_000


def shape_of(model: ModelShape, vocab: int) -> Shape:
    """The shape of a recipe's model; ``vocab``: of the tokenizer, if the model leaves it to that."""
    if model.config is not None:
        return load_shape(str(model.config))
    return Shape(
        model.layers,
        model.embed,
        model.heads,
        model.kv_heads or model.heads,
        model.head_dim or model.embed // model.heads,
        model.ffn or 4 * model.embed,
        model.vocab or vocab,
        tied=int(model.tied),
    )


def shape_from_config(config: dict[str, Any], origin: str) -> Shape:
    """From the fields of a Hugging Face config, dense or with experts. Names the field that is missing."""

    def get(*names: str, default: Any = None) -> Any:
        value = next((config[name] for name in names if config.get(name) is not None), default)
        if value is None:
            raise UsageError(f"{origin}: {names[0]} is missing; give a complete config.json or a built-in shape")
        return value

    layers = get("num_hidden_layers", "n_layer")
    embed = get("hidden_size", "n_embd")
    heads = get("num_attention_heads", "n_head")
    experts = get("num_local_experts", "num_experts", "n_routed_experts", default=0)
    ffn = get("intermediate_size", "n_inner", default=4 * embed)
    expert_ffn = get("moe_intermediate_size", default=ffn) if experts else 0
    dense = get("first_k_dense_replace", default=0) if experts else layers
    head_dim = get("v_head_dim", "head_dim", default=embed // heads)
    kinds = config.get("layer_types") or []
    windowed = kinds.count("sliding_attention") / max(1, len(kinds))
    qkv = qk = 0
    if config.get("kv_lora_rank"):  # latent attention: low-rank queries, keys and values (DeepSeek-V2)
        kv, q = config["kv_lora_rank"], config.get("q_lora_rank")
        wide = heads * (get("qk_nope_head_dim") + get("qk_rope_head_dim"))
        qk = get("qk_nope_head_dim") + get("qk_rope_head_dim")
        into = kv + get("qk_rope_head_dim") + (q or wide)
        qkv = into + (kv * heads * (get("qk_nope_head_dim") + head_dim) + (q * wide if q else 0)) // embed
    return Shape(
        layers,
        embed,
        heads,
        get("num_key_value_heads", default=heads),
        head_dim,
        ffn,
        get("vocab_size"),
        gated=int(get("hidden_act", "activation_function", default="silu") in ("silu", "swiglu", "gelu_pytorch_tanh")
                  and "n_embd" not in config),
        tied=int(get("tie_word_embeddings", default="n_embd" in config)),
        experts=experts,
        top_k=get("num_experts_per_tok", default=0) if experts else 0,
        expert_ffn=expert_ffn,
        shared_ffn=get("n_shared_experts", default=0) * expert_ffn,
        moe_layers=layers - dense,
        qkv=qkv,
        qk=qk,
        window=get("sliding_window", default=0) if windowed else 0,
        windowed=windowed,
        clamped=int(bool(experts) and config.get("swiglu_limit") is not None),
    )  # fmt: skip
