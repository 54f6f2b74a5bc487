"""A critic in processes of its own, seen from these: it values texts, and learns from what the run says they returned.

A process has the weights from the run, keeps the texts of the present rollout phase with their values, and takes an
update whenever the run names the samples of one. Several processes train it under a layout, as ranks of a run do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from weft.data.policy_rows import PolicySample, policy_rows
from weft.layout.dims import Box, Logical, Tensor, whole_box
from weft.layout.mesh import Mesh, from_all
from weft.models.hooks import Hooks
from weft.models.policy_loss import PolicyObjective
from weft.parallel.build import parallelize
from weft.plugins import load_plugins
from weft.recipe import ModelShape, Optimizer, PolicyLoss, Train
from weft.recipe.host_section import section_of
from weft.rl.log_probabilities import token_readings
from weft.rl.recorded_loader import divided_rows
from weft.rl.role_texts import (
    MarkedText,
    packed_numbers,
    process_number,
    shared_returns,
    shared_texts,
)
from weft.rl.weight_frames import (
    Sources,
    WeightIntake,
    copied_sources,
    moves_to_others,
    weight_frames,
)
from weft.train.rule_optimizer import RuleOptimizer, learning_rate
from weft.train.step import StepContext, plain_step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weft.layout.parts import Part
    from weft.net.wire import Frame, Head, SealedConnection


class StateTable(NamedTuple):
    """What a process holds of a critic's tensors, by name: the whole ``tensors``, and the ``boxes`` that it has."""

    tensors: dict[str, Tensor]
    boxes: dict[str, list[Box]]


def state_table(parts: Mapping[str, Part]) -> StateTable:
    """Return the tensors of which ``parts`` are, by name, and their boxes."""
    tensors = {
        name: Tensor(part.tensor.shape, part.tensor.dtype)
        for name, part in parts.items()
    }
    return StateTable(tensors, {name: [part.box] for name, part in parts.items()})


def state_sources(parts: Mapping[str, Part]) -> Sources:
    """Return the values of ``parts`` by name and box, from which and into which frames are read."""
    return {name: {part.box: part.values.detach()} for name, part in parts.items()}


