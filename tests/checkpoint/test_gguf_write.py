"""GGUF out: what Weft's own reader makes of the file is the model, its tokenizer and its settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chats import TEMPLATES, save_tokenizer
from weft.checkpoint.convert import convert, open_foreign
from weft.checkpoint.convert.gguf_write import export_gguf
from weft.checkpoint.model import export_model, open_model
from weft.checkpoint.weights import open_pretrained
from weft.data.gguf_tokenizer import gguf_tokenizer
from weft.data.gguf_vocabulary import TRIALS, gguf_vocabulary
from weft.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_files
from weft.errors import UsageError, WeftError
from weft.layout.mesh import Mesh
from weft.models.adapters import merged_parameters
from weft.models.hugging_face import export
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, RopeScaling, Train
from weft.shapes.carried_files import context_length

pytest.importorskip("gguf")

LLAMA: dict[str, Any] = {
    "vocab": 97,
    "layers": 2,
    "embed": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 64,
    "init_std": 0.2,
}
GEMMA: dict[str, Any] = {
    "qk_norm": True, "norm_after": True, "scaled_embedding": True, "tied": True, "activation": "gelu", "window": 5,
    "full_every": 6, "window_theta": 1e4, "rope_theta": 1e6, "head_dim": 16, "query_dim": 16, "layers": 7,
}  # fmt: skip
SHAPES = {
    "llama": {"rope_theta": 5e5, "norm_eps": 1e-5},
    "llama tied": {"tied": True, "head_dim": 12},
    "llama 3": {
        "rope_scaling": RopeScaling(factor=8.0),
        "norm_eps": 1e-6,
        "rope_theta": 5e5,
    },
    "llama 3, short": {
        "rope_scaling": RopeScaling(factor=4.0, original_max_position=16)
    },
    "llama 3, unseen": {
        "rope_scaling": RopeScaling(factor=8.0, low_freq_factor=2.0),
        "rope_theta": 1e3,
    },
    "llama linear": {"rope_scaling": RopeScaling(kind="linear", factor=2.5)},
    "qwen2": {"qkv_bias": True, "rope_theta": 1e6},
    "qwen2 tied": {"qkv_bias": True, "tied": True, "kv_heads": 1},
    "qwen3": {"qk_norm": True, "head_dim": 16, "rope_theta": 1e6},
    "gemma3": GEMMA,
    "gemma3 linear": GEMMA | {"rope_scaling": RopeScaling(kind="linear", factor=8.0)},
}
IDS = torch.arange(40).view(2, 20) * 7 % 97


def logits(model: Transformer, ids: torch.Tensor = IDS) -> torch.Tensor:
    rows, seq = ids.shape
    with torch.no_grad():
        return model(
            ids,
            torch.arange(seq).expand(rows, seq),
            torch.arange(rows + 1, dtype=torch.int32) * seq,
        )


def random_model(shape: ModelShape) -> Transformer:
    model, state = parallelize(shape, Mesh.single(), Train())
    for h in state.held:
        if h.local.ndim == 1:  # norms and biases are not one and zero
            h.local += 0.2 * torch.randn(
                h.local.shape, generator=torch.Generator().manual_seed(len(h.name))
            )
    return model


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_logits_come_back(name: str, tmp_path: Path) -> None:
    shape = ModelShape(**LLAMA | SHAPES[name])
    model = random_model(shape)
    weights, expected = merged_parameters(model), logits(model)
    for kind in ("float32", "bfloat16", "float16", "q8_0"):
        file = export_gguf(
            weights.__getitem__,
            shape,
            tmp_path / f"{kind}.gguf",
            kind,
            {},
            length=12345,
        )
        found = open_pretrained(file)
        assert found.shape.model_copy(update={"init_std": shape.init_std}) == shape
        assert context_length(found.files) == (
            30862 if name == "llama linear" else 12345
        )
        again = parallelize(found.shape, Mesh.single(), Train(), found.values)[0]
        if kind == "float32":
            assert torch.equal(logits(again), expected)
        for key, value in merged_parameters(again).items():
            assert (
                torch.allclose(value, weights[key], rtol=0, atol=1e-9)
                or kind != "float32"
            ), key
            if kind == "q8_0" and value.ndim == 2 and value.shape[1] % 32 == 0:
                blocks, off = (
                    weights[key].unflatten(1, (-1, 32)),
                    (value - weights[key]).unflatten(1, (-1, 32)),
                )
                # Half a step, and what the scale loses in float16. Queries and keys have their rows in another order.
                assert (
                    off.abs()
                    <= blocks.abs().amax(-1, keepdim=True) * (0.5 / 127 + 2**-11)
                ).all(), key
            elif kind in ("float16", "bfloat16"):
                near = (
                    weights[key]
                    if value.ndim == 1
                    else weights[key].to(getattr(torch, kind)).float()
                )
                assert torch.equal(value, near), key
    import gguf

    stored = {
        one.name: one.tensor_type.name
        for one in gguf.GGUFReader(tmp_path / "q8_0.gguf").tensors
    }
    assert (
        stored["token_embd.weight"] == "Q8_0" and stored["output_norm.weight"] == "F32"
    )
    assert ("output.weight" in stored) != shape.tied


@pytest.mark.parametrize(("change", "said"), [
    ({"rope_scaling": RopeScaling(kind="yarn", factor=4.0)}, "no word for rope_scaling"),
    ({"window": 7}, "no windows"),
    ({"activation": "gelu"}, "no word for hidden_act = 'gelu_pytorch_tanh' in its architecture llama"),
    (GEMMA | {"full_every": 3}, "no word for layer_types"),
    (GEMMA | {"query_dim": 24}, "no word for query_pre_attn_scalar = 24"),
    ({"experts": 4, "expert_ffn": 8}, "GGUF is not written of Mixtral"),
    ({"output": "score"}, "GGUF is not written of a model that scores"),
])  # fmt: skip
def test_what_a_file_would_say_otherwise_is_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(WeftError, match=said) as no:
        export_gguf(
            {}.__getitem__,
            ModelShape(**LLAMA | change),
            tmp_path / "m.gguf",
            "float32",
            {},
        )
    assert "\n" not in str(no.value) and not any(tmp_path.iterdir())


def test_numbers_beyond_float16_are_refused(tmp_path: Path) -> None:
    shape = ModelShape(**LLAMA)
    weights = merged_parameters(random_model(shape)) | {
        "blocks.1.ffn.up": torch.full((64, 32), 7e4)
    }
    with pytest.raises(
        WeftError, match=r"blocks\.1\.ffn\.up has numbers that float16 does not reach"
    ):
        export_gguf(weights.__getitem__, shape, tmp_path / "m.gguf", "float16", {})
    assert not any(tmp_path.iterdir())
    export_gguf(weights.__getitem__, shape, tmp_path / "m.gguf", "bfloat16", {})
    with pytest.raises(UsageError, match="exists already"):
        export_gguf(weights.__getitem__, shape, tmp_path / "m.gguf", "bfloat16", {})


def byte_pairs(
    pattern: str | None, prepare: Any = None, whole: bool = False
) -> Tokenizer:
    """A small byte-level tokenizer, whose texts are split by ``pattern`` first."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=whole))
    level = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=pattern is None
    )
    split = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(pattern or "x"), "isolated"
    )
    model.pre_tokenizer = (
        tokenizers.pre_tokenizers.Sequence([split, level]) if pattern else level
    )
    model.decoder = tokenizers.decoders.ByteLevel()
    model.normalizer = prepare
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "<|endoftext|>", "<|pad|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    model.train_from_iterator(
        [*TRIALS, *(f"number {i * i} of the words" for i in range(200))], trainer
    )
    config = {
        "eos_token": "<|endoftext|>",
        "bos_token": "<s>",
        "pad_token": "<|pad|>",
        "chat_template": "{{ x }}",
    }
    return tokenizer_from_files(
        {
            "tokenizer.json": model.to_str().encode(),
            "tokenizer_config.json": json.dumps(config).encode(),
        },
        "x",
    )


