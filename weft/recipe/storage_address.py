"""Parses where checkpoints are: a folder, ``s3://bucket/prefix`` or ``peer://path``."""

import re
from typing import Literal, NamedTuple

from weft.errors import UsageError


class StorageAddress(NamedTuple):
    """An address of checkpoints: a folder, a prefix in an S3 bucket, or a path shared by peers.

    ``kind``: which of the three it is. ``path``: the folder, prefix or path. ``bucket``: the S3 bucket, else empty.
    """

    kind: Literal["folder", "s3", "peer"]
    path: str
    bucket: str = ""


def storage_address(text: str) -> StorageAddress:
    """Parse the address of a folder, an S3 prefix or a path shared by peers.

    Raises :class:`UsageError`, whose line leaves out ``text``, as it may hold a credential.
    """
    # a Path has one slash left
    if match := re.fullmatch(r"s3:/{1,2}([^/]*)/*(.*?)/*", text):
        bucket, prefix = match.groups()
        # nor key:secret@bucket
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", bucket):
            raise UsageError(
                "an object store is given as s3://bucket/prefix; credentials go into AWS_* variables"
            )
        return StorageAddress("s3", re.sub("/+", "/", prefix), bucket)
    if match := re.fullmatch(r"peer:/{1,2}(.*?)/*", text):
        return StorageAddress("peer", match[1])
    if scheme := re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text):
        raise UsageError(
            f"{scheme[1]}:// is no storage that Weft knows; give a folder, s3://bucket/prefix or peer://path"
        )
    return StorageAddress("folder", text)
