"""Search of scheduling policies: in which order an engine serves the prompts that wait."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, ClassVar

from weft.registry import register
from weft.search.expression_policies import ORDER_FEATURES
from weft.search.judged_policy import JudgedPolicy

if TYPE_CHECKING:
    from weft.search.judged_policy import Formula
    from weft.serve.cluster_simulation import ClusterRequest

#: Requests that arrive, as a share of what the engine can end: more than it can for a while.
LOAD = 1.3
#: Seconds per token of a prompt and per written token of an answer alone.
READING, WRITING = 0.00002, 0.006
#: Mean and deviation of the logarithm of an answer's tokens, behind a long prompt and behind a short one: long prompts
#: are summarised, short ones answered at length.
ANSWERS = {True: (4.0, 0.7), False: (4.6, 0.7)}


@register(
    "search",
    "prompt-order",
    title="Search of scheduling policies against the simulated engine",
    paper="Cheng et al. 2025 (Barbarians at the Gate, 2510.06189)",
    recipe="weft search prompt-order",
    proof="tests/search/test_policy_search.py",
    figure=(
        "on six further workloads 25.9% of the answers are late, with exact-fill 53.6%, with the earliest deadline "
        "first 57.7%, with the shortest first, which it does not beat, 23.2% (`bench/policy_search.py`)"
    ),
)
class SearchedOrder(JudgedPolicy):
    """A policy search whose goal is the order in which an engine reads prompts (Barbarians at the Gate, Cheng et al.
    2025). A candidate is judged by the share of answers that come after their deadline. A deadline is between 1.2 and 4
    times the time that such a request takes alone, with an answer of the mean length. How long its own answer is,
    nobody knows before the answer ends: neither from the request nor from its deadline.
    """

    features = ORDER_FEATURES
    baselines: ClassVar[dict[str, str]] = {
        "exact-fill": "-waited - 1000000 * running",
        "shortest-first": "wanted",
        "earliest-deadline": "slack",
        "urgency": "slack if slack > 0 else 1000",
    }
    greedy = "exact-fill"
    unit = "share of late answers"
    registered, base = "policy", "ExpressionOrder"
    usage = "weft serve --checkpoint RUN --plugin {module} --policy {name}"

    def workload(self, seed: int, size: int) -> Sequence[ClusterRequest]:
        from weft.generate.workflow import Workflow
        from weft.search.simulated_engines import at_load
        from weft.serve.cluster_simulation import ClusterRequest

        draw, time = Random(f"order {seed}"), 0.0
        requests, allowed = [], []
        for index in range(size):
            time += draw.expovariate(1.0)
            long = draw.random() < 0.2
            length = max(8, round(draw.lognormvariate(8.3 if long else 5.0, 0.6)))
            prompt = [(index * 7919 + i) % 30_000 for i in range(length)]
            tokens = max(4, round(draw.lognormvariate(*ANSWERS[long])))
            requests.append(ClusterRequest(time, prompt, tokens))
            mean, deviation = ANSWERS[long]
            alone = READING * length + WRITING * math.exp(mean + deviation**2 / 2)
            allowed.append(draw.uniform(1.2, 4.0) * alone)
        load = at_load(requests, (1.0,), LOAD)
        timed = []
        for index, (each, seconds) in enumerate(zip(load, allowed, strict=True)):
            job = Workflow(f"{index}", "answer", (), each.time + seconds)
            timed.append(each._replace(workflow=job))
        return timed

    def cost(self, formula: Formula, workload: Sequence[ClusterRequest]) -> float:
        from weft.search.expression_policies import ExpressionOrder
        from weft.search.simulated_engines import new_engines
        from weft.serve.cluster_simulation import simulate_cluster

        engines = new_engines((1.0,), lambda: ExpressionOrder(formula))
        outcomes = simulate_cluster(engines, workload)
        late = sum(
            outcome.end > each.workflow.deadline
            for outcome, each in zip(outcomes, workload, strict=True)
            if each.workflow is not None
        )
        return late / len(workload)
