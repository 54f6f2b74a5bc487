"""Weft's server and client as apps of Flower (``flwr``), for clients behind firewalls that Flower passes.

An app's folder names them in its ``pyproject.toml``: ``serverapp = "weft.federated.flower_app:server"`` and
``clientapp = "weft.federated.flower_app:client"``. The server reads ``weft-recipe`` and ``weft-out`` of the run's
configuration, a client ``weft-recipe``, ``weft-data``, ``weft-name`` and ``weft-folder`` of its node's. Recipes are
those of a run without Flower. Flower's telemetry is switched off before Flower is imported.
"""

from __future__ import annotations

import atexit
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weft.errors import UsageError
from weft.federated.federated_facts import agreed_facts, disagreement
from weft.federated.federation_frames import FederationForms, answer_head, read_order
from weft.federated.federation_settings import federation_of
from weft.federated.flower_sessions import (
    FlowerGrid,
    FlowerSessions,
    read_message,
    reply_message,
)
from weft.federated.server_job import prepare_server
from weft.federated.trained_cohort import QuietGuard, TrainedClient, open_client
from weft.layout.mesh import Mesh
from weft.recipe import load_recipe
from weft.train.setup import device_type
from weft.train.training import train_job

if TYPE_CHECKING:
    from weft.net.wire import Head
    from weft.recipe import Recipe
    from weft.train.training import Outcome

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

try:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
except ImportError:
    raise UsageError(
        "this app needs Flower, in an environment of its own as its typer is an older one: pip install 'weft[flower]'"
    ) from None


def serve_over_flower(grid: FlowerGrid, recipe: Recipe, out: Path) -> Outcome:
    """Run the server of ``recipe`` with the clients of a Flower ``grid``; a run in the folder ``out`` is continued.

    Raises :class:`UsageError` for settings that Flower's messages cannot carry.
    """
    if federation_of(recipe).secure:
        raise UsageError(
            "federated.secure asks clients for seeds while they work, and a message of Flower has one answer; "
            "leave it out"
        )
    job = prepare_server(recipe)

    def sessions(forms: FederationForms) -> FlowerSessions:
        return FlowerSessions(
            grid, forms.most, lambda hello: disagreement(agreed_facts(job), hello)
        )

    job = replace(job, open_sessions=sessions)
    mesh = Mesh.single(torch.device(device_type(recipe)))
    return train_job(job, mesh, guard=QuietGuard(out, "auto"))


class FlowerClient:
    """A Weft client behind Flower: it trains in the ordinary way when a message of Flower orders it.

    ``recipe``: the client's recipe, with its data. ``name``: its name. ``folder``: its folder.
    """

    def __init__(self, recipe: Recipe, name: str, folder: Path) -> None:
        self.name, self.stack = name, ExitStack()
        atexit.register(self.stack.close)
        self.trained: TrainedClient = open_client(name, recipe, folder, self.stack)
        self.source = self.trained.source
        self.before: dict[str, torch.Tensor] = {}

    def hello(self) -> Head:
        """Return the client's first message to the server, which says what it trains and how many samples it has."""
        job = self.trained.job
        return {
            "kind": "hello", "client": self.name, "key": self.source.kept.key(), "facts": agreed_facts(job),
            "samples": job.samples,
        }  # fmt: skip

    def work(self, head: Head, payload: memoryview) -> tuple[Head, bytes]:
        """Take the local steps that a frame orders, and return the head and payload of a frame with the update.
        ``head``, ``payload``: JSON values and bytes of the frame with the order.
        """
        for note in head.get("said", ()):
            if note.get("kind") == "taken":
                self.source.settle(note.get("taken") is True)
        order = read_order(head, payload, self.source.forms, self.name, self.before)
        self.before = dict(order.parameters)
        answer = self.trained.work(order)
        text = self.source.payload
        for group in sorted(answer.extra):
            text += b"".join(
                self.source.forms.whole.packed(answer.extra[group], 0).views
            )
        return answer_head(answer), text


_clients: dict[str, FlowerClient] = {}
server = ServerApp()
client = ClientApp()


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Run the server of the recipe that the Flower run's configuration names."""
    given = context.run_config
    recipe = load_recipe(_setting(given, "weft-recipe"), ["federated.listen=flower:0"])
    serve_over_flower(grid, recipe, Path(_setting(given, "weft-out")))


@client.query()
def introduce_client(message: Message, context: Context) -> Message:
    """Return the answer to a Flower query ``message``: this client's hello (its first message to the server).
    ``context``: Flower's settings of the client.
    """
    return reply_message(_client(context).hello(), b"", message)


@client.train()
def train_client(message: Message, context: Context) -> Message:
    """Take the local steps that a Flower train ``message`` orders, and return the answer with the update. ``context``:
    Flower's settings of the client.
    """
    head, payload = read_message(message)
    if head.get("kind") != "work":  # the end of the run
        return reply_message({"kind": "bye"}, b"", message)
    return reply_message(*_client(context).work(head, payload), message)


def _client(context: Context) -> FlowerClient:
    """Return the client of this node, which is made when it is asked first."""
    given = context.node_config
    folder = _setting(given, "weft-folder")
    if folder not in _clients:
        name = _setting(given, "weft-name")
        overrides = ["federated.join=flower", f"federated.name={name}"]
        recipe = load_recipe(
            _setting(given, "weft-recipe"), overrides, data=_setting(given, "weft-data")
        )
        _clients[folder] = FlowerClient(recipe, name, Path(folder))
    return _clients[folder]


def _setting(given: Any, key: str) -> str:
    if key not in given:
        raise UsageError(
            f"the configuration of this Flower app has no {key}; see weft.federated.flower_app"
        )
    return str(given[key])
