"""What a plan is for: models by name, recipes and the ``config.json`` of Hugging Face, trainable by Weft or not."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import UsageError, WeftError, nearest
from weft.model_config import read_json
from weft.model_config import shape_from_config as section_from_config
from weft.model_shape import Shape, shape_of
from weft.recipe import ModelShape, Recipe, RopeScaling, build_recipe


@dataclass(frozen=True)
class Model:
    """A model to plan for.

    ``shape``: what time and memory depend on. ``recipe``: what a recipe that trains it says beside layout and batch,
    by section. ``untrainable``: why ``weft train`` cannot train it yet; empty if it can.
    """

    shape: Shape
    recipe: dict[str, Any]
    untrainable: str = ""


def _llama(
    layers: int, embed: int, heads: int, ffn: int, vocab: int = 128256, kv: int = 8, theta: float = 5e5, **more: Any
) -> ModelShape:
    return ModelShape(layers=layers, embed=embed, heads=heads, ffn=ffn, vocab=vocab, kv_heads=kv, rope_theta=theta,
                      **more)  # fmt: skip


def _qwen2(layers: int, embed: int, heads: int, ffn: int, kv: int = 8) -> ModelShape:
    return _llama(layers, embed, heads, ffn, 152064, kv, 1e6, qkv_bias=True, norm_eps=1e-6)


def _qwen3(layers: int, embed: int, heads: int, ffn: int) -> ModelShape:
    return _llama(layers, embed, heads, ffn, 151936, 8, 1e6, head_dim=128, qk_norm=True, norm_eps=1e-6)


def _gpt(layers: int, embed: int, heads: int, ffn: int = 0, vocab: int = 51200, kv: int = 0, tied: int = 1) -> Shape:
    """Two matrices in the feed-forward, without a gate."""
    return Shape(layers, embed, heads, kv or heads, embed // heads, ffn or 4 * embed, vocab, gated=0, tied=tied)


def _moe(
    layers: int, embed: int, heads: int, kv: int, vocab: int, experts: int, top_k: int, width: int, **more: Any
) -> Shape:
    moe = {"head_dim": 128, "ffn": 0, "moe_layers": layers, **more}
    return Shape(
        layers, embed, heads, kv, vocab=vocab, experts=experts, top_k=top_k, expert_ffn=width, **moe
    )  # fmt: skip


#: Models that Weft trains, from the papers and config.json of the models.
SECTIONS: dict[str, ModelShape] = {
    "llama2-7b": _llama(32, 4096, 32, 11008, 32000, 32, 1e4),
    "llama2-13b": _llama(40, 5120, 40, 13824, 32000, 40, 1e4),
    "llama2-70b": _llama(80, 8192, 64, 28672, 32000, 8, 1e4),
    "codellama-34b": _llama(48, 8192, 64, 22016, 32000, 8, 1e6),
    "mistral-7b": _llama(32, 4096, 32, 14336, 32000, 8, 1e6),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 18944, 4),
    "qwen2.5-32b": _qwen2(64, 5120, 40, 27648),
    "qwen2.5-72b": _qwen2(80, 8192, 64, 29568),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
    "llama3.2-1b": _llama(16, 2048, 32, 8192, tied=True, rope_scaling=RopeScaling(factor=32)),
    "llama3.2-3b": _llama(28, 3072, 24, 8192, tied=True, rope_scaling=RopeScaling(factor=32)),
    "llama3-8b": _llama(32, 4096, 32, 14336),
    "llama3-70b": _llama(80, 8192, 64, 28672),
    "llama3-405b": _llama(126, 16384, 128, 53248, rope_scaling=RopeScaling(factor=8)),
}
#: Shapes by name: those, and models that it can plan for only.
SHAPES: dict[str, Shape] = {name: shape_of(section) for name, section in SECTIONS.items()} | {
    "gpt3-175b": _gpt(96, 12288, 96),
    "gpt-22b": _gpt(48, 6144, 64),
    "gpt-530b": _gpt(105, 20480, 128),
    "gpt-1t": _gpt(128, 25600, 160),
    "nemotron4-15b": _gpt(32, 6144, 48, 24576, 256000, 8, tied=0),
    "nemotron4-340b": _gpt(96, 18432, 96, 73728, 256000, 8, tied=0),
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
#: What a recipe reads if nothing says better: text that every machine has.
DATA: dict[str, Any] = {"sources": [{"kind": "stdlib"}], "tokenizer": "bytes"}


def load_model(name: str) -> Model:
    """From the name of a built-in, a Weft recipe (``.toml``) or a Hugging Face ``config.json`` (or its folder)."""
    path = Path(name)
    if name in SECTIONS:
        fields = SECTIONS[name].model_dump(exclude_none=True, exclude={"mixer", "softmax_every"})
        return Model(SHAPES[name], {"model": fields, "data": DATA})
    if name in SHAPES:
        return Model(SHAPES[name], {}, _missing(SHAPES[name]))
    if path.suffix == ".toml":
        return _of_recipe(path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise WeftError(f"model {name!r} is neither a file nor built in; {nearest(name, SHAPES)}")
    data = DATA | ({"tokenizer": str(path.parent.resolve())} if (path.parent / "tokenizer.json").is_file() else {})
    try:
        return Model(shape_of(section_from_config(path)), {"model": {"config": str(path.resolve())}, "data": data})
    except WeftError as error:  # planned for, as far as it is understood
        shape = shape_from_config(read_json(path, "give a Hugging Face config.json"), str(path))
        return Model(shape, {}, _missing(shape) or str(error))


def _missing(shape: Shape) -> str:
    """What Weft cannot train about a model of this shape."""
    if shape.experts:
        return "weft train has no experts yet"
    return "" if shape.gated else "weft train computes SwiGLU only, and this model has no gate"


def _of_recipe(path: Path) -> Model:
    """The model of a recipe; its sections but ``[layout]``, which is what is planned, stay as they are."""
    if not path.is_file():
        raise WeftError(f"recipe {path} does not exist")
    try:
        tree = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    recipe = build_recipe(tree, str(path))
    tree.pop("layout", None)
    source = recipe.model.config or recipe.model.weights
    section = recipe.model if source is None else section_from_config(source)
    return Model(shape_of(section, vocab_of(recipe)), tree)


def vocab_of(recipe: Recipe) -> int:
    """Entries of the recipe's tokenizer, as far as its name tells."""
    kind, _, size = recipe.data.tokenizer.partition(":")
    return int(size) if kind == "train" and size.isdigit() else 257 if kind == "bytes" else 50_000


def shape_from_config(config: dict[str, Any], origin: str) -> Shape:
    """From the fields of any Hugging Face config, dense or with experts, as far as time and memory depend on them.

    Raises :class:`UsageError` with the name of the field that is missing.
    """

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
