"""Rollouts by engines in processes of their own, which write while the policy is trained.

The engines join a router, as those of a service do: it shares the requests out, and lets another engine go on with the
answers of one that was killed or frozen. New here is that weights change while engines write. The ledger of samples
admits groups as far ahead as the bound on staleness allows, and the router gives an answer only to engines whose
weights are new enough for it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any
from uuid import uuid4

from weft.cluster.engine_router import EngineRouter
from weft.cluster.flight import Flight
from weft.cluster.routed_answers import RoutedAnswers
from weft.cluster.router_model import RouterModel
from weft.data.sample_ledger import (
    ROLLOUT,
    LedgerTask,
    SampleLease,
    SampleLedger,
    VersionSpan,
)
from weft.errors import UsageError, WeftError
from weft.generate.backend import AnswerRequest, Busy, NoEngine
from weft.generate.sampling import Sampling
from weft.net.endpoint import Endpoint
from weft.recipe import ModelShape
from weft.rl.local_rollouts import RolloutInterrupted
from weft.rl.rollout import AnswerGroup, GroupRequest, SentWeights, WrittenAnswer
from weft.rl.weight_channel import WeightSender
from weft.version import VERSION

#: Tasks of the ledger between engines and trainer.
TASKS = (ROLLOUT, LedgerTask("train", ("answer",), whole=True))
#: Seconds until a group is offered again that no engine has taken, and between two looks whether anything is written.
AGAIN_S, LOOK_S = 0.02, 0.5
#: How often a group is begun whose answers have failed.
TRIES = 3
#: Holder of all that the router's engines write, and of what is trained.
ENGINES, TRAINER = "engines", "trainer"


@dataclass(frozen=True, kw_only=True)
class RemoteSettings:
    """How engines in processes of their own write rollouts.

    Attributes:
        ``bound``: largest number of policy updates between the weights that begin an answer and the weights that learn
            from it.
        ``batch``: number of groups of an update.
        ``group``: largest number of answers of a group.
        ``spare``: number of further groups that an update may take beyond ``batch``, for a bound of 0.
        ``most``: largest number of tokens of an answer.
        ``stops``: token ids that end an answer.
        ``how``: settings of sampling.
        ``requests``: number of answers that an engine writes at the same time.
        ``cache``: number of tokens that an engine's cache holds.
        ``budget``: largest number of tokens of an engine's step.
        ``dtype``: type of the weights, as the recipe's section ``train`` has it.
        ``weights``: "bfloat16" to generate with all weights in bfloat16, else "float".
        ``delta``: whether elements of the weights that have not changed are left out when weights are sent.
        ``invariant``: whether log-probabilities do not depend on other requests.
        ``patience``: seconds that an answer waits for an engine when there is none.
        ``stall``: seconds without any new token after which the run gives up.
    """

    bound: int
    batch: int
    group: int
    most: int
    spare: int = 0
    stops: frozenset[int] = frozenset()
    how: Sampling = field(default_factory=Sampling)
    requests: int = 64
    cache: int = 16384
    budget: int = 512
    dtype: str = "float32"
    weights: str = "float"
    delta: bool = False
    invariant: bool = False
    patience: float = 60.0
    stall: float = 600.0


class RemoteRollouts:
    """Source of rollouts that are written by engines in other processes, which join at ``endpoint``.

    It belongs to the first rank that trains; the other ranks have :class:`FollowingRollouts`. Groups are returned in
    the order in which they were asked for. :meth:`take_weights` counts groups as trained that :meth:`finished` has
    returned before. All methods are called in one thread.

    Arguments:
        ``secret``: secret that only the run and its engines know.
        ``shape``: the policy's shape.
        ``sender``: sends this rank's parts of the weights.
        ``say``: prints a line.
        ``started``: called once the first weights can be fetched, to wait for the engines that the run itself has
            started.
        ``ended``: called at the end with the names of the engines that were asked to end.
        ``interrupted``: returns whether this rank is asked to end the run.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        secret: str,
        shape: ModelShape,
        sender: WeightSender,
        settings: RemoteSettings,
        say: Callable[[str], None],
        started: Callable[[EngineRouter], None] = lambda router: None,
        ended: Callable[[Collection[str]], None] = lambda names: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._interrupted = interrupted
        self.settings, self.sender = settings, sender
        self.ledger = SampleLedger(
            TASKS, settings.bound, settings.batch, settings.spare
        )
        self._started, self._ended = started, ended
        fingerprint = blake2b(shape.model_dump_json().encode()).hexdigest()
        model = RouterModel(fingerprint, shape.vocab, shape.embed, {})
        self.router = EngineRouter(
            endpoint,
            secret,
            model,
            say,
            patience=settings.patience,
            balances=False,
            name="a training run",
        )
        about = {
            "run": uuid4().hex,
            "version": VERSION,
            "fingerprint": fingerprint,
            "shape": shape.model_dump(mode="json"),
            # others wait here, so that an engine that is ready gets them
            "most": max(settings.requests, settings.group),
        }
        for name in ("dtype", "weights", "cache", "budget", "requests", "invariant"):
            about[name] = getattr(settings, name)
        sender.about = about
        self._changed = threading.Condition()
        self._queue: deque[GroupRequest] = deque()
        self._requests: dict[int, GroupRequest] = {}  # by place
        self._written: dict[int, AnswerGroup] = {}
        self._leases: list[SampleLease] = []  # what is being trained
        # versions of weights as the ledger counts them, which begins at 0 in each life of a run, by the trainer's
        self._versions: dict[int, int] = {}
        self._failure: WeftError | None = None
        self._tokens_at = time.monotonic()
        # is set when an answer has ended, so that an engine may have room
        self._room = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="weft-rollouts", daemon=True
        )
        self._thread.start()

    @property
    def lags(self) -> Counter[int]:
        """Number of trained answers by their lag in policy updates."""
        return self.ledger.lags

    def request(self, groups: Sequence[GroupRequest]) -> None:
        """Ask for the answers of ``groups``.

        They are begun as soon as the weights are recent enough for the bound on staleness.
        """
        with self._changed:
            self._queue += groups
            self._admit()

    def finished(self, count: int) -> list[AnswerGroup]:
        """Wait for the next ``count`` groups, and return them in the order in which they were asked for.

        Raises :class:`WeftError` if they cannot be written, :class:`RolloutInterrupted` if this rank is asked to end
        the run meanwhile, and :class:`ValueError` if fewer were asked for.
        """
        if not count:
            return []
        with self._changed:
            known = len(self._queue) + len(self._requests)
            if count > known or count > self.ledger.slots:
                raise ValueError(f"{count} groups are wanted, and {known} asked for")
            self._tokens_at = time.monotonic()
            while True:
                if self._failure is not None:
                    raise self._failure
                lease = self.ledger.take("train", TRAINER, count)
                if lease is not None:
                    break
                if self._interrupted():
                    raise RolloutInterrupted
                self._changed.wait(LOOK_S)
                self._check_stall()
            self._leases.append(lease)
            places = [*dict.fromkeys(row.place for row in lease.rows)]
            for place in places:
                del self._requests[place]
            return [self._written.pop(place) for place in places]

    def take_weights(self, version: int) -> None:
        """Send the newest weights, version ``version``, to the engines. Collective over the ranks that train.

        Answers in progress go on with these weights from their next token. Answers that begin from now on are written
        by weights that are new enough for the bound on staleness. With a bound of 0 only the new weights are. The first
        call also waits for the engines. Raises :class:`WeftError` if they do not come, and :class:`ValueError` for a
        version that is not newer than the last.
        """
        if self._versions and version <= max(self._versions):
            raise ValueError(f"version {version} of the weights is not newer than {max(self._versions)}")  # fmt: skip
        first = not self._versions
        with self._changed:
            for lease in self._leases:
                self.ledger.finish(lease)
            if self._leases:
                self.ledger.advance()
            self._leases.clear()
            self._versions[version] = self.ledger.version
            oldest = self.ledger.version - self.settings.bound
            self._versions = {v: at for v, at in self._versions.items() if at >= oldest}  # fmt: skip
        self.sender.publish(version)
        if first:
            self._started(self.router)
        with self._changed:
            self._admit()

    def sent_weights(self) -> SentWeights:
        """Return how many bytes of weights this rank has sent to engines so far, and how many it could leave out."""
        return self.sender.sent_weights()

    def close(self) -> None:
        """End the engines that have joined, and the threads that serve them."""
        self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join()
        self.router.close()
        self.sender.close()
        # not `links`: engines whose connections have ended already may still write files
        self._ended(self.router.let_go)
        self._loop.close()

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        ending = asyncio.gather(*self._tasks, return_exceptions=True)
        ending.add_done_callback(lambda _: self._loop.stop())

    def _check_stall(self) -> None:
        """Raise :class:`WeftError` if nothing was written for too long. The lock is held."""
        if time.monotonic() - self._tokens_at < self.settings.stall:
            return
        links = self.router.links.values()
        engines = ", ".join(f"{link.name} (weights {link.weights})" for link in links)
        raise WeftError(
            f"no token of a rollout has come for {self.settings.stall:g} s; joined: {engines or 'no engine'}"
        )

    def _admit(self) -> None:
        """Begin as many groups as have slots. The lock is held."""
        while self._queue and self._versions:
            place = self.ledger.admit(self._queue[0].answers)
            if place is None:
                return
            self._requests[place] = self._queue.popleft()
            lease = self.ledger.take("rollout", ENGINES, 1, self.ledger.version)
            assert lease is not None
            least = self.ledger.oldest_version(place)
            oldest = min(v for v, at in self._versions.items() if at >= least)
            work = self._write(lease, self._requests[place], oldest)
            self._loop.call_soon_threadsafe(self._begin, work)

    # In the event loop.

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(
        self, lease: SampleLease, request: GroupRequest, oldest: int
    ) -> None:
        """Have a group's answers written by weights of version ``oldest`` or newer, and note them."""
        place, since, tries = lease.rows[0].place, time.monotonic(), TRIES
        asked = AnswerRequest(
            request.prompt,
            self.settings.most,
            replace(self.settings.how, seed=request.seed),
            (),  # stop tokens are written, as they are trained
            request.answers,
            0,
            "",
            None,
            priority=place,
        )
        while True:
            try:
                async with self.router.answers([asked], weights=oldest) as answers:
                    written = await self._collect(answers)
                return self._note(lease, request, written)
            except (Busy, NoEngine) as error:
                # those that wait for weights or for room wait on; `finished` has the limit of that
                late = time.monotonic() - since > self.settings.patience
                if isinstance(error, NoEngine) and late:
                    return self._fail(error)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._room.wait(), AGAIN_S)
            except Exception as error:
                # many engines were lost with it, by which it may be guilty of that, or be unlucky
                tries -= 1
                if isinstance(error, UsageError) or not tries:
                    return self._fail(error)

    def _note(
        self,
        lease: SampleLease,
        request: GroupRequest,
        written: tuple[WrittenAnswer, ...],
    ) -> None:
        """Note that a group is written."""
        with self._changed:
            spans = {
                row: [VersionSpan(s.first, self._versions[s.version]) for s in answer.versions]
                for row, answer in zip(lease.rows, written, strict=True)
            }  # fmt: skip
            self.ledger.finish(lease, versions=spans)
            self._written[lease.rows[0].place] = AnswerGroup(request, written)
            self._changed.notify_all()

    async def _collect(self, answers: RoutedAnswers) -> tuple[WrittenAnswer, ...]:
        """Wait for all tokens of ``answers``; an answer ends behind its stop token."""
        flights = answers.generations
        written: dict[int, WrittenAnswer] = {}
        lengths = [0] * len(flights)
        while len(written) < len(flights):
            event = await answers.next()
            if event.number in written:
                continue
            self._tokens_at = time.monotonic()
            lengths[event.number] += event.token is not None
            stopped = event.token in self.settings.stops
            if stopped or event.finished:
                how = "stop" if stopped else event.finished
                flight, length = flights[event.number], lengths[event.number]
                written[event.number] = _answer_of(flight, length, how)
            if stopped and not event.finished:
                await answers.cancel(event.number)
            if stopped or event.finished:
                self._room.set()
                self._room = asyncio.Event()
        return tuple(written[number] for number in range(len(flights)))

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or WeftError(f"rollouts have ended: {error}")
            self._changed.notify_all()


