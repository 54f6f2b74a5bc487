"""Tokenizers inside GGUF files: what comes out at the other end, through Weft and in transformers, is what went in."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from tests.checkpoint import foreign as write
from weft.checkpoint.convert import convert
from weft.checkpoint.weights import open_pretrained
from weft.data.gguf_tokenizer import G, gguf_tokenizer
from weft.errors import WeftError
from weft.recipe import ModelShape

pytest.importorskip("gguf")

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ALPHABET = "abcdefgh ABC  123456789.,!?'\n\t-éüß你好ｗ①👋🏽­e\u0301_"
WORDS = [
    "the",
    "There's",
    "can't",
    "WE'LL",
    "12345",
    "naïve",
    "你好世界",
    "  ",
    "\r\n",
    "x=y+1",
    "👋🏽",
    "\u017f",
    "ﬁ",
    "don\u2019t",
]


def strings(count: int) -> list[str]:
    """Random text of all kinds, with names of special tokens in some of it."""
    rng = random.Random(0)
    pieces = [*WORDS, *SPECIAL, *ALPHABET]
    return [
        "".join(rng.choice(pieces) for _ in range(rng.randint(0, 12)))
        for _ in range(count)
    ]


def byte_level(
    split: str | None, whole: bool = False, composed: bool = False
) -> Tokenizer:
    """As the models of that family have it published, with merges learned here."""
    model = Tokenizer(models.BPE(ignore_merges=whole))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    first = None if split is None else pre_tokenizers.Split(Regex(split), "isolated")
    model.pre_tokenizer = (
        level if first is None else pre_tokenizers.Sequence([first, level])
    )
    if split == "digits":
        level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), level]
        )
    if composed:
        model.normalizer = normalizers.NFC()
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=alphabet,
        special_tokens=SPECIAL,
        show_progress=False,
    )
    model.train_from_iterator(strings(800), trainer)
    model.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return model


LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KINDS: dict[str, tuple[str | None, bool, bool]] = {
    "gpt-2": (None, False, False),
    "llama-bpe": (LLAMA, True, False),
    "qwen2": (LLAMA.replace("{1,3}", ""), False, True),
    "smollm": ("digits", False, False),
}


def gguf_with(folder: Path, fill: Any, vocab: int) -> Path:
    shape = ModelShape(vocab=vocab, layers=1, embed=32, heads=2, ffn=32)
    write.write_gguf(folder / "m.gguf", write.weights_of(shape), shape, tokenizer=fill)
    return folder / "m.gguf"


def through_weft(file: Path, folder: Path) -> Any:
    """The tokenizer as transformers has it after GGUF -> Weft -> Hugging Face."""
    transformers = pytest.importorskip("transformers")
    convert(file, folder / "weft")
    convert(folder / "weft", folder / "hf", to="hf")
    return transformers.AutoTokenizer.from_pretrained(folder / "hf")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_byte_pairs_go_through_unchanged(tmp_path: Path, kind: str) -> None:
    original = byte_level(*KINDS[kind])
    vocab = original.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = [
        " ".join(pair) for pair in json.loads(original.to_str())["model"]["merges"]
    ]

    def fill(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(kind)
        writer.add_token_list([*tokens, "[PAD999]"])
        writer.add_token_types(
            [3 if t in SPECIAL else 4 if t == "<tool>" else 1 for t in tokens] + [5]
        )
        writer.add_token_merges(merges)
        writer.add_bos_token_id(vocab[SPECIAL[1]])
        writer.add_eos_token_id(vocab[SPECIAL[2]])
        writer.add_eot_token_id(vocab[SPECIAL[0]])
        writer.add_add_bos_token(False)
        named = [("default", TEMPLATE), ("tool_use", "tools")]
        writer.add_chat_template(
            [{"name": name, "template": text} for name, text in named]
        )

    file = gguf_with(tmp_path, fill, len(tokens) + 1)
    own, theirs = open_pretrained(file).tokenizer(), through_weft(file, tmp_path)
    assert (
        own is not None
        and own.eos == vocab[SPECIAL[2]]
        and own.bos == vocab[SPECIAL[1]]
    )
    assert (
        own.stops == (vocab[SPECIAL[2]], vocab[SPECIAL[0]])
        and own.chat_template == TEMPLATE
    )
    assert own.named_templates == {"tool_use": "tools"}
    assert theirs.eos_token == SPECIAL[2] and theirs.bos_token == SPECIAL[1]
    assert theirs.chat_template == {"default": TEMPLATE, "tool_use": "tools"}
    texts = strings(10_000)
    expected = [one.ids for one in original.encode_batch(texts)]
    assert theirs(texts)["input_ids"] == expected
    assert [list(ids) for ids in own.encode_many(texts, special=True)] == expected
    assert [theirs.decode(ids) for ids in expected[:200]] == [
        original.decode(i, False) for i in expected[:200]
    ]
    # Names of special tokens in a user's words are no tokens.
    assert not {vocab[name] for name in SPECIAL} & {
        int(i) for ids in own.encode_many(texts) for i in ids
    }


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """How sentencepiece cuts a text: the adjacent pair that makes the best piece is joined, the leftmost first."""
    pieces = list(text)
    while True:
        pairs = [
            (-scores[a + b], i)
            for i, (a, b) in enumerate(pairwise(pieces))
            if a + b in scores
        ]
        if not pairs:
            return pieces
        at = min(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_pieces_go_through_unchanged(tmp_path: Path, prefix: bool) -> None:
    """Llama 2, Mistral and (without a space in front) Gemma: pieces joined by score, other characters as bytes."""
    learned = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=160, show_progress=False)
    learned.train_from_iterator(
        [s.replace(" ", "▁") for s in strings(500) if "<" not in s], trainer
    )
    vocab = learned.get_vocab()
    pieces = sorted((piece for piece in vocab if len(piece) > 1), key=vocab.__getitem__)
    # all of which pieces are made; others are bytes
    characters = sorted({*"".join(pieces), *"abcdefgABC123.,"})
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        *pieces,
        *characters,
    ]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) + len(characters))]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) + len(characters))]
    ids, best = (
        {token: i for i, token in enumerate(tokens)},
        dict(zip(tokens[259:], scores[259:], strict=True)),
    )

    def fill(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_scores(scores)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(prefix)

    theirs = through_weft(gguf_with(tmp_path, fill, len(tokens)), tmp_path)
    texts = [text for text in strings(10_000) if text]
    found = theirs(texts)["input_ids"]
    for text, got in zip(texts, found, strict=True):
        marked = ("▁" * prefix + text).replace(" ", "▁")
        cut = [
            [ids[p]] if p in ids else [ids[f"<0x{b:02X}>"] for b in p.encode()]
            for p in merged(marked, best)
        ]
        assert got == [1, *(i for part in cut for i in part)], text
        assert theirs.decode(got, skip_special_tokens=True) == text


def test_unigrams_go_through_unchanged(tmp_path: Path) -> None:
    original = Tokenizer(models.Unigram())
    original.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    original.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>",
                                      show_progress=False)  # fmt: skip
    original.train_from_iterator(strings(800), trainer)
    pieces = json.loads(original.to_str())["model"]["vocab"]

    def fill(writer: Any) -> None:
        writer.add_tokenizer_model("t5")
        writer.add_token_list([piece for piece, _ in pieces])
        writer.add_token_types([3, 3, 2, *[1] * (len(pieces) - 3)])
        writer.add_token_scores([score for _, score in pieces])
        writer.add_eos_token_id(1)
        writer.add_unk_token_id(2)
        writer.add_pad_token_id(0)
        writer.add_add_eos_token(True)

    theirs = through_weft(gguf_with(tmp_path, fill, len(pieces)), tmp_path)
    texts = strings(10_000)
    expected = [[*one.ids, 1] for one in original.encode_batch(texts)]
    differing = [
        t
        for t, a, b in zip(texts, theirs(texts)["input_ids"], expected, strict=True)
        if a != b
    ]
    assert not differing, differing[:3]


@pytest.mark.parametrize(("fields", "said"), [
    ({"model": "rwkv"}, "its tokenizer is of kind 'rwkv'; Weft reads gpt2, llama, t5"),
    ({"model": "gpt2", "pre": "smollmm"}, "its pre-tokenizer 'smollmm' is unknown .*smollm"),
])  # fmt: skip
def test_kinds_that_weft_does_not_know_are_refused(
    fields: dict[str, str], said: str
) -> None:
    """A guess would be another tokenizer without a word; the weights can be had all the same."""
    known = {f"{G}tokens": ["a"], f"{G}merges": []} | {
        f"{G}{key}": value for key, value in fields.items()
    }
    with pytest.raises(WeftError, match=said):
        gguf_tokenizer(known)
    assert gguf_tokenizer({}) == {}


def test_a_tokenizer_that_cannot_be_read_is_said_when_it_is_needed(
    tmp_path: Path,
) -> None:
    def fill(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("of-tomorrow")
        writer.add_token_list(["a", "b"])

    found = open_pretrained(gguf_with(tmp_path, fill, 2))
    assert (
        found.tokenizer() is None and b"of-tomorrow" in found.files["no-tokenizer.txt"]
    )
    assert found.values is not None and np.isfinite(found.shape.vocab)
