"""The batches of a client, work by work: the samples of a work follow from its version, so that work given out again
is the same work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from weft.federated.client_state import ClientState
from weft.federated.client_work import (
    PresentWork,
    ServerEnded,
    WorkAnswer,
    WorkOrder,
    WorkSource,
)
from weft.federated.whole_tensors import (
    gathered_parameters,
    gathered_parts,
    scatter_parameters,
    scatter_parts,
    zeros_like_held,
)
from weft.layout.mesh import from_all

if TYPE_CHECKING:
    from weft.data.batch import Batch
    from weft.data.loader import Loader
    from weft.layout.mesh import Mesh
    from weft.parallel.state import State
    from weft.train.step_loader import AskedQuestions, RunRecords

T = torch.Tensor
#: Seconds after which the ranks of a client look whether they are asked to end, while the server has no work.
LOOK_S = 0.5


@dataclass
class WorkLoader:
    """Loader of a client's samples. Between two work orders it sends the update and receives the next model.

    Attributes:
        ``source``: receives work orders from the server; used on the first rank only.
        ``plain``: the loader of the client's own data.
        ``state``, ``mesh``: this rank's part of the model, and its position among the ranks of the client.
        ``present``: the current work order, with its results so far.
        ``shapes``: the shape of each learning parameter.
        ``samples``: number of samples that the client holds.
        ``batch``: number of samples of a step.
        ``stride``: number of samples between the first samples of successive versions.
        ``rate``: function that returns the learning rate of steps on a version of the model.
        ``recorder``: writes the run's records.
        ``interrupted``: function that returns whether this rank is asked to end the run.
        ``moments``: whether the optimizer's moments are kept from one work order to the next.
        ``kept``: state of the client that survives restarts, such as its control variate.
    """

    source: WorkSource | None
    plain: Loader
    state: State
    mesh: Mesh
    present: PresentWork
    shapes: Mapping[str, tuple[int, ...]]
    samples: int
    batch: int
    stride: int
    rate: Callable[[int], float]
    recorder: RunRecords
    interrupted: Callable[[], bool]
    moments: bool = False
    kept: ClientState = field(default_factory=lambda: ClientState(None))
    over: str = ""
    #: Steps of the present work that are not taken yet, the loop's position at its beginning, and when it began.
    left: int = 0
    start: int = 0
    began: float = 0.0
    #: Values with which the present work began, whole, on the first rank.
    sent: Mapping[str, T] = field(default_factory=dict)
    lr: float = 0.0

    # --- what the training loop calls ---

    def island_samples(self, position: int) -> range:
        """Return the numbers of the samples of the step that starts at ``position`` of the loop."""
        first = self._sample(position)
        return range(first, first + self.batch)

    def questions(self) -> Mapping[str, AskedQuestions]:
        """Return held-out questions to evaluate the model on, by task: an empty dict, because the server evaluates."""
        return {}

    def is_ready(self, position: int) -> bool:
        """Return whether the present work order has steps left. ``position`` has no effect."""
        return self.left > 0

    def make_ready(self, position: int) -> bool:
        """Send the answer to the last work order, and wait for the next order. All ranks must call it.

        Returns False if a rank is asked to end the run meanwhile, or if the server has ended the run.
        """
        if self.present.order is not None:
            self.send_answer()
        order = self._next_order()
        if order is None:
            return False
        self._begin(order, position)
        return True

    def step(self, position: int) -> Sequence[Batch] | None:
        """Return the batches of this rank of the step that starts at ``position`` of the loop, one per pass."""
        batches = self.plain.step(self._sample(position))
        self.left -= 1
        return batches

    # --- works ---

    @property
    def control(self) -> Mapping[str, T]:
        """The client's control variate, as whole tensors on the first rank; empty before there is any."""
        return self.kept.groups.get("control", {})

    def _sample(self, position: int) -> int:
        order = self.present.order
        assert order is not None
        return order.version * self.stride + position - self.start

    def _next_order(self) -> WorkOrder | None:
        """Return the next work, whose tensors the first rank alone has; None at the end of the run. Collective."""
        while True:
            order, why = self.mesh.on_main(self._look)
            if why:
                self._take_last_model(why)
                return None
            if order is not None:
                return order
            if any(from_all(self.interrupted(), self.mesh.step_group)):
                return None

    def _look(self) -> tuple[WorkOrder | None, str]:
        """Return the next work if it has come, and why the run ends if it does. On the first rank alone."""
        assert self.source is not None
        try:
            order = self.source.next_order(LOOK_S)
        except ServerEnded as ended:
            self.sent = ended.parameters
            return None, ended.why
        if order is not None:
            self.sent, self._vectors = order.parameters, order.sent
            order = WorkOrder(
                order.token, order.version, order.steps, {}, {key: {} for key in order.sent}, order.beta,
                order.control, order.secure,
            )  # fmt: skip
        return order, ""

    def _take_last_model(self, why: str) -> None:
        """Take the model with which the server has ended the run. Collective."""
        self.over = why
        if self.mesh.on_main(lambda: bool(self.sent)):
            self.present.before_change()
            scatter_parameters(self.state, self.mesh, self.sent)

    def _begin(self, order: WorkOrder, position: int) -> None:
        """Set the parameters and the correction of gradients of a work. Collective."""
        self.present.before_change()
        scatter_parameters(self.state, self.mesh, self.sent)
        if not self.moments:
            self.state.make_slots()
        self.present.order = order
        self.lr = self.rate(order.version)
        self.present.losses.clear()
        self.present.correction = self._correction(order)
        self.present.mean_gradient = {
            h.name: torch.zeros_like(h.local.detach())
            for h in self.state.learning
            if order.control
        }
        self.left, self.start = order.steps, position
        self.began = time.monotonic()

    def _correction(self, order: WorkOrder) -> dict[str, T]:
        """Return what is added to ``beta`` times a gradient, for this rank's parameters. Collective."""
        if order.is_plain:
            return {}
        whole = dict[str, T]()
        if self.mesh.is_main:
            direction = self._vectors.get("direction", {})
            server = self._vectors.get("control", {})
            for name in self.shapes:
                x = torch.zeros_like(self.sent[name])
                if direction:
                    x += (1 - order.beta) * direction[name]
                if order.control and server:
                    x += order.beta * server[name]
                if order.control and self.control:
                    x -= order.beta * self.control[name]
                whole[name] = x
        targets = {h.name: zeros_like_held(h) for h in self.state.learning}
        scatter_parts(targets, self.mesh, whole)
        return {name: part.values for name, part in targets.items()}

    def send_answer(self) -> None:
        """Gather the client's update on its first rank, and send it to the server as the answer to the present work
        order. All ranks must call it.
        """
        order, self.present.order = self.present.order, None
        assert order is not None
        seconds = time.monotonic() - self.began
        after = gathered_parameters(self.state, self.mesh, self.shapes)
        gradients = self._mean_gradients(order)
        losses = self.present.losses
        if not self.mesh.is_main:
            return
        assert self.source is not None
        difference = {name: after[name] - self.sent[name] for name in after}
        extra = dict[str, Mapping[str, T]]()
        if order.control:
            # known before the answer is sent: who is killed in between agrees with the server afterwards
            self.kept.expect(order.token, "control", gradients)
            extra["control"] = {
                name: x - self.control[name] if self.control else x
                for name, x in gradients.items()
            }
        loss = math.fsum(losses) / max(1, len(losses))
        self.source.answer(
            WorkAnswer(
                WorkOrder(order.token, order.version, order.steps, {}, secure=order.secure), difference, order.steps,
                seconds, order.steps * self.lr, loss, self.samples, extra,
            )
        )  # fmt: skip
        self.recorder.log(
            "work", version=order.version, steps=order.steps, seconds=seconds, loss=loss
        )

    def _mean_gradients(self, order: WorkOrder) -> dict[str, T]:
        """Return the mean of the work's gradients, whole, on the first rank. Collective."""
        if not order.control:
            return {}
        sums = self.present.mean_gradient
        own = {h.name: h.part(sums[h.name] / order.steps) for h in self.state.learning}
        return gathered_parts(own, self.mesh, self.shapes)
