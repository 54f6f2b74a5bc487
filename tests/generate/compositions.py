"""Worlds in which all that moves cache blocks happens at once, drawn by a seed; every text is compared with one alone.

Several engines in one process, of which one may be cut over ranks, have roles as in a service. Requests with adapters,
models, grammars and guesses move between them in rounds, have blocks at other engines, in host memory, in files and at
a cache engine, lose their blocks, are cancelled, and go on elsewhere when their engine is lost.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.generate.test_adapters import TARGETS, write
from tests.generate.test_cache import MIXERS
from tests.generate.test_lending import FragileLender
from tests.generate.test_many import BEGINNING, HOW
from tests.generate.test_migration import over_the_wire
from tests.models.test_shared_weights import empty, tuned, values_of
from weft.checkpoint.convert.peft import read_adapter
from weft.data.tokenizer import load_tokenizer
from weft.errors import WeftError
from weft.generate import block_channel
from weft.generate.block_channel import BLOCKS, open_blocks
from weft.generate.block_files import BlockFiles
from weft.generate.block_source import BlockSource, HostBlocks, TieredBlocks
from weft.generate.cache_policy import NONE, cache_policy_of
from weft.generate.cache_role import CacheEngines, CacheStock
from weft.generate.engine import Engine
from weft.generate.grammar import Grammars
from weft.generate.leader import follow_leader, mesh_of_rank
from weft.generate.lending import Borrower, LoanOffice
from weft.generate.lookup import Lookup
from weft.generate.migration import Arrival, Departure
from weft.generate.outside_cache import OutsideCache
from weft.generate.policies import policy_of
from weft.generate.request import Generation
from weft.generate.sampling import GREEDY, Sampling
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.row_adapters import HostAdapter
from weft.models.shared_weights import SharedWeights
from weft.models.transformer import Transformer
from weft.net.endpoint import Endpoint
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train
from weft.techniques.drafters.small_model import DraftModel

VOCAB, NEW, MOST_MOVES = 300, 20, 10
KINDS = ("softmax", "windows", "experts", "latent", "retention", "hybrid")
LENT = ("softmax", "windows", "experts", "latent")
POLICED = ("softmax", "windows", "experts")
POLICIES = (
    NONE,
    NONE,
    "window:7",
    "window:24",
    "window:500",
    "blocks:0.2",
    "blocks:0.5",
    "blocks:1",
)
TARGETS_OF = {
    "softmax": TARGETS,
    "windows": TARGETS,
    "hybrid": TARGETS,
    "latent": ("wo", "gate", "down"),
}
LAYOUTS = ("tp=2", "pp=2", "cp=2", "tp=3", "tp=2,pp=2", "cp=2,pp=2", "tp=2,cp=2")
OF_EXPERTS = ("tp=2,ep=2", "cp=2,ep=2", "cp=2,pp=2,ep=2,dispatch=per-rank")
PROMPTS = [
    [3],
    BEGINNING,
    [*BEGINNING, 4, 9],
    [7, 1, 3],
    [(3 * i + 1) % 31 for i in range(33)],
    [*BEGINNING, *((7 * i + 40) % 300 for i in range(35))],
    [9] * 9,
    [*BEGINNING[:9], *((11 * i) % 250 for i in range(62))],
]
HOWS: list[Sampling] = [GREEDY, *HOW[1:5], HOW[6]]
GRAMMARS: list[tuple[Any, Any]] = [
    ("json", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    ("regex", "(ab|c)*[0-9]+x"),
]  # fmt: skip
#: Why something may stay where it is.
REASONS = (
    "no room", "needed the room", "has ended", "step with the request is under way", "lie at another engine",
    "too many for the",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What is asked for: ``model`` is "" for the base, "a..." for an adapter, "m..." for another model."""

    prompt: int
    how: int = 0
    model: str = ""
    grammar: int = -1


@cache
def shape_of(kind: str) -> ModelShape:
    shape = {"vocab": VOCAB, "layers": 3, "embed": 24, "heads": 6, "kv_heads": 2}
    return ModelShape(**shape | {"ffn": 32, "init_std": 0.3} | MIXERS[kind])


def cut(kind: str, layout: Layout, dtype: str) -> Transformer:
    mesh, train = mesh_of_rank(layout, "cpu"), Train(seed=2, dtype=dtype)
    return parallelize(shape_of(kind), mesh, train, summed=False)[0]


