"""Guesses from a request's own text."""

from weft.generate.lookup import Lookup
from weft.registry import register


@register(
    "drafter",
    "text",
    title="Guesses from a request's own text",
    paper="Saxena 2023 (prompt lookup)",
    recipe="weft generate --checkpoint RUN --prompt TEXT --draft text",
    proof="tests/generate/test_speculation.py",
)
class OwnText(Lookup):
    """Guesses what followed the text's last tokens when they appeared before."""
