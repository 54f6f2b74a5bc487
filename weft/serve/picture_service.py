"""An engine of pictures in a thread of its own, used from an event loop: both go on at the same time."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import torch

from weft.diffusion.picture_engine import PictureAsk, PictureEngine, PictureJob
from weft.errors import WeftError
from weft.generate.backend import Busy, ServerEnding

R = TypeVar("R")


class PictureLoad(NamedTuple):
    """Load of an engine that makes images. ``running``: number of images in the batch; ``waiting``: number of images
    that wait; ``evaluations``: number of the model's predictions so far.
    """

    running: int
    waiting: int
    evaluations: int


class _Asked:
    """Images that were asked for together. ``jobs``: the images; ``done``: future that is set once all are there."""

    def __init__(self, jobs: Sequence[PictureJob], done: "Future[list[torch.Tensor]]"):
        self.jobs, self.done = jobs, done

    def end_if_whole(self) -> bool:
        """Set the future if all images are there, and return whether they are."""
        images = [job.image for job in self.jobs if job.image is not None]
        if len(images) < len(self.jobs):
            return False
        if self.done.set_running_or_notify_cancel():
            self.done.set_result(images)
        return True

    def fail(self, error: Exception) -> None:
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)


class PictureService:
    """Makes images with ``engine`` in a thread. At most ``most`` images, whether they are in the batch or wait, are
    accepted at a time, so that memory stays bounded.
    """

    def __init__(self, engine: PictureEngine, most: int) -> None:
        self.engine, self.most = engine, most
        self.failure: Exception | None = None
        self._asked: list[_Asked] = []
        self._inbox: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._closed = self._cut = False
        self.thread = threading.Thread(target=self._work, name="pictures", daemon=True)
        self.thread.start()

    async def make(self, asks: Sequence[PictureAsk]) -> list[torch.Tensor]:
        """Make the images that ``asks`` describe, and return each as ``[channels, (frames,) height, width]``. If the
        caller is cancelled, its images are taken out of the batch. Raises :class:`Busy` if too many images wait, and
        :class:`ServerEnding` when the server ends.
        """
        if self._cut:
            raise ServerEnding("the server ends; ask again later")
        done: Future[list[torch.Tensor]] = Future()
        submitted = self._call(lambda: self._submit(asks, done))
        try:
            await asyncio.shield(asyncio.wrap_future(submitted))
            return await asyncio.wrap_future(done)
        finally:
            if not done.done() or done.cancelled():
                done.cancel()
                self._take_out(done)

    def load(self) -> PictureLoad:
        """Return how many images the engine makes and how many wait; may be called in any thread."""
        engine = self.engine
        return PictureLoad(len(engine.running), len(engine.waiting), engine.evaluations)

    def cut_answers(self) -> int:
        """End all unfinished answers with :class:`ServerEnding`, and return their number."""
        self._cut = True
        cut = len(self._asked)
        if not self._ended:
            self._call(self._end_all)
        return cut

    def close(self) -> None:
        """End the service's thread after its current step."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self.thread.join()

    @property
    def _ended(self) -> bool:
        return self.failure is not None or self._closed

    def _call(self, action: Callable[[], R]) -> "Future[R]":
        """Run ``action`` in the thread between two steps, and return the future of its result."""
        future: Future[R] = Future()
        with self._wake:
            if self._ended:
                raise WeftError("the engine has stopped") from self.failure
            self._inbox.append((action, future))
            self._wake.notify()
        return future

    def _take_out(self, done: "Future[list[torch.Tensor]]") -> None:
        """Take the images out that ``done`` waits for, whether they have been submitted by now or are about to be."""
        if not self._ended:
            self._call(lambda: self._cancel(done))

    # In the thread.

    def _submit(
        self, asks: Sequence[PictureAsk], done: "Future[list[torch.Tensor]]"
    ) -> _Asked:
        held = len(self.engine.running) + len(self.engine.waiting)
        if held + len(asks) > self.most:
            raise Busy(
                f"{held} images are being made or wait, and the most is {self.most}; try again later"
            )
        asked = _Asked(self.engine.submit(asks), done)
        self._asked.append(asked)
        return asked

    def _cancel(self, done: "Future[list[torch.Tensor]]") -> None:
        for asked in [each for each in self._asked if each.done is done]:
            self._asked.remove(asked)
            self.engine.cancel(asked.jobs)

    def _end_all(self) -> None:
        ending = ServerEnding(
            "the server ends, and these images were not finished; ask again later"
        )
        self._fail_all(ending)

    def _fail_all(self, error: Exception) -> None:
        for asked in self._asked:
            self.engine.cancel(asked.jobs)
            asked.fail(error)
        self._asked.clear()

    def _work(self) -> None:
        try:
            while self._take_calls():
                if self.engine.step():
                    self._asked = [a for a in self._asked if not a.end_if_whole()]
        except Exception as error:
            self.failure = error
        with self._wake:
            self._closed = True
            calls, self._inbox = self._inbox, deque()
        stopped = WeftError(f"the engine has failed: {self.failure}")
        ended = stopped if self.failure else ServerEnding("the server ends")
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(ended)
        self._fail_all(ended)

    def _take_calls(self) -> bool:
        """Run what was called for, wait if there is nothing else to do, and return whether to go on."""
        with self._wake:
            while not (self._inbox or self._closed) and self.engine.idle:
                self._wake.wait()
            if self._closed:
                return False
            calls, self._inbox = self._inbox, deque()
        for action, future in calls:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)
        return True
