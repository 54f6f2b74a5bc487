"""What the passes of a large batch cost while experts move through memory: measured in a few passes, then predicted.

A pass keeps three resources busy. The mover reads every streamed layer's experts once. Products of matrices take time
by tokens, and by the experts that the tokens choose. Attention takes time by the keys that it reads. On one processor
the last two take turns, and the mover runs beside them (MoE-Lens, Yuan et al. 2025, 2504.09345, stage one).
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from weft.generate.engine import Engine
from weft.generate.request import Generation, check_generations
from weft.generate.sampling import GREEDY
from weft.generate.scheduler import ScheduledStep
from weft.generate.step_curve import nonnegative_rates
from weft.generate.step_work import work_of
from weft.memory.streamed_experts import RING, LayerRing
from weft.serve.load_simulation import noting_work

#: Budgets of the passes over prompts, and numbers of texts of the passes over new tokens, by which costs are measured.
PROBED_BUDGETS, PROBED_TEXTS = (64, 192), (16, 4, 2, 1)
#: How many times as long as the longest prompt a text is by which attention is told from all else.
LONGER = 8
#: Most tokens of that text.
LONGEST = 2048
#: Passes of each kind; the middle one counts.
TIMES = 4
#: Passes whose work differs by no more than this factor counts as equal.
ALIKE = 1.1
#: Rows of a product up to which one more costs more than in a large product.
FEW = 16
#: Tenant of the requests of a measurement, whose cache blocks no other request uses.
PROBE = "probe"


class PassWork(NamedTuple):
    """Amount of work of a forward pass.

    Attributes:
        ``step``: the six numbers of :func:`weft.generate.step_work.work_of`.
        ``chosen``: number of experts that its tokens choose, over all layers.
        ``rows``: number of rows that experts compute: one for each pair of a token and an expert that it chooses.
    """

    step: Sequence[float]
    chosen: float
    rows: float

    @property
    def inside(self) -> list[float]:
        """Features of a linear model of the seconds that a pass spends in the model's blocks, apart from their experts.
        In order: 1; number of tokens; this number, but at most :data:`FEW`, because small matrix products cost more per
        token; number of texts; number of keys that are read; number of products of queries and keys.
        """
        _, tokens, texts, _, keys, products = self.step
        return [1.0, tokens, min(tokens, FEW), texts, keys, products]

    @property
    def experts(self) -> list[float]:
        """Features of a linear model of the seconds that a pass spends in experts. In order: number of chosen experts;
        number of rows; this number, but at most :data:`FEW` per chosen expert, because small matrix products cost more
        per row.
        """
        return [self.chosen, self.rows, min(self.rows, FEW * self.chosen)]

    @property
    def outside(self) -> list[float]:
        """Features of a linear model of the seconds that a pass spends outside of the model's blocks. In order: 1, and
        the numbers of tokens, of texts and of rows of logits.
        """
        return list(self.step[:4])


class MeasuredPass(NamedTuple):
    """A forward pass that was measured. ``work``: its amount of work. ``inside``: seconds in the model's blocks, apart
    from their experts. ``experts``: seconds in experts, without waiting for their weights. ``outside``: seconds outside
    of blocks.
    """

    work: PassWork
    inside: float
    experts: float
    outside: float


class LayerCost(NamedTuple):
    """Costs of a layer's experts. ``moved``: seconds that the mover, the thread that reads experts into memory, needs
    for all experts of the layer; 0: none are moved. ``shares``: the fraction of all tokens that choose each expert,
    ``[experts]``; empty without experts.
    """

    moved: float
    shares: np.ndarray


@dataclass(frozen=True)
class BatchCosts:
    """Costs of passes of a model whose experts are read into memory layer by layer. ``inside``, ``experts``,
    ``outside``: coefficients of linear models of a pass's seconds, one for each feature that the property of the same
    name of :class:`PassWork` returns. ``layers``: costs of the experts of each layer.
    """

    inside: Sequence[float]
    experts: Sequence[float]
    outside: Sequence[float]
    layers: Sequence[LayerCost]

    @property
    def mover(self) -> float:
        """Seconds that the mover, the thread that reads experts into memory, needs for all experts of a pass."""
        return sum(layer.moved for layer in self.layers)

    def work(self, step: Sequence[float]) -> PassWork:
        """Return the amount of work of a pass whose tokens choose experts with the same frequencies as in the
        measurement. ``step``: the six numbers of :func:`weft.generate.step_work.work_of`.
        """
        tokens = step[1]
        every = np.concatenate([layer.shares for layer in self.layers])
        chosen = float((1 - (1 - every) ** tokens).sum())
        return PassWork(step, chosen, tokens * float(every.sum()))

    def parts(self, work: PassWork) -> dict[str, float]:
        """Return the seconds that a pass keeps each of three things busy, by name: "mover" (reading experts into
        memory), "attention" (reading keys, and products of queries and keys) and "products" (all other computation).
        """
        attention = _dot(self.inside[4:], work.inside[4:])
        computing = _dot(self.inside, work.inside) + _dot(self.experts, work.experts)
        products = computing - attention + _dot(self.outside, work.outside)
        return {"mover": self.mover, "products": products, "attention": attention}


def _dot(rates: Sequence[float], numbers: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(rates, numbers, strict=True))


class RingClock:
    """Predicts the time of passes whose experts are read into memory layer by layer. A layer's experts compute when
    they have been read. There is memory for the experts of :data:`RING` layers; the memory of a layer that has computed
    is used again for a later layer. ``costs``: the costs of a pass. A call with a planned step returns the seconds of
    the step, which depend on the steps before. The attribute ``spent`` has the seconds so far by cause: "mover"
    (waiting for experts), "products" and "attention".
    """

    def __init__(self, costs: BatchCosts) -> None:
        self.costs = costs
        self.now = 0.0
        self.spent: defaultdict[str, float] = defaultdict(float)
        # when the memory of layers becomes free, and when the mover has brought what it was last given
        self._free: deque[float] = deque([0.0] * RING)
        self._brought = 0.0

    def __call__(self, step: ScheduledStep) -> float:
        costs, begun = self.costs, self.now
        work = costs.work(work_of(step))
        inside = _dot(costs.inside, work.inside) / len(costs.layers)
        with_experts = sum(bool(len(layer.shares)) for layer in costs.layers)
        experts = _dot(costs.experts, work.experts) / max(1, with_experts)
        waited = 0.0
        for layer in costs.layers:
            self.now += inside
            if layer.moved:
                self._brought = max(self._brought, self._free.popleft()) + layer.moved
                waited += max(0.0, self._brought - self.now)
                self.now = max(self.now, self._brought)
            if len(layer.shares):
                self.now += experts
            if layer.moved:
                self._free.append(self.now)
        self.now += _dot(costs.outside, work.outside)
        for name, seconds in (costs.parts(work) | {"mover": waited}).items():
            self.spent[name] += seconds
        return self.now - begun


class PassTimer:
    """Adds up the seconds of a model's blocks and experts in forward passes, and counts the experts' tokens. ``model``:
    the model; ``ring``: memory into which its experts are read; ``clock``: returns seconds. Only passes inside the
    context :meth:`running` are timed.
    """

    def __init__(
        self, model: Any, ring: LayerRing, clock: Callable[[], float] = perf_counter
    ) -> None:
        self.clock = clock
        self.model, self.ring, self.device = model, ring, model.mesh.device
        self.blocks = [*model.blocks.values()]
        self.experts = {
            i: block.ffn.experts
            for i, block in enumerate(self.blocks)
            if hasattr(block.ffn, "experts")
        }
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.loads = {
            i: np.zeros(self.blocks[i].ffn.router.count) for i in self.experts
        }
        self.chosen = self.rows = 0.0
        self._begun: dict[str, float] = {}

    def now(self) -> float:
        """Wait until the device has computed all queued work, and return the time in seconds."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return a context in which forward passes of the model are timed and their experts' tokens counted."""
        hooks = []
        for name, modules in (
            ("blocks", self.blocks),
            ("experts", self.experts.values()),
        ):
            for module in modules:
                begin, end = partial(self._begin, name), partial(self._end, name)
                hooks += [
                    module.register_forward_pre_hook(begin),
                    module.register_forward_hook(end),
                ]
        for i, module in self.experts.items():
            hooks.append(module.register_forward_pre_hook(partial(self._count, i)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, name: str, module: Any, given: Any) -> None:
        self._begun[name] = self.now()

    def _end(self, name: str, module: Any, given: Any, result: Any) -> None:
        self.seconds[name] += self.now() - self._begun[name]

    def _count(self, layer: int, module: Any, given: Any) -> None:
        counts = given[1].cpu().numpy()
        self.loads[layer] += counts
        self.chosen += float((counts > 0).sum())
        self.rows += float(counts.sum())

    def measure(self, step: Callable[[], Sequence[float]]) -> MeasuredPass:
        """Run ``step``, a function that computes a pass and returns the six numbers of its work. Return the work with
        the measured seconds.
        """
        self.seconds.clear()
        self.chosen = self.rows = 0.0
        waited, begun = self.ring.waited, self.now()
        work = step()
        whole, waited = self.now() - begun, self.ring.waited - waited
        blocks, experts = self.seconds["blocks"], self.seconds["experts"]
        return MeasuredPass(
            PassWork(work, self.chosen, self.rows),
            blocks - experts,
            max(0.0, experts - waited),
            whole - blocks,
        )


def measure_costs(
    engine: Engine,
    ring: LayerRing,
    prompts: Sequence[Sequence[int]],
    clock: Callable[[], float] = perf_counter,
) -> BatchCosts:
    """Measure the costs of an engine's passes in a few passes over ``prompts``, the token ids of a batch's first texts.
    ``ring``: memory into which the experts of the engine's model are read. ``clock``: function that returns seconds,
    such as ``time.thread_time``, which counts neither other programs nor waiting. First the engine reads some prompts
    and one longer text, in pieces of several sizes. Then it generates tokens for several texts at a time, for fewer and
    fewer of them, and at last for one alone. Raises :class:`weft.errors.WeftError` if no text can go on.
    """
    timer, scheduler = PassTimer(engine.model, ring, clock), engine.scheduler
    before = scheduler.budget, scheduler.limit
    passes: list[MeasuredPass] = []
    texts: list[Generation] = []

    def step() -> Sequence[float]:
        engine.step()
        return noted[-1]

    def several() -> None:
        passes.extend(_middle([timer.measure(step) for _ in range(TIMES)]))

    with noting_work(engine) as noted, timer.running():
        try:
            scheduler.limit = max(PROBED_TEXTS) + 1
            texts = _probes(engine, prompts)
            scheduler.budget = PROBED_BUDGETS[0]
            engine.step()  # the first pass is slow
            for scheduler.budget in PROBED_BUDGETS:
                several()
            scheduler.budget = before[0]
            # a text that has failed is not computed any more
            while any(text.wanted > 1 and not text.finished for text in texts):
                passes.append(timer.measure(step))
            if all(text.finished for text in texts):
                check_generations(texts)
            # all of them, then the longest with short ones, and at last a short one alone
            for most in PROBED_TEXTS:
                for text in texts[most - 1 : -1]:
                    engine.cancel(text)
                several()
        finally:
            for text in texts:
                engine.cancel(text)
            scheduler.budget, scheduler.limit = before
    return _costs(timer, ring, passes)


def _probes(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Generation]:
    """Requests of which costs are measured, the longest first."""
    pool = engine.scheduler.pool
    texts = sorted(prompts[: max(PROBED_TEXTS) - 1], key=len, reverse=True)
    joined = [i for text in texts for i in text] * LONGER
    joined = joined[
        : min(LONGER * len(texts[0]), LONGEST, pool.blocks * pool.size // 2)
    ]
    if len(joined) > len(texts[0]):
        texts = [joined, *texts]
    # more than are written while others read their prompts, so that none ends before the measurement
    reading = sum(map(len, texts)) // PROBED_BUDGETS[0] + len(texts)
    most = reading + TIMES * (len(PROBED_TEXTS) + len(PROBED_BUDGETS)) + 1
    return [
        engine.submit(text, most, GREEDY, tenant=f"{PROBE} {i}")[0]
        for i, text in enumerate(texts)
    ]


def _middle(group: Sequence[MeasuredPass]) -> list[MeasuredPass]:
    """The middle one of each number of several passes of nearly equal work; of unequal ones all of them."""
    for numbers in zip(*(each.work.step for each in group), strict=True):
        if max(numbers) > ALIKE * min(numbers):
            return list(group)
    works = zip(*(each.work.step for each in group), strict=True)
    work = PassWork(
        [float(np.mean(each)) for each in works],
        float(np.mean([each.work.chosen for each in group])),
        float(np.mean([each.work.rows for each in group])),
    )
    inside, experts, outside = (
        median(getattr(each, part) for each in group)
        for part in ("inside", "experts", "outside")
    )
    return [MeasuredPass(work, inside, experts, outside)]


def _costs(
    timer: PassTimer, ring: LayerRing, passes: Sequence[MeasuredPass]
) -> BatchCosts:
    def rates(part: str) -> list[float]:
        work = np.array([getattr(each.work, part) for each in passes])
        seconds = np.array([getattr(each, part) for each in passes])
        used = seconds > 0
        work, seconds = work[used], seconds[used]
        # relative errors count, so that small passes weigh as much as large ones
        return [float(r) for r in nonnegative_rates(work / seconds[:, None], np.ones(len(seconds)))]  # fmt: skip

    each, most = record_seconds(ring), timer.model.shape.experts_per_token
    layers, place = list[LayerCost](), 0
    for i in range(len(timer.blocks)):
        loads = timer.loads.get(i, np.zeros(0))
        moves = i in timer.loads and place not in ring.staying
        shares = np.minimum(1.0, most * loads / max(1.0, loads.sum()))
        layers.append(LayerCost(moves * each * len(loads), shares))
        place += i in timer.loads
    return BatchCosts(rates("inside"), rates("experts"), rates("outside"), layers)


def record_seconds(ring: LayerRing) -> float:
    """Return the seconds in which the mover of ``ring`` reads one expert: the median of its last reads that began while
    another read was under way. Without such reads it is the median of all others, and 0 if nothing was read.
    """
    moves = [move for move in ring.moves if move.ended]
    busy, idle = list[float](), list[float]()
    for before, move in pairwise(moves):
        waits = move.begun < before.ended
        begun = max(move.begun, before.ended)
        (busy if waits else idle).append((move.ended - begun) / move.records)
    return median(busy or idle or [0.0])
