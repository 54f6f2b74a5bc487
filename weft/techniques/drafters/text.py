"""Guesses from a request's own text (prompt lookup)."""

from weft.generate.lookup import Lookup
from weft.registry import register


@register(
    "drafter",
    "text",
    title=(
        "Guesses from a request's own text, checked by the pass that computes the "
        "next token"
    ),
    paper="Saxena 2023 (prompt lookup)",
    recipe="weft generate --checkpoint RUN --prompt TEXT --draft text",
    proof="tests/generate/test_speculation.py, tests/generate/test_scheduler.py",
    figure=(
        "the tokens and log-probabilities without guesses, also of drawn texts; twice"
        " as fast on an edited text with SmolLM2-135M on one core, as fast on random "
        "text (`bench/generate.py`)"
    ),
)
class OwnText(Lookup):
    """Finds an earlier occurrence of a text's last tokens in the text, and guesses the tokens that followed there
    (prompt lookup, Saxena 2023).
    """
