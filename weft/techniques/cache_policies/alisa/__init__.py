"""A local window and the tokens with most attention so far, in three phases of the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

from weft.errors import UsageError
from weft.generate.cache_policy import CachePolicy, TextBlocks, share_of
from weft.registry import register

if TYPE_CHECKING:
    from weft.models.block_selector import BlockSelector

#: The least share with which queries choose. In blocks of few tokens they look at more, and it is larger.
QUERY_LEAST = 1 / 8


@register(
    "cache-policy",
    "alisa",
    title="Sparse window attention in three phases",
    paper="ALISA, 2403.17312",
    recipe="weft serve --checkpoint RUN --cache-policy alisa:0.25",
    proof="tests/techniques/test_cache_policies.py",
    figure=(
        "equal tokens whether blocks are on the device, on the host, or computed again; with `0.25:query` SmolLM2's "
        "perplexity over eleven texts is 1.002 of that with all keys, with `0.25` 1.128 (`bench/alisa_choices.py`); "
        "with `0.25:drawn` that of a small model is 1.008 (`bench/cache_policies.py`)"
    ),
)
class SparseWindow(CachePolicy):
    """Lets each written token see the fraction ``share`` of the tokens up to its own block (ALISA, 2403.17312). Half of
    the seen tokens are the last ones; the others are those with the largest running sums of attention weights. These
    sums are halved after each block. Each key head chooses for itself. Tokens of a prompt see all tokens before them,
    unless ``prompts``.

    The cache has three phases. While blocks are free, all keys and values are on the device. When none is free, the
    oldest blocks of the longest text move to the host, from where single tokens are read. When the host has no room
    either, the latest text gives all its blocks back and is computed again later.

    ``host``: tokens for which the host has room; None: as many as the cache has. ``rounded``: whether keys and values
    are rounded to 8 bits when they are computed, so that the host keeps them in 8 bits. ``prompts``: whether tokens of
    a prompt see a fraction of the tokens, too.

    ``query`` is not the paper's: each token chooses the others by its own queries in place of sums. It looks at some
    elements of all keys (after SparQ, 2312.04985) in two bits, which count in the share. Three eighths of the others
    are drawn and count for many (after MagicPIG, 2410.16179). Sums say what earlier tokens attended to; a text that
    returns to something is then lost. ``evenly``, the word ``drawn``: half of the others are drawn, each for as many as
    it stands for, for models that look at everything a little.
    """

    example: ClassVar[str] = "alisa:0.25"
    argument: ClassVar[str] = (
        "a share above 0 and at most 1, then host=TOKENS, int8, prompts, query or drawn, each once at most"
    )
    remembers: ClassVar[bool] = True
    windows: ClassVar[bool] = False
    words: ClassVar[tuple[str, ...]] = ("int8", "prompts", "query", "drawn")

    def __init__(
        self,
        share: float,
        host: int | None = None,
        rounded: bool = False,
        prompts: bool = False,
        query: bool = False,
        evenly: bool = False,
    ) -> None:
        self.share, self.host, self.rounded = share, host, rounded
        self.prompts, self.query, self.evenly = prompts, query or evenly, evenly

    @classmethod
    def of_argument(cls, argument: str | None) -> Self | None:
        first, *others = (argument or "").split(":")
        share = share_of(first)
        flags = [word in others for word in cls.words]
        rooms = [word for word in others if word not in cls.words]
        if share is None or len(rooms) > 1 or len({*others}) < len(others):
            return None
        if not rooms:
            return cls(share, None, *flags)
        name, _, room = rooms[0].partition("=")
        if name != "host" or not room.isdecimal():
            return None
        return cls(share, int(room), *flags)

    def check_size(self, size: int) -> None:
        if self.host is not None and 0 < self.host < size:
            raise UsageError(
                f"--cache-policy {self.word} has room on the host for less than a cache block of {size} tokens; "
                f"give host={size} or more, or host=0"
            )
        if self.query:
            from weft.techniques.cache_policies.alisa.query_selector import looked_share

            least = max(QUERY_LEAST, 2 * looked_share(size))
            if self.share < least:
                raise UsageError(
                    f"--cache-policy {self.word} leaves too few tokens beside what queries look at in cache blocks "
                    f"of size {size}; give a share of {least:g} or more, or leave query and drawn out"
                )

    def selector(self, size: int) -> BlockSelector:
        given = self.share, size, self.rounded, self.prompts
        if self.query:
            from weft.techniques.cache_policies.alisa.query_selector import (
                QuerySelector,
            )

            return QuerySelector(*given, self.evenly)
        from weft.techniques.cache_policies.alisa.alisa_selector import (
            WeightSumSelector,
        )

        return WeightSumSelector(*given)

    def most_blocks(self, tokens: int, budget: int, size: int) -> int:
        from weft.techniques.cache_policies.alisa.host_phase import NEAR

        whole = -(-tokens // size)
        if self.host is None:
            # as many on the host as on the device
            return max(min(whole, 2 + NEAR + -(-budget // size)), -(-whole // 2))
        return max(min(whole, 2 + NEAR + -(-budget // size)), whole - self.host // size)

    def attach(self, scheduler: TextBlocks) -> None:
        from weft.techniques.cache_policies.alisa.host_phase import HostPhase

        scheduler.relief.append(HostPhase(scheduler, self.host).relieve)
