"""A federated run with simulated clients, from ``weft train`` to its last checkpoint."""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from weft.checkpoint.reshard import load_parts
from weft.checkpoint.run_state import Progress
from weft.checkpoint.store import stored_files
from weft.errors import WeftError
from weft.federated.array_classifier import ArrayClassifier
from weft.federated.classifier_cohort import ClassifierCohort, ClassifierScore
from weft.federated.client_partition import Partition, draw_partition
from weft.federated.combined_updates import combine_as_asked
from weft.federated.federation_page import write_federation_page
from weft.federated.labelled_samples import read_labelled
from weft.federated.plain_tensors import load_values, save_values
from weft.federated.simulated_speeds import SimulatedSpeeds
from weft.federated.traffic_count import TrafficCount
from weft.federated.virtual_clock import VirtualClock
from weft.registry import find
from weft.rl.control.control_state import ControlState
from weft.train.progress_resume import resume_newest
from weft.train.progress_run import ProgressRun
from weft.train.training import Outcome

if TYPE_CHECKING:
    from weft.checkpoint.load import StoredCheckpoint
    from weft.federated.policy import ModelChange
    from weft.layout.mesh import Mesh
    from weft.recipe import Recipe
    from weft.train.progress_recorder import ProgressRecorder

#: Files of a checkpoint: what clock, policy and clients remember, and whose each sample is.
MEMORY_FILE, PARTITION_FILE = "federation.safetensors", "partition.json"


class SimulatedFederation:
    """A simulated federation: clients, clock and policy, made from a recipe.

    Attributes:
        ``clock``: the virtual clock, which holds the model.
        ``cohort``: the clients.
        ``partition``: the samples of each client.
        ``held_out``: numbers of the samples that no client has.
        ``traffic``: bytes sent so far.
    """

    def __init__(self, recipe: Recipe, partition: Partition | None = None) -> None:
        """``partition``: that of an earlier part of the run; None: a new one."""
        settings = recipe.federated
        assert settings is not None
        samples = read_labelled(settings.samples)
        net = ArrayClassifier(recipe)
        net.check(samples.features.shape[1], samples.classes)
        order = np.random.default_rng([settings.seed, 39]).permutation(len(samples.labels))  # fmt: skip
        own, self.held_out = np.split(order, [len(order) - int(settings.held_out * len(order))])  # fmt: skip
        if partition is None:
            drawn = draw_partition(
                settings.partition, settings.clients, samples.labels[own],
                None if samples.groups is None else samples.groups[own],
                alpha=settings.alpha, classes=settings.classes, seed=settings.seed,
            )  # fmt: skip
            partition = Partition(drawn.kind, tuple(np.sort(own[rows]) for rows in drawn.rows))  # fmt: skip
        self.partition = partition
        self.cohort = ClassifierCohort(
            net, samples, partition, recipe.train.batch, recipe.optimizer.lr, recipe.train.seed
        )  # fmt: skip
        self.speeds = SimulatedSpeeds(settings, self.cohort.names())
        policy = find("federation-policy", settings.policy).implementation(settings)
        parameters = {name: p.detach().clone() for name, p in net.named_parameters()}
        self.traffic = TrafficCount(parameters)
        self.close = combine_as_asked(policy, settings)
        self.clock = VirtualClock(policy, parameters, self.cohort, self.speeds)
        if settings.fresh == "inversion":
            from weft.federated.fresh_updates import FreshUpdates

            values = self.cohort.features
            self.clock.fresh = FreshUpdates(
                net, settings.fresh_after, recipe.optimizer.lr, float(values.min()), float(values.max())
            )  # fmt: skip

    def score(self) -> dict[str, float]:
        """Return loss and accuracy of the model on all clients' samples and, if there are any, on held-out samples."""
        learned = self.cohort.score(self.clock.parameters)
        values = {"loss": learned.loss, "accuracy": learned.accuracy}
        if len(self.held_out):
            judged: ClassifierScore = self.cohort.score(self.clock.parameters, self.held_out)  # fmt: skip
            values |= {"held_out_loss": judged.loss, "held_out_accuracy": judged.accuracy}  # fmt: skip
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which the simulation continues, for a checkpoint: clock, model, policy, clients and
        counts.
        """
        return {
            "clock": self.clock.state_dict(),
            "speeds": self.speeds.state_dict(),
            "traffic": self.traffic.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the simulation from ``state``, which :meth:`state_dict` returned."""
        self.clock.load_state_dict(state["clock"])
        self.speeds.load_state_dict(state["speeds"])
        self.traffic.load_state_dict(state["traffic"])


