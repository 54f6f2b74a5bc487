"""A client's connection with its server: dialled by the client, made again when it breaks, so that nothing is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from weft.errors import WeftError
from weft.federated.client_state import ClientState
from weft.federated.client_work import CohortShare, ServerEnded, WorkAnswer, WorkOrder
from weft.federated.federation_frames import (
    BEAT_S,
    SILENT_S,
    FederationForms,
    answer_head,
    read_order,
    travel_seed,
)
from weft.federated.privacy_budget import clipped_difference
from weft.federated.tensor_form import flat_tensors
from weft.federated.written_file import FileNotWritten
from weft.net.wire import Head, SealedConnection, WireBroken

if TYPE_CHECKING:
    import torch

    from weft.federated.secure_sum import MaskKey

    Named = Mapping[str, torch.Tensor]

#: Seconds that connecting may take, and between two attempts at first and at most.
DIAL_S, AGAIN_S, MOST_AGAIN_S = 10.0, 0.2, 5.0
#: Seconds that each MiB of a frame may take.
STALL_S = 60.0


class ServerLink:
    """Connection of a client to its server; implements :class:`weft.federated.client_work.WorkSource`.

    A thread keeps the connection and sends heartbeats, so that the server knows that the client lives while it trains.
    An answer is sent again over every new connection until the server confirms it.

    ``dial``: function that connects, with the client's hello (first message). ``forms``: encodings of the tensors that
    are sent and received. ``kept``: the client's state on disk. ``name``: the client's name. ``clip``: largest norm of
    a difference, 0 for none. ``patience``: seconds to wait for a server that cannot be reached. ``say``: prints a line.
    ``mask``: the client's key for secure sums, or None.
    """

    def __init__(
        self,
        dial: Callable[[Head], SealedConnection],
        forms: FederationForms,
        kept: ClientState,
        name: str,
        clip: float = 0.0,
        patience: float = 600.0,
        say: Callable[[str], object] = print,
        mask: MaskKey | None = None,
    ) -> None:
        self.dial, self.forms, self.kept, self.name = dial, forms, kept, name
        self.clip, self.patience, self.say, self.mask = clip, patience, say, mask
        self.sent = self.received = 0
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._connection: SealedConnection | None = None
        self._about: Head = {}
        self._order: WorkOrder | None = None
        self._working = ""
        self._before: Named = {}
        self._pending: tuple[Head, Sequence[memoryview]] | None = None
        self._taken: bool | None = None
        self._error: Exception | None = None
        self._seeds: dict[str, CohortShare] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    # --- what the loader calls ---

    def join(self, about: Mapping[str, Any]) -> None:
        self._about = {**about, "client": self.name, "key": self.kept.key()}
        if self.mask is not None:
            self._about["public"] = self.mask.public
        self._thread = threading.Thread(
            target=self._live, name="weft-client", daemon=True
        )
        self._thread.start()

    def next_order(self, limit: float) -> WorkOrder | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._order is not None or self._error, limit
            )
            if self._order is not None:
                order, self._order = self._order, None
                return order
            if self._error is not None:
                raise self._error
            return None

    def answer(self, answer: WorkAnswer) -> None:
        head = answer_head(answer)
        difference = clipped_difference(answer.difference, self.clip)
        if answer.order.secure is not None:
            try:
                views = self._masked(answer.order.secure, difference)
            except WeftError as error:
                # no mask can hide it, so that the server is told, and the others need not wait for this client
                head = {"kind": "failed", "token": answer.order.token, "why": str(error), "groups": []}  # fmt: skip
                views = []
        else:
            seed = travel_seed(self.name, answer.order.version)
            packed = self.forms.up.packed(
                difference, seed, self.kept.groups.get("left", {})
            )
            views = list(packed.views)
            if packed.left:
                self.kept.expect(answer.order.token, "left", packed.left)
        for group in head["groups"]:
            views += self.forms.whole.packed(answer.extra[group], 0).views
        with self._changed:
            self._pending, self._taken = (head, views), None
        self._send(head, views)

    def settled(self, limit: float) -> bool | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._taken is not None or self._error, limit
            )
            return self._taken

    def close(self) -> None:
        self._closed = True
        with self._changed:
            connection = self._connection
            self._changed.notify_all()
        if connection is not None:
            with suppress(OSError):
                connection.send({"kind": "bye"})
            connection.close()
        if self._thread is not None:
            self._thread.join(DIAL_S)

    # --- secure sums ---

    def _masked(self, share: CohortShare, difference: Named) -> list[memoryview]:
        from weft.federated.secure_sum import masked

        assert self.mask is not None
        seeds = {
            other: self.mask.seed(public, share.cohort)
            for other, public in share.members.items()
            if other != self.name
        }
        sent = masked(flat_tensors(difference).double() * share.share, self.name, seeds)
        return [sent.numpy().data.cast("B")]

    def _tell(self, head: Head) -> None:
        """Tell the server the seed that this client shares with a lost client, for a cohort that it belongs to."""
        share = self._seeds.get(str(head.get("cohort")))
        lost = str(head.get("lost"))
        if (
            share is None
            or self.mask is None
            or lost not in share.members
            or lost == self.name
        ):
            return
        seed = self.mask.seed(share.members[lost], share.cohort)
        self._send(
            {"kind": "seed", "cohort": share.cohort, "lost": lost, "seed": seed.hex()}
        )

    # --- the thread ---

    def _live(self) -> None:
        again, since = AGAIN_S, time.monotonic()
        while not self._closed and self._error is None:
            try:
                # an answer that an earlier process of this client has sent: whether it was taken
                waiting = self.kept.waiting if self._pending is None else ""
                connection = self.dial(
                    {**self._about, "working": self._working, "sent": waiting}
                )
            except OSError as error:
                if time.monotonic() - since > self.patience:
                    self._fail(WeftError(
                        f"the server has not answered for {self.patience:g} s: {error}; look whether it runs, and "
                        "join again: the work goes on where it was"
                    ))  # fmt: skip
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, again)
                again = min(2 * again, MOST_AGAIN_S)
                continue
            with self._changed:
                self._connection = connection
                pending = self._pending
            if pending is not None:
                self._send(*pending)
            try:
                self._listen(connection)
            except (
                FileNotWritten
            ) as error:  # the disk's fault, and no other connection mends it
                self._fail(error)
            except (OSError, WeftError) as error:
                if not self._closed and self._error is None:
                    self.say(
                        f"the connection with the server is gone ({error}); connecting again"
                    )
            finally:
                connection.close()
                with self._changed:
                    self._connection = None
            again, since = AGAIN_S, time.monotonic()

    def _listen(self, connection: SealedConnection) -> None:
        """Handle the server's frames until the connection ends."""
        heard = beaten = time.monotonic()
        while not self._closed and self._error is None:
            now = time.monotonic()
            if now - beaten >= BEAT_S:
                self._send({"kind": "beat"})
                beaten = now
            if not connection.poll(BEAT_S / 2):
                if now - heard > SILENT_S:
                    raise WireBroken(f"nothing has come for {SILENT_S:g} s")
                continue
            frame = connection.receive(self._room, BEAT_S)
            heard = time.monotonic()
            self.received += frame.payload.nbytes
            self._handle(frame.head, frame.payload)

    def _room(self, head: Head, size: int) -> memoryview:
        if size > self.forms.most:
            raise WireBroken(f"{size:,} bytes are more than this run's largest frame")
        return memoryview(bytearray(size))

    def _handle(self, head: Head, payload: memoryview) -> None:
        kind = head.get("kind")
        if kind == "work":
            order = read_order(head, payload, self.forms, self.name, self._before)
            with self._changed:
                self._order, self._before, self._working = (
                    order,
                    order.parameters,
                    order.token,
                )
                if order.secure is not None:
                    self._seeds = {order.secure.cohort: order.secure}
                self._changed.notify_all()
        elif kind == "taken":
            self._take(head)
        elif kind == "tell":
            self._tell(head)
        elif kind == "end":
            parameters: Named = {}
            if payload.nbytes:
                parameters = self.forms.whole.unpacked(payload, 0)
            self._fail(ServerEnded(str(head.get("why")), parameters))
        elif kind == "refused":
            self._fail(WeftError(f"the server refuses this client: {head.get('why')}"))

    def _take(self, head: Head) -> None:
        """Keep what the last answer changes, now that the server has said whether it has the update."""
        token, taken = head.get("token"), head.get("taken") is True
        with self._changed:
            if self._pending is None:
                if token != self.kept.waiting:
                    return
            elif self._pending[0]["token"] != token:
                return
            self._pending = None
        if token == self.kept.waiting:
            self.kept.settle(taken)
        with self._changed:
            self._taken = taken
            self._changed.notify_all()
        if not taken:
            self.say(f"the server has not taken the update: {head.get('why')}")

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _send(self, head: Head, views: Sequence[memoryview] = ()) -> None:
        """Send a frame if there is a connection. If it breaks, the thread makes another one."""
        connection = self._connection
        if connection is None:
            return
        try:
            with self._sending:
                self.sent += connection.send(head, views)
        except OSError:
            connection.close()
