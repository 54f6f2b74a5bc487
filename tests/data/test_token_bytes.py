"""The bytes of tokens add up to the text that they stand for, whatever the tokenizer; alternatives stay apart."""

from __future__ import annotations

import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from weft.data.token_bytes import TokenBytes, token_bytes
from weft.data.tokenizer import Tokenizer, load_tokenizer

WORDS = [
    "the cat sat on the mat",
    "naïve café",
    "日本語の文",
    "\U0001f600 smiles \U0001f601",
    "  blanks\n\n\tand lines",
]


def byte_level() -> Tokenizer:
    """Byte pairs with few merges, so that many characters are spread over several tokens."""
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(
        WORDS * 9, 300, 2, show_progress=False, special_tokens=["<|end|>"]
    )
    whole = tokenizers.Tokenizer.from_str(model._tokenizer.to_str())
    whole.encode_special_tokens = True
    return Tokenizer(whole.get_vocab_size(), 0, "level", whole)


def sentence_pieces() -> Tokenizer:
    """Characters with a mark for blanks, and bytes for characters that are not in the vocabulary, as Llama 2 has it."""
    pieces = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"catsemon",
        "▁c",
        "at",
        "▁cat",
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "c"), ("a", "t"), ("▁c", "at")]
    whole = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    whole.normalizer = normalizers.Replace(" ", "▁")
    whole.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return Tokenizer(len(pieces), 1, "pieces", whole)


TOKENIZERS = [byte_level(), sentence_pieces(), load_tokenizer("bytes")]


@settings(max_examples=60)
@given(st.text(st.characters(exclude_characters="▁", codec="utf-8"), max_size=30))
@example("naïve \U0001f600<|end|>")
def test_the_bytes_of_tokens_add_up_to_the_text(text: str) -> None:
    for tokenizer in TOKENIZERS:
        ids = tokenizer.encode(text)
        assert (
            b"".join(map(token_bytes(tokenizer).bytes_of, map(int, ids)))
            == text.encode()
        )


def test_special_tokens_have_the_bytes_of_their_names() -> None:
    level, pieces, plain = map(TokenBytes, TOKENIZERS)
    assert (
        level.bytes_of(0) == b"<|end|>"
        and plain.bytes_of(256) == b"<|endoftext|>"
        and plain.bytes_of(9) == b"\t"
    )
    assert (
        pieces.bytes_of(2 + 0xE6) == b"\xe6" and pieces.text(2 + 0xE6) == "bytes:\\xe6"
    )
    assert pieces.text(258) == " " and pieces.bytes_of(99_999) == b""


def test_alternatives_with_the_same_text_stay_apart() -> None:
    pieces = TokenBytes(TOKENIZERS[1])
    byte, letter = 2 + ord("a"), TOKENIZERS[1].model.token_to_id("a")  # type: ignore[union-attr]
    assert pieces.text(byte) == pieces.text(letter) == "a"
    assert pieces.names({byte: -3.0, letter: -1.0, 2: -9.0}) == {
        letter: "a",
        byte: f"token_id:{byte}",
        2: "\x00",
    }