def virtual_job(
    recipe: Recipe, mesh: Mesh, out: Path | None = None, resume: str | None = None
) -> Outcome:
    """Simulate until the recipe's number of changes or time is reached, or a signal arrives. Saves checkpoints.

    ``out``: the folder to create; ``resume``: the run or checkpoint to continue.
    """
    settings = recipe.federated
    assert settings is not None
    with ExitStack() as stack:
        simulation = SimulatedFederation(recipe)
        size = sum(t.numel() * t.element_size() for t in simulation.clock.parameters.values())  # fmt: skip
        run = ProgressRun(recipe, mesh, out, resume, size, stack)
        simulation = _resumed(recipe, run, simulation, mesh)
        stack.callback(simulation.close)
        count = sum(t.numel() for t in simulation.clock.parameters.values())
        title = (
            f"{recipe.name}: {settings.policy} over {settings.clients} simulated clients, "
            f"{count:,} parameters"
        )
        kept = dict(simulation.clock.parameters)
        state = ControlState({name: t.clone() for name, t in kept.items()}, mesh)
        files: dict[str, bytes] = {}
        facts = {"policy": settings.policy, "partition": simulation.partition.digest}
        run.begin(
            state, title, settings.rounds, count, "federated", facts, files,
            clients=dict(zip(simulation.cohort.names(), simulation.partition.sizes, strict=True)),
        )  # fmt: skip
        progress, recorder, stopped = run.progress, run.recorder, run.asked_to_stop()
        while progress.step < settings.rounds and not stopped:
            if not _next_change(simulation, recorder, progress, time.perf_counter()):
                recorder.event(f"federated.seconds = {settings.seconds:g} are over")
                break
            run.save_if_due(lambda: _refresh(simulation, state, files))
            stopped = run.asked_to_stop()
        if stopped:
            run.say_who_stopped()
        run.checkpoints.wait_for_copy()
        _refresh(simulation, state, files)
        recorder.log("score", **simulation.score())
        outcome = run.finish()
        recorder.event(f"page {write_federation_page(run.stored.folder)}")
        return outcome


def _next_change(
    simulation: SimulatedFederation,
    recorder: ProgressRecorder,
    progress: Progress,
    begun: float,
) -> bool:
    """Simulate until the model changes, and record how. Returns False if the recipe's time is over before."""
    clock, settings = simulation.clock, simulation.clock.policy.settings
    changes: list[ModelChange] = []
    clock.on_change = changes.append
    events = len(clock.events)
    clock.run(clock.policy.version + 1, settings.seconds)
    news = clock.events[events:]
    simulation.traffic.count(news, clock.policy)
    for event in news:
        if event.kind == "leave":
            recorder.event(f"{event.client} is gone at {event.time:.1f} s")
        elif event.kind == "update" and not event.accepted:
            recorder.event(
                f"dropped: an update of {event.client} for version {event.version}, which nobody waits for"
            )
    if not changes:
        return False
    (change,) = changes
    clock.events.clear()
    progress.step = progress.updates = clock.policy.version
    steps = sum(clock.last[client].steps for client in change.clients)
    progress.position += simulation.cohort.batch * steps
    score = simulation.score()
    last = [clock.last[client] for client in change.clients]
    recorder.log(
        "federated", clients=list(change.clients), weights=list(change.weights),
        staleness=[event.staleness for event in last], seconds=[event.seconds for event in last],
        steps=[event.steps for event in last], began=[event.time - event.seconds for event in last],
        arrived=[event.time for event in last], time=clock.now, bytes=simulation.traffic.total,
        down=simulation.traffic.down, up=simulation.traffic.up, loss=score["loss"],
    )  # fmt: skip
    recorder.log("train", **score, step_s=time.perf_counter() - begun, clock_s=clock.now)  # fmt: skip
    recorder.show(loss=score["loss"])
    return True


def _refresh(
    simulation: SimulatedFederation, state: ControlState, files: dict[str, bytes]
) -> None:
    """Bring to ``state`` and ``files`` what a checkpoint saves."""
    tensors = {name: part.values for name, part in state.saved().items()}
    for name, tensor in simulation.clock.parameters.items():
        tensors[name].copy_(tensor)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / MEMORY_FILE
        save_values(path, simulation.state_dict())
        files[MEMORY_FILE] = path.read_bytes()
    files[PARTITION_FILE] = json.dumps(simulation.partition.to_json()).encode()


def _resumed(
    recipe: Recipe, run: ProgressRun, fresh: SimulatedFederation, mesh: Mesh
) -> SimulatedFederation:
    """Return the simulation with which ``run`` goes on: ``fresh``, or the newest checkpoint's with its progress."""
    if run.stored.fresh:
        return fresh

    def check(checkpoint: StoredCheckpoint) -> None:
        about = checkpoint.meta.get("federated")
        if about is None:
            raise WeftError(
                f"{checkpoint} is of no federated run with simulated clients; start another run with another --out"
            )
        if about["policy"] != fresh.clock.policy.settings.policy:
            raise WeftError(
                f"{checkpoint} was made with federated.policy = {about['policy']!r}, the recipe has "
                f"{fresh.clock.policy.settings.policy!r}; restore it, or start another run with another --out"
            )

    def load(checkpoint: StoredCheckpoint) -> tuple[SimulatedFederation, Progress]:
        files = stored_files(checkpoint)
        partition = Partition.from_json(json.loads(files[PARTITION_FILE]))
        simulation = SimulatedFederation(recipe, partition)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / MEMORY_FILE
            path.write_bytes(files[MEMORY_FILE])
            simulation.load_state_dict(load_values(path))
        empty = {n: torch.empty_like(t) for n, t in simulation.clock.parameters.items()}
        loaded = ControlState(empty, mesh)
        load_parts(checkpoint, loaded.saved(), mesh.step_group)
        simulation.clock.parameters = {name: part.values for name, part in loaded.saved().items()}  # fmt: skip
        return simulation, Progress(**checkpoint.meta["progress"])

    checkpoint, (simulation, run.progress) = resume_newest(
        run.stored, load, run.notes.append, check, mesh
    )
    run.notes.append(
        f"resumed from {checkpoint} after {run.progress.step} changes, at {simulation.clock.now:g} s of the virtual "
        "clock"
    )
    return simulation
