"""Search of scheduling policies: in which order an engine serves the prompts that wait."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, ClassVar

from weft.registry import register
from weft.search.expression_policies import ORDER_FEATURES
from weft.search.judged_policy import JudgedPolicy

if TYPE_CHECKING:
    from weft.search.judged_policy import Formula
    from weft.serve.cluster_simulation import ClusterRequest

#: The share of the time for which the engine is busy.
LOAD = 0.9


@register(
    "search",
    "order",
    title="Search of scheduling policies against the simulated engine",
    paper="Cheng et al. 2025 (Barbarians at the Gate, 2510.06189)",
    recipe="weft search order",
    proof="tests/search/test_policy_search.py",
)
class SearchedOrder(JudgedPolicy):
    """Judges the order of prompts by the mean time of an answer on one engine.

    The length of an answer is not known before the answer ends.
    """

    features = ORDER_FEATURES
    baselines: ClassVar[dict[str, str]] = {
        "exact-fill": "-waited - 1000000 * running",
        "shortest-first": "wanted",
    }
    greedy = "exact-fill"
    unit = "seconds of an answer"
    registered, base = "policy", "ExpressionOrder"
    usage = "weft serve --checkpoint RUN --plugin {module} --policy {name}"

    def workload(self, seed: int, size: int) -> Sequence[ClusterRequest]:
        from weft.search.simulated_engines import at_load
        from weft.serve.cluster_simulation import ClusterRequest

        draw, time = Random(f"order {seed}"), 0.0
        requests = []
        for index in range(size):
            time += draw.expovariate(1.0)
            long = draw.random() < 0.2
            length = max(8, round(draw.lognormvariate(8.3 if long else 5.0, 0.6)))
            prompt = [(index * 7919 + i) % 30_000 for i in range(length)]
            # long prompts are summarised, short ones answered at length
            tokens = max(4, round(draw.lognormvariate(4.0 if long else 4.6, 0.7)))
            requests.append(ClusterRequest(time, prompt, tokens))
        return at_load(requests, (1.0,), LOAD)

    def cost(self, formula: Formula, workload: Sequence[ClusterRequest]) -> float:
        from weft.search.expression_policies import ExpressionOrder
        from weft.search.simulated_engines import mean_seconds, new_engines

        engines = new_engines((1.0,), lambda: ExpressionOrder(formula))
        return mean_seconds(engines, workload)
