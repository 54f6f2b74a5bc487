"""Scheduler and block pool against eleven properties, each of which sees its fault when one is planted.

The model is a fake whose next token is a hash of all that it finds through a request's table, so that a block that is
stale, shared or of somebody else shows in what is written.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from weft.errors import UsageError
from weft.generate import branches
from weft.generate import scheduler as module
from weft.generate.block_pool import BlockPool
from weft.generate.branches import branch
from weft.generate.keys import chained_keys, root_key
from weft.generate.policies import Policy, exact_fill, policy_of
from weft.generate.request import BlockFetch, Branch, Request
from weft.generate.scheduler import ScheduledStep, Scheduler

POLICIES: tuple[Policy, ...] = (
    exact_fill,
    policy_of("chunked:3"),
    policy_of("chunked:16"),
    policy_of("prompts-first"),
    policy_of("urgency"),
)
# a small vocabulary, so that prompts often begin alike
ADAPTERS, TENANTS, VOCAB = ("", "a"), ("", "t"), 3


@dataclass(frozen=True)
class World:
    """A cache, a policy, and what happens between the steps."""

    size: int
    blocks: int
    budget: int
    limit: int
    policy: Policy
    states: bool  # blocks sum up their tokens
    # ("add", prompt, new, adapter, tenant), ("fork" or "cancel", whom), ...; of moves between engines:
    # ("announce", prompt, new, adapter, tenant, computed), ("hop", whom), ("round", whom), ("land", whom)
    events: tuple[tuple[Any, ...], ...]
    keeps: bool = False  # full blocks are kept outside, too; ("arrive", how many) of those that are fetched


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40).map(tuple)
events = st.one_of(
    st.tuples(
        st.just("add"),
        prompts,
        st.integers(1, 12),
        st.sampled_from(ADAPTERS),
        st.sampled_from(TENANTS),
    ),
    st.tuples(st.just("fork"), st.integers(0, 9)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("renew")),
    st.tuples(
        st.just("guess"),
        st.lists(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5), max_size=3
        ),
    ),
    st.tuples(
        st.just("announce"),
        prompts,
        st.integers(1, 12),
        st.sampled_from(ADAPTERS),
        st.sampled_from(TENANTS),
        st.integers(0, 40),
    ),
    st.tuples(st.sampled_from(("hop", "round", "land", "arrive")), st.integers(0, 9)),
    st.tuples(st.just("step")),
)
worlds = st.builds(
    World, st.integers(1, 17), st.integers(0, 12), st.integers(1, 40), st.integers(1, 5), st.sampled_from(POLICIES),
    st.booleans(), st.lists(events, min_size=1, max_size=30).map(tuple), st.booleans(),
)  # fmt: skip


@dataclass
class Run:
    """What the requests of a world wrote, and all that was planned."""

    written: dict[int, list[int]] = field(default_factory=dict)
    trace: list[Any] = field(default_factory=list)
    preempted: int = 0


def contents(
    request: Request, version: int, ids: Sequence[int]
) -> list[tuple[Any, ...]]:
    """What the cache should hold of a request."""
    return [
        (version, request.adapter, request.tenant, at, token)
        for at, token in enumerate(ids)
    ]


@dataclass
class Traveller:
    """A request between two engines: how many of its tokens are computed, what their blocks hold, and which blocks the
    engine keeps for it.
    """

    request: Request
    computed: int
    held: list[tuple[Any, ...]]
    placeholder: Request


def tokens_of_guesses(r: Request) -> int:
    return sum(
        len(b.path) + (0 if b.table is r.table else r.wanted) for b in r.branches
    )


def next_token(seen: Sequence[tuple[Any, ...]], draw: int) -> int:
    """The fake model: of the weights, the adapter, and the tokens at their positions, whosever they are.

    ``draw``: how often the request has drawn, as a sampler with a stream of its own does not do twice the same.
    """
    found = [(version, adapter, at, token) for version, adapter, _, at, token in seen]
    return random.Random(repr((found, draw))).randrange(VOCAB)


class AdapterKeys(dict[str, list[bytes]]):
    """An adapter needs two blocks."""

    def __missing__(self, name: str) -> list[bytes]:
        return [f"{name} {i}".encode() for i in range(2 * bool(name))]


class Outside:
    """Full blocks outside the pool, as the scheduler finds and fetches them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.kept: dict[bytes, list[tuple[Any, ...]]] = {}
        self.fetching: list[tuple[Request, BlockFetch, Sequence[bytes]]] = []

    def find(self, request: Request, keys: Sequence[bytes]) -> int:
        return sum(1 for _ in takewhile(self.kept.__contains__, keys))

    def fetch(self, request: Request, keys: Sequence[bytes]) -> None:
        request.fetch = BlockFetch(Future(), math.inf)
        self.fetching.append((request, request.fetch, keys))

    def note_full(self, request: Request, key: bytes, block: int) -> None:
        self.kept.setdefault(key, list(self.machine.memory[block]))

    def arrive(self, most: int) -> None:
        """Write up to so many of the blocks that were asked for first; the others are gone."""
        request, fetch, keys = self.fetching.pop(0)
        if request.fetch is not fetch:  # it has lost its blocks, or has ended
            return
        first = request.computed // self.machine.size
        for at, key in enumerate(keys[:most]):
            self.machine.memory[request.table[first + at]] = list(self.kept[key])
        self.machine.scheduler.arrived(request, min(most, len(keys)))


