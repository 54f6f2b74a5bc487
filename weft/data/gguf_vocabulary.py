"""Convert a tokenizer to the fields of a GGUF file, the inverse of :mod:`weft.data.gguf_tokenizer`.

GGUF names code of llama.cpp where ``tokenizer.json`` has a full description. A name is used only if its code cuts a set
of difficult texts as the tokenizer does; a tokenizer without such a name is refused.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from weft.data.gguf_tokenizer import G, TokenKind, gguf_tokenizer
from weft.data.token_bytes import byte_of_character
from weft.data.tokenizer import Tokenizer, tokenizer_from_files
from weft.errors import WeftError

#: Names of pre-tokenizers of which each stands for another code, the usual first.
PRE = ("gpt-2", "llama-bpe", "qwen2", "tekken", "smollm")
#: Texts by which two tokenizers are told apart.
TRIALS = (
    "Hello, world! It's 12345 o'clock; I'LL go, WE'VE gone.", "  two  spaces\tand\ttabs \n\n\n lines\r\n end  ",
    "def f(x_1): return x_1**2 != 3.14 # 1,000,000", "naïve café Ωmega ﬁne Å A\u030angstrom e\u0301",
    "漢字かな交じり文 한국어 عربى עברית हिन्दी ไทย", "🙂👩‍👩‍👧 ½ № ™ \u00a0\u200b\u2028 x",
    "camelCaseXMLHttp URLs/paths//a/b\n/c",
    "", " ", "a", "'s't'RE", "0 00 000 0000 1a2b", "<b>[x]{y}(z)</b>", "\x00\x7f\u0085", "</s> <s> <|x|>",
)  # fmt: skip


def gguf_vocabulary(tokenizer: Tokenizer, size: int) -> dict[str, Any]:
    """Return the metadata fields that describe ``tokenizer`` in a GGUF file.

    ``size``: number of rows of the model's embedding. Raises :class:`WeftError` if GGUF cannot describe the tokenizer.
    """
    content = _content(tokenizer)
    model = content["model"]
    if model.get("type", "BPE") != "BPE":
        raise WeftError(
            f"its tokenizer is of kind {model['type']!r}, and GGUF is written of byte pairs only"
        )
    tokens, kinds = _tokens(content, size)
    fields: dict[str, Any] = {f"{G}tokens": tokens, f"{G}token_type": kinds}
    ids = {"bos": tokenizer.bos, "eos": tokenizer.eos, "padding": tokenizer.pad}
    ids["unknown"] = model["vocab"].get(model.get("unk_token") or "")
    more = [token for token in tokenizer.stops if token != tokenizer.eos]
    fields |= {f"{G}{name}_token_id": token for name, token in (*ids.items(), *zip(("eot", "eom"), more, strict=False))
               if token is not None}  # fmt: skip
    fields[f"{G}add_bos_token"] = tokenizer.bos is not None and tokenizer.opening == [
        tokenizer.bos
    ]
    fields[f"{G}add_eos_token"] = False
    if tokenizer.chat_template:
        fields["tokenizer.chat_template"] = tokenizer.chat_template
    for known in _ways(model, tokens, kinds):
        if _cuts_alike(tokenizer, fields | known):
            return fields | known
    raise WeftError("what splits its texts into words has no name in GGUF that Weft knows; convert the exported "
                    "Hugging Face folder with llama.cpp's own script")  # fmt: skip


def _content(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a tokenizer's ``tokenizer.json``; of plain bytes one of byte pairs without a pair."""
    if tokenizer.model is not None:
        content: dict[str, Any] = json.loads(tokenizer.model.to_str())
        return content
    added = [
        {
            "id": tokenizer.eos,
            "content": tokenizer.name_of(tokenizer.eos),
            "special": True,
        }
    ]
    vocab = {char: data[0] for char, data in byte_of_character().items()}
    return {
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "added_tokens": added,
    }


def _tokens(content: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Every row's token and its kind; rows without one are filled up as llama.cpp does."""
    names = {number: token for token, number in content["model"]["vocab"].items()}
    kinds = dict.fromkeys(names, TokenKind.NORMAL)
    if content["model"].get("byte_fallback"):
        of_bytes = {f"<0x{byte:02X}>" for byte in range(256)}
        kinds |= {
            number: TokenKind.BYTE
            for number, token in names.items()
            if token in of_bytes
        }
    for token in content["added_tokens"]:
        names[token["id"]] = token["content"]
        kinds[token["id"]] = (
            TokenKind.CONTROL if token.get("special") else TokenKind.USER_DEFINED
        )
    unknown = content["model"]["vocab"].get(content["model"].get("unk_token") or "")
    if unknown is not None:
        kinds[unknown] = TokenKind.UNKNOWN
    count = max(size, max(names) + 1)
    return [names.get(i, f"[PAD{i}]") for i in range(count)], [
        int(kinds.get(i, TokenKind.UNUSED)) for i in range(count)
    ]


def _ways(
    model: Mapping[str, Any], tokens: list[str], kinds: list[int]
) -> Iterator[dict[str, Any]]:
    """Yield the fields of every code that may be this tokenizer's."""
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]
    ]
    if not model.get("byte_fallback"):
        yield from (
            {f"{G}model": "gpt2", f"{G}pre": name, f"{G}merges": merges} for name in PRE
        )
        return
    order: dict[str, int] = {}
    for number, pair in enumerate(model["merges"]):
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        order.setdefault(left + right, number)
    # What no pair makes comes after all that some pair does.
    scores = [
        -float(order.get(token, len(order) + i)) for i, token in enumerate(tokens)
    ]
    for prefix in (True, False):
        yield {
            f"{G}model": "llama",
            f"{G}pre": "default",
            f"{G}scores": scores,
            f"{G}add_space_prefix": prefix,
        }


def _cuts_alike(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> bool:
    """Return whether a GGUF file with these fields has a tokenizer that does the same."""
    again = tokenizer_from_files(gguf_tokenizer(fields), "the fields")
    assert again.model is not None
    words, own = (
        again.model.pre_tokenizer,
        tokenizer.model.pre_tokenizer if tokenizer.model else None,
    )
    for text in TRIALS:
        ids = tokenizer.prompt_ids(text)
        if again.prompt_ids(text) != ids or again.decode(ids) != tokenizer.decode(ids):
            return False
        # Few merges may hide where words end.
        if (
            own is not None
            and words is not None
            and own.pre_tokenize_str(text) != words.pre_tokenize_str(text)
        ):
            return False
    return True
