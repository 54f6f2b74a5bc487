"""Handles text with bytes or escapes that are no characters, from a command line, a pipe or JSON."""


def encodable(text: str) -> str:
    """Replace lone surrogates, which neither a tokenizer nor UTF-8 can encode, by question marks."""
    return text if text.isascii() else text.encode(errors="replace").decode()
