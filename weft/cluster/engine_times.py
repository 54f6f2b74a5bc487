"""How long requests take each engine of a cluster, and how much work each has: learned from the requests themselves."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from weft.generate.stage_times import StageTimes, StageTokens


@dataclass
class _Underway:
    """A request that an engine has not ended. ``work``: estimated seconds; ``alone``: whether the engine had nothing
    else to do when it began. Times are in seconds.
    """

    stage: str
    prompt: int
    begun: float
    work: float
    alone: bool
    first: float = 0.0
    last: float = 0.0
    written: int = 0


class ClusterTimes:
    """Estimates the seconds of requests on each of ``engines``, and the seconds of work that every engine has still to
    do. Every request names its stage of a workflow. The mean tokens of a stage are counted over all engines together;
    the seconds per token are measured for each engine by itself.
    """

    def __init__(self, engines: Sequence[str] = ()) -> None:
        self.tokens = StageTokens()
        self.engines = {name: StageTimes(self.tokens) for name in engines}
        self._underway: dict[str, dict[Hashable, _Underway]] = {e: {} for e in engines}

    def add_engine(self, name: str) -> None:
        """Add the engine ``name``, which has joined and has no work yet."""
        self.engines[name] = StageTimes(self.tokens)
        self._underway[name] = {}

    def remove_engine(self, name: str) -> None:
        """Forget the engine ``name``, which has left, and all its work."""
        del self.engines[name], self._underway[name]

    def seconds(self, engine: str, stage: str) -> float:
        """Return the estimated seconds of a request of ``stage`` on ``engine``. An engine that has measured nothing yet
        is assumed to be as fast as the fastest engine, so that it gets requests.
        """
        times = self.engines[engine]
        if times.measured:
            return times.seconds(stage)
        known = [t.seconds(stage) for t in self.engines.values() if t.measured]
        return min(known, default=1.0)

    def retain(self, engine: str, requests: Collection[Hashable]) -> None:
        """Forget all work of ``engine`` except that for ``requests``; the rest was cancelled, for example."""
        underway = self._underway[engine]
        for request in underway.keys() - set(requests):
            del underway[request]

    def work(self, engine: str) -> float:
        """Return the estimated seconds of all requests that ``engine`` has not ended."""
        return sum(each.work for each in self._underway[engine].values())

    def begin(
        self, engine: str, request: Hashable, stage: str, prompt: int, now: float, read: bool = True
    ) -> None:  # fmt: skip
        """Count ``request`` as work of ``engine`` from the time ``now`` on.

        ``stage``: label of its stage in a workflow. ``prompt``: tokens of its prompt. ``read``: whether the engine must
        still compute the prompt.
        """
        work = self.seconds(engine, stage)
        if not read:
            work = self.engines[engine].writing_seconds(stage) or work
        underway = self._underway[engine]
        alone = read and not underway
        underway[request] = _Underway(stage, prompt, now, work, alone)

    def token(self, engine: str, request: Hashable, now: float) -> None:
        """Note that ``engine`` has written a token of ``request`` at the time ``now``."""
        each = self._underway[engine].get(request)
        if each is not None:
            each.written += 1
            each.first = each.first or now
            each.last = now

    def end(self, engine: str, request: Hashable, whole: bool = True) -> None:
        """Remove ``request`` from the work of ``engine``, and learn from its times. Nothing happens if the engine does
        not have the request. ``whole``: whether the answer is complete, so that its tokens count in the mean of its
        stage.
        """
        each = self._underway.get(engine, {}).pop(request, None)
        if each is None or not each.written:
            return
        times = self.engines[engine]
        if whole:
            self.tokens.note(each.stage, each.prompt, each.written)
        if each.alone:
            times.prompt_second.add((each.first - each.begun) / each.prompt)
        if each.written > 1:
            seconds = each.last - each.first
            times.written_second.add(seconds / (each.written - 1))