class CriticWork:
    """The part of a critic that this process trains, and the samples of the present rollout phase.

    ``about``: JSON values that the run gives (:func:`weft.rl.critic_processes.critic_about`). ``mesh``: the processes
    that train the critic together. The weights are those of :meth:`take`, and zeros before.
    """

    def __init__(self, about: Head, mesh: Mesh) -> None:
        load_plugins(about["plugins"])
        self.about, self.mesh = about, mesh
        self.loss = PolicyLoss(**about["loss"])
        self.optimizer: Optimizer = section_of(Optimizer, about["optimizer"])
        self.objective = PolicyObjective(self.loss, about["temperature"])
        train = Train(**about["train"]).model_copy(update={"freeze": ()})
        self.built = parallelize(
            ModelShape.model_validate(about["shape"]),
            mesh,
            train,
            _nothing,
            about["room"],
            hooks=Hooks(objective=self.objective),
            optimizer=RuleOptimizer(self.optimizer, mesh),
        )
        self.step = plain_step(StepContext(*self.built, mesh), self.optimizer.clip)
        self.texts: list[MarkedText] = []
        self.seen: list[np.ndarray] = []
        self.samples: list[PolicySample] = []
        self.table = state_table(self.built.state.tensors())
        targets = state_sources(self.built.state.parts())
        self.intake = WeightIntake(targets, (0,))
        self._plan_sending()

    def _plan_sending(self) -> None:
        """Agree with the other processes on who sends which elements to the run. Collective."""
        everyones = from_all(self.table, self.mesh.step_group)
        self._tensors = {
            name: tensor for of_rank in everyones for name, tensor in of_rank[0].items()
        }
        whole = {name: [whole_box(t.shape)] for name, t in self._tensors.items()}
        boxes = [of_rank[1] for of_rank in everyones]
        pairs = moves_to_others(self._tensors, boxes, [whole])
        self._moves = pairs.get((process_number(self.mesh), 0), [])

    def take(self, frame: Frame) -> None:
        """Write the tensors in ``frame``, which the run has sent, into the critic."""
        if self.intake.take(0, frame):
            self.built.state.release()  # what was gathered is of other values

    def frames(self, version: int) -> Iterator[Frame]:
        """Return the frames with this process's share of all tensors of the critic. ``version``: number of the frames.

        Collective. All processes together send each element once.
        """
        sources = state_sources(self.built.state.tensors())
        if self.mesh.device.type != "cpu":
            sources = copied_sources(self._moves, self._tensors, sources)
        return weight_frames(self._moves, self._tensors, sources, version)

    def values(self, texts: list[MarkedText]) -> list[np.ndarray]:
        """Return the critic's prediction before each marked token of ``texts``, for each text float64 ``[n]``.

        The texts are the samples of the rollout phase that begins. Collective.
        """
        about = self.about
        self.texts = texts
        self.seen = token_readings(
            self.built.model, self.built.state, self.mesh, texts, about["rows"], about["passes"], about["room"],
            about["temperature"],
        ).values  # fmt: skip
        return self.seen

    def learn_from(self, returns: Sequence[np.ndarray]) -> None:
        """Note for each text of the phase what its tokens returned, float64 ``[n]``, which the critic should have
        predicted.
        """
        self.samples = [
            PolicySample(
                np.array(ids, np.int64),
                np.array(marks, bool),
                np.zeros(len(ids)),
                returns=due,
                values=seen,
            )
            for (ids, marks), seen, due in zip(
                self.texts, self.seen, returns, strict=True
            )
        ]

    def update(self, chosen: Sequence[int], number: int) -> Head:
        """Take the critic's update with the number ``number`` by the samples ``chosen``, indices among the phase's
        texts. Collective.

        Returns what the run hears of it: whether it was left out, and sums over its tokens for the figures.
        """
        about = self.about
        # of the critic's own loss, which has no divergence from a reference
        settings = self.loss.model_copy(update={"kl": "none"})
        samples = [self.samples[i] for i in chosen]
        rows = [policy_rows([s], len(s.ids), settings).rows[0] for s in samples]
        batches = divided_rows(
            rows, self.mesh, about["batch"], about["rows"], about["passes"], about["full"]
        )  # fmt: skip
        self.built.state.updates = number
        rate = learning_rate(self.optimizer, number, about["steps"])
        (result,) = self.step.take(batches, rate)
        sums = self.objective.figures.take_value_sums(self.mesh)
        return {"kind": "result", "skipped": result.skipped, "sums": sums.tolist()}


def serve_critic(connection: SealedConnection, about: Head, mesh: Mesh) -> None:
    """Do what a run asks of its critic, until the connection ends.

    ``about``: JSON values about the critic. ``mesh``: the processes that train it; the first one answers.
    """
    work = CriticWork(about, mesh)
    said = {
        name: [list(tensor.shape), tensor.dtype, work.table.boxes[name][0]]
        for name, tensor in work.table.tensors.items()
    }
    connection.send({"kind": "ready", "held": said})
    leads, saves = process_number(mesh) == 0, 0
    while True:
        frame, begun = connection.receive(), time.perf_counter()
        kind, payload, reply = frame.head["kind"], list[memoryview](), dict[str, Any]()
        if kind == "state":
            work.take(frame)
        elif kind == "save":
            saves += 1
            for part in work.frames(saves):
                connection.send({"kind": "state", **part.head}, [part.payload])
        elif kind == "texts":
            texts = shared_texts(frame, mesh)
            payload = [packed_numbers(work.values(texts), texts)]
            reply = {"kind": "numbers"}
        elif kind == "returns":
            work.learn_from(shared_returns(frame, work.texts, mesh))
        else:
            reply = work.update(frame.head["samples"], frame.head["step"])
        if reply and leads:
            connection.send(reply | {"seconds": time.perf_counter() - begun}, payload)


def _nothing(name: str, logical: Logical, box: Box) -> torch.Tensor:
    return torch.zeros(())
