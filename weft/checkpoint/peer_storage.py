"""Storage of checkpoints that other peers share, read over :mod:`weft.peers`: ``peer://path``.

The invitation comes from ``WEFT_INVITATION``, as credentials of an object store come from its variables. Only the
blocks that are asked for travel, each from any peer that has it, and none is used whose bytes are not what its name
says. Nothing is written this way: who has a checkpoint shares its folder (``weft peer join --share``).
"""

import atexit
import os
import platform
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Self

from weft.checkpoint.storage import MissingObject, StorageError
from weft.errors import UsageError, WeftError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weft.peers.blocks import Shared
    from weft.peers.quic_peer import Peer

#: Blocks of a MiB that are kept, since neighbouring reads share them.
KEPT = 32


@dataclass(frozen=True)
class PeerStorage:
    """Read-only :class:`~.storage.Storage` of files that other peers share (``peer://path``).

    ``prefix``: path of the storage's root among the shared files.
    """

    prefix: str

    def __str__(self) -> str:
        return f"peer://{self.prefix}"

    @property
    def name(self) -> str:
        return self.prefix.rpartition("/")[2]

    def __truediv__(self, name: str) -> Self:
        return type(self)(f"{self.prefix}/{name}".strip("/"))

    def read(self, name: str) -> bytes:
        data = bytearray(self._file("read", name).size)
        self.read_into(name, 0, memoryview(data))
        return bytes(data)

    def holds(self, name: str) -> bool:
        return f"{self / name}".removeprefix("peer://") in self._files("read")

    @property
    def granule(self) -> int:
        return 8 << 20

    def read_into(self, name: str, offset: int, *buffers: memoryview) -> None:
        from weft.peers.blocks import BLOCK

        shared, total = self._file("read", name), sum(b.nbytes for b in buffers)
        if offset + total > shared.size:
            raise MissingObject(
                f"cannot read {self / name}: it is shorter than it should be"
            )
        first = offset // BLOCK
        with self._named("read", name):
            blocks = _blocks(
                (self / name).prefix,
                shared,
                first,
                -(-(offset + total) // BLOCK) if total else first,
            )
        at = offset - first * BLOCK
        for buffer in buffers:
            view = buffer.cast("B")
            while view:
                piece = memoryview(blocks[at // BLOCK])[at % BLOCK :][: len(view)]
                view[: len(piece)] = piece
                view, at = view[len(piece) :], at + len(piece)

    def list(self, prefix: str = "") -> dict[str, int]:
        inside = f"{self.prefix}/" if self.prefix else ""
        sizes = {
            path[len(inside) :]: s.size
            for path, s in self._files("list").items()
            if path.startswith(inside)
        }
        return {name: size for name, size in sizes.items() if name.startswith(prefix)}

    def folders(self) -> Sequence[str]:
        return sorted({name.split("/")[0] for name in self.list() if "/" in name})

    def modified(self, name: str = "") -> float:
        circle, path = (
            self._circle("read"),
            (self / name).prefix if name else self.prefix,
        )
        at = [
            entry.stamp.time / 1000
            for key, entry in list(circle.table.entries.items())
            if key == f"file/{path}" or (not name and key.startswith(f"file/{path}/"))
        ]
        if not at:
            raise MissingObject(
                f"cannot read {self / name if name else self}: nobody shares it"
            )
        return max(at)

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        raise self._read_only("write", name)

    def create(self, name: str, data: bytes) -> bool:
        raise self._read_only("create", name)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            raise self._read_only("delete", name)

    def clear(self) -> None:
        raise self._read_only("delete", "")

    def _read_only(self, doing: str, name: str) -> StorageError:
        where = self / name if name else self
        return StorageError(
            f"cannot {doing} {where}: peers only share; save to a folder and share it with `weft peer`"
        )

    def _file(self, doing: str, name: str) -> "Shared":
        path = (self / name).prefix
        if (shared := self._files(doing).get(path)) is None:
            raise MissingObject(f"cannot {doing} peer://{path}: nobody shares it")
        return shared

    def _files(self, doing: str) -> "dict[str, Shared]":
        return self._circle(doing).files()

    def _circle(self, doing: str) -> "Peer":
        with self._named(doing):
            return _circle(os.getpid())

    @contextmanager
    def _named(self, doing: str, name: str = "") -> "Iterator[None]":
        try:
            yield
        except (StorageError, UsageError):
            raise
        except WeftError as error:
            raise StorageError(
                f"cannot {doing} {self / name if name else self}: {error}"
            ) from None


@cache
def _circle(process: int) -> "Peer":
    """This process's own peer, made at the first call. ``process``: its id, so that a forked child makes another."""
    from weft.peers.invitation import read_invitation
    from weft.peers.quic_peer import Peer

    peer = Peer(read_invitation(), f"{platform.node()}-{process}").__enter__()
    try:
        peer.settle()
    except WeftError:
        peer.close()
        raise
    atexit.register(peer.close)
    return peer


@lru_cache(maxsize=64)
def _index(path: str, shared: "Shared") -> list[bytes]:
    return _circle(os.getpid()).index(path, shared)


_kept: OrderedDict[bytes, bytes] = OrderedDict()


def _blocks(path: str, shared: "Shared", first: int, end: int) -> list[bytes]:
    """Blocks ``first`` up to ``end`` of a file; the last ones that were read are kept."""
    peer, names = _circle(os.getpid()), _index(path, shared)[first:end]
    blocks = {name: _kept[name] for name in names if name in _kept}
    if missing := [name for name in dict.fromkeys(names) if name not in blocks]:
        blocks |= zip(
            missing, peer.fetch(missing, peer.having(path, shared)), strict=True
        )
    _kept.update(blocks)
    while len(_kept) > KEPT:
        _kept.popitem(last=False)
    return [blocks[name] for name in names]
