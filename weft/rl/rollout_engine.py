"""An engine in a process of its own that writes rollouts for a training run, with the weights that the run sends."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from uuid import uuid4

import torch

from weft.cluster.cluster_messages import ROUTER_SILENT_S, EngineAbout
from weft.cluster.engine_member import EngineMember
from weft.cluster.joining import unreached
from weft.errors import UsageError, WeftError
from weft.generate.engine import Engine
from weft.layout.mesh import Mesh
from weft.models.packed_copies import PackedCopies
from weft.net.endpoint import Address, Endpoint
from weft.recipe import ModelShape, Train
from weft.rl.generation_model import model_to_fill, targets_of, use_huge_copies
from weft.rl.weight_channel import AGAIN_S, VersionFrames, WeightReceiver
from weft.rl.weight_frames import WeightIntake
from weft.version import VERSION

#: Seconds between two looks whether weights have come.
LOOK_S = 0.1
#: The environment variable with the secret of engines that a run has started itself.
SECRET = "WEFT_ROLLOUT_SECRET"


def reach_run(
    endpoint: Endpoint, run: Address, secret: str, patience: float
) -> WeightReceiver:
    """Connect to the training run at the address ``run``, trying again for up to ``patience`` seconds.

    ``endpoint``: this process's endpoint. ``secret``: secret that only the run and its engines know. Returns the
    receiver of the run's weights. Raises :class:`WeftError` if the run cannot be reached, or sends no weights.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return WeightReceiver(endpoint, run, secret)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise unreached(f"{run[0]}:{run[1]}", error) from None
            time.sleep(AGAIN_S)


class RolloutEngine:
    """An engine that writes answers for a training run, and takes each new version of the policy's weights.

    Arguments:
        ``endpoint``: this process's endpoint.
        ``run``: host and port of the training run's endpoint.
        ``secret``: secret that only the run and its engines know.
        ``name``: name under which the run's router knows the engine.
        ``say``: prints a line.
        ``cache``: number of tokens that its cache holds; 0: the number that the run asks for.
        ``patience``: seconds for which it tries to reach the run.
        ``device``: PyTorch device on which it computes.

    Raises :class:`WeftError` if the run cannot be reached.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        run: Address,
        secret: str,
        name: str,
        say: Callable[[str], None],
        cache: int = 0,
        patience: float = 0.0,
        device: str = "cpu",
    ) -> None:
        self.endpoint, self.run, self.secret = endpoint, run, secret
        self.weights = reach_run(endpoint, run, secret, patience)
        about = self.weights.about
        if about["version"] != VERSION:
            raise UsageError(
                f"the run has Weft {about['version']}, and this engine {VERSION}; install the same version"
            )
        shape = ModelShape.model_validate(about["shape"])
        model, held = model_to_fill(
            shape,
            Mesh.single(torch.device(device)),
            Train(dtype=about["dtype"]),
            about["weights"],
        )
        self._copies = None if about["invariant"] else PackedCopies(model)
        if self._copies is not None:
            self._copies.rows = about["requests"]
        self._intake = WeightIntake(targets_of(held), self.weights.senders)
        self._first = threading.Event()
        self.engine = Engine(
            model,
            cache or about["cache"],
            about["budget"],
            about["requests"],
            invariant=about["invariant"],
        )
        self.engine.record_graphs()
        size = self.engine.reader.size
        self.failure: Exception | None = None
        self.member = EngineMember(
            self.engine,
            EngineAbout(
                name=name,
                instance=uuid4().hex,
                version=VERSION,
                fingerprint=about["fingerprint"],
                vocab=shape.vocab,
                embed=shape.embed,
                cache=self.engine.scheduler.pool.blocks * size,
                block=size,
                most=about["most"],
                searches=False,
                adapters={},
            ),
            say,
        )

    def work(self, redial: float) -> None:
        """Wait for weights, then write answers until the run ends.

        Raises :class:`WeftError` if the run cannot be reached for ``redial`` seconds, or if its weights cannot be used.
        """
        self.weights.start(self._take, self._fail)
        try:
            while not self._first.wait(LOOK_S) and self.failure is None:
                if self.weights.silent > ROUTER_SILENT_S + redial:
                    raise WeftError(
                        f"the run at {self.run[0]}:{self.run[1]} has ended before it sent weights"
                    )
            self.member.run(self.endpoint, self.run, self.secret, redial)
        except WeftError as error:
            raise (self.failure or error) from None
        finally:
            self.close()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Close the connections to the training run, and free the engine."""
        self.weights.close()
        self.member.close()
        self.engine.close()

    def drain(self, move: bool = False) -> None:
        """Tell the router to send no more requests to this engine.

        ``move``: whether other engines take over the present requests at once; otherwise they are finished here.
        """
        self.member.drain(move)

    def _take(self, version: VersionFrames) -> None:
        install = partial(self._install, version)
        self.member.take_weights(version.number, install).result()
        self._first.set()

    def _install(self, version: VersionFrames) -> None:
        if self._copies:
            self._copies.drop()
        complete = [self._intake.take(rank, frame) for rank, frame in version.frames]
        if self._copies:
            self._copies.renew()
            use_huge_copies(self._copies)
        if not complete[-1]:
            raise WeftError(f"version {version.number} of the weights lacks a part")

    def _fail(self, error: Exception) -> None:
        """End the engine, which would go on with old weights."""
        self.failure = WeftError(f"the weights cannot be used: {error}")
        self._first.set()
        self.member.leave()


def run_rollout_engine(
    endpoint: Endpoint,
    run: Address,
    secret: str,
    name: str,
    say: Callable[[str], None],
    redial: float,
    cache: int = 0,
    device: str = "cpu",
) -> None:
    """Run a :class:`RolloutEngine` in this process until its training run dismisses it, or a signal ends it.

    The arguments are those of :class:`RolloutEngine` and :meth:`RolloutEngine.work`. ``device``: "cpu" or "cuda".
    """
    if device == "cuda":  # as on ranks that train
        torch.set_float32_matmul_precision("high")
    engine = RolloutEngine(endpoint, run, secret, name, say, cache, redial, device)

    def ask_to_end(number: int, frame: object) -> None:
        engine.drain(move=True)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask_to_end)
    engine.work(redial)