def pieces(prefix: bool) -> Tokenizer:
    """A small tokenizer as those that were sentencepiece's: byte fallback, and spaces that are a character."""
    spaces = tokenizers.normalizers.Replace(" ", "\u2581")
    normal = (
        tokenizers.normalizers.Sequence(
            [tokenizers.normalizers.Prepend("\u2581"), spaces]
        )
        if prefix
        else spaces
    )
    words = [
        "\u2581the",
        "\u2581of",
        "th",
        "he",
        "\u2581t",
        "\u2581o",
        "the",
        "of",
        "\u2581th",
        "\u2581\u2581",
    ]
    vocab = {
        "<unk>": 0,
        "<s>": 1,
        "</s>": 2,
        **{f"<0x{b:02X}>": 3 + b for b in range(256)},
    }
    for piece in (*words, "\u2581", *"thefo0123456789"):
        vocab.setdefault(piece, len(vocab))
    ranked = [(len(words) - i, word) for i, word in enumerate(words)]
    merges = [(w[:at], w[at:]) for _, w in sorted(ranked, reverse=True) for at in range(1, len(w))
              if w[:at] in vocab and w[at:] in vocab]  # fmt: skip
    model = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    model.normalizer = normal
    back = [
        tokenizers.decoders.Replace("\u2581", " "),
        tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(),
    ]
    model.decoder = tokenizers.decoders.Sequence(
        [*back, tokenizers.decoders.Strip(" ", 1, 0)] if prefix else back
    )
    special = [
        tokenizers.AddedToken(one, special=True, normalized=False)
        for one in ("<unk>", "<s>", "</s>")
    ]
    model.add_tokens(special)
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    config = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    return tokenizer_from_files(
        {
            "tokenizer.json": model.to_str().encode(),
            "tokenizer_config.json": json.dumps(config).encode(),
        },
        "x",
    )


REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + REST
TOKENIZERS: dict[str, Any] = {
    "bytes": lambda: load_tokenizer("bytes"), "gpt-2": lambda: byte_pairs(None),
    "llama-bpe": lambda: byte_pairs(LLAMA3, whole=True),
    "qwen2": lambda: byte_pairs(LLAMA3.replace("{1,3}", ""), tokenizers.normalizers.NFC()),
    "pieces": lambda: pieces(True), "pieces without a prefix": lambda: pieces(False),
}  # fmt: skip


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[Tokenizer, Tokenizer]]:
    """Tokenizers, and what Weft reads in the fields that it writes of them."""
    found = {}
    for name, make in TOKENIZERS.items():
        own = make()
        fields = gguf_vocabulary(own, own.vocab + 7)
        assert fields.get("tokenizer.ggml.pre", "") in (name, "default", "gpt-2")
        found[name] = own, tokenizer_from_files(gguf_tokenizer(fields), "x")
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(TOKENIZERS)),
    st.text(max_size=30) | st.text("the of0123 \n\t'sré\u0301", max_size=30),
)
def test_a_tokenizer_comes_back(
    made: dict[str, tuple[Tokenizer, Tokenizer]], name: str, text: str
) -> None:
    own, again = made[name]
    assert again.prompt_ids(text) == own.prompt_ids(text)
    assert again.decode(own.encode(text)) == own.decode(own.encode(text))
    assert (again.eos, again.bos, again.stops) == (own.eos, own.bos, own.stops)
    assert again.chat_template == own.chat_template


def test_a_tokenizer_that_gguf_has_no_name_for_is_refused() -> None:
    with pytest.raises(WeftError, match="has no name in GGUF"):
        gguf_vocabulary(byte_pairs(r"\p{N}{2}|\p{L}"), 400)


def test_the_command_writes_all_that_the_model_came_with(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "words", TEMPLATES["smollm2"])
    files = {path.name: path.read_bytes() for path in (tmp_path / "words").iterdir()}
    own = tokenizer_from_files(files, "x")
    defaults = json.loads(files.get("generation_config.json", b"{}")) | {
        "temperature": 0.6, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}  # fmt: skip
    files["generation_config.json"] = json.dumps(defaults).encode()
    shape = ModelShape(**LLAMA | {"vocab": own.vocab + 3, "tied": True})
    model = random_model(shape)
    export(
        merged_parameters(model),
        shape,
        tmp_path / "hf",
        torch.bfloat16,
        files,
        max_positions=4096,
    )
    written = export_model(str(tmp_path / "hf"), tmp_path / "mine", print, form="gguf")
    assert written == tmp_path / "mine/mine-BF16.gguf"
    convert(tmp_path / "hf", tmp_path / "other.gguf", to="gguf", dtype=torch.float32)
    for file in (written, tmp_path / "other.gguf"):
        again, found, _ = open_model(str(file), "cpu", print)
        assert context_length(found) == 4096
        assert torch.equal(
            logits(again), logits(open_model(str(tmp_path / "hf"), "cpu", print)[0])
        )
        words = tokenizer_from_files(found, "x")
        assert (
            words.chat_template == own.chat_template and words.specials == own.specials
        )
        assert [words.prompt_ids(text) for text in TRIALS] == [
            own.prompt_ids(text) for text in TRIALS
        ]
        read = json.loads(found["generation_config.json"])
        assert {key: read[key] for key in ("temperature", "top_p", "top_k", "repetition_penalty")} == {
            "temperature": 0.6, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}  # fmt: skip
    assert (
        open_foreign(written).sources["blocks.0.attention.wo"].dtype == torch.bfloat16
    )


#: What transformers assumes where its reader of GGUF does not look: the widths of Qwen3's and Gemma 3's heads.
WIDE = {
    "qwen3": {"head_dim": 128},
    "gemma3": {"head_dim": 256, "query_dim": 256, "norm_eps": 1e-6},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama", "llama tied", "qwen2", "qwen2 tied", "qwen3", "gemma3"]
)
def test_transformers_reads_the_same_model(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tmp_path / "words", TEMPLATES["smollm2"])
    files = {path.name: path.read_bytes() for path in (tmp_path / "words").iterdir()}
    own = tokenizer_from_files(files, "x")
    shape = ModelShape(
        **LLAMA | SHAPES[name] | WIDE.get(name, {}) | {"vocab": own.vocab}
    )
    model = random_model(shape)
    export_gguf(
        merged_parameters(model).__getitem__,
        shape,
        tmp_path / "m.gguf",
        "float32",
        files,
        4096,
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    )
    ids = torch.arange(40).view(2, 20) * 7 % own.vocab
    with torch.no_grad():
        expected = theirs(ids).logits
    assert (logits(model, ids) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert theirs.config.max_position_embeddings == 4096
    words = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TRIALS[:4]:
        assert (
            words(text, add_special_tokens=False).input_ids == own.encode(text).tolist()
        )
    assert words.chat_template == own.chat_template
