"""The blocks whose mean keys fit a query best."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

from weft.generate.cache_policy import CachePolicy, share_of
from weft.registry import register

if TYPE_CHECKING:
    from weft.models.block_selector import BlockSelector


@register(
    "cache-policy",
    "blocks",
    title="Top blocks by their mean key",
    paper="Kinetics, 2506.05333",
    recipe="weft serve --checkpoint RUN --cache-policy blocks:0.25",
    proof="tests/techniques/test_cache_policies.py",
    figure="keys that are read, counted: the share, at equal tokens however the text is cut",
)
class TopBlocks(CachePolicy):
    """Lets each token see the fraction ``share`` of the blocks of its text (Kinetics, 2506.05333). It sees its own
    block, and the blocks whose mean keys have the largest products with the token's queries. Each key head chooses for
    its own group of query heads. All keys stay in memory; fewer of them are read. Texts of a few blocks are read whole
    (:data:`weft.techniques.cache_policies.blocks.blocks_selector.LEAST`).
    """

    example: ClassVar[str] = "blocks:0.25"
    argument: ClassVar[str] = "a share of the blocks, above 0 and at most 1"

    def __init__(self, share: float) -> None:
        self.share = share

    @classmethod
    def of_argument(cls, argument: str | None) -> Self | None:
        share = share_of(argument)
        return None if share is None else cls(share)

    def selector(self, size: int) -> BlockSelector:
        from weft.techniques.cache_policies.blocks.blocks_selector import (
            MeanKeySelector,
        )

        return MeanKeySelector(self.share)
