"""The loader of a server: between two steps it waits until clients have brought the next change of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weft.errors import WeftError
from weft.federated.federation_page import write_federation_page
from weft.federated.federation_server import FederationServer, ServedChange
from weft.federated.plain_tensors import load_values, save_values
from weft.federated.privacy_budget import PrivacyBudget, difference_norm
from weft.federated.whole_tensors import gathered_parameters

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.parallel.state import State
    from weft.train.step_loader import AskedQuestions, RunRecords

T = torch.Tensor
#: Folder in the run's folder with what the server remembers after each of the last changes, and how many are kept.
MEMORY, KEPT = "federation", 3


@dataclass(frozen=True)
class ChangeOfStep:
    """Input of a step of the server, in the place of a batch: a change of the model.

    Attributes:
        ``difference``: tensors to add to the parameters, by name; only on the first rank.
        ``loss``: mean loss of the clients' steps.
        ``norm``: norm of the difference.
    """

    difference: Mapping[str, T]
    loss: float
    norm: float


@dataclass
class ChangeLoader:
    """Loader of a federated server: in place of a batch, each step gets a change of the model, computed from clients'
    updates.

    Attributes:
        ``server``: drives the policy, on the first rank; None on others.
        ``mesh``, ``state``: the ranks of the server, and the part of the model that this rank holds.
        ``shapes``: the shape of each learning parameter.
        ``budget``: adds noise for differential privacy; None without noise.
        ``recorder``: writes the run's records.
        ``interrupted``: function that returns whether this rank is asked to end the run.
        ``kept``: JSON values that checkpoints keep.
        ``keep_steps``: returns the versions of which checkpoints exist.
        ``batch``: number by which a step increases the run's count of samples.
    """

    server: FederationServer | None
    mesh: Mesh
    state: State
    shapes: Mapping[str, tuple[int, ...]]
    budget: PrivacyBudget | None
    recorder: RunRecords
    interrupted: Callable[[], bool]
    kept: dict[str, Any]
    batch: int
    keep_steps: Callable[[], set[int]]
    over: str = ""
    served: ChangeOfStep | None = None
    #: By version, the place in the record of events behind which updates are kept in the journal.
    places: dict[int, int] = field(default_factory=dict)

    def island_samples(self, position: int) -> range:
        """Return ``batch`` numbers from ``position`` on as sample numbers, because only clients know which samples they
        read.
        """
        return range(position, position + self.batch)

    def questions(self) -> Mapping[str, AskedQuestions]:
        """Return held-out questions to evaluate the model on, by task: an empty dict, because this loader has none."""
        return {}

    def is_ready(self, position: int) -> bool:
        """Return whether the change of the model for the step that starts at ``position`` has arrived."""
        return self.served is not None

    def make_ready(self, position: int) -> bool:
        """Send the present model to clients, and wait for the next change of it. All ranks must call it.

        Returns False if a rank is asked to end the run meanwhile.
        """
        parameters = gathered_parameters(self.state, self.mesh, self.shapes)
        change: list[ServedChange | None] = [None]

        def serve() -> tuple[float, float] | None:
            assert self.server is not None
            change[0] = self.server.next_change(parameters, self._asked_to_end)
            return None if change[0] is None else self._serve(change[0])

        figures = self.mesh.on_main(serve)
        if figures is None:
            if not self.interrupted():
                self.over = f"federated.seconds = {self._seconds:g} are over"
            return False
        difference = self._difference if change[0] is not None else {}
        self.served = ChangeOfStep(difference, *figures)
        return True

    @property
    def _seconds(self) -> float:
        return float(self.server.policy.settings.seconds) if self.server else 0.0

    def _asked_to_end(self) -> bool:
        """Return whether the run is to end without another change."""
        assert self.server is not None
        return self.interrupted() or 0 < self._seconds <= self.server.now

    def _serve(self, served: ServedChange) -> tuple[float, float]:
        """Add noise to a change, record it, and return its loss and norm. On the first rank alone."""
        assert self.server is not None
        change, record = served.change, dict[str, Any]()
        self._difference: Mapping[str, T] = change.difference
        if self.budget is not None:
            self._difference = self.budget.noisy(
                change.difference, change.clients, change.weights
            )
            record["epsilon"] = self.budget.epsilon()
            record["delta"] = self.budget.delta
        reports, traffic = served.reports, self.server.sessions.traffic
        self.recorder.log(
            "federated", clients=list(change.clients), weights=list(change.weights),
            staleness=[r.staleness for r in reports], seconds=[r.seconds for r in reports],
            steps=[r.steps for r in reports], began=[r.began for r in reports], arrived=[r.arrived for r in reports],
            time=self.server.now, bytes=traffic.down + traffic.up, down=traffic.down, up=traffic.up,
            loss=served.loss, **record,
        )  # fmt: skip
        return served.loss, difference_norm(self._difference)

    def step(self, position: int) -> Sequence[Any]:
        """Return the change of the model for the step that starts at ``position``, as a list with this one element."""
        served, self.served = self.served, None
        assert served is not None
        if self.server is not None:
            self._remember()
        return [served]

    # --- over restarts ---

    def _remember(self) -> None:
        """Write what the server must know to go on after this step, and forget what no checkpoint needs."""
        assert self.server is not None
        version, folder = self.server.policy.version, self.recorder.folder / MEMORY
        state = self.server.state_dict()
        about: dict[str, Any] = {"clients": len(self.server.policy.members)}
        if self.budget is not None:
            state["budget"] = self.budget.state_dict()
            about["epsilon"] = self.budget.epsilon()
        self.kept["federated"] = about  # for the card of an export
        save_values(memory_file(self.recorder.folder, version), state)
        self.kept["federated_version"] = version
        needed = self.keep_steps()
        self.places[version] = state["events"]
        stored = [self.places[v] for v in needed if v in self.places]
        if self.server.journal is not None and stored:
            self.server.journal.forget(max(stored))
        for path in folder.glob("*.safetensors"):
            if (
                path.stem.isdigit()
                and int(path.stem) <= version - KEPT
                and int(path.stem) not in needed
            ):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Tell all clients that the run has ended, or that the server pauses."""
        if self.server is None:
            return
        version, rounds = self.server.policy.version, self.server.policy.settings.rounds
        if version >= rounds or self.over:
            parameters = gathered_parameters(self.state, self.mesh, self.shapes)
            self.server.end(
                f"the run is complete: {version} changes of the model", parameters
            )
        else:
            self.server.pause()
        if version:
            self.recorder.event(f"page {write_federation_page(self.recorder.folder)}")


def memory_file(folder: Path, version: int) -> Path:
    """Return the path of the server's state after change number ``version``, in the run's ``folder``."""
    return folder / MEMORY / f"{version}.safetensors"


def server_memory(folder: Path, version: int) -> dict[str, Any]:
    """Read the state of the server (policy, counters) after change number ``version`` of the run in ``folder``.

    Raises :class:`weft.errors.WeftError` if the file is missing or damaged.
    """
    values: dict[str, Any] = load_values(memory_file(folder, version))
    return values


def spent_budgets(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the privacy counts (``PrivacyBudget.state_dict``) that the run in ``folder`` has stored at each change.

    Counts after the newest checkpoint are included: those models were sent to clients too, although a killed server
    goes back to the checkpoint.
    """
    for path in sorted((folder / MEMORY).glob("*.safetensors")):
        try:
            values: dict[str, Any] = load_values(path)
        except WeftError:  # only that of the checkpoint must be whole
            continue
        if "budget" in values:
            yield values["budget"]
