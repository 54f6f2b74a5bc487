"""The speed at which cache blocks travel between simulated engines."""

from typing import NamedTuple


class BlockLink(NamedTuple):
    """Speed at which cache blocks travel from one engine to another.

    ``latency``: seconds until the first byte arrives. ``rate``: bytes per second. ``token_bytes``: bytes of a token's
    keys and values over all layers.
    """

    latency: float
    rate: float
    token_bytes: float
