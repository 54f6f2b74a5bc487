"""A ledger of samples on their way to training: which task has written and read what, and how old samples may become.

After AsyncFlow (Han et al. 2025): rows are samples, columns are fields. Unlike there, a slot is free again only when
its sample was trained, which bounds the lag by construction. Samples that simulators produce go through the same ledger
with a buffer (:mod:`weft.data.sample_buffer`), which decides what is trained next, and how often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from weft.data.sample_buffer import SampleBuffer


class VersionSpan(NamedTuple):
    """A span of an answer's tokens that one version of the weights has written.

    ``first``: index of the span's first token in the answer. ``version``: number of policy updates that these weights
    have had. The span ends where the next one begins.
    """

    first: int
    version: int


class SampleRow(NamedTuple):
    """A row of the ledger: one attempt at one sample.

    ``place``: index of the sample's group in the order of training. ``member``: index of the sample in its group.
    ``attempt``: number of earlier attempts at this sample, which were discarded or whose fields were lost.
    """

    place: int
    member: int
    attempt: int


@dataclass(frozen=True)
class LedgerTask:
    """A task that every sample passes through, such as generating, scoring or training: it reads and writes columns.

    Attributes:
        ``name``: name of the task.
        ``reads``: columns that must be written before the task gets a row.
        ``writes``: columns that the task writes.
        ``whole``: whether the task gets all rows of a group together, once each of them can be read.
        ``draws``: whether the task samples from the policy, so that the version of its weights counts.
    """

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    whole: bool = False
    draws: bool = False


#: Answers are written, scored one by one, and trained group by group.
ROLLOUT = LedgerTask("rollout", (), ("answer",), whole=True, draws=True)
REWARD = LedgerTask("reward", ("answer",), ("reward",))
TRAIN = LedgerTask("train", ("answer", "reward"), whole=True)


#: Samples of simulators are written by others than the model, and trained as the buffer of the ledger says.
SIMULATE = LedgerTask("simulate", (), ("arrays",))
LEARN = LedgerTask("learn", ("arrays",), whole=True)


#: The cause by which samples count whose fields were lost.
LOST = "lost"


class SampleLease(NamedTuple):
    """Rows that were handed to a process for a task. ``number``: differs from that of every other lease.

    ``task``: name of the task. ``holder``: name of the process that works on the rows. ``rows``: the rows.
    """

    number: int
    task: str
    holder: str
    rows: tuple[SampleRow, ...]


@dataclass
class _Sample:
    """What the ledger knows of a sample's present attempt.

    ``stores``: for each written column, the name of the store that keeps the field. ``leases``: numbers of the leases
    under which tasks work on the sample. ``done``: tasks that have consumed it. ``versions``: which weights have
    written it. ``lost``: whether a store of its fields was lost while it was trained. ``drawn``: how often a buffer
    has drawn it.
    """

    attempt: int = 0
    stores: dict[str, str] = field(default_factory=dict)
    leases: dict[str, int] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    versions: tuple[VersionSpan, ...] = ()
    lost: bool = False
    drawn: int = 0

    def begin_anew(self) -> None:
        self.attempt += 1
        self.stores.clear()
        self.leases.clear()
        self.done.clear()
        self.versions, self.lost, self.drawn = (), False, 0


class SampleLedger:
    """Hands samples from task to task, each sample to each task exactly once, and bounds how old samples become.

    A sample is a row, and its fields are columns; samples come in groups. The ledger has ``(bound + 1) * batch +
    spare`` slots for groups. A group takes a slot when it is admitted. The slot becomes free when the group was trained
    and :meth:`advance` has counted the update. If a process is lost, its rows are handed out again, and its later
    messages about them are ignored. The ledger holds no fields itself, but knows which process stores each. It opens no
    sockets, starts no threads and reads no clock.

    Arguments:
        ``tasks``: the tasks in an order in which every column is written before it is read. The last one trains, and
            gets whole groups in the order of their places.
        ``bound``: largest lag of a trained sample. The lag is the number of policy updates between the weights that
            sampled its first token and the weights that it updates; 0: the synchronous loop.
        ``batch``: smallest number of groups of an update.
        ``spare``: further slots, for groups that may join an update beyond ``batch``. Only for ``bound`` 0.
        ``buffer``: chooses the samples that are trained next, in place of the order of places. Its capacity is then the
            number of slots. A sample keeps its slot while the buffer holds it, and until its last update is counted.
        ``freed``: called with the place of each group whose slot becomes free.

    Raises :class:`ValueError` for tasks that read a column before it is written, or write one twice, and for a buffer
    if a task samples from the policy.
    """

    def __init__(
        self,
        tasks: Sequence[LedgerTask],
        bound: int,
        batch: int = 1,
        spare: int = 0,
        buffer: SampleBuffer | None = None,
        freed: Callable[[int], None] = lambda place: None,
    ) -> None:
        _check_tasks(tasks)
        if buffer is not None and any(task.draws for task in tasks):
            raise ValueError("a buffer is for samples that no policy draws")
        if bound < 0 or batch < 1:
            raise ValueError(f"bound {bound} is below 0, or batch {batch} below 1")
        if spare and bound:
            raise ValueError(
                "spare slots would let samples become older than a bound above 0"
            )
        self.spare = spare
        self.tasks = {task.name: task for task in tasks}
        self.last = tasks[-1].name
        self.bound, self.batch = bound, batch
        self.buffer, self._freed = buffer, freed
        #: Whether no sample comes any more, and numbers of samples by how often the buffer has drawn them, from 1 on.
        self.ended = False
        self.times: Counter[int] = Counter()
        self._leaving: dict[int, None] = {}
        self.version, self.trained = 0, 0
        #: Number of trained samples by their lag, and of attempts that were left out or lost, by cause.
        self.lags: Counter[int] = Counter()
        self.left_out: Counter[str] = Counter()
        # places trained when each of the last versions began; a version that is missing is too old for every sample
        self._trained_at: dict[int, int] = {0: 0}
        self._groups: dict[int, list[_Sample]] = {}
        self._leases: dict[int, SampleLease] = {}
        self._next_place = self._next_lease = 0

    @property
    def slots(self) -> int:
        """Number of groups that can be in the ledger at a time, or that the buffer can hold."""
        if self.buffer is not None:
            return self.buffer.capacity
        return (self.bound + 1) * self.batch + self.spare

    @property
    def free(self) -> int:
        """Number of slots that no group takes, and thus of groups that :meth:`admit` can accept now."""
        return self.slots - len(self._groups)

    def admit(self, samples: int) -> int | None:
        """Admit a group of ``samples`` samples, and return its place.

        If no slot is free, a group that the buffer can do without is removed for it. If there is none, nothing is
        admitted, and the result is None.
        """
        if samples < 1:
            raise ValueError("a group has at least one sample")
        if self.free < 1 and not self._evict():
            return None
        place = self._next_place
        self._next_place += 1
        self._groups[place] = [_Sample() for _ in range(samples)]
        return place

    def bring(self, task: str, samples: int = 1, store: str = "") -> int | None:
        """Admit a group of ``samples`` samples that come from outside, with the columns of ``task`` written already.

        ``task``: a task that reads nothing and does not sample from the policy. ``store``: name of the process that
        keeps the written fields; "": the ledger's owner. Returns the group's place, or None if no slot is free.
        """
        about = self.tasks[task]
        if about.reads or about.draws:
            raise ValueError(f"{task} does not bring samples from outside")
        place = self.admit(samples)
        if place is None:
            return None
        for sample in self._groups[place]:
            sample.done.add(task)
            sample.stores |= dict.fromkeys(about.writes, store)
        self._offer(place)
        return place

    def take(
        self, task: str, holder: str, count: int = 1, version: int | None = None
    ) -> SampleLease | None:
        """Lease rows to a process that is free to work on ``task``, the earliest places first; None if no row is ready.

        With a buffer, the task that trains gets samples that the buffer draws; a sample may be among them several
        times.

        Arguments:
            ``holder``: name of the process that is going to work on the rows.
            ``count``: largest number of rows, or of groups for a task that gets whole groups. The task that trains gets
                exactly ``count`` groups or None; it gets fewer only if :attr:`ended` is set.
            ``version``: for a task that samples from the policy, the version of its weights. Only groups for which
                these weights are recent enough are leased.
        """
        about = self.tasks[task]
        if about.draws and version is None:
            raise ValueError(f"{task} draws, and must say the version of its weights")
        if task == self.last:
            rows = self._next_trained(count) if self.buffer is None else self._drawn(count)  # fmt: skip
        elif about.whole:
            groups = (self._whole_rows(about, place) for place in self._in_turn(about, version))  # fmt: skip
            rows = [row for group in islice(filter(None, groups), count) for row in group]  # fmt: skip
        else:
            single = (
                row
                for place in self._in_turn(about, version)
                for row in self._rows(place)
                if self._is_open(about, self._sample(row))
            )
            rows = [*islice(single, count)]
        if not rows:
            return None
        lease = SampleLease(self._next_lease, task, holder, tuple(rows))
        self._next_lease += 1
        self._leases[lease.number] = lease
        for row in rows:
            self._sample(row).leases[task] = lease.number
        return lease

    def oldest_version(self, place: int) -> int:
        """Return the oldest version of the weights from which the group at ``place`` may be sampled."""
        versions = [v for v in self._trained_at if self._in_time(place, v)]
        return min(versions, default=self.version)

    def holds(self, lease: SampleLease, row: SampleRow) -> bool:
        """Return whether ``lease`` is still valid for ``row``: the row was neither handed out again nor begun anew
        since it was leased.
        """
        samples = self._groups.get(row.place, [])
        return (
            lease.number in self._leases
            and row.member < len(samples)
            and samples[row.member].attempt == row.attempt
            and samples[row.member].leases.get(lease.task) == lease.number
        )

    def finish(
        self,
        lease: SampleLease,
        rows: Sequence[SampleRow] | None = None,
        versions: Mapping[SampleRow, Sequence[VersionSpan]] | None = None,
        store: str = "",
    ) -> list[SampleRow]:
        """Note that the task has read ``rows`` of ``lease`` and written its columns; return the rows for which this
        counts.

        A row does not count if it was handed out again, or begun anew, since it was leased. ``rows``: None for all rows
        of the lease. ``versions``: for a task that samples, which weights have written each row. ``store``: name of the
        process that keeps the written fields; "": the ledger's owner. Raises :class:`ValueError` for tokens from
        weights older than allowed, and if the task that trains gives ``rows``, because it finishes a lease as a whole.
        """
        about = self.tasks[lease.task]
        if about.name == self.last and rows is not None:
            raise ValueError("what was handed out for training is trained as a whole")
        rows = [*dict.fromkeys(lease.rows if rows is None else rows)]
        counted = [row for row in rows if self.holds(lease, row)]
        for row in counted if about.draws else ():
            spans = (versions or {}).get(row)
            if not spans:
                raise ValueError(f"{row}: no version of the weights that have drawn it")
            oldest = min(span.version for span in spans)
            if not self._in_time(row.place, oldest):
                raise ValueError(
                    f"{row} was drawn from version {oldest} of the weights, which is too old at version {self.version}"
                )
        for row in counted:
            sample = self._sample(row)
            del sample.leases[lease.task]
            sample.done.add(lease.task)
            sample.stores |= dict.fromkeys(about.writes, store)
            if about.draws and versions is not None:
                sample.versions = tuple(versions[row])
        for place in {row.place: None for row in counted if about.name != self.last}:
            self._offer(place)
        if not any(self.holds(lease, row) for row in lease.rows):
            self._leases.pop(lease.number, None)
        return counted

    def advance(self) -> int:
        """Count a policy update with all groups trained since the last one, and free their slots; return the new
        version.

        Raises :class:`ValueError` if fewer than ``batch`` groups were trained although others wait, because their lag
        would then exceed the bound.
        """
        waiting = self._groups if self.buffer is None else self._leaving
        trained = [
            place
            for place in waiting
            if all(self.last in sample.done for sample in self._groups[place])
        ]
        if self.buffer is None and len(trained) < min(self.batch, len(self._groups)):
            raise ValueError(
                f"an update trained {len(trained)} groups, and must train {self.batch} at least"
            )
        for place in trained:
            for sample in self._leave(place):
                self.lags[self._lag(sample)] += 1
        self.trained += len(trained)
        self.version += 1
        self._trained_at[self.version] = self.trained
        self._trained_at.pop(self.version - self.bound - 1, None)
        self._leases = {
            number: lease
            for number, lease in self._leases.items()
            if any(self.holds(lease, row) for row in lease.rows)
        }
        return self.version

    def lose(self, holder: str) -> list[SampleRow]:
        """Note that the process ``holder`` is lost: end its leases, and begin anew the samples whose fields it stores.

        Samples that are being trained go on, because the task that trains has read all fields. Returns the rows on
        which the process was working.
        """
        returned = []
        for lease in [each for each in self._leases.values() if each.holder == holder]:
            returned += [row for row in lease.rows if self.holds(lease, row)]
            self._release(lease)
        for place, samples in self._groups.items():
            for member, sample in enumerate(samples):
                if holder not in sample.stores.values():
                    continue
                if self.last in sample.leases.keys() | sample.done:
                    sample.lost = True
                else:
                    self._begin_anew(place, member, LOST)
        return returned

    def leave_out(self, row: SampleRow, why: str) -> SampleRow | None:
        """Discard an attempt at a sample and begin another one. Returns its row, or None if ``row`` is not the current
        attempt.

        If the sample's group is being trained, the whole group is handed out for training again. ``why``: the cause,
        such as a reward that has failed; ``left_out`` counts attempts by it.
        """
        samples = self._groups.get(row.place, [])
        if row.member >= len(samples) or samples[row.member].attempt != row.attempt:
            return None
        if self.last in samples[row.member].done:
            raise ValueError(f"{row} was trained already and cannot be left out")
        self._begin_anew(row.place, row.member, why)
        return self._rows(row.place)[row.member]

    def leave_out_group(self, place: int, why: str) -> list[SampleRow]:
        """Discard all samples of the group at ``place``, and begin a new attempt at each; return the new rows.

        ``why``: the cause, as for :meth:`leave_out`.
        """
        rows = [self.leave_out(row, why) for row in self._rows(place)]
        return [row for row in rows if row is not None]

    def repetitions(self) -> Counter[int]:
        """Count the samples by how often they were drawn: the result has the number of samples for each number of draws
        so far. 0 stands for samples not drawn yet.
        """
        undrawn = sum(not s.drawn for samples in self._groups.values() for s in samples)
        return self.times + Counter({0: undrawn})

    def state(self) -> dict[str, Any]:
        """Return the state of the ledger as JSON values, for a checkpoint; :meth:`load_state` restores it."""
        buffered = {}
        if self.buffer is not None:
            times = [[*pair] for pair in self.times.items()]
            buffered = {"draws": self.buffer.draws, "ended": self.ended, "times": times}
        return buffered | {
            "version": self.version,
            "trained": self.trained,
            "trained_at": [[*pair] for pair in self._trained_at.items()],
            "lags": [[*pair] for pair in self.lags.items()],
            "left_out": dict(self.left_out),
            "next_place": self._next_place,
            "next_lease": self._next_lease,
            "groups": [
                [place, [_sample_values(sample) for sample in samples]]
                for place, samples in self._groups.items()
            ],
        }

    def load_state(
        self, state: Mapping[str, Any], stores: Collection[str] = ("",)
    ) -> None:
        """Restore the ledger from ``state``, which :meth:`state` has returned. Rows that were leased are handed out
        again.

        ``stores``: names of the processes that still keep their fields. Untrained samples with fields elsewhere are
        begun anew.
        """
        self.version, self.trained = state["version"], state["trained"]
        self._trained_at = {version: trained for version, trained in state["trained_at"]}  # fmt: skip
        self.lags = Counter({lag: count for lag, count in state["lags"]})
        self.left_out = Counter(state["left_out"])
        self._next_place, self._next_lease = state["next_place"], state["next_lease"]
        self._groups = {
            place: [_read_sample(values) for values in samples]
            for place, samples in state["groups"]
        }
        self._leases, self._leaving = {}, {}
        self.times = Counter({times: count for times, count in state.get("times", ())})
        for samples in self._groups.values():
            for sample in samples:
                gone = {*sample.stores.values()} - {*stores}
                if (gone or sample.lost) and self.last not in sample.done:
                    self._forget_draws(sample)
                    sample.begin_anew()
                    self.left_out[LOST] += 1
        if self.buffer is not None:
            self._load_buffer(self.buffer, state)

    def _load_buffer(self, buffer: SampleBuffer, state: Mapping[str, Any]) -> None:
        """Fill the empty ``buffer`` with the samples that the ledger has taken on from ``state``."""
        buffer.draws, self.ended = state["draws"], state["ended"]
        kept = {place for place, _ in buffer.places()}
        for place in kept:
            buffer.withdraw(place)
        for place, samples in self._groups.items():
            seen = all(self.last in sample.done for sample in samples)
            for sample in () if seen else samples:
                self._forget_draws(sample)
            self._offer(place, seen)

    # --- the buffer ---

    def _evict(self) -> bool:
        """Remove a group that the buffer can do without; return whether there is one."""
        place = None if self.buffer is None else self.buffer.evict()
        if place is not None:
            self._leave(place)
        return place is not None

    def _leave(self, place: int) -> list[_Sample]:
        """Remove a group, free its slot, and return its samples."""
        samples = self._groups.pop(place)
        self._leaving.pop(place, None)
        self._freed(place)
        return samples

    def _offer(self, place: int, seen: bool = False) -> None:
        """Put a group into the buffer, if there is one, as soon as the task that trains can read all samples.

        ``seen``: whether the group was trained before.
        """
        if self.buffer is None:
            return
        reads = self.tasks[self.last].reads
        if all({*reads} <= sample.stores.keys() for sample in self._groups[place]):
            self._leaving.pop(place, None)
            self.buffer.put(place, seen)
            if seen and self.buffer.empties:  # it was trained, and left at the draw
                self._leaving[place] = None

    def _forget_draws(self, sample: _Sample) -> None:
        """Count ``sample`` as not drawn yet."""
        self.times[sample.drawn] -= bool(sample.drawn)
        sample.drawn = 0

    def _drawn(self, count: int) -> list[SampleRow]:
        """Return the rows of the next ``count`` groups that the buffer draws, or none if it draws none."""
        assert self.buffer is not None
        rows = []
        for place, leaves in self.buffer.draw(count, self.ended):
            rows += self._rows(place)
            for sample in self._groups[place]:
                self.times[sample.drawn] -= bool(sample.drawn)
                sample.drawn += 1
                self.times[sample.drawn] += 1
            if leaves:
                self._leaving[place] = None
        return rows

    def _sample(self, row: SampleRow) -> _Sample:
        return self._groups[row.place][row.member]

    def _rows(self, place: int) -> list[SampleRow]:
        samples = self._groups[place]
        return [SampleRow(place, i, each.attempt) for i, each in enumerate(samples)]

    @staticmethod
    def _is_open(task: LedgerTask, sample: _Sample) -> bool:
        """Return whether ``sample`` has what ``task`` reads, and ``task`` has neither got nor consumed it."""
        known = all(column in sample.stores for column in task.reads)
        return known and task.name not in sample.done | sample.leases.keys()

    def _in_turn(self, task: LedgerTask, version: int | None) -> Iterator[int]:
        """Yield the places of groups, of a task that draws only those that ``version`` of the weights may begin."""
        for place in self._groups:
            if not task.draws or self._in_time(place, version or 0):
                yield place

    def _whole_rows(self, task: LedgerTask, place: int) -> list[SampleRow]:
        """Return the rows of a group that ``task`` has not got yet, or none unless it may read all of these."""
        rows = [
            row
            for row, each in zip(self._rows(place), self._groups[place], strict=True)
            if task.name not in each.done | each.leases.keys()
        ]
        ready = all(self._is_open(task, self._sample(row)) for row in rows)
        return rows if ready else []

    def _next_trained(self, count: int) -> list[SampleRow]:
        """Return the rows of the next ``count`` groups in the order of training, or none if some are not ready."""
        task = self.tasks[self.last]
        groups = [
            self._whole_rows(task, place)
            for place, samples in self._groups.items()
            if not all(task.name in each.done | each.leases.keys() for each in samples)
        ][:count]
        if len(groups) < count or not all(groups):
            return []
        return [row for group in groups for row in group]

    def _in_time(self, place: int, version: int) -> bool:
        """Return whether a sample drawn from weights of ``version`` is trained before its lag exceeds the bound.

        Every update trains ``batch`` groups at least, in order, so that those before ``place`` take few enough updates.
        """
        trained = self._trained_at.get(version)
        return trained is not None and place < trained + self.slots

    def _lag(self, sample: _Sample) -> int:
        return self.version - min((span.version for span in sample.versions), default=self.version)  # fmt: skip

    def _release(self, lease: SampleLease) -> None:
        """Let the rows of ``lease`` be handed out again, and begin those anew whose fields were lost meanwhile."""
        for row in [row for row in lease.rows if self.holds(lease, row)]:
            self._return(self._sample(row), lease.task)
            if lease.task == self.last:
                self._offer(row.place)
        self._leases.pop(lease.number, None)

    def _begin_anew(self, place: int, member: int, why: str) -> None:
        """Begin a sample anew. Its whole group is then handed out for training anew, as it is only trained together."""
        self._forget_draws(self._groups[place][member])
        self._groups[place][member].begin_anew()
        self.left_out[why] += 1
        if self.buffer is not None:
            self.buffer.withdraw(place)
            self._leaving.pop(place, None)
        for sample in self._groups[place]:
            self._return(sample, self.last)

    def _return(self, sample: _Sample, task: str) -> None:
        """Take ``sample`` back from ``task``, if it has it; without fields that were lost meanwhile it begins anew."""
        if sample.leases.pop(task, None) is not None and sample.lost:
            sample.begin_anew()
            self.left_out[LOST] += 1


def _check_tasks(tasks: Sequence[LedgerTask]) -> None:
    """Raise :class:`ValueError` unless each column is written by one task, before others read it."""
    written: set[str] = set()
    for task in tasks:
        if missing := {*task.reads} - written:
            raise ValueError(f"{task.name} reads {sorted(missing)}, which nothing writes before")  # fmt: skip
        if twice := {*task.writes} & written:
            raise ValueError(f"{task.name} writes {sorted(twice)}, as another task does")  # fmt: skip
        written |= {*task.writes}
    if not tasks or not tasks[-1].whole:
        raise ValueError("the last task trains, and gets whole groups")


def _sample_values(sample: _Sample) -> dict[str, Any]:
    return {
        "attempt": sample.attempt,
        "stores": dict(sample.stores),
        "done": sorted(sample.done),
        "versions": [[*span] for span in sample.versions],
        "lost": sample.lost,
    } | ({"drawn": sample.drawn} if sample.drawn else {})


def _read_sample(values: Mapping[str, Any]) -> _Sample:
    spans = tuple(VersionSpan(*span) for span in values["versions"])
    stores, done = dict(values["stores"]), {*values["done"]}
    drawn = values.get("drawn", 0)
    return _Sample(values["attempt"], stores, {}, done, spans, values["lost"], drawn)
