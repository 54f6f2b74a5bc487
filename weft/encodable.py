"""Texts that come with what is no character: bytes of a command line or a pipe, escapes of JSON."""


def encodable(text: str) -> str:
    """Replace lone surrogates, which neither a tokenizer nor UTF-8 can encode, by question marks."""
    return text if text.isascii() else text.encode(errors="replace").decode()
