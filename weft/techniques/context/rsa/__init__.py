"""Ring Self-Attention (Li et al. 2021, 2105.13120): keys go around the ring first, and values after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weft.parallel.context.scheme import AttentionScheme
from weft.registry import register

if TYPE_CHECKING:
    from weft.parallel.context.tables import TileTable


@register(
    "context",
    "rsa",
    title="Ring Self-Attention, the baseline: two rounds, whole rows of scores",
    paper="Li et al. 2021",
    recipe="rsa.toml",
    proof="tests/parallel/test_context.py, tests/test_counts.py",
    figure=(
        "bytes of ring attention; a step of 512 and 1,024 tokens per rank needs 112 "
        "and 432 MiB where zigzag needs 16 and 32, and takes 2.5 to 3.2x as long "
        "(`bench/sequence.py`)"
    ),
)
class RingSelfAttention(AttentionScheme):
    """Computes whole rows of attention scores before their softmax, without an online softmax (Li et al. 2021). First
    keys, then values, are sent around a ring of ranks. It is the baseline with which later schemes are compared.
    """

    def table(self, ranks: int) -> TileTable:
        from weft.parallel.context.tables import circle, contiguous_owners

        return circle("rsa", contiguous_owners(ranks), "kv", buffers=2)

    def operator(self) -> Callable[..., Any]:
        from weft.techniques.context.rsa.operator import ring_self_attention

        return ring_self_attention
