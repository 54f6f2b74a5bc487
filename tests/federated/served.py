"""A server of federated training in this process, and clients that answer what a test wants."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weft.federated.client_link import ServerLink
from weft.federated.client_sessions import ClientSessions
from weft.federated.client_state import ClientState
from weft.federated.client_work import ServerEnded, WorkAnswer, WorkOrder
from weft.federated.federated_facts import disagreement
from weft.federated.federation_events import EventLog
from weft.federated.federation_frames import FederationForms
from weft.federated.federation_server import FederationServer
from weft.federated.secure_sum import new_mask_key
from weft.federated.server_invitation import CHANNEL
from weft.federated.update_journal import UpdateJournal
from weft.federated.update_judge import UpdateJudge
from weft.net.endpoint import Endpoint
from weft.net.wire import Head, SealedConnection
from weft.recipe.federated_section import Federated
from weft.registry import find

SHAPES = {"w": (3, 2), "b": (2,)}
FACTS = {"model": "1", "tokenizer": "2"}


def zeros() -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()
    }


class Served:
    """A server with ``rounds`` changes to come. ``settings``: those of ``[federated]``; ``grace`` and ``patience`` too.

    ``journal``: keep updates, and go on after those that an earlier server in ``folder`` has kept.
    ``said``: what it has said. ``parameters``: the model. ``error``: what has ended it.
    """

    def __init__(
        self, folder: Path, rounds: int = 1, journal: bool = False, **settings: Any
    ) -> None:
        section = Federated(
            **{"rounds": rounds, "grace": 0.3, "patience": 20.0, **settings}
        )
        self.section, self.rounds = section, rounds
        self.forms = FederationForms.of(
            SHAPES, torch.float64, section.compress, section.compress_back
        )
        self.endpoint = Endpoint("127.0.0.1", 0, "never")
        self.said: list[str] = []
        self.sessions = ClientSessions(
            self.endpoint, "secret", self.forms.most, ({"kind": "recipe"}, b""),
            lambda hello: disagreement(FACTS, hello),
        )  # fmt: skip
        policy = find("federation-policy", section.policy).implementation(section)
        kept = UpdateJournal(folder) if journal else None
        follow = kept.since(0) if kept else []
        self.server = FederationServer(
            policy, self.sessions, self.forms, UpdateJudge(section.clip, section.largest),
            EventLog(folder, follow[-1].end if follow else 0), self.said.append, section.patience, section.grace,
            section.secure, journal=kept, follow=follow,
        )  # fmt: skip
        self.parameters = zeros()
        self.changes: list[Any] = []
        self.error: Exception | None = None
        self.stop = False
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.links: list[ServerLink] = []

    def __enter__(self) -> Served:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop = True
        self.thread.join(30)
        for link in self.links:
            link.close()
        self.endpoint.close()

    def _serve(self) -> None:
        try:
            while self.server.policy.version < self.rounds:
                served = self.server.next_change(self.parameters, lambda: self.stop)
                if served is None:
                    return
                self.changes.append(served)
                self.parameters = {
                    name: x + served.change.difference[name]
                    for name, x in self.parameters.items()
                }
            self.server.end("the run is complete", self.parameters)
        except Exception as error:
            self.error = error

    def dial(self, hello: Head, secret: str = "secret") -> SealedConnection:
        endpoint = self.endpoint
        return endpoint.join(CHANNEL, secret).dial(endpoint.address, hello, 5.0, 5.0)

    def link(
        self, name: str, facts: Any = FACTS, samples: int = 1, kept: ClientState | None = None
    ) -> ServerLink:  # fmt: skip
        mask = new_mask_key() if self.section.secure else None
        link = ServerLink(
            self.dial, self.forms, kept or ClientState(None), name, self.section.clip, 5.0, self.said.append, mask
        )  # fmt: skip
        self.links.append(link)
        link.join({"facts": facts, "samples": samples})
        return link

    def heard(self, words: str, limit: float = 20.0) -> str:
        """Wait until the server has said a line with ``words``, and return the line."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            for line in list(self.said):
                if words in line:
                    return line
            time.sleep(0.01)
        raise AssertionError(f"nobody has said {words!r} but {self.said}; {self.error}")


def next_order(link: ServerLink, limit: float = 20.0) -> WorkOrder:
    order = link.next_order(limit)
    assert order is not None, f"{link.name} has got no work"
    return order


def answer(order: WorkOrder, value: float, **change: Any) -> WorkAnswer:
    difference = {
        name: torch.full(shape, value, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }
    values: dict[str, Any] = dict(
        order=order,
        difference=difference,
        steps=order.steps,
        seconds=0.1,
        rates=0.1,
        loss=1.0,
        samples=1,
    )
    return WorkAnswer(**(values | change))


def ending(link: ServerLink, limit: float = 20.0) -> ServerEnded:
    """Wait for the end of the run, and return it."""
    try:
        order = link.next_order(limit)
    except ServerEnded as ended:
        return ended
    raise AssertionError(f"{link.name} was to hear the end, and got {order}")


def play(link: ServerLink, value: Callable[[WorkOrder], float]) -> threading.Thread:
    """Answer all work of ``link`` with differences of one value, in a thread of its own, until the run ends."""

    def run() -> None:
        try:
            while True:
                if (order := link.next_order(20.0)) is not None:
                    link.answer(answer(order, value(order)))
        except Exception:
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
