"""Collect coded results from the fastest ranks (:mod:`weft.sync.coded`): nobody waits for the slowest.

Rank 0 of a group collects and decodes in threads of its own, so that it may be a late rank itself. Every rank, rank 0
too, has a connection to these threads. A round ends when the code says that enough results have come. All ranks are
then told whose results these were, from which the tasks of the next round follow, and at the end of a step the sum of
all its jobs, so that all go on from the same bits. A late rank finds that message while it still computes: it drops its
results and goes on with the round that the others are in. Messages carry the numbers of their step and round; those of
an earlier one are dropped.
"""

import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from weft.net.endpoint import Channel, process_endpoint
from weft.net.lost import PeerLost
from weft.net.wire import Encryption, Frame, Head, SealedConnection
from weft.sync.coded import Code, CodedTask, Result

#: Messages of ended rounds, with whole gradients among them, that may wait for a late rank. Then all wait for it.
BEHIND = 4


class Sum(NamedTuple):
    """Weighted sum over some parts of a job, as a rank sends it in gradient coding.

    A job is one gradient that is to be computed, and its parts are groups of samples. ``vector``: the sum of the parts'
    gradients. ``numbers``: the sums of the parts' losses and counts of tokens, in float64.
    """

    vector: np.ndarray
    numbers: np.ndarray


def _about(total: Sum) -> list[str | int]:
    """Return the type of a sum's vector and its numbers of elements, which :func:`_sums_of` needs to read the bytes."""
    return [total.vector.dtype.str, total.vector.size, total.numbers.size]


def _views(sums: Iterable[Sum]) -> list[memoryview]:
    return [np.ascontiguousarray(array).data for total in sums for array in total]


def _sums_of(about: Iterable[Sequence[Any]], payload: memoryview) -> list[Sum]:
    """Return the sums whose bytes follow one another in ``payload``."""
    sums, at = [], 0
    for kind, elements, count in about:
        dtype, arrays = np.dtype(str(kind)), list[np.ndarray]()
        for each, size in ((dtype, int(elements)), (np.dtype(np.float64), int(count))):
            end = at + each.itemsize * size
            arrays.append(np.frombuffer(payload[at:end], each))
            at = end
        sums.append(Sum(*arrays))
    return sums


class RoundMessage(NamedTuple):
    """Message of a rank to rank 0 in a round of gradient coding.

    ``step``: training step; ``round``: number of the round in the step; ``flag``: whether the sending rank asks to end
    the run; ``sums``: the rank's weighted sums of gradients, by the number of the job. A job is one gradient that is to
    be computed.
    """

    step: int
    round: int
    flag: bool
    sums: dict[int, Sum]

    def frame(self) -> tuple[Head, list[memoryview]]:
        about = [[job, *_about(total)] for job, total in self.sums.items()]
        head = {"step": self.step, "round": self.round, "flag": self.flag}
        return head | {"sums": about}, _views(self.sums.values())

    @classmethod
    def of(cls, frame: Frame) -> "RoundMessage":
        head, about = frame.head, frame.head["sums"]
        sums = _sums_of([rest for _, *rest in about], frame.payload)
        jobs = [int(job) for job, *_ in about]
        return cls(
            head["step"],
            head["round"],
            head["flag"],
            dict(zip(jobs, sums, strict=True)),
        )


class Ended(NamedTuple):
    """Message of rank 0 to all ranks that ends a round of gradient coding.

    ``arrived``: the ranks whose results came in time. ``total``: the sum of all gradients of the step, sent after the
    last round of the step; None in earlier rounds. ``flag``: whether any rank has asked to end the run so far.
    ``failed``: the reason why no more messages will come; empty if more may come.
    """

    arrived: frozenset[int] = frozenset()
    total: Sum | None = None
    flag: bool = False
    failed: str = ""

    def frame(self) -> tuple[Head, list[memoryview]]:
        totals = [] if self.total is None else [self.total]
        head = {"arrived": sorted(self.arrived), "flag": self.flag}
        about = {"totals": [_about(total) for total in totals], "failed": self.failed}
        return head | about, _views(totals)

    @classmethod
    def of(cls, frame: Frame) -> "Ended":
        head, totals = frame.head, _sums_of(frame.head["totals"], frame.payload)
        return cls(
            frozenset(head["arrived"]),
            totals[0] if totals else None,
            head["flag"],
            head["failed"],
        )