@cache
def models_of(kind: str, dtype: str) -> dict[str, Transformer]:
    """A base and two fine-tunes of it, which share the blocks that are equal."""
    whole = cut(kind, Layout(), dtype)
    base = {name: p.detach() for name, p in whole.named_parameters()}
    shared, models = SharedWeights(None), {"": whole}
    own = getattr(torch, dtype)
    pairs = [*combinations(range(3), 2)][:2]
    weights = {"": base} | {
        f"m{i}": tuned(base, *(f"blocks.{at}" for at in pair))
        for i, pair in enumerate(pairs)
    }
    for name, each in weights.items():
        models[name] = empty(shape_of(kind)).to(own)
        shared.fill(models[name], values_of(each))
    return models


@cache
def adapters_of(kind: str, dtype: str) -> dict[str, HostAdapter]:
    if kind not in TARGETS_OF:
        return {}
    model = cut(kind, Layout(), dtype)
    with tempfile.TemporaryDirectory() as folder:
        return {
            f"a{i}": read_adapter(
                write(Path(folder) / f"a{i}", model, rank, i, TARGETS_OF[kind]), model
            )
            for i, rank in enumerate((2, 4))
        }


def small_model(dtype: str) -> Transformer:
    """A model of its own for each engine, whose thread it computes in."""
    shape = {"vocab": VOCAB, "layers": 1, "embed": 16, "heads": 2, "ffn": 16}
    train = Train(seed=5, dtype=dtype)
    return parallelize(ModelShape(**shape, init_std=0.3), Mesh.single(), train)[0]


@cache
def grammars() -> Grammars:
    return Grammars(load_tokenizer("bytes"), VOCAB)


def begin(
    engine: Engine, asked: Asked, how: Sampling, written: list[int], n: int = 1
) -> list[Generation]:
    grammar = (
        grammars().compile(*GRAMMARS[asked.grammar]) if asked.grammar >= 0 else None
    )
    return engine.submit(
        PROMPTS[asked.prompt], NEW, how, n=n, top=0, adapter=asked.model, grammar=grammar, written=written,
    )  # fmt: skip


@cache
def written_alone(
    kind: str, dtype: str, asked: Asked, sibling: int, size: int, policy: str
) -> Generation:
    model = models_of(kind, dtype)[asked.model if asked.model[:1] == "m" else ""]
    # what a token sees depends on the size of blocks
    own = {"size": size, "cache_policy": cache_policy_of(policy)} if policy != NONE else {}  # fmt: skip
    engine = Engine(model, **own)
    if asked.model[:1] == "a":
        engine.add_adapter(asked.model, adapters_of(kind, dtype)[asked.model])
    if asked.model[:1] == "m":
        asked = replace(asked, model="")
    how = HOWS[asked.how]
    (alone,) = begin(engine, asked, replace(how, seed=how.seed + sibling), [])
    engine.run()
    return alone


@dataclass
class Member:
    """An engine of a world: its role, and its parts in loans and in the cache beyond its own."""

    engine: Engine
    role: str
    office: LoanOffice | None = None
    borrower: Borrower | None = None


@dataclass(eq=False)
class Answer:
    """A text that somebody waits for, and where it is."""

    asked: Asked
    sibling: int
    generation: Generation
    where: int
    moves: int = 0
    cancelled: bool = False
    flight: Iterator[None] | None = None


