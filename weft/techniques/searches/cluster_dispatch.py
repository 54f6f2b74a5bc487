"""Search of dispatch policies: which engine of a cluster a request goes to."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, ClassVar

from weft.registry import register
from weft.search.expression_policies import DISPATCH_FEATURES
from weft.search.judged_policy import JudgedPolicy

if TYPE_CHECKING:
    from weft.search.judged_policy import Formula
    from weft.serve.cluster_simulation import ClusterRequest

#: Relative speeds of the engines, and the share of the time for which they are busy.
SPEEDS, LOAD = (1.0, 1.0, 0.5), 0.85


@register(
    "search",
    "cluster-dispatch",
    title="Search of dispatch policies against the simulated cluster",
    paper="Cheng et al. 2025 (Barbarians at the Gate, 2510.06189)",
    recipe="weft search cluster-dispatch",
    proof="tests/search/test_policy_search.py",
    figure=(
        "on eight further workloads an answer takes 0.390 s, with load 0.466, with balanced 0.432 "
        "(`bench/policy_search.py`)"
    ),
)
class SearchedDispatch(JudgedPolicy):
    """A policy search whose goal is the choice of an engine for each request (Barbarians at the Gate, Cheng et al.
    2025). A candidate is judged by the mean time of an answer on three engines, the last of which has half the others'
    speed. The prompts begin with one of twelve shared texts, some more popular than others, and come in bursts.
    """

    features = DISPATCH_FEATURES
    baselines: ClassVar[dict[str, str]] = {
        "load": "-(blocks - usage) / max(1, answers)",
        "cached-prefix": "(tokens - known) / size + usage - least_usage",
        "balanced": "0.8 * work / mean_work - 0.2 * fastest / seconds",
    }
    greedy = "load"
    unit = "seconds of an answer"
    registered, base = "dispatch-policy", "ExpressionDispatch"
    usage = (
        "weft serve --checkpoint RUN --engines 2 --plugin {module} --dispatch {name}"
    )

    def workload(self, seed: int, size: int) -> Sequence[ClusterRequest]:
        from weft.search.simulated_engines import at_load
        from weft.serve.cluster_simulation import ClusterRequest

        draw, time = Random(f"dispatch {seed}"), 0.0
        shared = [round(draw.lognormvariate(6.5, 0.6)) for _ in range(12)]
        requests = []
        for index in range(size):
            time += draw.expovariate(1.0) * (0.1 if draw.random() < 0.5 else 1.9)
            text = min(int(draw.expovariate(0.4)), len(shared) - 1)
            own = round(draw.lognormvariate(5.0, 0.8))
            prompt = [text] * shared[text] + [
                100 + (index * 7 + i) % 900 for i in range(own)
            ]
            tokens = max(4, round(draw.lognormvariate(4.0, 0.8)))
            requests.append(ClusterRequest(time, prompt, tokens))
        return at_load(requests, SPEEDS, LOAD)

    def cost(self, formula: Formula, workload: Sequence[ClusterRequest]) -> float:
        from weft.search.expression_policies import ExpressionDispatch
        from weft.search.simulated_engines import mean_seconds, new_engines

        return mean_seconds(new_engines(SPEEDS), workload, ExpressionDispatch(formula))
