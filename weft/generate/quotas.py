"""Quotas: how two phases share a device, while one process reads prompts (prefill) and another writes (decode).

A quota is the share of the device that prefill may use while decode has work too. Decode has the rest. A phase without
the other one has all of it. A number is a fixed quota and the core's own; the controllers are techniques, which choose
the quota anew as the load changes.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Self

from weft.generate.option_word import chosen_technique, wrong_word

if TYPE_CHECKING:
    from weft.generate.policies import Order, Policy
    from weft.generate.request import Request
    from weft.generate.scheduler import Scheduler

#: Least and largest quota that a controller may choose, so that neither phase ever stands still.
LEAST, LARGEST = 0.1, 0.9

Phase = Literal["prefill", "decode"]


class PhaseView(NamedTuple):
    """What a quota controller knows at one moment about the two phases, reading prompts and writing texts.

    Attributes:
        ``now``: present time in seconds.
        ``quota``: the present quota.
        ``prompts``: for each request without a written token, the number of tokens that are still to be read.
        ``oldest``: seconds that the first of these requests has waited.
        ``texts``: number of requests that are being written.
        ``keys``: tokens of these requests in the cache.
        ``usage``: share of the cache's blocks that requests own.
    """

    now: float
    quota: float
    prompts: Sequence[int]
    oldest: float
    texts: int
    keys: int
    usage: float


class PassTime(NamedTuple):
    """A forward pass that has ended. ``phase``: whether it read prompts or wrote texts. ``work``: its six numbers, as
    :func:`weft.generate.step_work.work_of` returns them. ``seconds``: time that it took. ``share``: the fraction of the
    device that its phase might use. ``beside``: whether the other phase had work, too.
    """

    phase: Phase
    work: Sequence[float]
    seconds: float
    share: float
    beside: bool


class QuotaController:
    """Base class of controllers that choose, again and again, which share of the device prefill may use.

    ``weft serve --quota NAME`` or ``--quota NAME:ARGUMENT`` selects one.

    ``example``: an example of NAME:ARGUMENT; empty for controllers without an argument. ``argument``: words on the
    argument, for error lines. ``initial``: the share before the first choice.
    """

    example: ClassVar[str] = ""
    argument: ClassVar[str] = ""
    initial: float = 0.5

    @classmethod
    def of_argument(cls, argument: str | None) -> Self | None:
        """Build the controller from ``argument``, the text after the colon; None: there is no colon. Return None if the
        argument is not valid.
        """
        return cls() if argument is None else None

    def order(self, prompts: Order) -> Order:
        """Return the requests ``prompts``, each with its number of tokens, in the order in which prefill is to read
        them. By default the order is not changed.
        """
        return prompts

    def note_first(self, now: float, seconds: float) -> None:
        """Note that a request has got its first token at the time ``now``, ``seconds`` after it came."""

    def note_gap(self, now: float, seconds: float) -> None:
        """Note that a request has got a further token at the time ``now``, ``seconds`` after the one before."""

    def note_pass(self, ended: PassTime) -> None:
        """Note that a forward pass has ended. ``ended``: its phase, work and time."""

    def choose(self, view: PhaseView) -> float:
        """Return the share of the device that reading prompts may use from now on, from :data:`LEAST` to
        :data:`LARGEST`. The caller asks whenever a forward pass has ended. ``view``: requests and cache at this
        moment.
        """
        raise NotImplementedError


class PhaseOrders:
    """Decides in which order two phases serve requests: one reads prompts, the other writes texts, each in a process of
    its own. Each phase's requests are ordered by ``base``, a scheduling policy; ``controller`` may then change the
    order of the prompts.
    """

    def __init__(self, base: Policy, controller: QuotaController) -> None:
        self.base, self.controller = base, controller

    def reading(
        self, running: Sequence[Request], waiting: Sequence[Request], budget: int
    ) -> Order:
        """Return the requests whose prompts are to be read, in the order to read them, each with its number of tokens.
        ``running``, ``waiting``, ``budget``: as in :func:`weft.generate.policies.exact_fill`.
        """
        prompts = [request for request in running if request.wanted > 1]
        return self.controller.order(self.base(prompts, waiting, budget))

    def writing(
        self, running: Sequence[Request], waiting: Sequence[Request], budget: int
    ) -> Order:
        """Return the requests that need their next token, in the order to serve them, each with its number of tokens.
        ``running``, ``waiting``, ``budget``: as in :func:`weft.generate.policies.exact_fill`.
        """
        texts = [request for request in running if request.wanted == 1]
        return self.base(texts, (), budget)


def phase_view(
    scheduler: Scheduler, now: float, quota: float, begun: Container[Request]
) -> PhaseView:
    """Return what a quota controller sees of the requests of ``scheduler`` at the time ``now``. ``quota``: the present
    quota. ``begun``: requests that have a written token.
    """
    pool, running = scheduler.pool, scheduler.running
    prompts = [*scheduler.waiting, *(r for r in running if r.wanted > 1)]
    texts = [request for request in running if request.wanted <= 1]
    return PhaseView(
        now,
        quota,
        [request.wanted for request in prompts],
        max((now - r.asked_at for r in prompts if r not in begun), default=0.0),
        len(texts),
        sum(request.computed for request in texts),
        len(pool.owners) / pool.blocks,
    )


def chosen_quota(controller: QuotaController, view: PhaseView) -> float:
    """Return the quota that ``controller`` chooses by ``view``, moved into the range from :data:`LEAST` to
    :data:`LARGEST`.
    """
    return min(LARGEST, max(LEAST, controller.choose(view)))


class FixedQuota(QuotaController):
    """A controller that always gives prefill the share ``quota`` of the device."""

    def __init__(self, quota: float) -> None:
        self.initial = quota

    def choose(self, view: PhaseView) -> float:
        return self.initial


def quota_of(word: str) -> QuotaController:
    """Return the controller that ``word`` names: a number such as ``0.5`` for a fixed quota, or a technique such as
    ``semi-pd:0.5,0.05``. Raises :class:`UsageError` for a word that names none.
    """
    controller: QuotaController | None = chosen_technique("quota", word)
    if controller is not None:
        return controller
    fixed = as_quota(word)
    if fixed is not None:
        return FixedQuota(fixed)
    number = f", or a number from {LEAST} to {LARGEST}"
    raise wrong_word("--quota", word, "quota", other=number)


def as_quota(word: str) -> float | None:
    """Return the number that ``word`` names if it can be a quota, from :data:`LEAST` to :data:`LARGEST`; else None."""
    try:
        number = float(word)
    except ValueError:
        return None
    return number if LEAST <= number <= LARGEST else None