class Machine:
    """Runs a world and checks it after every event."""

    def __init__(self, world: World, kind: type[Scheduler], blocks: int) -> None:
        self.size, self.run = world.size, Run()
        self.scheduler = kind(
            BlockPool(blocks, world.size, world.states),
            world.budget,
            world.limit,
            world.policy,
        )
        self.scheduler.adapter_keys = AdapterKeys()
        self.memory = [[(None,)] * world.size for _ in range(blocks)]
        self.requests: list[Request] = []
        self.first_drawn: dict[Request, int] = {}  # where what a request writes begins
        self.draws: Counter[Request] = Counter()
        self.done: set[Request] = set()
        self.travellers: list[Traveller] = []
        self.outside = Outside(self)
        if world.keeps:
            self.scheduler.outside = self.outside

    def happen(self, kind: str, *rest: Any) -> None:
        if kind == "add":
            prompt, new, adapter, tenant = rest
            self._enter(
                Request(
                    list(prompt), len(prompt) + new, adapter, tenant, len(self.requests)
                ),
                None,
            )
        elif kind == "fork" and (live := self._live()):
            parent = live[rest[0] % len(live)]
            # a token that the parent does not have there
            ids = [*parent.ids[: parent.computed], VOCAB]
            child = Request(
                ids,
                max(parent.most, len(ids)),
                parent.adapter,
                parent.tenant,
                len(self.requests),
            )
            self._enter(child, parent)
        elif kind == "cancel" and (live := self._live()):
            gone = live[rest[0] % len(live)]
            before = Counter(self.scheduler.pool.owners)
            before.subtract(Counter([*gone.shelf, *gone.table]))
            assert not gone.branches, "property 3: guesses outlive a step"
            self.scheduler.remove(gone)
            assert not gone.table and +before == Counter(self.scheduler.pool.owners), (
                "property 10: cancelled, yet there"
            )
            self.done.add(gone)
        elif kind == "guess":
            for r in self.scheduler.running:
                if r.wanted == 1 and len(r.ids) < r.most:
                    r.drafts = [path[: r.most - len(r.ids)] for path in rest[0]]
        elif kind == "renew":
            self.scheduler.renew()
        elif kind == "announce":
            prompt, new, adapter, tenant, most = rest
            ids = list(prompt)
            request = Request(ids, len(ids) + new, adapter, tenant, len(self.requests))
            self.requests.append(request)
            self.first_drawn[request] = len(ids)
            held = contents(request, self.scheduler.version, ids[:-1])[:most]
            self._set_off(request, held)
        elif kind == "hop" and (live := self._live()):
            request = live[rest[0] % len(live)]
            held = self._read(request.table, request.computed)
            self.scheduler.remove(request)
            self._set_off(request, held)
        elif kind == "round" and self.travellers:
            self._send(self.travellers[rest[0] % len(self.travellers)], whole=False)
        elif kind == "land" and self.travellers:
            self._land(self.travellers.pop(rest[0] % len(self.travellers)))
        elif kind == "arrive" and self.outside.fetching:
            self.outside.arrive(*rest)
        elif kind == "step":
            self.step()
        self.check_owners()

    def _live(self) -> list[Request]:
        away = {traveller.request for traveller in self.travellers}
        return [r for r in self.requests if r not in self.done and r not in away]

    def _set_off(self, request: Request, held: list[tuple[Any, ...]]) -> None:
        """Let a request come from elsewhere, as if it had been computed there."""
        traveller = Traveller(request, len(held), held, Request([], 0))
        self.travellers.append(traveller)
        self.scheduler.arriving.append(traveller.placeholder)

    def _send(self, traveller: Traveller, whole: bool) -> bool:
        """Write blocks of a request that comes, its full ones or all; False if there is no room for it any more."""
        scheduler, (own, held) = (
            self.scheduler,
            (traveller.placeholder, traveller.held),
        )
        blocks = -(-len(held) // self.size) if whole else len(held) // self.size
        first = len(own.table)
        if own not in scheduler.arriving or not scheduler.expect(own, blocks - first):
            return False
        for at in range(first * self.size, min(len(held), blocks * self.size)):
            self.memory[own.table[at // self.size]][at % self.size] = held[at]
        return True

    def _land(self, traveller: Traveller) -> None:
        """Go on with a request here, with its blocks, or as a new one if there is no room."""
        request, scheduler = traveller.request, self.scheduler
        request.computed = traveller.computed
        if not self._send(traveller, whole=True) or not scheduler.adopt(
            traveller.placeholder, request
        ):
            scheduler.give_up(traveller.placeholder)
            request.computed = 0
            scheduler.add(request)

    def _enter(self, request: Request, parent: Request | None) -> None:
        self.requests.append(request)
        self.first_drawn[request] = len(request.ids)
        self.scheduler.fork(parent, request) if parent else self.scheduler.add(request)

    def step(self) -> None:
        scheduler, begun = self.scheduler, {r for r in self.requests if r.runs}
        step = scheduler.plan()
        self.run.preempted += len(begun - {r for r in self.requests if r.runs})
        waiting, fresh = (
            [r for r in self._live() if not r.runs],
            [r for r in self._live() if r.runs and r not in begun],
        )
        for r in fresh:
            assert not any(other.arrival < r.arrival for other in waiting), (
                "property 9: somebody overtook"
            )
        spent = sum(step.work.values()) + sum(map(tokens_of_guesses, step.work))
        assert spent <= scheduler.budget, "property 2: more tokens than the budget"
        assert all(not r.branches for r in scheduler.running if r not in step.work), (
            "property 3: guesses of nobody"
        )
        assert len(scheduler.running) <= scheduler.limit, (
            "property 2: more requests than the limit"
        )
        if not step.work and self.outside.fetching:
            return self.outside.arrive(len(self.run.trace) % 4)
        assert step.work or not self._live(), "property 6: nobody goes on"
        assert all(r.fetch is None for r in step.work), "property 1: blocks are missing"
        for r, tokens in step.work.items():
            assert 0 < tokens <= len(r.ids) - r.computed, (
                "property 5: more computed than there is, or nothing"
            )
        self.run.trace.append(
            (
                [(r.arrival, n, tuple(r.table)) for r, n in step.work.items()],
                tuple(step.copies),
            )
        )
        self._execute(step)
        scheduler.advance(step)
        for r in step.work:
            assert r.computed <= len(r.ids), "property 5: more computed than there is"
            if r.computed == len(r.ids):
                self._write(r)

    def _write(self, r: Request) -> None:
        """The next token, and more while they are guessed."""
        live, right, best, table = list(r.branches), 0, None, r.table
        while True:
            self.draws[r] += 1
            r.ids.append(next_token(self._read(table, len(r.ids)), self.draws[r]))
            expected = next_token(
                contents(r, self.scheduler.version, r.ids[:-1]), self.draws[r]
            )
            assert r.ids[-1] == expected, "property 1: not what it would write alone"
            live = [b for b in live if list(b.path[right : right + 1]) == r.ids[-1:]]
            if len(r.ids) > r.most:
                return self.finish(r)
            if not live:
                break
            best, table, right = live[0], live[0].table, right + 1
        self.scheduler.settle(r, best, right)
        assert r.computed < len(r.ids), "property 5: more computed than there is"

    def finish(self, request: Request) -> None:
        self.run.written[request.arrival] = request.ids[self.first_drawn[request] :]
        self.scheduler.remove(request)
        self.done.add(request)

    def _execute(self, step: ScheduledStep) -> None:
        for old, new in step.copies:
            self.memory[new] = list(self.memory[old])
        for name, table in step.loads:
            for block, key in zip(table, AdapterKeys()[name], strict=True):
                self.memory[block] = [(key,)] * self.size
        for r, tokens in step.work.items():
            shelf = [self.memory[block][0] for block in r.shelf]
            assert shelf == [(key,) for key in AdapterKeys()[r.adapter]], (
                "property 8: another adapter is there"
            )
            held, wanted = (
                self._read(r.table, r.computed),
                contents(r, self.scheduler.version, r.ids[: r.computed]),
            )
            assert held[: r.hits] == wanted[: r.hits], (
                "property 8: a key found somebody else's tokens"
            )
            assert held == wanted, "property 1: computed tokens are not there"
            for at in range(r.computed, r.computed + tokens):
                block = r.table[at // self.size]
                assert self.scheduler.pool.owners[block] == 1, (
                    "property 4: a shared block is written"
                )
                self.memory[block][at % self.size] = contents(
                    r, self.scheduler.version, r.ids
                )[at]
            for path, table in r.branches:
                text = contents(r, self.scheduler.version, [*r.ids, *path])
                for at in range(
                    r.computed + (tokens if table is r.table else 0), len(text)
                ):
                    assert self.scheduler.pool.owners[table[at // self.size]] == 1, (
                        "property 4: a shared block is written"
                    )
                    self.memory[table[at // self.size]][at % self.size] = text[at]
        # a state that has taken in a guess has forgotten what was before it
        for r in step.work:
            if self.scheduler.pool.states and any(
                table is r.table for _, table in r.branches
            ):
                raise AssertionError(
                    "property 1: a guess is in a state that cannot be taken back"
                )

    def _read(self, table: Sequence[int], count: int) -> list[tuple[Any, ...]]:
        return [
            self.memory[table[at // self.size]][at % self.size] for at in range(count)
        ]

    def check_owners(self) -> None:
        pool = self.scheduler.pool
        assert pool.owners == Counter(
            b
            for r in (*self.requests, *(t.placeholder for t in self.travellers))
            for b in (*r.shelf, *r.table)
        ), "property 3: owners are miscounted"
        reachable = pool.free + len(pool.owners)
        assert reachable == pool.blocks and not set(pool.owners) & set(pool._freed), (
            "property 3: a block is lost"
        )
        assert len(pool._freed) + len(pool.owners) == pool._fresh, (
            "property 3: a block is lost"
        )
        assert {pool.known[key] for key in pool.keys.values()} == set(pool.keys), (
            "property 3: a key leads nowhere"
        )


def blocks_of(world: World) -> int:
    """A pool that is tiny, but holds the largest request."""
    largest = max(
        (len(e[1]) + e[2] + 1 for e in world.events if e[0] in ("add", "announce")),
        default=1,
    )
    return -(-largest // world.size) + world.blocks + 2


def run(
    world: World, kind: type[Scheduler] = Scheduler, blocks: int | None = None
) -> Run:
    machine = Machine(world, kind, blocks or blocks_of(world))
    for event in world.events:
        machine.happen(*event)
    # The oldest that runs goes on in every step, or one that is nearer to its end does.
    bound = sum(r.most + 1 for r in machine.requests) * (len(machine.requests) + 1)
    while machine._live() or machine.travellers:
        if not machine._live():
            machine.happen("land", 0)
        machine.step()
        machine.check_owners()
        assert len(machine.run.trace) <= bound + len(world.events), (
            "property 6: somebody never ends"
        )
    assert not machine.scheduler.pool.owners, "property 3: blocks are left"
    return machine.run


def hold_properties(world: World, kind: type[Scheduler] = Scheduler) -> None:
    """Raises AssertionError with the number of a property that does not hold."""
    found = run(world, kind)
    assert found.trace == run(world, kind).trace, "property 11: not the same again"
    if not {"cancel", "renew", "fork", "guess", "hop"} & {
        event[0] for event in world.events
    }:  # which happen to whoever is there
        roomy = run(world, kind, 10_000)
        assert found.written == roomy.written and not roomy.preempted, (
            "property 7: preempted requests write otherwise"
        )


@settings(max_examples=100, deadline=None)
@given(worlds)
def test_the_eleven_properties_hold(world: World) -> None:
    hold_properties(world)


class Forgetful(Scheduler):
    """1: what a shared block holds is not copied into the one that is written."""

    def plan(self) -> ScheduledStep:
        return super().plan()._replace(copies=[])


class Greedy(Scheduler):
    """2: a token more than the budget."""

    def plan(self) -> ScheduledStep:
        self.budget += 1
        try:
            return super().plan()
        finally:
            self.budget -= 1


class Crowded(Scheduler):
    """2: forks do not count as requests."""

    def fork(self, parent: Request, child: Request) -> None:
        self.limit += 100
        super().fork(parent, child)
        self.limit -= 100


class Unowned(Scheduler):
    """3: a fork does not own what it reads."""

    def fork(self, parent: Request, child: Request) -> None:
        super().fork(parent, child)
        if child.table:
            self.pool.release(child.table)


class Leaking(Scheduler):
    """3: what is done keeps its last block."""

    def remove(self, request: Request) -> None:
        self.pool.hold(request.table[1:])
        super().remove(request)


class Gullible(Scheduler):
    """5: a guess that was wrong is taken for right."""

    def settle(self, request: Request, branch: Branch | None, right: int) -> None:
        branch = branch or next(iter(request.branches), None)
        super().settle(
            request,
            branch,
            min(len(branch.path), len(request.ids) - request.computed) if branch else 0,
        )


class Writing(Scheduler):
    """4: no copy on write."""

    def _reserve(self, request: Request, tokens: int, step: ScheduledStep) -> bool:
        new = max(
            0, -(-(request.computed + tokens) // self.pool.size) - len(request.table)
        )
        if new <= self.pool.free:
            request.table.extend(self.pool.take() for _ in range(new))
        return new <= self.pool.free or new == 0


class Overshooting(Scheduler):
    """5: a chunk counts for a token more than it has."""

    def advance(self, step: ScheduledStep) -> None:
        super().advance(step)
        for request in step.work:
            request.computed += 1


class Idle(Scheduler):
    """5: a step of no tokens."""

    def plan(self) -> ScheduledStep:
        step = super().plan()
        return step._replace(work=dict.fromkeys(step.work, 0))


class Starving(Scheduler):
    """6: whoever runs is not served while others wait, for whom there is no room."""

    def plan(self) -> ScheduledStep:
        self.policy = lambda running, waiting, budget: [
            (r, r.wanted) for r in waiting or running
        ]
        return super().plan()


class Losing(Scheduler):
    """7: who is preempted loses the last token."""

    def requeue(self, request: Request) -> None:
        known = vars(self).setdefault("known", set())
        if request in known:
            request.ids.pop()
        known.add(request)
        super().requeue(request)


class Impatient(Scheduler):
    """9: the last one first."""

    def add(self, request: Request) -> None:
        super().add(request)
        self.waiting.sort(key=lambda r: -r.arrival)


class Believing(Scheduler):
    """8: a block that was gone counts as read."""

    def arrived(self, request: Request, blocks: int) -> None:
        if request.computed + (blocks + 1) * self.pool.size < len(request.ids):
            blocks = min(
                blocks + 1, len(request.table) - request.computed // self.pool.size
            )
        super().arrived(request, blocks)


class Clinging(Scheduler):
    """10: who is cancelled in the middle of a prompt keeps the blocks."""

    def remove(self, request: Request) -> None:
        if request.wanted > 1:
            self.pool.hold(request.table)
        super().remove(request)


class Hoarding(Scheduler):
    """6: what comes keeps its blocks, whoever needs them."""

    def _begin(self, request: Request) -> bool:
        coming, self.arriving = self.arriving, []
        try:
            return super()._begin(request)
        finally:
            self.arriving = coming


class Careless(Scheduler):
    """3: the blocks of what comes are given back, and yet are its own."""

    def adopt(self, placeholder: Request, request: Request) -> bool:
        table = list(placeholder.table)
        adopted = super().adopt(placeholder, request)
        if adopted and table:
            self.pool.release(table[-1:])
        return adopted


class Trusting(Scheduler):
    """1: what was computed with other weights lands after them."""

    def renew(self) -> None:
        coming, self.arriving = self.arriving, []
        super().renew()
        self.arriving = coming


class Moody(Scheduler):
    """11: in an order that nothing decides."""

    def plan(self) -> ScheduledStep:
        self.policy = lambda running, waiting, budget: [
            (r, r.wanted)
            for r in (*random.SystemRandom().sample(running, len(running)), *waiting)
        ]
        return super().plan()


def caught(property_: int, kind: type[Scheduler]) -> None:
    """That some world sees the fault, as what it is."""

    @settings(
        max_examples=3000,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    @given(worlds)
    def look(world: World) -> None:
        try:
            hold_properties(world, kind)
        except AssertionError as error:
            if f"property {property_}:" in str(error):
                raise
        except (KeyError, IndexError, ValueError):  # what a fault breaks besides
            pass

    with pytest.raises(AssertionError, match=f"property {property_}:"):
        look()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("property_", "kind"), [
    (1, Forgetful), (2, Greedy), (2, Crowded), (3, Unowned), (3, Leaking), (4, Writing),
    (5, Gullible), (5, Overshooting), (5, Idle),
    (6, Starving), (3, Careless), (1, Trusting), (7, Losing),
    (9, Impatient), (10, Clinging), (11, Moody), (8, Believing),
])  # fmt: skip
def test_a_planted_fault_is_caught(property_: int, kind: type[Scheduler]) -> None:
    caught(property_, kind)


def test_what_comes_gives_way_to_those_who_wait() -> None:
    """A pool of seven blocks, of which four are for another request on its way, and a prompt of four."""
    prompt = tuple(i % VOCAB for i in range(16))
    coming = ("announce", tuple(1 for _ in range(17)), 1, "", "", 40)
    world = World(4, 0, 40, 5, exact_fill, False, (
        coming, ("round", 0), ("add", prompt, 2, "", ""), ("step",), ("land", 0),
    ))  # fmt: skip
    hold_properties(world)
    with pytest.raises(AssertionError, match="property 6: nobody goes on"):
        hold_properties(world, Hoarding)


def keep_blocks(pool: BlockPool, request: Request) -> None:
    """3: guesses keep their blocks."""
    request.branches = []


def share_blocks(
    pool: BlockPool, request: Request, left: int, copies: list[tuple[int, int]]
) -> int:
    """4: guesses are written where others write too."""
    spent = branch(pool, request, left, copies)
    if request.branches:
        pool.hold(request.branches[-1].table[-1:])
    return spent


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("property_", "name", "fault"),
    [(3, "release", keep_blocks), (4, "branch", share_blocks)],
    ids=["3", "4"],
)
def test_a_fault_of_guesses_is_caught(
    property_: int, name: str, fault: Callable[..., Any], monkeypatch: Any
) -> None:
    monkeypatch.setattr(branches, name, fault)
    caught(property_, Scheduler)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "fault"), [
    ("root_key", lambda version, adapter, tenant, seen=None: root_key(0, adapter, tenant)),
    ("root_key", lambda version, adapter, tenant, seen=None: root_key(version, "", tenant)),
    ("root_key", lambda version, adapter, tenant, seen=None: root_key(version, adapter, "")),
    ("chained_keys", lambda root, ids, size: [  # each block by its own tokens
        key for at in range(0, len(ids) - size + 1, size) for key in chained_keys(b"", ids[at : at + size], size)]),
], ids=["version", "adapter", "tenant", "position"])  # fmt: skip
def test_a_key_that_lacks_something_is_caught(
    name: str, fault: Callable[..., Any], monkeypatch: Any
) -> None:
    """Property 8."""
    monkeypatch.setattr(module, name, fault)
    caught(8, Scheduler)


def drive(scheduler: Scheduler, steps: int) -> list[list[int]]:
    """The tokens of every request in each of so many steps; each then writes the token 7 until it has enough."""
    found = []
    for _ in range(steps):
        step = scheduler.plan()
        found.append(list(step.work.values()))
        scheduler.advance(step)
        for r in step.work:
            if not r.wanted:
                r.ids.append(7)
                if len(r.ids) > r.most:
                    scheduler.remove(r)
    return found


def asked(length: int, new: int = 50, first: int = 0) -> Request:
    return Request([first + i % 7 for i in range(length)], length + new)


def test_policies_fill_steps_as_their_papers_say() -> None:
    """A prompt of 40 comes while two requests write: with them, cut to the budget, in equal chunks, or before them."""
    found = {}
    for name, policy in (
        ("fill", exact_fill),
        ("chunks", policy_of("chunked:10")),
        ("first", policy_of("prompts-first")),
    ):
        scheduler = Scheduler(BlockPool(100, 4), 16, 8, policy)
        for length in (2, 3):
            scheduler.add(asked(length))
        drive(scheduler, 2)
        scheduler.add(asked(40))
        scheduler.add(asked(9, first=100))
        found[name] = drive(scheduler, 4)
    assert found["fill"] == [[1, 1, 14], [1, 1, 14], [1, 1, 12, 2], [1, 1, 1, 7]]
    assert found["chunks"] == [[1, 1, 10]] * 4
    assert found["first"] == [[16], [16], [8, 8], [1, 1, 1, 1]]


def test_requests_that_join_at_once_take_half_the_steps_of_batches_that_wait_for_their_longest() -> (
    None
):
    """Lengths as of ShareGPT, log-normal with means of 161 and 338 tokens; steps of at most 8 requests."""
    drawn, limit = random.Random(0), 8

    def length(mean: int, sigma: float) -> int:
        return max(
            4,
            min(
                1024, round(drawn.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))
            ),
        )

    lengths = [(length(161, 1.1), length(338, 0.9)) for _ in range(64)]
    scheduler = Scheduler(BlockPool(10**6, 16), 512, limit)
    for number, (prompt, new) in enumerate(lengths):
        scheduler.add(Request([number] * prompt, prompt + new - 1))
    steps = [sum(step) for step in drive(scheduler, 6000) if step]
    waits = sum(
        max(new for _, new in lengths[i : i + limit])
        for i in range(0, len(lengths), limit)
    )
    assert not scheduler.running and not scheduler.waiting
    # nothing twice, and no padding
    assert sum(steps) == sum(prompt + new - 1 for prompt, new in lengths)
    assert 2 * len(steps) < waits


def test_a_prefix_is_computed_once_and_found_until_its_blocks_are_needed() -> None:
    scheduler = Scheduler(BlockPool(8, 4), 64, 4)
    first = asked(18, 2)
    scheduler.add(first)
    assert drive(scheduler, 3) == [[18], [1], [1]] and not scheduler.running
    again, other = asked(18, 2), asked(18, 2)
    other.tenant = "other"
    scheduler.add(again)
    assert drive(scheduler, 1) == [[2]] and again.hits == 16
    scheduler.remove(again)
    scheduler.add(other)
    assert drive(scheduler, 3) == [[18], [1], [1]] and other.hits == 0
    scheduler.add(again := asked(18, 2))
    drive(scheduler, 1)
    # other's five blocks were the three that were free, and the end of the first one's
    assert again.hits == 12
    # All of a text may be known; one token is computed all the same.
    scheduler = Scheduler(BlockPool(8, 4), 64, 4)
    for _ in range(2):
        scheduler.add(asked(16, 1))
        found = drive(scheduler, 2)
    assert found == [[4], [1]]


def test_requests_that_never_fit_are_refused() -> None:
    with pytest.raises(
        UsageError, match="33 tokens of prompt and answer do not fit into a cache of 32"
    ):
        Scheduler(BlockPool(8, 4), 64, 4).add(asked(18, 15))
