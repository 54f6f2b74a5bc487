"""Keys of cache blocks: a block is found again by the beginning of a text, or by an adapter."""

from collections.abc import Iterator, Sequence
from hashlib import blake2b


def root_key(
    version: int, adapter: str, tenant: str, context: int | None = None
) -> bytes:
    """Return the root key of a text: the hash from which the keys of the text's cache blocks are derived, each from the
    one before. Requests find cached blocks of equal texts by these keys.

    Blocks with equal keys are shared. Texts that differ in any argument have different keys, and so share no cache
    blocks. ``version``: number of the weights. ``adapter``: name of the adapter, or "". ``tenant``: name of the tenant.
    ``context``: for a request that attends to other requests, a number of its own; else None.
    """
    return _key(repr((version, adapter, tenant, context)).encode())


def chained_keys(root: bytes, ids: Sequence[int], size: int) -> Iterator[bytes]:
    """Yield a key for every full block of ``size`` tokens of the text ``ids``, by which a cached block is found. It is
    a hash of the block's tokens and of the previous block's key. ``root``: the text's :func:`root_key`, which stands
    before the first block.
    """
    for at in range(0, len(ids) - size + 1, size):
        root = _key(root + repr(tuple(ids[at : at + size])).encode())
        yield root


def shelf_keys(adapter: str, blocks: int) -> list[bytes]:
    """Return a list of keys for the ``blocks`` cache blocks that hold the adapter named ``adapter``, one per block."""
    return [_key(repr((adapter, block)).encode()) for block in range(blocks)]


def _key(text: bytes) -> bytes:
    return blake2b(text, digest_size=16).digest()
