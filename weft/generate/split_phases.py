"""Two phases on one device: a process of its own reads prompts while the engine's process writes (semi-PD, Hong et al.
2025, 2504.19867; Nexus, 2507.06608).

One scheduler plans both: passes over prompts go to the other process, and steps of the texts that write are computed
here. Both use the same cache blocks in shared memory, and only the scheduler hands blocks out. So a text whose prompt
is read goes on here at once, and no keys are moved. A quota divides the cores while both phases have work
(:mod:`weft.generate.quotas`). If the other process ends, its prompts are computed here until there is a new one.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from weft.generate.core_share import CoreShare, Pacer, apply_share
from weft.generate.engine import LOOK_S, Engine, LaunchedPass
from weft.generate.packed_row import pack, parts_of
from weft.generate.prefill_process import PrefillLost, PrefillProcess
from weft.generate.quotas import (
    PassTime,
    PhaseOrders,
    QuotaController,
    chosen_quota,
    phase_view,
)
from weft.generate.reader import PagedReader
from weft.generate.request import Generation, Written
from weft.generate.scheduler import ScheduledStep
from weft.generate.step_work import work_of


class _Reading(NamedTuple):
    """A pass over prompts that is under way in the other process.

    ``held``: blocks that nobody else may write to before its end. ``rows``: number of rows of logits. ``alone``:
    whether decode had nothing to do when the pass began.
    """

    launched: LaunchedPass
    held: list[int]
    rows: int
    work: list[float]
    begun: float
    share: float


class SplitPhases:
    """Takes the steps of ``engine`` in two processes: ``process`` reads prompts, this one writes texts. ``controller``:
    chooses the quota. ``cores``: numbers of the cores that both share. ``apply``: sets the threads and cores of this
    process to its share.

    Attributes:
        ``quota``: share of the cores that reading prompts may use while texts are written.
        ``passes``: number of passes over prompts that the other process has ended.
        ``lost``: number of passes that were computed again, because the other process had ended.
    """

    def __init__(
        self,
        engine: Engine,
        process: PrefillProcess,
        controller: QuotaController,
        cores: Sequence[int],
        apply: Callable[[CoreShare], None] = apply_share,
    ) -> None:
        assert isinstance(engine.reader, PagedReader)
        self.engine, self.reader, self.process = engine, engine.reader, process
        self.controller, self.quota = controller, controller.initial
        self.passes = self.lost = 0
        self._reading: _Reading | None = None
        self._orders = PhaseOrders(engine.scheduler.policy, controller)
        self._last: dict[Generation, float] = {}
        self._pacer = Pacer(cores, self, last=True, apply=apply, rest=self._rest)
        engine.scheduler.beside, engine.phases = True, self

    def present_share(self) -> float:
        """Return the fraction of the cores that writing texts may use now."""
        reads = self._reading is not None and not self.process.has_ended(0)
        return 1.0 - self.quota if reads else 1.0

    def step(self) -> list[Written]:
        """Begin a pass over prompts in the other process if none is under way, and compute a step of the texts that are
        being written. If there is none, wait a moment for the prompts. Return the tokens that have been written. While
        the other process is not ready, this process computes everything.
        """
        written = self._collect(0.0)
        self.process.look()
        if not self.process.ready and self._reading is None:
            return written + self.engine.step_alone()
        self.engine.prepare()
        self._choose()
        if self._reading is None:
            self._begin_reading()
        scheduler = self.engine.scheduler
        step = scheduler.plan(policy=self._orders.writing)
        self.process.set_quota(self.quota, bool(step.work))
        if step.work:
            written += self._write(step)
        elif self._reading is not None:
            written += self._collect(LOOK_S)
        elif scheduler.waiting and not written:
            time.sleep(LOOK_S)  # nothing can begin until blocks come back
        return written

    def close(self) -> None:
        """End the process that reads prompts; this process goes on with the texts."""
        self.process.close()

    # Prefill.

    def _begin_reading(self) -> None:
        """Send the other process its next pass, if there are prompts."""
        scheduler = self.engine.scheduler
        step = scheduler.plan(policy=self._orders.reading)
        if not step.work:
            return
        work, rows = work_of(step), self.engine.rows_of(step)
        self.reader.change_blocks(step.copies, ())
        scheduler.due |= step.work.keys()
        held = [block for request in step.work for block in request.table]
        scheduler.pool.hold(held)
        count = sum(prompt + drawn for *_, prompt, drawn in rows)
        logits = partial(self.process.logits, count)
        launched = LaunchedPass(step, rows, logits, scheduler.version)
        texts = any(r.wanted == 1 and r not in step.work for r in scheduler.running)
        share = self.quota if texts else 1.0
        self.process.set_quota(self.quota, texts)
        self._reading = _Reading(launched, held, count, work, time.monotonic(), share)
        try:
            self.process.begin(pack(parts_of(step)))
        except PrefillLost:
            self._take_back(self._reading)

    def _collect(self, seconds: float) -> list[Written]:
        """Return the tokens of the pass over prompts, if it ends within ``seconds``."""
        reading = self._reading
        if reading is None or not self.process.has_ended(seconds):
            return []
        try:
            written = self.engine.receive(reading.launched)
        except PrefillLost:
            self._take_back(reading)
            return []
        self._reading, self.passes = None, self.passes + 1
        self.engine.scheduler.pool.release(reading.held)
        now = time.monotonic()
        beside = reading.share < 1.0
        seconds = now - reading.begun
        self.controller.note_pass(PassTime("prefill", reading.work, seconds, reading.share, beside))  # fmt: skip
        self._note(written, now)
        return written

    def _take_back(self, reading: _Reading) -> None:
        """Forget a pass that will not end. Its tokens were not counted, so that they are computed again."""
        scheduler, requests = self.engine.scheduler, reading.launched.drawn.work.keys()
        scheduler.due -= requests
        scheduler.pool.release(reading.held)
        # keys are written again, but a recurrent state may have taken the tokens in already
        for request in requests if scheduler.pool.states else ():
            if request.runs:
                scheduler.requeue(request)
        self._reading, self.lost = None, self.lost + 1

    # Decode.

    def _write(self, step: ScheduledStep) -> list[Written]:
        """Compute a step here, and rest as the quota wants it."""
        work, share = work_of(step), self.present_share()
        begun = time.monotonic()
        self._pacer.begin()
        written = self.engine.receive(self.engine.launch(step))
        self._pacer.pace()
        now = time.monotonic()
        self.controller.note_pass(PassTime("decode", work, now - begun, share, share < 1.0))  # fmt: skip
        self._note(written, now)
        return written

    def _rest(self, seconds: float) -> None:
        """Wait for ``seconds``, or until the pass over prompts has ended."""
        if self._reading is not None:
            self.process.has_ended(seconds)

    # What the controller sees.

    def _choose(self) -> None:
        view = phase_view(
            self.engine.scheduler, time.monotonic(), self.quota, self._last
        )
        self.quota = chosen_quota(self.controller, view)

    def _note(self, written: Iterable[Written], now: float) -> None:
        """Tell the controller when texts have got their tokens."""
        for each in written:
            request = each.request
            before = self._last.get(request)
            if each.token is not None and before is not None:
                self.controller.note_gap(now, now - before)
            elif each.token is not None and not request.resumed:
                self.controller.note_first(now, now - request.asked_at)
            self._last[request] = now
            if each.finished:
                del self._last[request]
        scheduler = self.engine.scheduler
        if len(self._last) > 2 * scheduler.limit:  # some were cancelled
            alive = {*scheduler.running, *scheduler.waiting}
            self._last = {r: t for r, t in self._last.items() if r in alive}
