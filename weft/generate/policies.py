"""Scheduling policies: which requests are served first in a step, and how many tokens each gets."""

from collections.abc import Callable, Iterable, Sequence

from weft.errors import UsageError
from weft.generate.request import Request

#: Takes (running, waiting, budget), and gives the requests in the order to serve them, with the most tokens for each.
Policy = Callable[
    [Sequence[Request], Sequence[Request], int], Iterable[tuple[Request, int]]
]


def exact_fill(
    running: Sequence[Request], waiting: Sequence[Request], budget: int
) -> list[tuple[Request, int]]:
    """New tokens first, then prompts, the oldest first, cut where the budget ends (Dynamic SplitFuse)."""
    order = sorted(running, key=lambda r: (r.wanted > 1, r.arrival))
    return [(r, r.wanted) for r in (*order, *waiting)]


def chunked(chunk: int) -> Policy:
    """New tokens first, then one chunk of one prompt, of at most ``chunk`` tokens: steps of equal length (SARATHI)."""

    def policy(
        running: Sequence[Request], waiting: Sequence[Request], budget: int
    ) -> list[tuple[Request, int]]:
        order = exact_fill(running, waiting, budget)
        later = [r for r, tokens in order if tokens > 1 or not r.runs][1:]
        return [(r, min(tokens, chunk)) for r, tokens in order if r not in later]

    return policy


def prompts_first(
    running: Sequence[Request], waiting: Sequence[Request], budget: int
) -> list[tuple[Request, int]]:
    """Prompts before new tokens: whoever writes waits while others are read (Orca, and vLLM at first)."""
    order = exact_fill(running, waiting, budget)
    return sorted(order, key=lambda served: served[1] == 1 and served[0].runs)


def policy_of(word: str) -> Policy:
    """The policy of that name: ``exact-fill``, ``prompts-first`` or ``chunked:N``."""
    name, _, chunk = word.partition(":")
    if name == "chunked" and chunk.isdecimal() and int(chunk):
        return chunked(int(chunk))
    named = {"exact-fill": exact_fill, "prompts-first": prompts_first}
    if word not in named:
        raise UsageError(
            f"--policy cannot be {word!r}; give exact-fill, prompts-first or, for instance, chunked:64"
        )
    return named[word]
