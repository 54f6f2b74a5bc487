"""Convert the tokenizer of a GGUF file to the files of a Hugging Face folder.

GGUF stores a vocabulary, merges or scores, kinds of tokens and the name of a pre-tokenizer, whose code is in llama.cpp.
Weft implements the pre-tokenizers of its models and refuses other names, because a guess could silently be another
tokenizer.
"""

import re
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from weft.errors import WeftError, nearest
from weft.recipe.named_templates import DEFAULT, listed
from weft.shapes.carried_files import as_json

G = "tokenizer.ggml."
#: What stands for a space in vocabularies of sentencepiece.
SPACE = "\u2581"


class TokenKind(IntEnum):
    """Kinds of tokens in a vocabulary, with the numbers by which GGUF files name them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
#: What splits a text into words before byte pairs are merged: an expression, by the names that GGUF has for it. None is
#: GPT-2's own, which the library has.
SPLITS: dict[str, str | None] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx"),
                    rf"{_SHORT}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), rf"{_SHORT}|{_WORDS}|\p{{N}}|{_REST}"),
    "tekken": rf"{_CASES}|\p{{N}}|" + _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1),
    **dict.fromkeys(("gpt-2", "olmo", "mpt", "phi-2", "gigachat")),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), r"\p{N}"),
}  # fmt: skip
#: Pre-tokenizers whose models take a word that is a token as it is, and begin a text with ``bos``.
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
#: Those that compose characters first (NFC).
COMPOSED = ("qwen2", "deepseek-r1-qwen")


def gguf_tokenizer(fields: Mapping[str, Any]) -> dict[str, bytes]:
    """Convert the tokenizer in the metadata ``fields`` of a GGUF file to the files of a Hugging Face folder.

    Returns the contents of the files by name, none if the GGUF file has no tokenizer. Raises :class:`WeftError` for an
    unknown kind of tokenizer or pre-tokenizer.
    """
    if f"{G}tokens" not in fields:
        return {}
    kind = fields.get(f"{G}model")
    if kind not in MODELS:
        raise WeftError(
            f"its tokenizer is of kind {kind!r}; Weft reads {', '.join(MODELS)}: set data.tokenizer to one"
        )
    tokens: list[str] = fields[f"{G}tokens"]
    kinds: list[int] = fields.get(f"{G}token_type") or [TokenKind.NORMAL] * len(tokens)
    model = MODELS[kind](fields, tokens, kinds)
    added = [
        AddedToken(token, special=kinds[i] != TokenKind.USER_DEFINED, normalized=False)
        for i, token in enumerate(tokens)
        if kinds[i] in (TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN)
    ]
    model.add_tokens(added)

    def name(which: str) -> str | None:
        token = fields.get(f"{G}{which}_token_id")
        return tokens[token] if token is not None and token < len(tokens) else None

    named = {which: name(theirs) for which, theirs in
             (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))}  # fmt: skip
    begins = fields.get(
        f"{G}add_bos_token", kind == "llama" or fields.get(f"{G}pre") in WHOLE_WORDS
    )
    ends = fields.get(f"{G}add_eos_token", kind == "t5")
    _add_ends(
        model, tokens, named["bos"] if begins else None, named["eos"] if ends else None
    )
    template: Any = fields.get("tokenizer.chat_template")
    key = "tokenizer.chat_template."
    if others := {
        field.removeprefix(key): fields[field]
        for field in fields
        if field.startswith(key)
    }:
        template = listed(({DEFAULT: template} if template else {}) | others)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{which}_token": token for which, token in named.items() if token},
        "clean_up_tokenization_spaces": False,
        **({"chat_template": template} if template else {}),
    }
    stops = [
        fields[f"{G}{name_of_end}_token_id"]
        for name_of_end in ("eos", "eot", "eom")
        if f"{G}{name_of_end}_token_id" in fields
    ]
    files = {
        "tokenizer.json": model.to_str().encode(),
        "tokenizer_config.json": as_json(config),
    }
    return files | (
        {
            "generation_config.json": as_json(
                {"eos_token_id": list(dict.fromkeys(stops))}
            )
        }
        if stops
        else {}
    )


def _add_ends(
    model: Tokenizer, tokens: list[str], bos: str | None, eos: str | None
) -> None:
    """Begin every text with ``bos`` and end it with ``eos``, where special tokens are asked for."""
    if not (bos or eos):
        return
    ids = [(token, tokens.index(token)) for token in (bos, eos) if token]
    first, second = (
        [part for part in (bos, text, eos) if part] for text in ("$A", "$B:1")
    )
    ends = processors.TemplateProcessing(
        single=first, pair=first + second, special_tokens=ids
    )
    before = model.post_processor
    model.post_processor = processors.Sequence([before, ends]) if before else ends


def _used(tokens: list[str], kinds: list[int]) -> dict[str, int]:
    """Return the vocabulary, without the rows that fill the table up: ``[PAD151646]`` and the like."""
    return {
        token: i
        for i, token in enumerate(tokens)
        if not (kinds[i] == TokenKind.UNUSED and re.fullmatch(r"\[PAD\d+\]", token))
    }


def _byte_pairs(
    fields: Mapping[str, Any], tokens: list[str], kinds: list[int]
) -> Tokenizer:
    """Byte-level BPE as GPT-2 has it (Radford et al. 2019): ``gpt2``."""
    kind = fields.get(f"{G}pre", "gpt-2")
    if kind not in SPLITS:
        raise WeftError(f"its pre-tokenizer {kind!r} is unknown ({nearest(kind, SPLITS)}): set data.tokenizer to the "
                        "folder of the model's tokenizer.json")  # fmt: skip
    merges = []
    for merge in fields.get(f"{G}merges", ()):
        at = merge.index(" ", 1)  # a piece may begin with a space
        merges.append((merge[:at], merge[at + 1 :]))
    model = Tokenizer(
        models.BPE(_used(tokens, kinds), merges, ignore_merges=kind in WHOLE_WORDS)
    )
    if kind in COMPOSED:
        model.normalizer = normalizers.NFC()
    split = SPLITS[kind]
    level: pre_tokenizers.PreTokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    if split is not None:
        plain = split != r"\p{N}"  # digits one by one, and then as GPT-2
        first = pre_tokenizers.Split(Regex(split), "isolated")
        level = pre_tokenizers.Sequence(
            [
                first,
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not plain),
            ]
        )
    model.pre_tokenizer = level
    model.decoder = decoders.ByteLevel()
    model.post_processor = processors.ByteLevel(trim_offsets=False)
    return model


def _sentence_pieces(
    fields: Mapping[str, Any], tokens: list[str], kinds: list[int]
) -> Tokenizer:
    """BPE of sentencepiece (Kudo & Richardson 2018), ``llama``: of all pairs that make a piece, the best one first."""
    vocab, scores = _used(tokens, kinds), fields[f"{G}scores"]
    pairs = []
    for i, piece in enumerate(tokens):
        if kinds[i] == TokenKind.NORMAL and len(piece) > 1:
            for at in range(1, len(piece)):
                left, right = vocab.get(piece[:at]), vocab.get(piece[at:])
                if (
                    left is not None
                    and right is not None
                    and kinds[left] == kinds[right] == TokenKind.NORMAL
                ):
                    pairs.append((-scores[i], left, right))
    merges = [
        (tokens[left], tokens[right])
        for _, left, right in sorted(pairs, key=lambda pair: pair[0])
    ]
    unknown = fields.get(f"{G}unknown_token_id")
    model = Tokenizer(models.BPE(
        vocab, merges, unk_token=None if unknown is None else tokens[unknown], fuse_unk=True,
        byte_fallback=TokenKind.BYTE in kinds,
    ))  # fmt: skip
    prefix = fields.get(f"{G}add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    model.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    )
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    model.decoder = decoders.Sequence(
        [*back, decoders.Strip(" ", 1, 0)] if prefix else back
    )
    return model


def _unigrams(
    fields: Mapping[str, Any], tokens: list[str], kinds: list[int]
) -> Tokenizer:
    """Return the likeliest cut into pieces, of sentencepiece's unigram model (Kudo 2018): ``t5``."""
    scores = fields[f"{G}scores"]
    pieces = list(zip(tokens, scores, strict=True))
    model = Tokenizer(
        models.Unigram(
            pieces, fields.get(f"{G}unknown_token_id"), TokenKind.BYTE in kinds
        )
    )
    steps: list[normalizers.Normalizer] = []
    if charsmap := fields.get(f"{G}precompiled_charsmap"):
        steps.append(normalizers.Precompiled(bytes(charsmap)))
    if fields.get(f"{G}remove_extra_whitespaces", True):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    model.normalizer = normalizers.Sequence(steps)
    scheme = "always" if fields.get(f"{G}add_space_prefix", True) else "never"
    model.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme)
    model.decoder = decoders.Metaspace(SPACE, scheme)
    return model


#: Kinds of tokenizers by the names that GGUF has for them.
MODELS = {"gpt2": _byte_pairs, "llama": _sentence_pieces, "t5": _unigrams}
