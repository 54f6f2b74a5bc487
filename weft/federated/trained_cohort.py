"""Clients of a virtual clock that train as real ones do: ordinary runs of Weft, one after the other in one process.

With the events that a server has recorded, and the recipes and data of its clients, a virtual clock comes to the very
model that the server has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weft.federated.client_cohort import LocalResult
from weft.federated.client_job import ClientJob, prepare_client
from weft.federated.client_state import ClientState
from weft.federated.client_work import WorkAnswer, WorkOrder
from weft.federated.combined_updates import combine_as_asked
from weft.federated.federated_facts import learning_shapes, travel_dtype
from weft.federated.federation_events import read_events
from weft.federated.federation_frames import FederationForms, travel_seed
from weft.federated.federation_settings import federation_of
from weft.federated.privacy_budget import clipped_difference
from weft.federated.virtual_clock import VirtualClock
from weft.federated.whole_tensors import gathered_parameters
from weft.layout.mesh import Mesh
from weft.registry import find
from weft.train.guard import Guard
from weft.train.setup import build_for_training, device_type
from weft.train.training import open_loop

if TYPE_CHECKING:
    from weft.federated.policy import AssignedWork, ClientStep, Differences
    from weft.federated.work_loader import WorkLoader
    from weft.recipe import Recipe
    from weft.train.loop import Loop

T = torch.Tensor


class QuietGuard(Guard):
    """Guard of a run inside another run. It ignores signals, because the outer run handles them."""

    @contextmanager
    def signals(self) -> Iterator[list[int]]:
        yield []


@dataclass
class HandedWork:
    """Work source of a simulated client (:class:`weft.federated.client_work.WorkSource`), in the server's process.

    Attributes:
        ``name``: the client's name.
        ``forms``: encodings of tensors. Tensors are encoded and decoded, to lose as much as on a network.
        ``kept``: the client's state between work orders.
        ``clip``: largest norm of a difference; 0: none.
        ``order``: the next work order.
        ``result``: the answer to the last work order.
        ``payload``: the encoded difference of that answer.
    """

    name: str
    forms: FederationForms
    kept: ClientState
    clip: float = 0.0
    order: WorkOrder | None = None
    result: WorkAnswer | None = None
    taken: bool | None = None
    payload: bytes = b""

    def join(self, about: Mapping[str, Any]) -> None:
        """Do nothing with ``about``: the server of a simulation knows its clients, so that they need not announce
        themselves.
        """

    def next_order(self, limit: float) -> WorkOrder | None:
        order, self.order = self.order, None
        return order

    def answer(self, answer: WorkAnswer) -> None:
        difference: Mapping[str, T] = clipped_difference(answer.difference, self.clip)
        seed = travel_seed(self.name, answer.order.version)
        packed = self.forms.up.packed(
            difference, seed, self.kept.groups.get("left", {})
        )
        if packed.left:
            self.kept.expect(answer.order.token, "left", packed.left)
        self.taken = None
        self.payload = b"".join(packed.views)
        arrives = self.forms.up.unpacked(memoryview(self.payload), seed)
        self.result = replace(answer, difference=arrives)

    def settled(self, limit: float) -> bool | None:
        return self.taken

    def settle(self, taken: bool) -> None:
        """Store the server's decision on the client's last answer. ``taken``: whether the server has accepted it."""
        self.kept.settle(taken)
        self.taken = taken

    def close(self) -> None:
        """Do nothing: a simulated client has no connection that could be closed."""


@dataclass
class TrainedClient:
    """A client that is simulated in this process: its training loop, the loader of its data (``loader``), and the
    object that hands it its work orders and keeps its answer (``source``).
    """

    job: ClientJob
    loop: Loop
    loader: WorkLoader
    source: HandedWork

    def work(self, order: WorkOrder) -> WorkAnswer:
        """Take the local steps of ``order``, and return the answer."""
        self.source.order = order
        self.loader.make_ready(self.loop.position)
        for _ in range(order.steps):
            results = self.loop.take_step()
            self.loop.begun += 1
            self.loop.account(results + self.loop.step.finish())
        self.loader.send_answer()
        assert self.source.result is not None
        return self.source.result


def open_client(
    name: str, recipe: Recipe, folder: Path, stack: ExitStack
) -> TrainedClient:
    """Open a simulated client in this process; it has no work order yet.

    ``name``: its name. ``recipe``: its recipe. ``folder``: the folder of its run; a run in it is continued. ``stack``:
    closes the client's resources at its exit.
    """
    job = prepare_client(recipe)
    settings, sources = federation_of(recipe), list[HandedWork]()
    forms = FederationForms.of(
        learning_shapes(recipe, job.shape), travel_dtype(recipe), settings.compress, settings.compress_back
    )  # fmt: skip

    def opened(kept: ClientState, say: Callable[[str], object]) -> HandedWork:
        sources.append(HandedWork(name, forms, kept, settings.clip))
        return sources[0]

    job = replace(job, open_source=opened)
    mesh = Mesh.single(torch.device(device_type(recipe)))
    loop = open_loop(job, mesh, QuietGuard(folder, "auto"), stack)
    loader: Any = loop.loader
    return TrainedClient(job, loop, loader, sources[0])


class TrainedCohort:
    """Simulated clients that train by the same loop as real ones; a :class:`weft.federated.client_cohort.ClientCohort`.

    ``recipes``: the recipe of each client, by its name. ``folder``: where their runs are written. Use it as a context.
    """

    def __init__(self, recipes: Mapping[str, Recipe], folder: Path) -> None:
        self.recipes, self.folder = recipes, folder
        self.clients: dict[str, TrainedClient] = {}
        self._stack = ExitStack()

    def __enter__(self) -> TrainedCohort:
        for name, recipe in self.recipes.items():
            self.clients[name] = open_client(
                name, recipe, self.folder / name, self._stack
            )
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def names(self) -> Sequence[str]:
        return [*self.clients]

    def samples(self, client: str) -> int:
        return self.clients[client].job.samples

    def train(
        self, work: Sequence[AssignedWork], version: int, parameters: Differences, sent: Mapping[str, Differences],
        step: ClientStep,
    ) -> list[LocalResult]:  # fmt: skip
        results = []
        for client, steps in work:
            order = WorkOrder(
                f"{client}-{version}",
                version,
                steps,
                parameters,
                sent,
                step.beta,
                step.control,
            )
            answer = self.clients[client].work(order)
            results.append(
                LocalResult(
                    answer.difference, answer.steps, answer.samples, answer.rates, answer.loss, answer.extra
                )
            )  # fmt: skip
        return results

    def settle(self, client: str, accepted: bool) -> None:
        self.clients[client].source.settle(accepted)

    def state_dict(self) -> dict[str, Any]:
        return {
            name: dict(each.source.kept.groups) for name, each in self.clients.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, groups in state.items():
            self.clients[name].source.kept.groups = dict(groups)


def replayed_model(
    server: Recipe, run: Path, clients: Mapping[str, Recipe], folder: Path
) -> dict[str, T]:
    """Replay the events that the server in ``run`` has recorded on a virtual clock, and return the final parameters.

    ``server``: the server's recipe. ``clients``: the recipe of each client by name. ``folder``: where their runs are
    written.
    """
    from weft.federated.server_job import prepare_server

    job = prepare_server(server)
    mesh = Mesh.single(torch.device(device_type(server)))
    built = build_for_training(
        job.shape, mesh, job.recipe, _values(job.recipe, job.shape)
    )
    start = gathered_parameters(built.state, mesh, learning_shapes(server, job.shape))
    settings = federation_of(server)
    policy = find("federation-policy", settings.policy).implementation(settings)
    with ExitStack() as stack:
        stack.callback(combine_as_asked(policy, settings))
        cohort = stack.enter_context(TrainedCohort(clients, folder))
        clock = VirtualClock(policy, start, cohort)
        clock.replay(read_events(run))
    return dict(clock.parameters)


def stored_model(server: Recipe, run: Path) -> dict[str, T]:
    """Return the learning parameters of the newest checkpoint of the server's run, by name.

    ``server``: the server's recipe. ``run``: the folder of its run.
    """
    from weft.checkpoint.address import open_storage
    from weft.checkpoint.run_state import load_state
    from weft.checkpoint.store import candidates, open_checkpoint
    from weft.federated.server_job import prepare_server

    job = prepare_server(server)
    mesh = Mesh.single(torch.device(device_type(server)))
    built = build_for_training(
        job.shape, mesh, job.recipe, _values(job.recipe, job.shape)
    )
    places = candidates(open_storage(str(run / "checkpoints")))
    load_state(open_checkpoint(places[0]), built.state)
    return gathered_parameters(built.state, mesh, learning_shapes(server, job.shape))


def _values(recipe: Recipe, shape: Any) -> Any:
    if recipe.model.origin is None:
        return None
    from weft.checkpoint.weights import starting_values

    return starting_values(recipe, shape)
