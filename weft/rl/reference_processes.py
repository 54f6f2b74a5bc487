"""The reference model of reinforcement learning in processes of its own, as the ranks that train use it.

The first rank starts the processes on its host, sends them texts, and gets log-probabilities, while all ranks compute
what else the loss needs. A process that ends or hangs ends the run with a line that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from weft.errors import WeftError
from weft.layout.mesh import from_all
from weft.rl.local_rollouts import RolloutInterrupted
from weft.rl.recorded_loader import shares_prompts
from weft.rl.role_links import WAIT, RoleLinks, RoleReply, Travelled, shared_numbers
from weft.rl.role_texts import MarkedText, packed_texts, unpacked_numbers

if TYPE_CHECKING:
    import numpy as np

    from weft.layout.mesh import Mesh
    from weft.net.wire import Frame
    from weft.rl.rl_phases import RlPhases


def reference_about(job: RlPhases) -> dict[str, Any]:
    """Return JSON values that tell a process which reference model to build, and how texts are computed."""
    recipe, role = job.recipe, job.roles.reference
    named = job.named_reference
    rows, passes = recipe.rows_per_pass(role.process_layout)
    shape = named.shape if named else job.shape
    return {
        "shape": shape.model_dump(mode="json"),
        "model": role.model or recipe.model.origin or "",
        "train": recipe.train.model_dump(mode="json"),
        "layout": role.process_layout.model_dump(mode="json"),
        "device": role.device.partition(":")[0],
        "threads": role.threads,
        "timeout": recipe.train.timeout,
        "rows": rows,
        "passes": passes,
        "room": recipe.data.seq_len,
        "temperature": job.rl.temperature,
        "share": shares_prompts(job, role.process_layout, shape),
    }


class ReferenceProcesses:
    """Log-probabilities under a reference model in other processes. All methods are collective over the ranks of
    ``mesh``; the first rank starts the processes and talks with them.

    ``job``: the checked recipe. ``interrupted``: returns whether this rank is asked to end the run. ``travelled``: the
    bytes that texts and log-probabilities had since the last figures; zeros on all ranks but the first. ``links``: the
    processes, on the first rank.
    """

    def __init__(
        self, job: RlPhases, mesh: Mesh, interrupted: Callable[[], bool]
    ) -> None:
        self.mesh, self.travelled = mesh, Travelled()
        self._texts: Sequence[MarkedText] = ()
        self._numbers: Frame | None = None
        self._failure: Exception | None = None
        group = mesh.step_group
        self.leads = group is None or group.rank() == 0
        if self.leads:
            limit = WAIT * job.recipe.train.timeout
            about = reference_about(job)
            self.links = RoleLinks(
                "reference", job.roles, about, limit, interrupted, self._take
            )

    def request(self, texts: Sequence[MarkedText]) -> None:
        """Send ``texts`` to the processes, which begin to compute their log-probabilities."""
        self._texts = texts
        if not self.leads or not texts:
            return
        self._numbers = None
        try:
            self.links.await_ready()
            payload = packed_texts(texts)
            self.links.send({"lengths": [len(ids) for ids, _ in texts]}, payload)
        except (WeftError, RolloutInterrupted) as error:
            self._failure = error  # all ranks hear of it with the reply
            return
        sent = self.travelled.sent + sum(len(part) for part in payload)
        self.travelled = self.travelled._replace(sent=sent)

    def log_probabilities(self) -> list[np.ndarray]:
        """Wait for the log-probabilities of the requested texts, and return for each text float64 ``[n]``, with 0 at
        tokens that are not marked.

        Raises :class:`WeftError` if a process has ended or does not answer in time.
        """
        asked = self.leads and self._texts
        return shared_numbers(self._own_reply() if asked else RoleReply([]), self.mesh)

    def take_figures(self) -> dict[str, float]:
        """Return the bytes that have travelled since the last call, and the seconds for which the processes have
        computed, by the names of a phase's records.
        """
        (now, *_) = from_all(self.travelled, self.mesh.step_group)
        self.travelled = Travelled()
        return {
            "reference_sent_bytes": now.sent,
            "reference_received_bytes": now.received,
            "reference_s": now.seconds,
        }

    def close(self) -> None:
        """End the processes."""
        if self.leads:
            self.links.close()

    def _own_reply(self) -> RoleReply:
        try:
            if self._failure is not None:
                raise self._failure
            self.links.wait(lambda: self._numbers is not None)
            assert self._numbers is not None
            numbers = unpacked_numbers(self._numbers.payload, self._texts)
        except RolloutInterrupted:
            return RoleReply(None, interrupted=True)
        except WeftError as error:
            return RoleReply(None, str(error))
        before = self.travelled
        self.travelled = before._replace(
            received=before.received + len(self._numbers.payload),
            seconds=before.seconds + self._numbers.head["seconds"],
        )
        return RoleReply(numbers)

    def _take(self, rank: int, frame: Frame) -> None:
        """Keep the log-probabilities, which the process 0 sends."""
        self._numbers = frame
