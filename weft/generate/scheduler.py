"""Plans which tokens of which requests are computed in a step.

There are no phases. A request wants all its tokens computed: at first those of its prompt, later the last sampled one.
Each step has a budget of tokens to compute. That one rule gives prompts in chunks with other requests' new tokens
beside them (SARATHI, Agrawal et al. 2023, 2308.16369), steps that are filled exactly (Dynamic SplitFuse, Holmes et al.
2024, 2401.08671), and requests that join and leave at any step (Orca, Yu et al. 2022; Flover, 2305.13484). If no block
is free, the latest request gives its blocks back and is computed again later. The order and the number of tokens are a
policy (:mod:`weft.generate.policies`).

Drafts (:mod:`weft.generate.lookup`) are further tokens of a request, if a step has room.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from threading import Lock
from typing import NamedTuple, Protocol

from weft.errors import UsageError
from weft.generate import branches
from weft.generate.block_pool import BlockPool
from weft.generate.cache_policy import CachePolicy
from weft.generate.keys import chained_keys, root_key
from weft.generate.policies import Policy, exact_fill
from weft.generate.request import Branch, Request


class ScheduledStep(NamedTuple):
    """What a step computes, and how the cache is changed before it.

    Attributes:
        ``work``: for each request of the step, how many of its next tokens are computed: those behind the tokens whose
            keys and values are cached.
        ``copies``: pairs of cache blocks (from, to). They are copied first.
        ``loads``: pairs of an adapter's name and the cache blocks into which it is loaded. This is done after the
            copies.
    """

    # how many tokens of each request, from its computed ones on
    work: dict[Request, int]
    copies: list[tuple[int, int]]  # pairs of blocks, from and to
    # adapters, and the blocks that they go to
    loads: Sequence[tuple[str, list[int]]] = ()


class OutsideBlocks(Protocol):
    """Interface of the object that keeps copies of cache blocks outside the pool, in host memory or files."""

    def find(self, request: Request, keys: Sequence[bytes]) -> int:
        """Return how many of ``keys``, from the first one on without a gap, are kept outside the pool. ``keys``: keys
        of the blocks of ``request`` that the pool lacks.
        """

    def fetch(self, request: Request, keys: Sequence[bytes]) -> None:
        """Start to read the blocks of ``keys`` for ``request``, which waits until :meth:`Scheduler.arrived` is called.
        Sets ``request.fetch``.
        """

    def note_full(self, request: Request, key: bytes, block: int) -> None:
        """Note that the cache block number ``block``, of ``request``, is full, so that a copy of it is kept under
        ``key``.
        """


class Scheduler:
    """Plans the steps of an engine over its requests. Cache blocks are taken from ``pool``.

    ``budget``: largest number of tokens in a step. ``limit``: largest number of requests in a step. ``policy``: shares
    the budget among requests. ``cache_policy``: says which blocks of a text are still needed; None: all are. The
    attribute ``version`` is the number of the weights, which :meth:`renew` raises.
    """

    def __init__(
        self,
        pool: BlockPool,
        budget: int,
        limit: int,
        policy: Policy = exact_fill,
        cache_policy: CachePolicy | None = None,
    ) -> None:
        self.pool, self.budget, self.limit, self.policy = pool, budget, limit, policy
        self.cache_policy = cache_policy
        # blocks that the next step copies first: pairs (from, to)
        self.moves: list[tuple[int, int]] = []
        self.moved_blocks = 0  # blocks that have moved to the host
        self.hidden_blocks = 0  # blocks that were freed as no later token sees them
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        # placeholders that own the blocks of requests on their way here, the oldest first
        self.arriving: list[Request] = []
        # held while another thread writes to their blocks, and while they lose them
        self.landing = Lock()
        self.due: set[Request] = set()  # requests whose next token is being computed
        self.version = 0
        # of the blocks of an adapter, by its name
        self.adapter_keys: dict[str, list[bytes]] = {"": []}
        self._loads: list[tuple[str, list[int]]] = []
        self.outside: OutsideBlocks | None = None
        # passes run beside each other, so that no request loses its blocks while it is due
        self.beside = False
        self.preemptions = 0  # times that a request gave its blocks back
        # called in turn before a request is preempted; each returns whether it has freed a block
        self.relief: list[Callable[[], bool]] = []
        # blocks of other engines that requests may use besides: at most, and now
        self.borrowable = 0
        self.lendable: Callable[[], int] = lambda: 0

    def add(self, request: Request) -> None:
        """Queue ``request``. If the request is running, it frees its cache blocks first and is computed again later."""
        self.check_size(request)
        self.requeue(request)

    def requeue(self, request: Request) -> None:
        """Free the cache blocks of ``request``, which is computed again later."""
        self.remove(request)
        insort(self.waiting, request, key=lambda r: r.turn)

    def check_size(self, request: Request) -> None:
        """Raise :class:`UsageError` if ``request`` is too long for the cache, even if it had all blocks."""
        size, beside = self.pool.size, len(self.adapter_keys[request.adapter])
        blocks = -(-request.most // size)
        if self.cache_policy is not None:
            blocks = self.cache_policy.most_blocks(request.most, self.budget, size)
        # blocks to which other texts attend, or that must never go, are not lent
        stays = request.pinned or request.kept or bool(request.context)
        most = self.pool.blocks + (0 if stays else self.borrowable)
        if blocks + beside > most or beside >= self.pool.blocks:
            adapter = f" beside the adapter's {beside * size}" if beside else ""
            raise UsageError(f"{request.most} tokens of prompt and answer do not fit into a cache of "
                             f"{self.pool.blocks * size}{adapter}; ask for fewer")  # fmt: skip

    def expect(self, placeholder: Request, blocks: int) -> bool:
        """Take ``blocks`` more cache blocks for ``placeholder``, which stands for a request that another engine is
        sending (:attr:`arriving`). Return False if too few are free. If running requests need these blocks, they take
        them back, and the placeholder is removed from :attr:`arriving`.
        """
        if blocks > self.pool.free:
            return False
        placeholder.table += [self.pool.take() for _ in range(blocks)]
        return True

    def give_up(self, placeholder: Request) -> None:
        """Free the cache blocks of ``placeholder``, because the request for which it stands does not come to this
        engine any more.
        """
        with self.landing:
            if placeholder in self.arriving:
                self.arriving.remove(placeholder)
            self.pool.release(placeholder.table)
            placeholder.table = []

    def adopt(self, placeholder: Request, request: Request) -> bool:
        """Start ``request``, which has arrived from another engine: its first ``request.computed`` tokens are in the
        blocks of ``placeholder``. If the placeholder has lost its blocks, the request waits like a new one.

        Return False, without a change, if there is no room for the request and its adapter. Raises :class:`UsageError`
        if the cache can never hold the request.
        """
        self.check_size(request)
        if not placeholder.table:
            self.give_up(placeholder)
            self.add(request)
            return True
        shelf, beside = self._shelf(request.adapter), self.adapter_keys[request.adapter]
        lacks = len(beside) if shelf is None else 0
        if len(self.running) >= self.limit or lacks > self.pool.free:
            return False
        request.table, placeholder.table = placeholder.table, []
        self.give_up(placeholder)
        request.shelf = self._lend(request.adapter, shelf)
        request.keys = [root_key(self.version, request.adapter, request.tenant)]
        # what the other engine has sent of hidden blocks may be of another block
        self._remember(request, self._hidden(request))
        self._free_hidden(request)
        self.running.append(request)
        return True

    def fork(self, parent: Request, child: Request) -> None:
        """Start ``child`` with the cache blocks of ``parent``. The text of ``child`` must begin with all computed
        tokens of ``parent``.
        """
        shares = self.cache_policy is None or not self.cache_policy.remembers
        if not (parent.runs and shares) or len(self.running) == self.limit:
            return self.add(child)
        child.computed, child.table, child.keys = (
            parent.computed,
            list(parent.table),
            list(parent.keys),
        )
        child.shelf = list(parent.shelf)
        self.pool.hold([*child.shelf, *child.table])
        self.running.append(child)

    def remove(self, request: Request) -> None:
        """Remove a request, if the scheduler has it. Its cache blocks can still be found by their keys until they are
        reused.
        """
        queue = self.running if request.runs else self.waiting
        if request in queue:
            queue.remove(request)
        branches.release(self.pool, request)
        self.pool.release([*request.shelf, *request.table])
        request.shelf, request.table, request.keys, request.computed = [], [], [], 0
        request.fetch = None

    def arrived(self, request: Request, blocks: int) -> None:
        """Let ``request`` continue after waiting for blocks. ``blocks``: how many of these blocks, from the first one
        on, have been read. The request computes the others itself.
        """
        request.fetch = None
        request.computed += blocks * self.pool.size
        request.hits += blocks * self.pool.size
        self._remember(request)

    def renew(self, version: int | None = None) -> None:
        """Recompute all running requests, because the weights have changed. Cached blocks of the old weights are not
        used again. ``version``: number of the new weights; None: the next number. If the number is not larger than the
        present one, the pool forgets all its blocks, because other weights may have given them the same keys.
        """
        later = self.version + 1 if version is None else version
        if later <= self.version:
            self.pool.forget()
        self.version = later
        for placeholder in list(self.arriving):
            self.give_up(placeholder)
        for request in list(self.running):
            self.add(request)

    def plan(self, depth: int = 1, policy: Policy | None = None) -> ScheduledStep:
        """Plan the next step and take cache blocks for it. Return the step.

        Several steps can be under way at once: launched, but their tokens not known yet. A request is in only one of
        them. ``depth``: number of steps that may be under way; each may have at most the ``depth``-th part of the
        requests. ``policy``: shares the budget in place of the scheduler's own. The returned step is empty only if no
        request is left, or if all that are left wait for a step under way.
        """
        step, left, full = ScheduledStep({}, []), self.budget, False
        most = -(-min(self.limit, len(self.running) + len(self.waiting)) // depth)
        running, waiting = (
            tuple(r for r in some if r not in self.due)
            for some in (self.running, self.waiting)
        )
        for request, tokens in (policy or self.policy)(running, waiting, self.budget):
            if len(step.work) == most:
                break
            if not request.ready:
                continue
            # no request overtakes another, or takes blocks just taken from one
            if not request.runs:
                full = (
                    full
                    or not left
                    or len(self.running) == self.limit
                    or not self._begin(request)
                )
            waits = not request.runs or not request.wanted or not request.ready
            if not left or waits:
                continue
            tokens = min(tokens, request.wanted, left)
            while request.runs and not self._reserve(request, tokens, step):
                if any(relieve() for relieve in self.relief):
                    continue
                if self.arriving:
                    self.give_up(self.arriving[-1])
                    continue
                if self.borrowable and (room := self._room(request)):
                    tokens = min(tokens, room)
                    continue
                full = True
                last = max(
                    (r for r in self.running if not r.pinned), key=lambda r: r.turn
                )
                if self.beside and last in self.due:
                    tokens = 0  # the request waits until that one's pass has ended
                    break
                left += step.work.pop(last, 0) + sum(len(b.path) for b in last.branches)
                lost = {
                    *last.table,
                    *(block for b in last.branches for block in b.table),
                }
                step.copies[:] = [
                    (old, new) for old, new in step.copies if new not in lost
                ]
                self.preemptions += 1
                here = len({block for block in last.table if block >= 0})
                room = here if self.cache_policy else len(last.table)
                last.least_blocks = room + 1 if last is request else 0
                self.requeue(last)
            if request.runs and tokens:
                step.work[request] = tokens
                left -= tokens
                if tokens == request.wanted:
                    left -= branches.branch(self.pool, request, left, step.copies)
        if not step.work:
            return step
        step.copies[:0], self.moves = self.moves, []
        # Of whoever lost the blocks again in the same step, others may have them now.
        loads = [
            (name, table)
            for name, table in self._loads
            if self.pool.find(self.adapter_keys[name]) == table
        ]
        self._loads = []
        return step._replace(loads=loads)

    def advance(self, step: ScheduledStep) -> None:
        """Count the tokens of ``step``, which has been computed, as cached. From now on other requests can find the
        full blocks of its texts by their keys.
        """
        for request, tokens in step.work.items():
            self.due.discard(request)
            if request.runs:  # it may have lost its blocks meanwhile
                request.computed += tokens
                self._remember(request)
                self._free_hidden(request)

    def settle(self, request: Request, branch: Branch | None, right: int) -> None:
        """Keep the right guesses of a draft as tokens of ``request``, and free the cache blocks of all other drafts.

        ``branch``: the draft whose guesses are kept; None: no draft is. ``right``: how many of the draft's first tokens
        are right.
        """
        branches.merge_branches(self.pool, request, branch, right)
        kept = -(
            -(request.most + 1 if request.pinned else request.computed)
            // self.pool.size
        )
        self.pool.release(request.table[kept:])
        del request.table[kept:]
        self._remember(request)

    def _remember(self, request: Request, without: range = range(0)) -> None:
        """Give full blocks of computed tokens their keys, but not to the blocks ``without``, indices in the table."""
        size = self.pool.size
        first, end = len(request.keys) - 1, request.computed // size
        if end <= first:
            return
        for key in chained_keys(
            request.keys[-1], request.ids[first * size : end * size], size
        ):
            at = len(request.keys) - 1
            block = request.table[at]
            request.keys.append(key)
            if at in without:
                continue
            self.pool.remember(block, key)
            if self.outside is not None:
                self.outside.note_full(request, key, block)

    def _hidden(self, request: Request) -> range:
        """Indices in the table of those blocks of ``request`` that no later token sees."""
        if self.cache_policy is None:
            return range(0)
        return self.cache_policy.hidden(request.computed, self.pool.size)

    def _free_hidden(self, request: Request) -> None:
        """Give blocks back that no later token of ``request`` sees. Its first block stands in their place in the table,
        so that every number there is that of a block of its own.
        """
        table = request.table
        if not table:
            return
        for at in reversed(self._hidden(request)):
            if table[at] == table[0]:
                break  # all before it are free already
            self.pool.hold(table[:1])
            self.pool.release([table[at]])
            table[at] = table[0]
            self.hidden_blocks += 1

    def _begin(self, request: Request) -> bool:
        """Start a request after the part of its text that is in the cache; return False if there is no room."""
        pool, last, seen = (
            self.pool,
            len(request.ids) - 1,
            request.arrival if request.context else None,
        )
        root = root_key(self.version, request.adapter, request.tenant, seen)
        # one token is computed in any case
        keys = [root, *chained_keys(root, request.ids[:last], pool.size)]
        apart = self.cache_policy is not None and self.cache_policy.remembers
        blocks = [] if request.scored or apart else pool.find(keys[1:])
        known, away = len(blocks) * pool.size, keys[len(blocks) + 1 :]
        if self.outside is None or request.scored or request.pinned:
            away = []
        else:
            away = away[: self.outside.find(request, away)]
        beside, shelf = (
            self.adapter_keys[request.adapter],
            self._shelf(request.adapter),
        )
        unloaded = len(beside) - sum(block in pool.owners for block in shelf or ())
        if self.borrowable and not request.pinned:
            blocks, away = self._fitting(blocks, away, unloaded)
            known = len(blocks) * pool.size
        if self.cache_policy is not None:
            # of a text that is longer than the cache, no more than leaves room for a step
            room = pool.blocks - len(beside)
            if -(-len(request.ids) // pool.size) > room:
                room = max(0, room - -(-self.budget // pool.size))
                blocks = blocks[:room]
                away = away[: room - len(blocks)]
                known = len(blocks) * pool.size
        most = (
            request.most + 1
            if request.pinned
            else min(len(request.ids), known + len(away) * pool.size + self.budget)
        )
        owned = sum(block in pool.owners for block in (*blocks, *(shelf or ())))
        lacks = -(-most // pool.size) + len(beside) - owned
        # nobody else would give blocks back
        while lacks > pool.free and self.arriving and not self.running:
            self.give_up(self.arriving[-1])
        # the beginning of a text makes room for the rest of it, but not for an adapter
        if self.borrowable and not request.pinned:
            lacks = min(lacks, unloaded + max(1, (pool.blocks - len(beside)) // 2))
        if lacks > pool.free:
            return False
        if request.least_blocks > pool.free + self.lendable():
            return False
        pool.hold(blocks)
        request.shelf = self._lend(request.adapter, shelf)
        request.table, request.keys, request.computed, request.hits = (
            blocks,
            keys[: len(blocks) + 1],
            known,
            known,
        )
        if request.pinned:
            request.table.extend(
                pool.take() for _ in range(-(-most // pool.size) - len(blocks))
            )
        self.waiting.remove(request)
        self.running.append(request)
        if away and self.outside is not None:
            request.table.extend(pool.take() for _ in away)
            self.outside.fetch(request, away)
        return True

    def _fitting(
        self, blocks: list[int], away: list[bytes], others: int
    ) -> tuple[list[int], list[bytes]]:
        """Return as many of a text's first blocks as there is room for at once, beside ``others`` more and one of the
        next step. Later ones find room when blocks have moved to other engines.

        ``blocks``: those that the cache has; ``away``: keys of those that are fetched behind them.
        """
        room, fits = self.pool.free - others - 1, list[int]()
        for block in blocks:
            room -= block not in self.pool.owners
            if room < 0:
                return fits, []
            fits.append(block)
        # others need room meanwhile
        return fits, away if len(away) <= room else away[: room // 2]

    def _shelf(self, adapter: str) -> list[int] | None:
        """The blocks in which an adapter is; None if it is in none."""
        keys = self.adapter_keys[adapter]
        shelf = self.pool.find(keys)
        return shelf if len(shelf) == len(keys) else None

    def _lend(self, adapter: str, shelf: list[int] | None) -> list[int]:
        """Own the blocks of an adapter, which is loaded with the next step if it is in none."""
        if shelf is not None:
            self.pool.hold(shelf)
            return shelf
        shelf = [self.pool.take(key) for key in self.adapter_keys[adapter]]
        self._loads.append((adapter, shelf))
        return shelf

    def _room(self, request: Request) -> int:
        """Return how many more tokens the free blocks and the request's own blocks have room for."""
        free = self.pool.free - len(self._shared(request))
        if free < 0:
            return 0
        return (len(request.table) + free) * self.pool.size - request.computed

    def _shared(self, request: Request) -> list[int]:
        """Indices in the table of those blocks of ``request`` that are copied before the request writes to them, as
        others own them too.
        """
        pool, table = self.pool, request.table
        return [
            at
            for at in range(request.computed // pool.size, len(table))
            if pool.owners[table[at]] > 1
        ]

    def _reserve(self, request: Request, tokens: int, step: ScheduledStep) -> bool:
        """Give a request blocks of its own for ``tokens`` more tokens; return False, without a change, if there are too
        few.
        """
        pool, table = self.pool, request.table
        new = max(0, -(-(request.computed + tokens) // pool.size) - len(table))
        shared = self._shared(request)
        if new + len(shared) > pool.free:
            return False
        for at in shared:  # copy on write
            step.copies.append((table[at], pool.take()))
            pool.release([table[at]])
            table[at] = step.copies[-1][1]
        table.extend(pool.take() for _ in range(new))
        return True