@dataclass
class Link:
    """A rank's end of its connection to rank 0, to which it sends weighted sums of gradients.

    ``rank``: number of this rank; ``limit``: seconds to wait at most for a message; ``step``: how many training steps
    this rank has taken.
    """

    connection: SealedConnection
    rank: int
    limit: float
    step: int = 0

    def take_step(
        self,
        code: Code,
        compute: Callable[[CodedTask, Callable[[], bool]], Sum | None],
        flag: bool,
    ) -> Ended:
        """Compute and send this rank's weighted sums of gradients in all rounds of a training step.

        Returns the message with which rank 0 ends the last round.

        ``code``: the gradient code. ``compute(task, over)``: function that returns the sum that ``task`` asks for. It
        may call ``over()``, which returns True once the round has ended, and then return None. ``flag``: whether this
        rank asks to end the run; the returned message tells all ranks if any rank does. Raises :class:`PeerLost` if
        rank 0 is late or gone.
        """
        arrived: list[frozenset[int]] = []
        while True:
            sums = self._sums(code.tasks(self.rank, len(arrived), arrived), compute)
            if sums is not None:
                self._send(RoundMessage(self.step, len(arrived), flag, sums))
            word = self._next()
            # a rank that is late finds several
            while word.total is None and self.connection.poll():
                arrived.append(word.arrived)
                word = self._next()
            if word.total is not None:
                self.step += 1
                return word
            arrived.append(word.arrived)

    def _sums(
        self,
        tasks: Sequence[CodedTask],
        compute: Callable[[CodedTask, Callable[[], bool]], Sum | None],
    ) -> dict[int, Sum] | None:
        """Return the sums of all tasks of a round, by job; None if the round is over before they are computed."""
        sums = {}
        for task in tasks:
            total = (
                None if self.connection.poll() else compute(task, self.connection.poll)
            )
            if total is None:
                return None
            sums[task.job] = total
        return sums

    def _send(self, message: RoundMessage) -> None:
        # rank 0 is gone, or has said why it ended: the next read tells
        with suppress(OSError):
            self.connection.send(*message.frame())

    def _next(self) -> Ended:
        try:
            word = Ended.of(self.connection.receive(limit=self.limit))
        except TimeoutError:
            raise PeerLost(
                f"rank 0, which puts gradients together, has not answered for {self.limit:g} s"
            ) from None
        except OSError:
            raise PeerLost("rank 0, which puts gradients together, is gone") from None
        if word.failed:
            raise PeerLost(word.failed)
        return word


def connect_ranks(
    code: Code,
    group: dist.ProcessGroup,
    limit: float,
    patience: float,
    encrypt: Encryption = "auto",
) -> Link:
    """Connect all ranks of ``group`` with its first rank, and return this rank's link. Collective.

    On the first rank this also starts the threads that collect results for ``code``, the gradient code. The threads end
    when the links are closed or garbage collected. ``limit``: seconds that any rank waits at most for a message.
    ``patience``: time for late ranks after a round's first result, as a multiple of the time until that result.
    ``encrypt``: "always" or "never" encrypt, or "auto" for only those connections that leave the private network.
    """
    rank, endpoint = group.rank(), process_endpoint(encrypt=encrypt)
    given = [(("", 0), "", "")]
    if rank == 0:
        name, secret = f"gradients/{secrets.token_hex(8)}", secrets.token_hex(16)
        gathering = Gathering(code, patience, limit)
        channel = endpoint.open(name, secret, gathering.admit)
        given = [(endpoint.address, name, secret)]
        threading.Thread(target=gathering.run, args=(channel,), daemon=True).start()
    dist.broadcast_object_list(given, group_src=0, group=group)
    address, name, secret = given[0]
    connection = endpoint.join(name, secret).dial(address, {"rank": rank}, limit, limit)
    # the other end names those that it waits for, and is to be the first
    return Link(connection, rank, 2 * limit)


