"""The job of a server of federated training: no samples of its own to learn from, and clients that have them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.data.loader import Corpus, open_data, tokenizer_of_data
from weft.data.order import Order
from weft.errors import UsageError
from weft.federated.adapter_products import AdapterProducts
from weft.federated.change_loader import ChangeLoader, server_memory, spent_budgets
from weft.federated.client_sessions import ClientSessions
from weft.federated.combined_updates import combine_as_asked
from weft.federated.federated_facts import (
    agreed_facts,
    check_rounds,
    disagreement,
    learning_shapes,
    offered_recipe,
    travel_dtype,
)
from weft.federated.federation_events import EventLog
from weft.federated.federation_frames import FederationForms
from weft.federated.federation_server import FederationServer
from weft.federated.federation_settings import federation_of
from weft.federated.privacy_budget import PrivacyBudget, opacus_accountant
from weft.federated.server_invitation import (
    INVITATION_FILE,
    ServerInvitation,
    keep_invitation,
    new_server_secret,
    read_server_invitation,
)
from weft.federated.update_journal import FollowedEvent, UpdateJournal
from weft.federated.update_judge import UpdateJudge
from weft.registry import find
from weft.train.setup import Job, completed_job, model_shape

if TYPE_CHECKING:
    from weft.checkpoint.run_state import Progress
    from weft.data.tokenizer import Tokenizer
    from weft.layout.mesh import Mesh
    from weft.net.endpoint import Endpoint
    from weft.parallel.build import Built
    from weft.recipe import Recipe
    from weft.train.step_loader import RunRecords

#: For each address that means all of this machine's, one far away, over whose network clients come.
FAR = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}


@dataclass(frozen=True)
class ServerJob(Job):
    """A checked recipe with ``federated.listen``: each step of its run adds a change, computed from clients' updates.

    Attributes:
        ``open_sessions``: opens the connections to clients; None: clients connect to ``federated.listen``.
    """

    open_sessions: Callable[[FederationForms], Any] | None = field(
        default=None, compare=False
    )

    def steps(self, progress: Progress) -> int:
        """Return the number of changes of the model in the whole run."""
        return int(federation_of(self.recipe).rounds)

    def learning_rate(self, step: int, steps: int) -> float:
        """Return ``federated.rate``, the factor by which the mean of clients' differences is multiplied."""
        return float(federation_of(self.recipe).rate)

    @cached_property
    def agreed(self) -> dict[str, str]:
        """Digests of the settings in which clients must agree with this server."""
        return agreed_facts(self)

    def training_loader(
        self, mesh: Mesh, built: Built, recorder: RunRecords, interrupted: Callable[[], bool], stack: ExitStack,
        kept: dict[str, Any],
    ) -> ChangeLoader:  # fmt: skip
        """Return the loader of changes from clients' updates. The server listens for clients until the run ends.

        The arguments are those of :meth:`Job.training_loader`.
        """
        settings, folder = federation_of(self.recipe), recorder.folder
        shapes = learning_shapes(self.recipe, self.shape)
        policy = find("federation-policy", settings.policy).implementation(settings)
        stack.callback(combine_as_asked(policy, settings))
        judge = UpdateJudge(settings.clip, settings.largest)
        budget = None
        if settings.clip and settings.noise:
            budget = PrivacyBudget(settings.clip, settings.noise, settings.delta)
        memory = self._memory(kept, folder)
        if memory:
            policy.load_state_dict(memory["policy"])
            judge.norms.extend(memory["norms"])
        if budget is not None:
            for spent in spent_budgets(folder):
                budget.count(spent)
        forms = FederationForms.of(
            shapes, travel_dtype(self.recipe), settings.compress, settings.compress_back
        )
        if self.open_sessions is not None:
            sessions = self.open_sessions(forms)
        else:
            sessions = self._sessions(forms, folder, recorder, stack)
        journal, follow, keep = None, list[FollowedEvent](), memory.get("events", 0)
        if policy.client_step.control or not forms.up.compressor.exact:
            # clients forget what they would need to send an update again
            journal = UpdateJournal(folder)
            follow = journal.since(keep)
            keep = follow[-1].end if follow else keep
        server = FederationServer(
            policy, sessions, forms, judge, EventLog(folder, keep), recorder.event, settings.patience, settings.grace,
            settings.secure, memory.get("seconds", 0.0),
            AdapterProducts.of(shapes) if settings.average == "product" else None, journal, follow,
            memory.get("answered"),
        )  # fmt: skip
        loader = ChangeLoader(
            server, mesh, built.state, shapes, budget, recorder, interrupted, kept, self.recipe.train.batch,
            lambda: _saved_steps(folder),
        )  # fmt: skip
        stack.callback(loader.close)
        return loader

    def _sessions(
        self,
        forms: FederationForms,
        folder: Path,
        recorder: RunRecords,
        stack: ExitStack,
    ) -> ClientSessions:
        """Listen where the recipe says, and write the invitation."""
        endpoint, invitation = self._listen(folder)
        stack.callback(endpoint.close)
        path = keep_invitation(folder, invitation)
        sessions = ClientSessions(
            endpoint, invitation.secret, forms.most, offered_recipe(self),
            lambda hello: disagreement(self.agreed, hello),
        )  # fmt: skip
        recorder.event(
            f"clients join at {invitation.where} with the invitation in {path}"
        )
        return sessions

    def _memory(self, kept: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Return what the server remembers of the run that it resumes; nothing for a new run."""
        version = kept.get("federated_version", 0)
        if not version:
            return {}
        return server_memory(folder, version)

    def _listen(self, folder: Path) -> tuple[Endpoint, ServerInvitation]:
        """Listen where the recipe says. The secret is that of the run's earlier invitation, if it has one."""
        from weft.net.endpoint import Endpoint
        from weft.net.sockets import own_address

        host, _, port = federation_of(self.recipe).listen.rpartition(":")
        host = host.strip("[]")
        secret = new_server_secret()
        if (folder / INVITATION_FILE).exists():
            earlier = read_server_invitation(str(folder / INVITATION_FILE))
            secret = earlier.secret
            port = (
                str(earlier.port) if port == "0" else port
            )  # where clients look for it
        encrypt = self.recipe.resilience.encrypt
        if os.environ.get("WEFT_INVITATION"):
            from weft.net.endpoint import process_endpoint
            from weft.peers.rendezvous import join_peers

            join_peers(encrypt, int(port), "federation-server")
            endpoint = process_endpoint()
        else:
            endpoint = Endpoint(host, int(port), encrypt)
        address, number = endpoint.address
        shown = own_address(FAR[address]) if address in FAR else address
        return endpoint, ServerInvitation(shown, number, secret, encrypt == "always")


def _saved_steps(folder: Path) -> set[int]:
    """Return the steps of the checkpoints that the run in ``folder`` has."""
    from weft.checkpoint.store import committed_checkpoints, step_of

    try:
        return {
            step_of(place) for place in committed_checkpoints(folder / "checkpoints")
        }
    except OSError:
        return set()


def prepare_server(recipe: Recipe) -> ServerJob:
    """Check a recipe with ``federated.listen``, and open the server's validation data, if any.

    Raises :class:`UsageError` or :class:`weft.errors.WeftError` for settings or data that cannot be used.
    """
    settings = federation_of(recipe)
    if recipe.layout.world != 1:
        raise UsageError(
            f"a server of federated training adds up what clients send, on one rank, and layout {recipe.layout} has "
            f"{recipe.layout.world}; leave the layout to the clients"
        )
    check_rounds(recipe)
    if settings.average == "product":
        AdapterProducts.of(learning_shapes(recipe, model_shape(recipe)))
    if settings.noise:
        opacus_accountant()
    if settings.secure:
        from weft.net.wire import require_cipher

        require_cipher()
    train = recipe.train.model_copy(update={"steps": settings.rounds})
    recipe = recipe.model_copy(update={"train": train})
    return completed_job(recipe, lambda own: _server_corpus(recipe, own), ServerJob)


def _server_corpus(recipe: Recipe, own: Tokenizer | None) -> Corpus:
    """Return the server's data: what the model is measured on, or nothing but a tokenizer."""
    data = recipe.data
    if data.model_fields_set & {"path", "sources"}:
        return open_data(data, own)
    tokenizer = tokenizer_of_data(data, own)
    return Corpus(
        tokenizer,
        Order((), (), 0),
        None,
        "data of clients, which the server never sees",
        "federated",
    )
