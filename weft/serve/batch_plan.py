"""How a large batch is written while experts move through memory: how many texts at a time, and in which order.

Stage one bounds the rate for each number of texts: of the mover, the products and the attention of a pass in the middle
of the job, the slowest counts. Stage two plays the best of them through, pass by pass, with the engine's own scheduler:
prompts that come in beside new tokens, and texts that run out at the end (MoE-Lens, Yuan et al. 2025, 2504.09345).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.errors import UsageError
from weft.generate.block_pool import BlockPool
from weft.generate.scheduler import Scheduler
from weft.serve.batch_costs import BatchCosts, RingClock
from weft.serve.load_simulation import TimedRequest, simulate_load

#: Numbers of texts whose bounds are nearest to the best one, which are played through.
PLAYED = 3
#: Tokens of a step that are tried.
BUDGETS = (256, 512, 1024, 2048)
#: How much faster, at least, a job has to be in another order than that of its prompts.
FASTER = 1.02


@dataclass(frozen=True)
class BatchPlan:
    """How a batch of prompts is continued, and how long this will take.

    Attributes:
        ``limit``: largest number of texts at a time.
        ``budget``: largest number of tokens of a pass.
        ``order``: indices of the prompts in the order in which they begin.
        ``bound``: the highest possible rate in new tokens per second, reached with endlessly many prompts.
        ``seconds``: predicted seconds of the whole batch.
        ``tokens``: number of new tokens of all texts.
        ``limits``: fraction of the predicted time that each cause takes: "mover" (waiting for experts), "products" and
            "attention".
    """

    limit: int
    budget: int
    order: Sequence[int]
    bound: float
    seconds: float
    tokens: int
    limits: dict[str, float]

    @property
    def rate(self) -> float:
        """Predicted rate of the batch: new tokens per second."""
        return self.tokens / self.seconds

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {share:.0%}" for name, share in self.limits.items())
        return (
            f"{self.limit:,} texts at a time, {self.budget:,} tokens a pass: predicted {self.seconds:,.4g} s, "
            f"{self.rate:,.4g} new tokens/s, at most {self.bound:,.4g} ({parts})"
        )


def rate_bound(
    costs: BatchCosts, lengths: np.ndarray, new: int, limit: int, budget: int
) -> float:
    """Return the highest rate, in new tokens per second, that is possible with endlessly many prompts of these lengths.
    ``costs``: costs of passes; ``lengths``: tokens of each prompt; ``new``: tokens to generate for each; ``limit``:
    largest number of texts at a time; ``budget``: largest number of tokens of a pass.
    """
    prompt = float(lengths.mean())
    # as many texts begin in a pass as end
    under_way = min(limit, budget * new / (prompt + new - 1))
    begun, later = under_way / new, np.arange(1, new)
    tokens = begun * (prompt + new - 1)
    keys = begun * (prompt + float((prompt + later).sum()))
    read = begun * float((lengths**2).mean()) / 2
    scored = read + begun * float((prompt + later).sum())
    parts = costs.parts(costs.work([1.0, tokens, under_way, under_way, keys, scored]))
    return under_way / max(parts["mover"], parts["products"] + parts["attention"])


def played_batch(
    costs: BatchCosts, prompts: Sequence[Sequence[int]], new: int, limit: int, budget: int, order: Sequence[int],
    blocks: int, size: int,
) -> BatchPlan:  # fmt: skip
    """Simulate a batch with the engine's scheduler, and return its plan. ``prompts``: token ids of the prompts;
    ``order``: indices of the prompts in the order in which they begin; ``blocks``: number of cache blocks, of ``size``
    tokens each. The other arguments are those of :func:`rate_bound`.
    """
    clock = RingClock(costs)
    load = [TimedRequest(0.0, prompts[i], new) for i in order]
    scheduler = Scheduler(BlockPool(blocks, size), budget, limit)
    simulate_load(scheduler, load, clock)
    spent = sum(clock.spent.values())
    limits = {name: seconds / spent for name, seconds in clock.spent.items()}
    lengths = np.array([len(prompt) for prompt in prompts])
    bound = rate_bound(costs, lengths, new, limit, budget)
    return BatchPlan(limit, budget, order, bound, clock.now, new * len(prompts), limits)


def plan_batch(
    costs: BatchCosts,
    prompts: Sequence[Sequence[int]],
    new: int,
    blocks: int,
    size: int,
) -> BatchPlan:
    """Choose how a batch is written so that it takes the least time: how many texts at the same time, in which order,
    and how many tokens per pass. The arguments are those of :func:`played_batch`. Raises :class:`UsageError` if the
    cache has no room for the longest text.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    longest = int(lengths.max()) + new
    if -(-longest // size) > blocks:
        raise UsageError(
            f"a text of {longest:,} tokens does not fit into a cache of {blocks * size:,}; ask for fewer"
        )
    room = max(1, int(blocks * size // (lengths.mean() + new + size)))
    most = min(len(prompts), room)
    limits = {most} | {2**i for i in range(most.bit_length())}
    bounds = {
        (limit, budget): rate_bound(costs, lengths, new, limit, budget)
        for limit in sorted(limits)
        for budget in BUDGETS
        if budget >= limit
    } or {(most, most): 0.0}
    best = sorted(bounds, key=lambda pair: -bounds[pair])[:PLAYED]
    given, falling = range(len(prompts)), np.argsort(-lengths, kind="stable").tolist()
    plans = [
        played_batch(costs, prompts, new, limit, budget, given, blocks, size)
        for limit, budget in best
    ]
    plan = min(plans, key=lambda each: each.seconds)
    longest_first = played_batch(
        costs, prompts, new, plan.limit, plan.budget, falling, blocks, size
    )
    return plan if longest_first.seconds * FASTER > plan.seconds else longest_first
