"""Addresses of places that hold checkpoints; what reads a kind of place is imported with the first of it."""

from pathlib import Path

from weft.checkpoint.storage import LocalStorage, Storage
from weft.recipe.storage_address import storage_address

#: A place, or the address of one: a folder, ``s3://bucket/prefix`` or ``peer://path``.
Where = str | Path | Storage


def open_storage(where: Where) -> Storage:
    """``s3://bucket/prefix``, ``peer://path`` or a folder. Raises :class:`UsageError` for anything else."""
    if not isinstance(where, (str, Path)):
        return where
    address = storage_address(str(where))
    if address.kind == "s3":
        from weft.checkpoint.s3 import S3Storage

        return S3Storage(address.bucket, address.path)
    if address.kind == "peer":
        from weft.checkpoint.peer import PeerStorage

        return PeerStorage(address.path)
    return LocalStorage(Path(where))
