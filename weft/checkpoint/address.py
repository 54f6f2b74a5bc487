"""Addresses of places that hold checkpoints; what reads a kind of place is imported with the first of it."""

import re
from pathlib import Path

from weft.checkpoint.storage import LocalStorage, Storage
from weft.errors import UsageError

#: A place, or the address of one: a folder, ``s3://bucket/prefix`` or ``peer://path``.
Where = str | Path | Storage


def open_storage(where: Where) -> Storage:
    """``s3://bucket/prefix``, ``peer://path`` or a folder. Raises :class:`UsageError` for anything else."""
    if not isinstance(where, (str, Path)):
        return where
    text = str(where)
    # a Path has one slash left
    if found := re.fullmatch(r"s3:/{1,2}([^/]*)/*(.*?)/*", text):
        bucket, prefix = found.groups()
        # nor key:secret@bucket
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", bucket):
            raise UsageError(
                "an object store is given as s3://bucket/prefix; credentials go into AWS_* variables"
            )
        from weft.checkpoint.s3 import S3Storage

        return S3Storage(bucket, re.sub("/+", "/", prefix))
    if found := re.fullmatch(r"peer:/{1,2}(.*?)/*", text):
        from weft.checkpoint.peer import PeerStorage

        return PeerStorage(found[1])
    if scheme := re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text):
        raise UsageError(
            f"{scheme[1]}:// is no storage that Weft knows; give a folder, s3://bucket/prefix or peer://path"
        )
    return LocalStorage(Path(where))
