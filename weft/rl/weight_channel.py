"""The channel by which ranks that train send the policy's weights to engines that write rollouts in other processes.

An engine connects with the first rank, learns which model to build and which ranks have parts of it, and connects with
these too. At every new version each rank sends its own parts (:mod:`weft.rl.weight_frames`); no rank ever has all of
them. The engine goes on writing until all frames of a version have come, and takes them between two steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch

from weft.cluster.cluster_messages import BEAT_S, ROUTER_SILENT_S
from weft.errors import WeftError
from weft.layout.dims import Tensor, whole_box
from weft.layout.mesh import Mesh, from_all
from weft.layout.parts import NAMES
from weft.models.products import NARROW
from weft.net.endpoint import Address, Endpoint
from weft.net.wire import Frame, Head, SealedConnection, WireBroken
from weft.parallel.state import Held, State
from weft.rl.generation_model import changes
from weft.rl.rollout import SentWeights
from weft.rl.weight_frames import (
    Sources,
    copied_sources,
    move_bytes,
    moves_to_others,
    weight_frames,
)

#: The name of the channel, and seconds that connecting may take.
WEIGHTS, DIAL_S = "policy-weights", 5.0
#: Seconds between two attempts to connect again.
AGAIN_S = 0.25


class PolicyVersion(NamedTuple):
    """This rank's part of a version of the policy's weights.

    ``number``: number of the version. ``sources``: a copy of the part in host memory, by name and box.
    """

    number: int
    sources: Sources


class WeightSender:
    """Sends this rank's parts of the policy to all engines that connect to ``endpoint``.

    Every rank of ``mesh`` has one, and all methods are collective over these ranks.

    Arguments:
        ``state``: the training state.
        ``secret``: secret that only the run and its engines know.
        ``weights``: "bfloat16" if the engines generate with all weights in bfloat16, or "float" for the type of the
            training state.
        ``delta``: whether an engine that has the version before gets only elements whose bytes have changed, if that is
            shorter. A copy of the version before is kept for this.

    Attributes:
        ``about``: JSON values about the model that the first rank tells engines. Engines wait until it is set.
        ``senders``: addresses of the ranks from which an engine gets weights, by the rank's number.
        ``sent``: bytes sent to all engines so far.
        ``spared``: bytes that were not sent so far, because the elements had not changed.
    """

    def __init__(
        self,
        mesh: Mesh,
        state: State,
        endpoint: Endpoint,
        secret: str,
        weights: str = "float",
        delta: bool = False,
    ) -> None:
        self.state, self.delta, self.sent, self.spared = state, delta, 0, 0
        held = {h.name: [h.box] for h in state.held}
        learning = [h.name for h in state.held if changes(h)]
        self._tensors = {h.name: _as_sent(h, weights) for h in state.held}
        group = mesh.step_group
        said = (self._tensors, held, learning, endpoint.address)
        everyones = from_all(said, group)
        tensors: dict[str, Tensor] = {}
        for of_rank, *_ in everyones:
            tensors |= of_rank
        needed = {name: [whole_box(tensor.shape)] for name, tensor in tensors.items()}
        pairs = moves_to_others(tensors, [each[1] for each in everyones], [needed])
        self.rank = group.rank() if group is not None else 0
        learns = {name for each in everyones for name in each[2]}
        self._moves = pairs.get((self.rank, 0), [])
        self._learning = [move for move in self._moves if move.name in learns]
        self._tensors = tensors
        self.senders: dict[int, Address] = {
            rank: each[3]
            for rank, each in enumerate(everyones)
            if rank == 0 or (rank, 0) in pairs
        }
        self.about: Head = {}
        self._newest = self._earlier = PolicyVersion(-1, {})
        self._changed, self._closed = threading.Condition(), False
        self._channel = endpoint.open(WEIGHTS, secret, self._serve)

    def publish(self, version: int) -> None:
        """Copy this rank's newest weights, version ``version``.

        Threads then send the copy while training goes on. All ranks must call it.
        """
        self.state.bring_home()
        self.state.settle()
        first = self._newest.number < 0
        own = {h.name: {h.box: h.local} for h in self.state.held}
        moves = self._moves if first else self._learning
        copies = {**self._newest.sources, **copied_sources(moves, self._tensors, own)}
        with self._changed:
            if self.delta:
                self._earlier = self._newest
            self._newest = PolicyVersion(version, copies)
            self._changed.notify_all()

    def sent_weights(self) -> SentWeights:
        """Return how many bytes of weights this rank has sent to all engines so far, and how many it could
        leave out.
        """
        return SentWeights(self.sent, self.spared)

    def close(self) -> None:
        """End all connections to engines, so that no more weights are sent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._channel.close()

    # A thread for each connection.

    def _serve(self, connection: SealedConnection) -> None:
        with suppress(OSError, KeyError, TypeError):
            with self._changed:
                while self.rank == 0 and not (self.about or self._closed):
                    self._changed.wait(BEAT_S)
            senders = [[rank, *address] for rank, address in self.senders.items()]
            connection.send({"kind": "about", "senders": senders, **self.about})
            number = connection.receive(limit=ROUTER_SILENT_S).head["version"]
            while not self._closed:
                with self._changed:
                    if self._newest.number == number:
                        self._changed.wait(BEAT_S)
                    newest, earlier = self._newest, self._earlier
                if newest.number == number:
                    connection.send({"kind": "beat"})
                else:
                    self._send(connection, newest, earlier, number)
                    number = newest.number
        connection.close()

    def _send(
        self,
        connection: SealedConnection,
        newest: PolicyVersion,
        earlier: PolicyVersion,
        known: int,
    ) -> None:
        """Send the newest version; an engine that has the version ``known`` gets only what changes in training, and
        if that is the version ``earlier``, only what has changed.
        """
        moves = self._moves if known < 0 else self._learning
        before = earlier.sources if 0 <= known == earlier.number else None
        frames = weight_frames(
            moves, self._tensors, newest.sources, newest.number, before, known
        )
        payloads = 0
        for head, payload in frames:
            payloads += len(payload)
            self.sent += connection.send({"kind": "weights", **head}, [payload])
        if before is not None:
            self.spared += move_bytes(moves, self._tensors) - payloads


