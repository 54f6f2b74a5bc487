"""Ends the waits of process groups from another thread, once it is known that the waits are in vain.

Gloo has no abort. What it waits for are TCP connections that it made with the groups; once these are shut down, all
that waits for them raises within milliseconds, and the groups can be destroyed at once.

They are shut for reading alone. When a peer asks for what is ready for it, gloo's loop takes that operation off its
list before it writes; if the write then fails, as on a connection that was shut both ways in this moment, nobody wakes
who waits for it until the time limit. The end of what can be read wakes all that is on the list. What peers have reset
meanwhile, as of a rank that was frozen, can do the same: a wait that does not end is found, and said.
"""

import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

#: Seconds between two passes while a hung up thread is on its way out, as it may make further connections.
AGAIN_S = 0.05

#: Seconds after which a wait whose connections are shut is lost, however much else the processors have to do.
STUCK_S = 10.0
#: Files whose functions wait for other ranks.
WAITING = (
    os.path.join("torch", "distributed", ""),
    os.path.join("resilience", "hooks.py"),
)

_spared: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
_lock = threading.Lock()


def spare(*sockets: socket.socket) -> None:
    """Exclude ``sockets``, which belong to no process group, from the connections that :class:`HangUp` shuts."""
    with _lock:
        _spared.update(sockets)


@contextmanager
def _connections() -> Iterator[dict[int, socket.socket]]:
    """Yield this process's TCP connections by inode, as copies of the sockets, which are closed at the end."""
    copies: dict[int, socket.socket] = {}
    try:
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                # so that it stays this one while it is looked at
                copy = socket.socket(fileno=os.dup(int(name)))
                inode = os.fstat(copy.fileno()).st_ino
                tcp = (
                    copy.family in (socket.AF_INET, socket.AF_INET6)
                    and copy.type == socket.SOCK_STREAM
                )
                # gloo ends the process when its listening socket fails
                if (
                    tcp
                    and inode not in copies
                    and not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                ):
                    copies[inode] = copy
                else:
                    copy.close()
        yield copies
    finally:
        for copy in copies.values():
            copy.close()


def connections_now() -> set[int]:
    """Return the inodes of this process's present TCP connections, by which connections are told apart."""
    with _connections() as connections:
        return set(connections)


class HangUp:
    """Breaks off all waits in process groups, by shutting the groups' connections.

    Create the object before the groups. It cannot tell their connections from others, as gloo may connect at any time.
    So it shuts every connection that this process has opened since the object was created, except the sockets that were
    given to :func:`spare`. Call ``hang_up()`` in any thread to shut them. Call ``close()`` when no thread waits in any
    of the groups any more; nothing is shut after that.

    ``stuck``: function that is called in another thread if the main thread keeps waiting although the connections are
    shut. ``kept``: connections, by inode, of groups that are older than this object. ``everything`` (attribute):
    whether the connections of all groups were shut.
    """

    def __init__(
        self, stuck: Callable[[], None] = lambda: None, kept: Collection[int] = ()
    ) -> None:
        self._stuck = stuck
        self._before = connections_now() - {*kept}
        self.everything = False
        self._over = threading.Event()
        self._hung, self._shutting = threading.Lock(), threading.Lock()

    def hang_up(self, whole: Collection[int] = (), patience: float = 0.0) -> None:
        """Shut all connections of process groups, and those that are made until :meth:`close`. Returns at once.

        ``whole``: connections, by inode, of groups that have lost no rank. Waits in these groups may end by themselves,
        and they are shut only after ``patience`` seconds.
        """
        if self._over.is_set() or not self._hung.acquire(blocking=False):
            return
        self._whole, self._until = {*whole}, time.monotonic() + patience
        self._shut()
        threading.Thread(target=self._again, name="weft-hangup", daemon=True).start()

    def close(self) -> None:
        with self._shutting:
            self._over.set()

    def _again(self) -> None:
        _abort_nccl()
        place, since = _waits_at(), time.monotonic()
        while not self._over.wait(AGAIN_S):
            self._shut()
            now, before, place = time.monotonic(), place, _waits_at()
            if place is None or place != before:
                since = now
            elif now - since > STUCK_S:
                return self._stuck()

    def _shut(self) -> None:
        with _connections() as connections:
            chosen = connections.keys() - self._before - self._spared()
            with self._shutting:
                # meanwhile, and what was found may be the next view's
                if self._over.is_set():
                    return
                if time.monotonic() < self._until and self._whole:
                    chosen -= self._whole
                else:
                    self.everything = True
                for inode in chosen:
                    with suppress(OSError):  # not connected any more
                        connections[inode].shutdown(socket.SHUT_RD)

    @staticmethod
    def _spared() -> set[int]:
        inodes = set()
        with _lock:
            for spared in _spared:
                with suppress(OSError):
                    inodes.add(os.fstat(spared.fileno()).st_ino)
        return inodes


def _waits_at() -> tuple[object, int] | None:
    """Return the frame and instruction at which the main thread waits for other ranks; None if it does not wait."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    for waiting in (frame, frame.f_back if frame else None):
        if waiting is not None and any(
            part in waiting.f_code.co_filename for part in WAITING
        ):
            return waiting, waiting.f_lasti
    return None


def _abort_nccl() -> None:
    """Abort all NCCL groups. (Gloo's abort does nothing.)"""
    import torch.distributed as dist

    if dist.is_initialized() and "nccl" in dist.get_backend():
        with suppress(RuntimeError, ValueError):  # the groups were destroyed meanwhile
            dist.distributed_c10d._abort_process_group()