@dataclass
class World:
    """A world drawn by ``seed``; ``layout``: over which ranks its first engine is cut, or ""."""

    seed: int
    layout: str = ""
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        drawn = self.drawn = random.Random(f"world {self.seed} {self.layout}")
        self.kind = drawn.choice(KINDS)
        if "ep" in self.layout:
            self.kind = "experts"
        self.dtype = drawn.choice(["float32", "float64"])
        self.size = drawn.choice([4, 8] if "cp" in self.layout else [3, 4, 7])
        self.many = not self.layout and drawn.random() < 0.4
        self.adapted = self.kind in TARGETS_OF and drawn.random() < 0.5
        self.lends = not self.layout and self.kind in LENT and drawn.random() < 0.6
        self.keeps = drawn.random() < 0.6
        # a small model's guesses keep the distribution of what is drawn, and the tokens of what is greedy
        self.greedy = drawn.random() < 0.4
        self.policy = NONE
        if self.kind in POLICED and not (self.many or self.lends or "cp" in self.layout):  # fmt: skip
            # from numbers of its own, so that worlds stay what they are
            of_policy = random.Random(f"policy {self.seed} {self.layout}")
            self.policy = of_policy.choice(POLICIES)

    def open(self, stack: ExitStack, ranked: Transformer | None) -> None:
        """Start the engines."""
        drawn, self.stack = self.drawn, stack
        self.members: list[Member] = []
        self.answers: list[Answer] = []
        self.lenders: dict[tuple[int, int], FragileLender] = {}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.memory, self.folder = HostBlocks(drawn.choice([10**4, 10**6])), folder
        self.keeper: Endpoint | None = None  # of the cache engine
        self.caches: list[CacheEngines] = []
        roles = drawn.choice([
            ["mixed"] * 3, ["prefill", "decode", "decode"], ["prefill", "mixed", "decode"], ["mixed"] * 2,
        ])  # fmt: skip
        drawn.shuffle(roles)
        for number, role in enumerate(roles):
            self.members.append(Member(self._engine(number, ranked), role))
        for number in range(len(roles) if self.lends else 0):
            self._join_lending(number)
        if self.keeps:
            for member in self.members:
                self._keep(member)

    def _engine(self, number: int, ranked: Transformer | None) -> Engine:
        drawn = self.drawn
        room = drawn.choice(
            [100, 120, 180, 400] if self.lends else [None, 100, 120, 180, 400]
        )
        models = models_of(self.kind, self.dtype)
        drafter: Any = drawn.choice(
            [None, Lookup(least=1), Lookup(least=1, width=2), *["small"] * self.greedy]
        )
        if drafter == "small":
            drafter = DraftModel(small_model(self.dtype), 3, drawn.choice([0, 2]))
        of_ranks = ranked is not None and number == 0
        engine = Engine(
            ranked if ranked is not None and number == 0 else models[""],
            tokens=room, budget=drawn.choice([1, 5, 9, 30, 512]), limit=drawn.choice([2, 4, 64]), size=self.size,
            policy=policy_of(drawn.choice(["exact-fill", "chunked:5", "prompts-first"])), drafter=drafter,
            ranks=of_ranks, cache_policy=cache_policy_of(self.policy),
        )  # fmt: skip
        if self.adapted:
            for name, adapter in adapters_of(self.kind, self.dtype).items():
                engine.add_adapter(name, adapter)
            shelves = sum(map(len, engine.scheduler.adapter_keys.values()))
            engine.scheduler.pool.blocks += shelves
        if self.many:
            for name in ("m0", "m1"):
                engine.add_model(name, models[name])
        return engine

    def _join_lending(self, number: int) -> None:
        member = self.members[number]
        member.office = LoanOffice(member.engine, self.drawn.choice([0.0, 0.1, 0.5]))
        for other in range(len(self.members)):
            if other != number:
                self._introduce(number, other)
                self._introduce(other, number)

        def others() -> list[FragileLender]:
            return [l for (of, _), l in self.lenders.items() if of == number and not l.lost]  # fmt: skip

        member.borrower = Borrower(member.engine, others, 0)

    def _introduce(self, of: int, to: int) -> None:
        if (office := self.members[to].office) is not None:
            self.lenders[of, to] = FragileLender(office, f"{of} {self.counts['lost']}")

    def _keep(self, member: Member) -> None:
        """Keep the engine's blocks in memory of its own, in memory of all, in files, and at the cache engine."""
        drawn = self.drawn
        files = BlockFiles(self.folder, "m", drawn.choice([10**4, 10**7]), pytest.fail)
        known: list[BlockSource] = [HostBlocks(10**4), self.memory, files]
        chosen = [known[i] for i in sorted(drawn.sample(range(3), drawn.randint(1, 3)))]
        if drawn.random() < 0.5:
            chosen = [*chosen[: drawn.randint(0, 2)], self._join_cache_engine()]
        cache = OutsideCache(member.engine, TieredBlocks(chosen), "m", 60, pytest.fail)
        self.stack.callback(files.close)
        self.stack.callback(cache.source.close)

    def _join_cache_engine(self) -> CacheEngines:
        """Open what another engine keeps at the cache engine of the world."""
        if self.keeper is None:
            self._start_cache_engine()
        assert self.keeper is not None
        caches = CacheEngines(self.keeper.join(BLOCKS, "secret"))
        caches.meet([self.keeper.address])
        self.caches.append(caches)
        self.stack.callback(caches.close)
        return caches

    def _start_cache_engine(self) -> None:
        self.keeper = Endpoint("127.0.0.1")
        stock = CacheStock(HostBlocks(self.drawn.choice([10**4, 10**6])))
        open_blocks(self.keeper, "secret", stock, takes=True)
        self.stack.callback(self.keeper.close)

    # What happens.

    def live(self) -> list[Answer]:
        return [a for a in self.answers if not a.generation.finished]

    def act(self) -> None:
        drawn = self.drawn
        acts: list[tuple[float, Callable[[], None]]] = [
            (4, self.step), (1.5, self.ask), (4, self.move), (8, self.fly), (0.3, self.cancel),
            (0.15, self.lose), (0.15 * self.keeps, self.lose_cache_engine),
            (2.0 * self.lends, self.lend), (0.5 * self.lends, self.recall),
        ]  # fmt: skip
        (act,) = drawn.choices([a for _, a in acts], [w for w, _ in acts])
        act()

    def step(self) -> None:
        for _ in range(self.drawn.randint(1, 2)):
            for member in self.drawn.sample(self.members, len(self.members)):
                member.engine.step()

    def ask(self) -> None:
        drawn = self.drawn
        if len(self.answers) >= 10:
            return self.step()
        names = [""] + ["a0", "a1"] * self.adapted + ["m0", "m1"] * self.many
        asked = Asked(
            drawn.randrange(len(PROMPTS)), 0 if self.greedy else drawn.randrange(len(HOWS)), drawn.choice(names),
            drawn.choice([-1, -1, -1, 0, 1]),
        )  # fmt: skip
        where = drawn.choice(
            [i for i, m in enumerate(self.members) if m.role != "decode"]
        )
        n = drawn.choice([1, 1, 1, 3])
        generations = begin(self.members[where].engine, asked, HOWS[asked.how], [], n)
        for sibling, generation in enumerate(generations):
            self.answers.append(Answer(asked, sibling, generation, where))

    def move(self) -> None:
        """Begin to move a request; away from an engine that reads prompts, once its first token is written."""
        able = [a for a in self.live() if a.flight is None and a.moves < MOST_MOVES]
        if able:
            answer = self.drawn.choice(able)
            answer.flight = self._flight(answer)

    def fly(self) -> None:
        """Let some of the moves go on."""
        for answer in self.answers:
            if answer.flight is None or self.drawn.random() > 0.8:
                continue
            if next(answer.flight, self) is self:
                answer.flight = None

    def _flight(self, answer: Answer) -> Iterator[None]:
        """Move one frame at each call."""
        source = self.members[answer.where]
        to = self.drawn.choice([
            i for i, m in enumerate(self.members) if i != answer.where and m.role != "prefill"
        ] or [i for i in range(len(self.members)) if i != answer.where])  # fmt: skip
        target = self.members[to]
        request = answer.generation
        departure = Departure(source.engine, request)
        # what the engine does between two steps for one that comes layer by layer
        between = list[Callable[[], None]]()
        call = between.append if answer.moves % 2 else None
        arrival = Arrival(target.engine, grammars().compile, call)
        if self.drawn.random() < 0.5:
            departure.stream(lambda frame: arrival.keep(over_the_wire(frame)))
        waits, left = source.role == "prefill", False
        try:
            while True:
                if (frame := departure.round()) is not None:
                    assert arrival.take(over_the_wire(frame)) is None
                    self.counts["rounds"] += 1
                elif (
                    waits and not request.written
                ) or request in source.engine.scheduler.due:
                    if request.finished:
                        break
                else:
                    if any(block < 0 for block in request.table[departure.sent :]):
                        assert source.borrower is not None
                        source.borrower.bring_home(request)
                    frame, left = departure.leave(), True
                    moved = arrival.take(over_the_wire(frame))
                    assert moved is not None
                    answer.generation, answer.where = moved, to
                    answer.moves += 1
                    self.counts["moves"] += 1
                    return
                yield
                while between:
                    between.pop(0)()
                arrival.unload()
        except WeftError as error:
            assert any(reason in str(error) for reason in REASONS), error
            if left:
                departure.stay()
            self.counts["stays"] += 1
        finally:
            arrival.drop()
            departure.drop()

    def cancel(self) -> None:
        if live := self.live():
            answer = self.drawn.choice(live)
            self.members[answer.where].engine.cancel(answer.generation)
            answer.cancelled = True
            self.counts["cancels"] += 1

    def lend(self) -> None:
        """Move blocks of a request to another engine, at any border."""
        member = self.drawn.choice(self.members)
        if member.borrower is not None and member.engine.scheduler.running:
            request = self.drawn.choice(member.engine.scheduler.running)
            self.counts["lent"] += member.borrower.lend(
                request, self.drawn.randint(1, 6)
            )

    def recall(self) -> None:
        office = self.drawn.choice(self.members).office
        while office is not None and office.relieve():
            pass

    def lose(self) -> None:
        """An engine ends without a word; its requests go on elsewhere from what they have written."""
        number = self.drawn.randrange(int(bool(self.layout)), len(self.members))
        lost = self.members[number]
        for answer in self.answers:  # moves to it
            answer.flight = answer.flight if answer.where == number else None
        self.counts["lost"] += 1
        for (of, to), lender in self.lenders.items():
            if to == number:
                lender.lost = True
            if of == number:
                lender.office.drop_all(lender.borrower)
        member = self.members[number] = Member(self._engine(number, None), lost.role)
        if self.lends:
            self._join_lending(number)
        if self.keeps:
            self._keep(member)
        for answer in self.live():
            if answer.where == number:
                self._go_on(answer)

    def lose_cache_engine(self) -> None:
        """The cache engine ends without a word, and another one begins with nothing."""
        if self.keeper is None:
            return self.step()
        self.keeper.close()
        self.counts["lost caches"] += 1
        self._start_cache_engine()
        for caches in self.caches:
            caches.meet([self.keeper.address])

    def _go_on(self, answer: Answer) -> None:
        answer.flight = None
        answer.where = self.drawn.randrange(len(self.members))
        engine = self.members[answer.where].engine
        how = answer.generation.how
        (answer.generation,) = begin(
            engine, answer.asked, how, answer.generation.written
        )

    # The end.

    def end(self) -> None:
        """Let all texts end, and look that nothing is left."""
        for _ in range(20_000):
            if not self.live():
                break
            self.step()
            self.move()
            self.fly()
        assert not self.live(), "somebody never ends"
        for answer in self.answers:
            answer.flight = None
        for _ in range(3):
            for member in self.members:
                member.engine.step()
                if member.borrower is not None:
                    member.borrower.settle()
        for member in self.members:
            if member.office is not None:
                member.office.reserve = 1.0
                member.office.settle()
                assert not member.office.loans
            scheduler = member.engine.scheduler
            pool = scheduler.pool
            assert not pool.owners and not +pool.lent, (pool.owners, pool.lent)
            assert not scheduler.arriving and not scheduler.due
            self.counts["preempted"] += scheduler.preemptions
            if member.engine.outside is not None:
                outside: Any = member.engine.outside
                self.counts["fetched"] += outside.fetched
                self.counts["late"] += outside.late
                for usage in outside.source.usages():
                    self.counts[f"from {usage.name}"] += usage.fetched

    def check(self) -> None:
        """Compare all texts with each of them alone."""
        within = 1e-9 if self.dtype == "float64" else 1e-3
        for answer in self.answers:
            one = answer.generation
            alone = written_alone(
                self.kind, self.dtype, answer.asked, answer.sibling, self.size, self.policy,
            )  # fmt: skip
            length = len(one.written)
            about = f"{self.seed} {self.layout} {self.kind} {self.dtype} {self.policy} {answer.asked} {answer.sibling}"
            assert one.written == alone.written[:length], about
            if not answer.cancelled:
                assert length == len(alone.written), about
                assert one.finished == alone.finished, about
                self.counts["texts"] += 1
            said = [p for p, _ in one.log_probabilities]
            assert said == pytest.approx(
                [p for p, _ in alone.log_probabilities][length - len(said) : length],
                abs=within,
            ), about
            self.counts["tokens"] += length


def run_world(seed: int, layout: str = "") -> Counter[str]:
    """Run a world on all ranks of ``layout``; the first one returns what has happened in it."""
    torch.set_num_threads(1)
    world, ranked = World(seed, layout), None
    if layout:
        ranked = cut(world.kind, Layout.parse(layout), world.dtype)
        if dist.get_rank():
            follow_leader(ranked)
            return Counter()
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_channel, "NEWS_S", 0.005)  # a world is short
        world.open(stack, ranked)
        if layout:
            stack.callback(world.members[0].engine.close)
        for _ in range(world.drawn.randint(60, 160)):
            world.act()
        world.end()
    world.check()
    return world.counts
