"""The samples of a stream between simulators and training: their arrays, and what is known of each simulator.

The ledger decides which samples are trained and which leave (:mod:`weft.data.sample_ledger`). Here are the arrays, and
which sample of which simulator each is: a sample is identified by the simulator's name and the sample's index, so that
one that comes twice counts once.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from weft.data.sample_buffer import SampleBuffer
from weft.data.sample_ledger import LEARN, SIMULATE, SampleLedger
from weft.streams.index_ranges import as_ranges, of_ranges

#: Seconds between two looks of whoever waits for room or for samples.
LOOK_S = 0.2


class SampleName(NamedTuple):
    """Identity of a sample: the name of its ``producer``, and its ``number`` among the samples of this producer."""

    producer: str
    number: int


@dataclass
class ProducerState:
    """What a training knows of one simulator.

    Attributes:
        ``next``: index of the first sample that has not come yet.
        ``again``: indices of earlier samples that must be sent again, because they were lost before they were drawn.
        ``undrawn``: indices of samples that are in the buffer and were not drawn yet.
        ``ended``: whether the simulator has sent all of its samples.
        ``refused``: why no further samples are accepted from it; "": they are.
        ``repeated``: number of samples that came twice and were ignored.
    """

    next: int = 0
    again: set[int] = field(default_factory=set)
    undrawn: set[int] = field(default_factory=set)
    ended: bool = False
    refused: str = ""
    repeated: int = 0

    @property
    def over(self) -> bool:
        """Whether no further sample comes from the simulator: it has sent all, or is refused."""
        return self.ended or bool(self.refused)


class DrawnRows(NamedTuple):
    """Samples of a step. ``rows``: their values, float32 ``[samples, width]``. ``names``: their identities, in the same
    order.
    """

    rows: np.ndarray
    names: list[SampleName]


class SampleStore:
    """Holds the samples of a stream. Threads of simulators put samples in, and the training draws from them.
    ``buffer``: decides which samples are drawn, and which leave to make room.
    """

    def __init__(self, buffer: SampleBuffer) -> None:
        self.ledger = SampleLedger((SIMULATE, LEARN), 0, buffer=buffer, freed=self._free)  # fmt: skip
        self.producers: dict[str, ProducerState] = {}
        #: Notified when a sample has come or was drawn, and when a simulator has ended.
        self.changed = threading.Condition()
        #: Whether the training takes no further samples.
        self.closed = False
        #: Numbers of samples that have come, and of draws; when the last new sample has come, in seconds.
        self.received = self.drawn = 0
        self.came_at = time.monotonic()
        self._rows: dict[int, np.ndarray] = {}
        self._names: dict[int, SampleName] = {}

    def producer(self, name: str) -> ProducerState:
        """Return the state of the simulator ``name``: which of its samples have come. An unknown name is registered as
        that of a new simulator.
        """
        return self.producers.setdefault(name, ProducerState())

    def wants(self, sample: SampleName) -> bool:
        """Return whether ``sample`` is new. Raises :class:`ValueError` if samples before it are missing."""
        state = self.producer(sample.producer)
        if sample.number > state.next or sample.number < 0:
            raise ValueError(
                f"sample {sample.number} where sample {state.next} was due"
            )
        return sample.number == state.next or sample.number in state.again

    def put(self, sample: SampleName, row: np.ndarray) -> bool:
        """Add ``sample`` with its values ``row``; wait up to :data:`LOOK_S` seconds for room. Return True if the sample
        is in now or came before; False if there is no room. Raises :class:`ValueError` if samples before it are
        missing.
        """
        with self.changed:
            for last in (False, True):
                state = self.producer(sample.producer)
                if not self.wants(sample):
                    state.repeated += 1
                    return True
                place = None if self.closed else self.ledger.bring(SIMULATE.name)
                if place is not None:
                    self._rows[place], self._names[place] = row, sample
                    state.next = max(state.next, sample.number + 1)
                    state.again.discard(sample.number)
                    state.undrawn.add(sample.number)
                    self.received += 1
                    self.came_at = time.monotonic()
                    self.changed.notify_all()
                    return True
                if not last:
                    self.changed.wait(LOOK_S)
        return False

    def end(self, name: str, refused: str = "") -> None:
        """Note that the simulator ``name`` sends no further samples. ``refused``: why none are accepted from it; "": it
        has sent all.
        """
        with self.changed:
            state = self.producer(name)
            state.ended, state.refused = not refused, refused
            self.changed.notify_all()

    def draw(self, count: int, ended: bool) -> DrawnRows | None:
        """Draw the samples of a step, and count them as trained. Return None if it is too early to draw, or no sample
        is left. ``count``: number of samples; the last step of a stream may get fewer. ``ended``: whether no further
        sample comes.
        """
        with self.changed:
            self.ledger.ended = ended
            lease = self.ledger.take(LEARN.name, "trainer", count)
            if lease is None:
                return None
            places = [row.place for row in lease.rows]
            names = [self._names[place] for place in places]
            rows = np.stack([self._rows[place] for place in places])
            for name in names:
                self.producers[name.producer].undrawn.discard(name.number)
            self.ledger.finish(lease)
            self.ledger.advance()
            self.drawn += len(places)
            self.changed.notify_all()
            return DrawnRows(rows, names)

    def close(self) -> None:
        """Accept no further samples, and wake the simulators that wait for room."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    @property
    def size(self) -> int:
        """Number of samples in the buffer."""
        return len(self._rows)

    def repetitions(self) -> Counter[int]:
        """Return how many samples were drawn once, twice and so on: numbers of samples by number of draws."""
        with self.changed:
            return self.ledger.repetitions()

    def state(self) -> dict[str, Any]:
        """Return the state of the stream for a checkpoint, as JSON values: which samples have come, and which of these
        were not drawn yet.
        """
        with self.changed:
            producers = {
                name: [p.next, as_ranges(p.undrawn | p.again), p.ended]
                for name, p in self.producers.items()
            }
            times = sorted((+self.ledger.times).items())
            buffer = self.ledger.buffer
            assert buffer is not None
            return {
                "producers": producers,
                "draws": buffer.draws,
                "drawn": self.drawn,
                "received": self.received,
                "times": [[*pair] for pair in times],
            }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue the stream of a checkpoint. Samples that had come and were not drawn must be sent again; the values
        of others are not needed. ``state``: the result of :meth:`state`.
        """
        with self.changed:
            self.producers = {
                name: ProducerState(due, {*of_ranges(again)}, ended=ended and not again)
                for name, (due, again, ended) in state["producers"].items()
            }
            undrawn = sum(len(p.again) for p in self.producers.values())
            self.received, self.drawn = state["received"] - undrawn, state["drawn"]
            assert self.ledger.buffer is not None
            self.ledger.buffer.draws = state["draws"]
            self.ledger.times = Counter({times: count for times, count in state["times"]})  # fmt: skip

    def _free(self, place: int) -> None:
        self._rows.pop(place, None)
        self._names.pop(place, None)