class VersionFrames(NamedTuple):
    """All frames (messages with weights) that an engine needs to get to a version of the weights from the one it has.

    ``number``: the version. ``frames``: pairs of the rank that sent a frame, and the frame. The frames of each rank are
    in order. If a version in between was never complete, its frames come before those of the version that builds on it.
    """

    number: int
    frames: list[tuple[int, Frame]]


class WeightReceiver:
    """Receives the policy's weights at an engine, in one thread for each rank that sends parts of them.

    ``endpoint``: this process's endpoint. ``run``: address of the training run's first rank. ``secret``: secret that
    only the run and its engines know. The constructor connects to the first rank only; the attribute ``about`` then
    holds what the run has told about the model. Raises :class:`OSError` if no run sends weights at that address.
    """

    def __init__(self, endpoint: Endpoint, run: Address, secret: str) -> None:
        self._channel, self._run = endpoint.join(WEIGHTS, secret), run
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._connections: dict[int, SealedConnection] = {}
        self.version, self._heard = -1, time.monotonic()
        self._coming: dict[int, dict[int, list[Frame]]] = {}  # by version and rank
        connection, self.about = self._dial(run)
        self._connections[0] = connection
        senders = self.about["senders"]
        self.senders: dict[int, Address] = {rank: (host, port) for rank, host, port in senders}  # fmt: skip

    def start(
        self, take: Callable[[VersionFrames], None], failed: Callable[[Exception], None]
    ) -> None:
        """Receive all versions, and call ``take`` with each complete one; a version is skipped if a later one is
        complete.

        A lost connection is restored until :meth:`close` is called. ``failed``: called with an error after which no
        more versions come.
        """
        for rank in self.senders:
            work = partial(self._watch, rank, take, failed)
            name = f"weft-weights-{rank}"
            threading.Thread(target=work, name=name, daemon=True).start()

    @property
    def silent(self) -> float:
        """Seconds since the last message from any of the ranks."""
        return time.monotonic() - self._heard

    def close(self) -> None:
        """Close all connections, so that no more weights are received."""
        self._closed.set()
        self._channel.close()

    def _dial(self, address: Address) -> tuple[SealedConnection, Head]:
        connection = self._channel.dial(address, {}, DIAL_S, ROUTER_SILENT_S)
        try:
            head = connection.receive(limit=DIAL_S).head
        except BaseException:
            connection.close()
            raise
        return connection, head

    def _watch(
        self,
        rank: int,
        take: Callable[[VersionFrames], None],
        failed: Callable[[Exception], None],
    ) -> None:
        while not self._closed.is_set():
            try:
                connection = self._connections.pop(rank, None)
                if connection is None:
                    connection, about = self._dial(self.senders[rank])
                    if rank == 0 and about["run"] != self.about["run"]:
                        raise WeftError("another run listens where this engine's was")
                connection.send({"kind": "known", "version": self.version})
                while True:
                    self._receive(rank, connection, take)
            except OSError:
                with self._lock:
                    for ranks in self._coming.values():
                        ranks.pop(rank, None)
                self._closed.wait(AGAIN_S)
            except Exception as error:
                if not self._closed.is_set():  # else the engine has ended meanwhile
                    failed(error)
                return

    def _receive(
        self,
        rank: int,
        connection: SealedConnection,
        take: Callable[[VersionFrames], None],
    ) -> None:
        """Take a frame; if it completes a version, have it taken."""
        try:
            frame = connection.receive(limit=ROUTER_SILENT_S)
        except TimeoutError:
            raise WireBroken(f"no sign of life for {ROUTER_SILENT_S:g} s") from None
        self._heard = time.monotonic()
        if frame.head["kind"] != "weights":
            return
        number = frame.head["weights"]
        with self._lock:
            if number <= self.version:
                return
            ranks = self._coming.setdefault(number, {})
            ranks.setdefault(rank, []).append(frame)
            if {*self.senders} - ranks.keys() or any(
                len(frames) < frames[0].head["frames"] for frames in ranks.values()
            ):
                return
            frames = [
                (rank, each) for rank in ranks for each in self._chain(rank, number)
            ]
            # a part of an earlier version would be dropped behind one of this version
            frames.sort(key=lambda pair: int(pair[1].head["weights"]))
            self._coming = {at: of for at, of in self._coming.items() if at > number}
            take(VersionFrames(number, frames))
            self.version = number

    def _chain(self, rank: int, number: int) -> list[Frame]:
        """Return the frames by which a rank's part of version ``number`` follows from what the engine has.

        Other ranks may have skipped a version that this rank has sent, and whose changes are in between.
        """
        versions = [at for at in sorted(self._coming) if at <= number]
        chain = list[Frame]()
        for at in versions:
            frames = self._coming[at].get(rank, [])
            if frames and frames[0].head["base"] < 0:
                chain = []
            chain += frames
        return chain


def _as_sent(held: Held, weights: str) -> Tensor:
    """Return the whole tensor of which ``held`` is a part, in the type in which engines get it."""
    dtype = held.local.dtype
    if dtype.is_floating_point:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        dtype = torch.bfloat16 if weights == NARROW else wide
    return Tensor(held.logical.shape, NAMES[dtype])
