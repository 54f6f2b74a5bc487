"""Open the storage that an address names. The code for S3 and peers is imported only when an address needs it."""

from pathlib import Path

from weft.checkpoint.storage import LocalStorage, Storage
from weft.recipe.storage_address import storage_address

#: A storage, or the address of one: a folder, ``s3://bucket/prefix`` or ``peer://path``.
Where = str | Path | Storage


def open_storage(where: Where) -> Storage:
    """Open the storage that ``where`` names: a folder, ``s3://bucket/prefix`` or ``peer://path``.

    An open storage is returned unchanged. Raises :class:`UsageError` for any other address.
    """
    if not isinstance(where, (str, Path)):
        return where
    address = storage_address(str(where))
    if address.kind == "s3":
        from weft.checkpoint.s3 import S3Storage

        return S3Storage(address.bucket, address.path)
    if address.kind == "peer":
        from weft.checkpoint.peer_storage import PeerStorage

        return PeerStorage(address.path)
    return LocalStorage(Path(where))