@dataclass
class Gathering:
    """The state that rank 0's threads share while they collect coded results, end rounds and decode gradients.

    Attributes:
        ``code``: the gradient code.
        ``patience``: time for late ranks after a round's first result, as a multiple of the time until that result.
        ``limit``: seconds to wait at most for results that are needed.
        ``inbox``: messages that have come, with the rank that sent each; None when a rank has left.
        ``outboxes``: messages to each rank that are still to be sent.
        ``gone``: the ranks that have left.
        ``flag``: whether any rank has asked to end the run.
        ``news``: condition that is notified when a rank has connected.
    """

    code: Code
    patience: float
    limit: float
    inbox: queue.SimpleQueue[tuple[int, RoundMessage | None]] = field(
        default_factory=queue.SimpleQueue
    )
    outboxes: dict[int, queue.Queue[Ended | None]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    flag: bool = False
    news: threading.Condition = field(default_factory=threading.Condition)

    def run(self, channel: Channel) -> None:
        """Wait until all ranks have connected over ``channel``; then collect and decode their results until all have
        left.
        """
        with self.news:
            everybody = self.news.wait_for(
                lambda: len(self.outboxes) == self.code.ranks, self.limit
            )
        step = 0
        while everybody and len(self.gone) < self.code.ranks:
            try:
                self._take_step(step)
            except PeerLost as error:
                self._tell(Ended(failed=str(error)))
                break
            step += 1
        channel.shut()
        for outbox in self.outboxes.values():
            with suppress(queue.Full):
                outbox.put(None, timeout=1)

    def admit(self, connection: SealedConnection) -> None:
        """Receive the messages of the rank at the other end of ``connection`` until the rank leaves.

        The channel calls this in a thread of its own for each connection.
        """
        rank = int(connection.hello["rank"])
        outbox = queue.Queue[Ended | None](BEHIND)
        with self.news:
            self.outboxes[rank] = outbox
            self.news.notify_all()
        threading.Thread(
            target=self._write, args=(outbox, connection), daemon=True
        ).start()
        with suppress(OSError):
            while True:
                message = RoundMessage.of(connection.receive())
                self.inbox.put((rank, message))
        self.inbox.put((rank, None))

    def _write(
        self, outbox: "queue.Queue[Ended | None]", connection: SealedConnection
    ) -> None:
        while (word := outbox.get()) is not None:
            # it is gone; what is for it is dropped, so that nobody waits
            with suppress(OSError):
                connection.send(*word.frame())
        connection.close()

    def _tell(self, word: Ended) -> None:
        end = time.monotonic() + self.limit
        for rank, outbox in self.outboxes.items():
            try:
                outbox.put(word, timeout=max(0.01, end - time.monotonic()))
            except queue.Full:
                if not word.failed:
                    late = f"rank {rank} is {BEHIND} rounds late and has not answered for {self.limit:g} s"
                    raise PeerLost(late) from None

    def _take_step(self, step: int) -> None:
        left: dict[int, dict[Result, Sum]] = {job: {} for job in range(self.code.jobs)}
        arrived: list[set[int]] = []
        total: Sum | None = None
        while left:
            arrived.append(set())
            self._collect(step, arrived, left)
            if len(self.gone) == self.code.ranks:
                return
            for job in list(left):
                if (weights := self.code.decoding(job, arrived)) is not None:
                    total = add_result(total, weights, left.pop(job))
            self._tell(
                Ended(frozenset(arrived[-1]), None if left else total, self.flag)
            )

    def _collect(
        self, step: int, arrived: list[set[int]], left: dict[int, dict[Result, Sum]]
    ) -> None:
        """Fill ``left`` with the results of the last of the rounds that have ``arrived``, until it is over."""
        number, begun, first = len(arrived) - 1, time.monotonic(), 0.0
        while (most := self.duration(arrived, left, first)) is not None:
            wait = begun + min(most, self.limit) - time.monotonic()
            if wait <= 0:
                if most > self.limit:
                    self._give_up(
                        step, set(range(self.code.ranks)) - self.gone - arrived[-1]
                    )
                return
            with suppress(queue.Empty):
                rank, message = self.inbox.get(timeout=wait)
                if message is None:
                    self.gone.add(rank)
                    continue
                self.flag |= message.flag
                if (message.step, message.round) != (step, number):
                    continue  # it was too late
                arrived[-1].add(rank)
                if message.sums and not first:
                    first = time.monotonic() - begun
                for job, total in message.sums.items():
                    if job in left:
                        left[job][Result(rank, number)] = total

    def duration(
        self, arrived: Sequence[set[int]], left: Iterable[int], first: float
    ) -> float | None:
        """Return how many seconds the present round may take, counted from its begin; None if the round is over.

        A job is one gradient that is to be computed in several rounds. The round is over once all jobs that have begun
        are decoded, or all ranks have sent their results.

        The returned time is infinite before the first result of a rank has come. It is also infinite while a job cannot
        do without further results of this round: even all results of later rounds would not suffice to decode it. In
        all other cases the time is ``(1 + patience) * first``. Late ranks are not needed then. They still get this
        time, because ranks that have sent a result late are often in time in the next rounds.

        Raises :class:`PeerLost` if a gradient needs a rank that has left.

        ``arrived``: for each round, the ranks whose results have come, the present round last. ``left``: the jobs that
        are not decoded yet. ``first``: seconds until the present round's first result, 0 if there is none.
        """
        here = set(range(self.code.ranks)) - self.gone
        unknown = {job for job in left if self.code.decoding(job, arrived) is None}
        all_in, under_way = (
            here <= arrived[-1],
            {job for job in unknown if job < len(arrived)},
        )
        if not here or not unknown:
            return None
        rest = [here] * self.code.delay
        if any(self.code.decoding(job, [*arrived, *rest]) is None for job in under_way):
            if all_in:
                raise PeerLost(
                    f"rank {_listed(self.gone)} is gone, and a gradient cannot be decoded without it"
                )
            return inf
        if all_in or not under_way:
            return None
        return (1 + self.patience) * first if first else inf

    def _give_up(self, step: int, late: set[int]) -> None:
        raise PeerLost(
            f"rank {_listed(late)} has sent no coded gradient of step {step + 1} for {self.limit:g} s, and the sum of "
            f"all cannot be decoded without {'it' if len(late) == 1 else 'one of them'}"
        )


def _listed(ranks: set[int]) -> str:
    return " and ".join(map(str, sorted(ranks)))


def add_result(
    total: Sum | None, weights: dict[Result, float], results: dict[Result, Sum]
) -> Sum:
    """Return ``total`` plus the gradient of a job (one gradient of the step), decoded as a weighted sum of ``results``.

    ``total``: the sum so far; None: zeros. ``weights``: the weight of each result in the gradient; ``results``: the sum
    that each rank has sent, by rank and round.
    """
    some: Sequence[Sum] = [results[result] for result in weights]
    vector, numbers = (np.zeros_like(x) for x in some[0]) if total is None else total
    for weight, result in zip(weights.values(), some, strict=True):
        vector += weight * result.vector
        numbers += weight * result.numbers
    return Sum(vector, numbers)
