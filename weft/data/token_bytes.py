"""Bytes of each token. A character may be spread over several tokens."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from weft.data.tokenizer import Tokenizer

#: A token that stands for one byte, in tokenizers that have all others as characters.
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes of each token of ``tokenizer``. A special token has the bytes of its name."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        decoders = (
            []
            if tokenizer.model is None
            else list(_decoders(json.loads(tokenizer.model.to_str())))
        )
        kinds = {decoder["type"] for decoder in decoders}
        self._level, self._fallback = "ByteLevel" in kinds, "ByteFallback" in kinds
        self._replaced = [
            (d["pattern"]["String"], d["content"]) for d in decoders if _replaces(d)
        ]
        self._replaced += [
            (d.get("replacement", "▁"), " ")
            for d in decoders
            if d["type"] == "Metaspace"
        ]
        self._added = (
            {}
            if tokenizer.model is None
            else tokenizer.model.get_added_tokens_decoder()
        )
        self._byte = byte_of_character()
        self.bytes_of = lru_cache(2**16)(self._bytes_of)

    def _bytes_of(self, token: int) -> bytes:
        """Return the bytes of ``token``; none of an id that the tokenizer does not have."""
        if self.tokenizer.model is None:
            return (
                bytes([token])
                if token < 256
                else (self.tokenizer.name_of(token) or "").encode()
            )
        if token in self._added:
            return self._added[token].content.encode()
        word = self.tokenizer.model.id_to_token(token)
        if word is None:
            return b""
        if self._level:
            return b"".join(self._byte.get(char, char.encode()) for char in word)
        if self._fallback and (match := BYTE.fullmatch(word)):
            return bytes([int(match[1], 16)])
        for old, new in self._replaced:
            word = word.replace(old, new)
        return (
            word.encode()
            if self._replaced or self._fallback
            else self.tokenizer.decode([token]).encode()
        )

    def text(self, token: int) -> str:
        """Return the text of a token as OpenAI's API writes it.

        If the token's bytes are not valid UTF-8, the text is ``bytes:`` followed by their hexadecimal escapes.
        """
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def names(self, chances: Mapping[int, float]) -> dict[int, str]:
        """Return a unique name for each token id of ``chances``, which maps token ids to their probabilities.

        The name is the token's text, or ``token_id:N`` if a more probable token has the same text.
        """
        named: dict[int, str] = {}
        taken: set[str] = set()
        for token in sorted(chances, key=lambda i: -chances[i]):
            text = self.text(token)
            named[token] = f"token_id:{token}" if text in taken else text
            taken.add(text)
        return named


@lru_cache(8)
def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """Return the :class:`TokenBytes` of ``tokenizer``; later calls return the same object."""
    return TokenBytes(tokenizer)


def byte_of_character() -> dict[str, bytes]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2, Radford et al. 2019)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): bytes([byte]) for byte in shown} | {
        chr(256 + n): bytes([byte]) for n, byte in enumerate(hidden)
    }


def _decoders(tree: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the steps by which a tokenizer makes text of tokens."""
    decoder = tree.get("decoder") or {}
    yield from decoder.get("decoders", [decoder] if decoder else [])


def _replaces(decoder: Mapping[str, Any]) -> bool:
    return decoder["type"] == "Replace" and "String" in decoder.get("pattern", {})
