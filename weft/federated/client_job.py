"""The job of a client of federated training: an ordinary run on its own data, whose works a server gives out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weft.data.loader import open_data
from weft.errors import UsageError
from weft.federated.client_dialler import dialler
from weft.federated.client_link import ServerLink
from weft.federated.client_recipe import MANY
from weft.federated.client_state import ClientState
from weft.federated.client_work import WorkSource, present_work
from weft.federated.federated_facts import agreed_facts, learning_shapes, travel_dtype
from weft.federated.federation_frames import FederationForms
from weft.federated.federation_settings import federation_of
from weft.federated.work_loader import WorkLoader
from weft.train.rule_optimizer import learning_rate
from weft.train.setup import Job, completed_job

if TYPE_CHECKING:
    from weft.checkpoint.run_state import Progress
    from weft.layout.mesh import Mesh
    from weft.parallel.build import Built
    from weft.recipe import Recipe
    from weft.train.step_loader import RunRecords


#: Connects with a server, given what the client keeps and a function that prints a line.
Opener = Callable[[ClientState, Callable[[str], object]], WorkSource]


@dataclass
class PresentVersion:
    """Object that holds the ``number`` of the model version on which a client trains now. Parts of the client's run
    share it: the loader sets the number, and the learning rate depends on it.
    """

    number: int = 0


@dataclass(frozen=True)
class ClientJob(Job):
    """A checked recipe with ``federated.join``, whose run trains as a client of a federated server.

    Attributes:
        ``open_source``: connects to the server; None: connect as the invitation says.
        ``present``: the model version that the client trains on.
    """

    open_source: Opener | None = field(default=None, compare=False)
    present: PresentVersion = field(default_factory=PresentVersion, compare=False)

    def steps(self, progress: Progress) -> int:
        """Return a number of steps that no run reaches, because only the server knows when the run ends."""
        return MANY

    def learning_rate(self, step: int, steps: int) -> float:
        """Return the learning rate for the version of the model that the client trains on.

        ``step`` and ``steps`` have no effect.
        """
        return self.rate(self.present.number)

    def rate(self, version: int) -> float:
        """Return the learning rate of local steps on a version of the model: the recipe's schedule at ``version``."""
        return learning_rate(
            self.recipe.optimizer, version, federation_of(self.recipe).rounds
        )

    @property
    def samples(self) -> int:
        """Number of samples that the client holds, of which it tells the server."""
        return sum(stream.rows for stream in self.corpus.train.streams)

    def training_loader(
        self, mesh: Mesh, built: Built, recorder: RunRecords, interrupted: Callable[[], bool], stack: ExitStack,
        kept: dict[str, Any],
    ) -> WorkLoader:  # fmt: skip
        """Return the loader of the samples for the local steps that the server orders. All ranks must call it.

        The arguments are those of :meth:`Job.training_loader`.
        """
        settings, batch = federation_of(self.recipe), self.recipe.train.batch
        source, state = None, ClientState(recorder.folder)
        if mesh.is_main:
            state.load()
            opener = self.open_source or self._server_link
            source = opener(state, recorder.event)
            stack.callback(source.close)
            source.join({"facts": agreed_facts(self), "samples": self.samples})
        most = max(settings.steps, getattr(settings, "most_steps", 0))
        return WorkLoader(
            source, self.loader(self.corpus.train, mesh), built.state, mesh, present_work(built.state),
            learning_shapes(self.recipe, self.shape), self.samples, batch, most * batch, self._rate_of_work, recorder,
            interrupted, settings.moments == "kept", state,
        )  # fmt: skip

    def _rate_of_work(self, version: int) -> float:
        self.present.number = version
        return self.rate(version)

    def _server_link(
        self, kept: ClientState, say: Callable[[str], object]
    ) -> ServerLink:
        """Connect with the server of the invitation."""
        settings = federation_of(self.recipe)
        shapes = learning_shapes(self.recipe, self.shape)
        forms = FederationForms.of(
            shapes, travel_dtype(self.recipe), settings.compress, settings.compress_back
        )
        mask = None
        if settings.secure:
            from weft.federated.secure_sum import new_mask_key

            mask = new_mask_key()
        dial = dialler(settings.join, self.recipe.resilience.encrypt)
        return ServerLink(
            dial,
            forms,
            kept,
            settings.name,
            settings.clip,
            settings.patience,
            say,
            mask,
        )


def prepare_client(recipe: Recipe) -> ClientJob:
    """Check a recipe with ``federated.join``, and open the client's data.

    Raises :class:`UsageError` or :class:`weft.errors.WeftError` if settings or data cannot be used.
    """
    if federation_of(recipe).listen:
        raise UsageError(
            "federated.listen is about a server and federated.join about a client, and a run is one of them; leave one "
            "out"
        )
    if recipe.data.epochs:
        raise UsageError(
            "data.epochs says when a run ends, and the server ends that of a client; leave it out"
        )
    if not federation_of(recipe).name:
        raise UsageError(
            "a client has a name at its server; set federated.name, or use weft client"
        )
    job = completed_job(recipe, lambda own: open_data(recipe.data, own), ClientJob)
    if not job.corpus.train.streams:
        raise UsageError("this client has no data to learn from; give --data PATH")
    return job
