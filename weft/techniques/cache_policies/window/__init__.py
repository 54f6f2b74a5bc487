"""Attention sinks and a window: the first block of a text, and its last tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

from weft.errors import UsageError
from weft.generate.cache_policy import CachePolicy
from weft.registry import register

if TYPE_CHECKING:
    from weft.models.block_selector import BlockSelector


@register(
    "cache-policy",
    "window",
    title="Attention sinks and a window",
    paper="StreamingLLM, 2309.17453",
    recipe="weft serve --checkpoint RUN --cache-policy window:1024",
    proof="tests/techniques/test_cache_policies.py",
    figure="blocks that no token will see are freed: a text twice as long as the cache, its memory constant",
)
class SinkWindow(CachePolicy):
    """Lets each token see the first cache block of its text and the last ``tokens`` tokens before it, rounded up to
    whole blocks (StreamingLLM, 2309.17453). The first tokens of a text get much attention whatever they say (attention
    sinks), so that a window without them spoils the text. A block that no later token sees is given back to the pool at
    once: a text may be much longer than the cache. Keys stay rotated to their positions in the text.
    """

    example: ClassVar[str] = "window:1024"
    argument: ClassVar[str] = "a whole number of tokens above 0"

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    @classmethod
    def of_argument(cls, argument: str | None) -> Self | None:
        tokens = int(argument) if argument and argument.isdecimal() else 0
        return cls(tokens) if tokens else None

    def check_size(self, size: int) -> None:
        if self.tokens < size:
            raise UsageError(
                f"--cache-policy {self.word} is less than a cache block of {size} tokens; give window:{size} or more"
            )

    def selector(self, size: int) -> BlockSelector:
        from weft.techniques.cache_policies.window.window_selector import WindowSelector

        return WindowSelector(self.tokens, self.blocks(size))

    def blocks(self, size: int) -> int:
        """Return how many blocks a token sees between the text's first block and its own block, neither of them
        counted. ``size``: tokens of a block.
        """
        return -(-self.tokens // size)

    def hidden(self, computed: int, size: int) -> range:
        return range(1, max(1, computed // size - self.blocks(size)))

    def most_blocks(self, tokens: int, budget: int, size: int) -> int:
        # the first block, those of the window, and those of the step, of which both ends can be cut
        kept = 1 + self.blocks(size) + -(-budget // size) + 1
        return min(-(-tokens // size), kept)
