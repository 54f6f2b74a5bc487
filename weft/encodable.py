"""Handles text with bytes or escapes that are no characters, from a command line, a pipe or JSON."""


def encodable(text: str) -> str:
    """Return ``text`` with question marks in place of lone surrogates, which neither a tokenizer nor UTF-8 can
    encode.
    """
    return text if text.isascii() else text.encode(errors="replace").decode()
