"""A critic with layers of its own in processes of its own, as the ranks that train the policy use it.

The first rank starts the processes and talks with them. In each rollout phase they get the answers, give a value for
every written token while the policy's ranks compute their own numbers, and get the returns. Then each of the policy's
steps names the samples of a step of the critic, which is taken at the same time. Unless the critic is many steps
behind, nobody waits for it before the next phase, or the next checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from weft.errors import WeftError
from weft.layout.dims import Tensor
from weft.layout.mesh import from_all
from weft.rl.critic_work import state_sources, state_table
from weft.rl.role_texts import packed_numbers
from weft.rl.text_processes import TextProcesses
from weft.rl.weight_frames import (
    WeightIntake,
    move_bytes,
    moves_to_others,
    weight_frames,
)
from weft.train.own_critic import SkippedUpdates, critic_optimizer, critic_shape

if TYPE_CHECKING:
    import numpy as np

    from weft.layout.dims import Box
    from weft.layout.mesh import Mesh
    from weft.models.policy_loss import PolicyFigures
    from weft.net.wire import Frame, Head
    from weft.rl.rl_phases import RlPhases
    from weft.train.critic_copy import CopiedState

#: How many of the critic's steps may be awaited while the policy's ranks go on: with more the first rank waits, so that
#: the others, which wait for it later, need not wait for many steps at once.
MOST_DUE = 2


def critic_about(job: RlPhases) -> Head:
    """Return JSON values that tell a process which critic to build, how it is trained, and how texts are computed."""
    recipe, role = job.recipe, job.roles.critic
    rows, passes = recipe.rows_per_pass(role.process_layout)
    return {
        "plugins": list(recipe.plugins),
        "shape": critic_shape(job.shape, recipe).model_dump(mode="json"),
        "train": recipe.train.model_dump(mode="json"),
        "optimizer": critic_optimizer(recipe).model_dump(mode="json"),
        "loss": job.loss.model_dump(mode="json"),
        "layout": role.process_layout.model_dump(mode="json"),
        "device": role.device.partition(":")[0],
        "threads": role.threads,
        "timeout": recipe.train.timeout,
        "rows": rows,
        "passes": passes,
        "batch": recipe.train.batch,
        "room": recipe.data.seq_len,
        "full": recipe.data.seq_len if recipe.train.compile else 0,
        "steps": recipe.train.steps - job.rl.start.steps,
        "temperature": job.rl.temperature,
    }


class CriticProcesses(TextProcesses):
    """A critic in other processes. All methods are collective over the ranks of ``mesh``, of which the first starts the
    processes and talks with them.

    Arguments:
        ``job``: the checked recipe.
        ``interrupted``: returns whether this rank is asked to end the run.
        ``copy``: the critic's state beside the policy's, from which the processes begin, and into which the critic's
            tensors are written for checkpoints.
        ``figures``: figures of the policy, to which those of the critic's steps are added.

    Attributes:
        ``moved``: the bytes of the critic's tensors since the last figures, both ways.
        ``skipped``: counts the critic's updates that were left out.
    """

    def __init__(
        self,
        job: RlPhases,
        mesh: Mesh,
        interrupted: Callable[[], bool],
        copy: CopiedState,
        figures: PolicyFigures,
    ) -> None:
        self.copy, self.figures = copy, figures
        self.moved, self.skipped = 0, SkippedUpdates()
        self._loaded = self._changed = False
        # seconds that the first rank may still wait for the requested values
        self._left = 0.0
        # seconds of values since the last figures
        self._valued = 0.0
        # numbers of the run's steps whose results are awaited
        self._due = list[int]()
        # how many frames of the critic's tensors are awaited of each process; -1: it has sent none yet
        self._incoming = dict[int, int]()
        self._intake = WeightIntake({}, ())
        super().__init__("critic", job, mesh, critic_about, interrupted)
        copy.fetch = self.fetch

    # --- what a rollout phase does ---

    def check(self) -> None:
        """Raise :class:`WeftError` on all ranks if a process has failed or ended, before answers are written for it."""
        why = ""
        if self.leads:
            try:
                self._check()
                self.links.look(heeds=False)
            except WeftError as error:
                self._failure, why = error, str(error)
        self._tell(why)

    def _tell(self, why: str) -> None:
        """Raise an error with the line ``why`` of the first rank on all ranks; "": there is none. Collective."""
        (why, *_) = from_all(why, self.mesh.step_group)
        if why:
            raise WeftError(why)

    def values(self) -> list[np.ndarray]:
        """Wait for the values of the requested texts, and return for each text float64 ``[n]``, with 0 at tokens that
        are not marked.

        Raises :class:`WeftError` if a process has ended or does not answer in time, which counts from the request,
        without the time between the two calls.
        """
        return self._replied()

    def learn_from(self, returns: Sequence[np.ndarray]) -> None:
        """Tell the processes what the tokens of the requested texts have returned, for each text float64 ``[n]``."""
        if not self.leads or not self._texts:
            return
        payload = [packed_numbers(returns, self._texts)]
        if self._sent({"kind": "returns"}, payload):
            self._count_sent(payload)

    def begin_step(self, samples: Sequence[int], number: int, step: int) -> None:
        """Let the processes begin the critic's step with the number ``number``, without waiting for its end.

        If more than :data:`MOST_DUE` steps are not over, the first rank waits for the oldest ones.
        ``samples``: indices of the step's samples among the texts. ``step``: the number of the run's step.
        """
        self._changed = True
        if self.leads:
            head = {"kind": "step", "samples": [int(i) for i in samples]}
            self._due.append(step)
            if self._sent(head | {"step": number}):
                self._bound_steps()

    def take_figures(self) -> dict[str, float]:
        """Return the bytes that have travelled since the last call, and the seconds for which the processes have
        computed, by the names of a phase's records.
        """
        now = self._take_travelled()
        own = (self.moved, self._valued)
        ((moved, valued), *_) = from_all(own, self.mesh.step_group)
        self.moved, self._valued = 0, 0.0
        return {
            "critic_sent_bytes": now.sent,
            "critic_received_bytes": now.received,
            "critic_state_bytes": moved,
            "critic_s": now.seconds,
            "values_s": valued,
        }

    # --- what a checkpoint does ---

    def fetch(self) -> None:
        """Write the critic's present tensors into the copy, after all steps that were begun.

        Raises :class:`WeftError` if a process has ended or does not answer in time, also in an earlier step.
        """
        if not self._changed:
            return
        why = ""
        if self.leads:
            try:
                self._check()
                until = self._deadline()
                self._await_results(until, heeds=False)
                self._receive_state(until)
            except WeftError as error:
                self._failure, why = error, str(error)
        self._tell(why)
        self._changed = False

    # --- the first rank ---

    def _await_idle(self, until: float) -> None:
        self._check()
        super()._await_idle(until)
        # so that a process is not sent much while it does other work
        self._await_results(until)
        if not self._loaded:
            self._load()

    def _note_requested(self, until: float) -> None:
        # what other ranks have waited for the first one by now, it does not wait once more for values
        self._left = max(0.0, until - time.monotonic())

    def _reply_deadline(self) -> float:
        return time.monotonic() + self._left

    def _check(self) -> None:
        """Raise the error of a process that was noticed when nobody could be told."""
        if isinstance(self._failure, WeftError):
            raise self._failure
        self._failure = None

    def _sent(self, head: Head, payload: Sequence[memoryview] = ()) -> bool:
        """Send a message that has no reply at once, and return whether it was. An error is kept for :meth:`_check`."""
        if self._failure is not None:
            return False
        try:
            # also so that results do not pile up
            self.links.look(heeds=False)
            self.links.send(head, payload)
        except WeftError as error:
            self._failure = error
            return False
        return True

    def _await_results(self, until: float, heeds: bool = True) -> None:
        """Wait, no longer than ``until``, until all steps that were begun are over."""
        self.links.wait(lambda: not self._due, heeds=heeds, until=until)

    def _bound_steps(self) -> None:
        """Wait until few enough of the begun steps are not over. An error is kept for :meth:`_check`."""
        try:
            self.links.wait(
                lambda: len(self._due) <= MOST_DUE, heeds=False, until=self._deadline()
            )
        except WeftError as error:
            self._failure = error

    def _load(self) -> None:
        """Send the tensors of the copy to the processes, to each what it holds."""
        tensors, boxes = state_table(self.copy.parts())
        needed = [
            _held_boxes(self.links.ready[rank], tensors)
            for rank in sorted(self.links.ready)
        ]
        pairs = moves_to_others(tensors, [boxes], needed)
        sources = state_sources(self.copy.parts())
        for rank in range(len(needed)):
            moves = pairs.get((0, rank), [])
            for frame in weight_frames(moves, tensors, sources, 0):
                self.links.send(
                    {"kind": "state", **frame.head}, [frame.payload], to=rank
                )
            self.moved += move_bytes(moves, tensors)
        self._loaded = True

    def _receive_state(self, until: float) -> None:
        """Receive each element of the critic's tensors from one of the processes, no later than ``until``."""
        targets = state_sources(self.copy.parts())
        self._incoming = dict.fromkeys(range(len(self.links.processes)), -1)
        self._intake = WeightIntake(targets, self._incoming)
        self.links.send({"kind": "save"})

        def late() -> int:
            return min(rank for rank, left in self._incoming.items() if left)

        self.links.wait(
            lambda: not any(self._incoming.values()), late, heeds=False, until=until
        )
        self.moved += self._intake.received

    def _take(self, rank: int, frame: Frame) -> None:
        """Take a message of the process with the number ``rank``."""
        kind, head = frame.head["kind"], frame.head
        if kind == "state":
            left = self._incoming[rank]
            self._incoming[rank] = (head["frames"] if left < 0 else left) - 1
            self._intake.take(rank, frame)
            return
        if kind == "numbers":
            super()._take(rank, frame)
            self._valued += head["seconds"]
            return
        seconds = self.travelled.seconds + head["seconds"]
        self.travelled = self.travelled._replace(seconds=seconds)
        self.figures.add_values(torch.tensor(head["sums"], dtype=torch.float64))
        self.skipped.count(head["skipped"], self._due.pop(0))


def _held_boxes(ready: Frame, tensors: Mapping[str, Tensor]) -> dict[str, list[Box]]:
    """Return the boxes that a process has said it holds, by name.

    ``tensors``: the critic's tensors. Raises :class:`WeftError` if the process has others.
    """
    boxes: dict[str, list[Box]] = {}
    for name, (shape, dtype, box) in ready.head["held"].items():
        if name not in tensors or (tuple(shape), dtype) != (
            tensors[name].shape,
            tensors[name].dtype,
        ):
            raise WeftError(
                f"a process of roles.critic holds {name} as {dtype} {shape}, which the run does not; use the same "
                "version of Weft for both"
            )
        boxes[name] = [tuple((lo, hi) for lo, hi in box)]
    return boxes
