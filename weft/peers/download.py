"""Fetches files of other peers into a folder block by block; blocks that are already there are not fetched again."""

import os
from collections.abc import Callable
from pathlib import Path

from weft.peers.blocks import BLOCK, Shared, name_of
from weft.peers.quic_peer import IN_FLIGHT, Peer
from weft.peers.transport import PeerError


def download(
    peer: Peer,
    path: str,
    folder: Path,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, int]:
    """Fetch a shared file, or all shared files under a path, from other peers into ``folder``.

    Returns the number of bytes fetched for each file. ``peer``: this process as a peer. ``path``: path of the file, or
    of a folder. ``progress``: called with the number of new bytes as blocks arrive. A download that was interrupted
    continues: an incomplete file has the ending ``.part``, and its blocks are kept if their hashes are right. Raises
    :class:`PeerError` if nobody shares the path.
    """
    files = {
        p: s for p, s in peer.files().items() if p == path or p.startswith(f"{path}/")
    }
    if not files:
        there = sorted({p.split("/")[0] for p in peer.files()})
        raise PeerError(
            f"nobody shares {path}; there is: {', '.join(there) or 'nothing'}"
        )
    above = path.rpartition("/")[0]
    return {
        p: _download(peer, p, s, folder / p[len(above) :].lstrip("/"), progress)
        for p, s in files.items()
    }


def _download(
    peer: Peer, path: str, shared: Shared, file: Path, progress: Callable[[int], None]
) -> int:
    draft, fetched = file.with_name(f"{file.name}.part"), 0
    index = peer.index(path, shared)
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(
        os.open(file if file.exists() else draft, os.O_RDWR | os.O_CREAT, 0o644), "r+b"
    ) as handle:
        for at in range(0, len(index), IN_FLIGHT):
            names = index[at : at + IN_FLIGHT]
            handle.seek(at * BLOCK)
            here = [name_of(handle.read(BLOCK)) == name for name in names]
            missing = [
                name for name, is_here in zip(names, here, strict=True) if not is_here
            ]
            blocks = (
                dict(
                    zip(
                        missing,
                        peer.fetch(missing, peer.having(path, shared)),
                        strict=True,
                    )
                )
                if missing
                else {}
            )
            for i, name in enumerate(names):
                if not here[i]:
                    handle.seek((at + i) * BLOCK)
                    handle.write(blocks[name])
                    fetched += len(blocks[name])
            progress(min(shared.size, (at + len(names)) * BLOCK) - at * BLOCK)
        handle.truncate(shared.size)
        handle.flush()
        os.fsync(handle.fileno())
    if draft.exists():
        draft.replace(file)
    return fetched