class FollowingRollouts:
    """Source of rollouts on training ranks other than the first: it only sends the rank's parts of the weights to
    engines.

    ``sender``: sends the parts.
    """

    def __init__(self, sender: WeightSender) -> None:
        self.sender = sender

    def request(self, groups: Sequence[GroupRequest]) -> None:
        """Do nothing, because the first rank asks for all groups."""

    def finished(self, count: int) -> list[AnswerGroup]:
        """Return no groups, because the first rank gets all of them."""
        return []

    def take_weights(self, version: int) -> None:
        """Send this rank's parts of the newest weights to all engines. Collective over the ranks that train."""
        self.sender.publish(version)

    def sent_weights(self) -> SentWeights:
        """Return how many bytes of weights this rank has sent to engines so far, and how many it could leave out."""
        return self.sender.sent_weights()

    def close(self) -> None:
        """Close the connections over which engines get weights from this rank."""
        self.sender.close()


def _answer_of(flight: Flight, length: int, finished: str) -> WrittenAnswer:
    """Return the first ``length`` tokens of an answer, as more may have come since."""
    chosen = [each[0] for each in flight.log_probabilities[:length]]
    spans = [VersionSpan(*pair) for pair in flight.versions if pair[0] < length]
    return WrittenAnswer(
        tuple(flight.tokens[:length]), tuple(chosen), tuple(spans), finished
    )
