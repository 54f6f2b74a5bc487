"""Processes of a role that get texts and send a number for each of their tokens, as the ranks that train use them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from weft.errors import WeftError
from weft.layout.mesh import from_all
from weft.rl.local_rollouts import RolloutInterrupted
from weft.rl.role_links import WAIT, RoleLinks, RoleReply, Travelled, shared_numbers
from weft.rl.role_texts import MarkedText, packed_texts, unpacked_numbers

if TYPE_CHECKING:
    import numpy as np

    from weft.layout.mesh import Mesh
    from weft.net.wire import Frame, Head
    from weft.rl.rl_phases import RlPhases


class TextProcesses:
    """Processes of the role ``role``. All methods are collective over the ranks of ``mesh``; the first rank starts the
    processes and talks with them, and keeps an error until all ranks can hear of it.

    Arguments:
        ``job``: the checked recipe.
        ``about``: returns JSON values that each process learns first, such as the model to build.
        ``interrupted``: returns whether this rank is asked to end the run.

    Attributes:
        ``leads``: whether this rank is the first.
        ``links``: the processes, on the first rank.
        ``travelled``: the bytes of texts and numbers since the last figures, and the seconds for which the processes
            have computed; zeros on all ranks but the first.
    """

    def __init__(
        self,
        role: str,
        job: RlPhases,
        mesh: Mesh,
        about: Callable[[RlPhases], Head],
        interrupted: Callable[[], bool],
    ) -> None:
        self.mesh, self.travelled = mesh, Travelled()
        self._texts: Sequence[MarkedText] = ()
        self._numbers: Frame | None = None
        self._failure: Exception | None = None
        group = mesh.step_group
        self.leads = group is None or group.rank() == 0
        if self.leads:
            limit = WAIT * job.recipe.train.timeout
            self.links = RoleLinks(
                role, job.roles, about(job), limit, interrupted, self._take
            )

    def request(self, texts: Sequence[MarkedText]) -> None:
        """Send the ``texts`` of a rollout phase to the processes, which begin to compute their numbers."""
        self._texts = texts
        if not self.leads or not texts:
            return
        self._numbers = None
        until = self._deadline()
        try:
            self._await_idle(until)
            payload = packed_texts(texts)
            lengths = [len(ids) for ids, _ in texts]
            self.links.send({"kind": "texts", "lengths": lengths}, payload)
        except (WeftError, RolloutInterrupted) as error:
            self._failure = error  # all ranks hear of it with the reply
            return
        self._note_requested(until)
        self._count_sent(payload)

    def close(self) -> None:
        """End the processes."""
        if self.leads:
            self.links.close()

    def _await_idle(self, until: float) -> None:
        """Wait, no longer than ``until``, until the processes can take texts."""
        self.links.await_ready(until)

    def _note_requested(self, until: float) -> None:
        """Note that texts were sent for whose numbers the first rank waits no longer than ``until``."""

    def _deadline(self) -> float:
        """Return the time at which a wait that begins now ends, so that no other rank waits for train.timeout."""
        return time.monotonic() + self.links.limit

    def _reply_deadline(self) -> float | None:
        """Return the time at which waiting for numbers ends however many messages come; None: there is none."""
        return None

    def _count_sent(self, payload: Sequence[memoryview]) -> None:
        sent = self.travelled.sent + sum(len(part) for part in payload)
        self.travelled = self.travelled._replace(sent=sent)

    def _replied(self) -> list[np.ndarray]:
        """Wait for the numbers of the requested texts, and return for each text float64 ``[n]``, with 0 at tokens that
        are not marked. Raises :class:`WeftError` on all ranks if there are none.
        """
        asked = self.leads and self._texts
        return shared_numbers(self._own_reply() if asked else RoleReply([]), self.mesh)

    def _own_reply(self) -> RoleReply:
        try:
            if self._failure is not None:
                raise self._failure
            until = self._reply_deadline()
            self.links.wait(lambda: self._numbers is not None, until=until)
            assert self._numbers is not None
            numbers = unpacked_numbers(self._numbers.payload, self._texts)
        except RolloutInterrupted:
            self._failure = None  # there is a last checkpoint to save
            return RoleReply(None, interrupted=True)
        except WeftError as error:
            self._failure = error
            return RoleReply(None, str(error))
        received = self.travelled.received + len(self._numbers.payload)
        self.travelled = self.travelled._replace(received=received)
        return RoleReply(numbers)

    def _take_travelled(self) -> Travelled:
        """Return what has travelled since the last call, as the first rank has counted it. Collective."""
        (now, *_) = from_all(self.travelled, self.mesh.step_group)
        self.travelled = Travelled()
        return now

    def _take(self, rank: int, frame: Frame) -> None:
        """Take a message of the process with the number ``rank``, on the first rank: numbers of tokens, which the
        process 0 sends.
        """
        self._numbers = frame
        seconds = self.travelled.seconds + frame.head["seconds"]
        self.travelled = self.travelled._replace(seconds=seconds)
