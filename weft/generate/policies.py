"""Scheduling policies: which requests a step serves first, and how many tokens each gets.

``exact-fill`` is the core's own; the others are techniques, and say what is different from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from weft.generate.option_word import chosen_technique, wrong_word
from weft.registry import declared

if TYPE_CHECKING:
    from weft.generate.request import Request

#: Requests in the order to serve them, with the most tokens for each.
Order = Iterable[tuple["Request", int]]
#: Takes (running, waiting, budget), and gives the order.
Policy = Callable[[Sequence["Request"], Sequence["Request"], int], Order]

#: The policy of the core.
EXACT_FILL = "exact-fill"


class SchedulingPolicy:
    """Base class of scheduling policies, which decide how many tokens of which requests a step computes. A call takes
    the running and the waiting requests and the step's budget of tokens, and returns the requests in the order to serve
    them. ``weft serve --policy NAME`` or ``--policy NAME:ARGUMENT`` selects one. ``example``: an example of
    NAME:ARGUMENT for a policy that needs an argument. ``argument``: words on it, for error lines. ``candidates``: the
    values of ``--policy`` of this policy that ``weft bench policies`` compares.
    """

    example: ClassVar[str] = ""
    argument: ClassVar[str] = ""
    candidates: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def of_argument(cls, argument: str | None) -> Self | None:
        """Build the policy from ``argument``, the text after the colon of ``--policy NAME:ARGUMENT``; None: there is no
        colon. Return None if the argument is not valid.
        """
        return cls() if argument is None else None

    def read_time(self, clock: Callable[[], float]) -> None:
        """Read the time, in seconds, from ``clock`` from now on instead of from ``time.monotonic``. By default nothing
        is done, because most policies read no time.
        """

    def __call__(
        self, running: Sequence[Request], waiting: Sequence[Request], budget: int
    ) -> Order:
        """Return the requests in the order to serve them, with the largest number of tokens for each.

        ``budget``: tokens of the step; the order is cut where it is used up. A running request may be left out. A
        waiting request begins if the order reaches it. Fields of a request: ``wanted`` is the number of tokens still to
        be computed, ``arrival`` its number, ``runs`` whether it is running.
        """
        raise NotImplementedError


def exact_fill(
    running: Sequence[Request], waiting: Sequence[Request], budget: int
) -> list[tuple[Request, int]]:
    """Return all requests in the order in which the next step serves them, each with the number of tokens that it could
    use.

    The step goes through the list until its ``budget`` of tokens is used up. If too few tokens are left for the last
    request, only a part of its tokens is computed (Dynamic SplitFuse). ``running`` requests come first: those that need
    one token, then those with more tokens to compute. ``waiting`` requests follow, the oldest first.
    """
    order = sorted(running, key=lambda r: (r.wanted > 1, r.turn))
    return [(r, r.wanted) for r in (*order, *waiting)]


def policy_of(word: str) -> Policy:
    """Return the policy that ``word`` names, such as ``exact-fill`` or ``chunked:64``. It is a function of the
    arguments and result of :func:`exact_fill`. Raises :class:`UsageError` for a word that names none.
    """
    if word == EXACT_FILL:
        return exact_fill
    policy: Policy | None = chosen_technique("policy", word)
    if policy is None:
        raise wrong_word("--policy", word, "policy", (EXACT_FILL,))
    return policy


def compared_policies() -> list[str]:
    """Return the policies that ``weft bench policies`` compares, as values of ``--policy``."""
    every: list[Any] = [technique.implementation for technique in declared("policy")]
    return [EXACT_FILL, *(word for policy in every for word in policy.candidates)]
