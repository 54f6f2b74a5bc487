"""Which tokens of which requests are computed in a step.

There are no phases. A request wants all its tokens computed: those of its prompt at first, later the one that was
drawn last. Each step hands out a budget of tokens, so that computed ones catch up with wanted ones. That one rule gives
prompts in chunks with other requests' new tokens beside them (SARATHI, Agrawal et al. 2023, 2308.16369), steps that are
filled exactly (Dynamic SplitFuse, Holmes et al. 2024, 2401.08671), and requests that join and leave at any step (Orca,
Yu et al. 2022; Flover, 2305.13484). Where no block is free, the request that came last gives its blocks back and is
computed again later. Who is served first, and how much at once, is a *policy*: a function of who runs, who waits, and
the budget.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from weft.errors import UsageError
from weft.generate.pool import Pool, chained_keys, root_key

_arrivals = count()


@dataclass(eq=False)
class Request:
    """A text that grows: its tokens so far, how many of these are computed, and the blocks that remember them."""

    ids: list[int]
    most: int  # tokens that it may come to have
    adapter: str = ""
    tenant: str = ""  # whose cached prefixes it may find
    arrival: int = field(default_factory=lambda: next(_arrivals))
    computed: int = 0
    table: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # of its full blocks; the first one is the root
    hits: int = 0  # tokens that were found computed when it last began

    @property
    def runs(self) -> bool:
        """Whether it has begun: it then has a root key at least."""
        return bool(self.keys)

    @property
    def wanted(self) -> int:
        return len(self.ids) - self.computed


#: Of (running, waiting, budget): the requests in the order in which they are served, with the most tokens for each.
Policy = Callable[[Sequence[Request], Sequence[Request], int], Iterable[tuple[Request, int]]]


def exact_fill(running: Sequence[Request], waiting: Sequence[Request], budget: int) -> list[tuple[Request, int]]:
    """New tokens first, then prompts, the oldest first, cut where the budget ends (Dynamic SplitFuse)."""
    order = sorted(running, key=lambda r: (r.wanted > 1, r.arrival))
    return [(r, r.wanted) for r in (*order, *waiting)]


def chunked(chunk: int) -> Policy:
    """New tokens first, then one chunk of one prompt, of at most ``chunk`` tokens: steps of equal length (SARATHI)."""

    def policy(running: Sequence[Request], waiting: Sequence[Request], budget: int) -> list[tuple[Request, int]]:
        order = exact_fill(running, waiting, budget)
        later = [r for r, tokens in order if tokens > 1 or not r.runs][1:]
        return [(r, min(tokens, chunk)) for r, tokens in order if r not in later]

    return policy


def prompts_first(running: Sequence[Request], waiting: Sequence[Request], budget: int) -> list[tuple[Request, int]]:
    """Prompts before new tokens: whoever writes waits while others are read (Orca, and vLLM at first)."""
    order = exact_fill(running, waiting, budget)
    return sorted(order, key=lambda served: served[1] == 1 and served[0].runs)


class Step(NamedTuple):
    work: dict[Request, int]  # tokens of each request, behind its computed ones
    copies: list[tuple[int, int]]  # blocks whose contents are needed in another one before anything is written


class Scheduler:
    """At most ``budget`` tokens of at most ``limit`` requests in a step; ``version`` numbers the weights."""

    def __init__(self, pool: Pool, budget: int, limit: int, policy: Policy = exact_fill) -> None:
        self.pool, self.budget, self.limit, self.policy = pool, budget, limit, policy
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.version = 0

    def add(self, request: Request) -> None:
        """Let ``request`` wait for its turn."""
        if -(-request.most // self.pool.size) > self.pool.blocks:
            raise UsageError(f"{request.most} tokens of prompt and answer do not fit into a cache of "
                             f"{self.pool.blocks * self.pool.size}; ask for fewer")  # fmt: skip
        insort(self.waiting, request, key=lambda r: r.arrival)

    def fork(self, parent: Request, child: Request) -> None:
        """Let ``child``, which begins with all that ``parent`` has computed, go on from there with the same blocks."""
        if not parent.runs or len(self.running) == self.limit:
            return self.add(child)
        child.computed, child.table, child.keys = parent.computed, list(parent.table), list(parent.keys)
        self.pool.hold(child.table)
        self.running.append(child)

    def remove(self, request: Request) -> None:
        """Forget a request that is done or not wanted any more; its blocks can be found until they are needed."""
        (self.running if request.runs else self.waiting).remove(request)
        self.pool.release(request.table)
        request.table, request.keys, request.computed = [], [], 0

    def renew(self) -> None:
        """The weights have changed: nothing that was computed with the old ones is used any more."""
        self.version += 1
        for request in list(self.running):
            self.remove(request)
            self.add(request)

    def plan(self) -> Step:
        """What to compute next, and blocks for it. Without any work if and only if there is no request."""
        step, left, full = Step({}, []), self.budget, False
        for request, tokens in self.policy(tuple(self.running), tuple(self.waiting), self.budget):
            if not request.runs:  # nobody overtakes, nor takes what was just taken away
                full = full or not left or len(self.running) == self.limit or not self._begin(request)
            if not left or not request.runs:
                continue
            tokens = min(tokens, request.wanted, left)
            while request.runs and not self._reserve(request, tokens, step):
                full, last = True, max(self.running, key=lambda r: r.arrival)
                left += step.work.pop(last, 0)
                step.copies[:] = [(old, new) for old, new in step.copies if new not in last.table]
                self.remove(last)
                self.add(last)
            if request.runs:
                step.work[request] = tokens
                left -= tokens
        return step

    def advance(self, step: Step) -> None:
        """The tokens of ``step`` have been computed: full blocks can be found from now on."""
        size = self.pool.size
        for request, tokens in step.work.items():
            request.computed += tokens
            first, end = len(request.keys) - 1, request.computed // size
            for key in chained_keys(request.keys[-1], request.ids[first * size : end * size], size):
                self.pool.remember(request.table[len(request.keys) - 1], key)
                request.keys.append(key)

    def _begin(self, request: Request) -> bool:
        """Let a request run from what is known of its text, if there is room for what it wants first."""
        pool, root, last = self.pool, root_key(self.version, request.adapter, request.tenant), len(request.ids) - 1
        keys = [root, *chained_keys(root, request.ids[:last], pool.size)]  # one token is computed in any case
        found = pool.find(keys[1:])
        known = len(found) * pool.size
        most = min(len(request.ids), known + self.budget)
        if -(-most // pool.size) - sum(block in pool.owners for block in found) > pool.free:
            return False
        pool.hold(found)
        request.table, request.keys, request.computed, request.hits = found, keys[: len(found) + 1], known, known
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def _reserve(self, request: Request, tokens: int, step: Step) -> bool:
        """Blocks for so many more tokens, which nobody else owns; False, and nothing changes, if there are too few."""
        pool, table = self.pool, request.table
        new = max(0, -(-(request.computed + tokens) // pool.size) - len(table))
        shared = [at for at in range(request.computed // pool.size, len(table)) if pool.owners[table[at]] > 1]
        if new + len(shared) > pool.free:
            return False
        for at in shared:  # copy on write
            step.copies.append((table[at], pool.take()))
            pool.release([table[at]])
            table[at] = step.copies[-1][1]
        table.extend(pool.take() for _ in range(new))
        return True
