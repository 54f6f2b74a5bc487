"""Dispatch policies: which engine of a cluster a request goes to.

``load`` is the core's own; the others are techniques, and say what is different from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from weft.errors import UsageError, nearest
from weft.registry import find, names

#: The policy of the core.
LOAD = "load"


class EngineView(NamedTuple):
    """What a dispatch policy knows of an engine that can take the request.

    Attributes:
        ``name``: the engine's name.
        ``blocks``: cache blocks of the engine.
        ``usage``: virtual usage of its cache, in blocks: those that requests own, those that waiting requests will
            need, and headroom for requests of high priority.
        ``answers``: answers that it writes or that wait there.
        ``known``: tokens of the request's prompt that its cache probably holds.
        ``size``: tokens of a cache block.
        ``seconds``: estimated time of the request on this engine.
        ``work``: estimated seconds of all requests that the engine has not ended.
        ``kept``: tokens of the request's prompt that cache engines probably hold, so that every engine can fetch them.
    """

    name: str
    blocks: int
    usage: float
    answers: int
    known: int
    size: int
    seconds: float = 1.0
    work: float = 0.0
    kept: int = 0

    @property
    def freeness(self) -> float:
        """Free cache blocks for each answer under way (Llumnix); negative if requests will have to wait."""
        return (self.blocks - self.usage) / max(1, self.answers)


class DispatchRequest(NamedTuple):
    """What a dispatch policy knows of a request. ``tokens``: number of tokens of its text so far; ``session``: name of
    the conversation or user that the request belongs to, or ""; ``priority``: a smaller number is more urgent.
    """

    tokens: int
    session: str
    priority: int


#: Takes the engines that can take a request, and the request; returns the name of one of them.
DispatchPolicy = Callable[[Sequence[EngineView], DispatchRequest], str]


def freest(engines: Sequence[EngineView], request: DispatchRequest) -> str:
    """Return the name of the engine with the most free cache blocks per answer, by virtual usage (Llumnix, Sun et al.
    2024, 2406.03243). ``engines``: the engines that can take the request. ``request`` is not used. Of equals, the
    engine with the fewest answers is chosen, then the first by name.
    """
    return min(engines, key=lambda e: (-e.freeness, e.answers, e.name)).name


def lightest(engines: Sequence[EngineView], request: DispatchRequest) -> str:
    """Choose the engine with the least to do in a step that writes a token of each answer: the one with the smallest
    share of all answers plus its share of all used cache blocks, which are read in every step. Of equals, the engine
    with the fewest answers is chosen, then the first by name.
    """
    answers = sum(e.answers for e in engines)
    used = sum(e.usage / e.blocks for e in engines)

    def cost(e: EngineView) -> float:
        return e.answers / max(1, answers) + e.usage / e.blocks / (used or 1.0)

    return min(engines, key=lambda e: (cost(e), e.answers, e.name)).name


def dispatch_policy(name: str, setting: str = "--dispatch") -> DispatchPolicy:
    """Return the dispatch policy called ``name``. Raises :class:`UsageError` if there is none.

    ``setting``: the option or key that gave the name, for the text of this error.
    """
    if name == LOAD:
        return freest
    known = names("dispatch-policy")
    if name not in known:
        raise UsageError(
            f"{setting} cannot be {name!r}; {nearest(name, [LOAD, *known])}"
        )
    policy: Any = find("dispatch-policy", name).implementation
    chosen: DispatchPolicy = policy()
    return chosen
