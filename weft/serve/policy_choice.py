"""Find the policy and budget that answer a load best: time a few requests, and simulate every candidate.

This is Vidur's method (Agrawal et al. 2024), with the engine's own scheduler in the simulation.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate, product
from typing import Any, NamedTuple

from weft.data.tokenizer import Tokenizer
from weft.generate.engine import Engine
from weft.generate.policies import EXACT_FILL, compared_policies
from weft.generate.step_curve import Curve
from weft.serve.load_requests import LoadRequest, latency_statistics
from weft.serve.load_simulation import TimedRequest, measure_load, simulate_load

BUDGETS = (128, 512, 2048)
#: The share of the requests that must meet all limits, in the search for the most requests per second.
SHARE = 0.9

#: Makes a new engine with a policy and a budget; the size of the cache is always the same.
Build = Callable[[str, int], Engine]


class Candidate(NamedTuple):
    """A scheduling policy with a token budget, and how well both answer a load. ``policy``: value of ``--policy``.
    ``budget``: largest number of tokens of a step. ``figures``: simulated statistics, under the names of ``vllm bench
    serve``.
    """

    policy: str
    budget: int
    figures: dict[str, Any]


def split_load(
    asked: Sequence[LoadRequest],
    waits: Sequence[float],
    open_tokenizer: Callable[[], Tokenizer],
    first: int,
) -> tuple[list[TimedRequest], list[TimedRequest]]:
    """Split the load ``asked`` in two: its first ``first`` requests, by which steps are to be timed, and all other
    requests. The arrival times of the latter are shifted so that they begin at 0.

    ``waits``: seconds between each request and the one before. ``open_tokenizer`` returns the tokenizer, and is called
    only if a prompt is text.
    """
    opened = cache(open_tokenizer)
    prompts = [
        opened().encode(each.prompt) if isinstance(each.prompt, str) else each.prompt
        for each in asked
    ]
    times = list(accumulate(waits))
    requests = [
        TimedRequest(time - times[first], [int(i) for i in prompt], each.tokens)
        for time, prompt, each in zip(times, prompts, asked, strict=True)
    ]
    return requests[:first], requests[first:]


def time_steps(build: Build, load: Sequence[TimedRequest]) -> Curve:
    """Measure the step times of an engine on ``load``, and fit a function of a step's work to them. ``build``: makes an
    engine from a scheduling policy and a token budget. The requests run three times: one by one, all at once, and all
    at once in small chunks.
    """
    # in small chunks, where there is such a policy
    small = [*compared_policies(), EXACT_FILL][1]
    # the first steps of a process are slow
    measure_load(build(EXACT_FILL, BUDGETS[1]), load[:1])
    samples = []
    for policy, budget, apart in (
        (EXACT_FILL, 2048, 1e6),
        (EXACT_FILL, 512, 0.0),
        (small, 128, 0.0),
    ):
        coming = [request._replace(time=apart * i) for i, request in enumerate(load)]
        samples += measure_load(build(policy, budget), coming)[1]
    return Curve(samples)


def play_candidate(
    build: Build, policy: str, budget: int, load: Sequence[TimedRequest], curve: Curve, percentiles: Sequence[float],
    limits: Mapping[str, float],
) -> Candidate:  # fmt: skip
    """Simulate ``load`` with the scheduling policy ``policy`` and ``budget`` tokens per step. Return both with their
    statistics.

    ``build``: makes an engine of a policy and a budget. ``curve``: predicts step times. ``percentiles``: percentiles of
    each metric to compute. ``limits``: largest milliseconds by metric, for goodput.
    """
    outcomes = simulate_load(build(policy, budget).scheduler, load, curve)
    return Candidate(
        policy,
        budget,
        latency_statistics(
            outcomes, max(outcome.end for outcome in outcomes), percentiles, limits
        ),
    )


def compare_policies(
    build: Build,
    load: Sequence[TimedRequest],
    curve: Curve,
    percentiles: Sequence[float],
    limits: Mapping[str, float],
) -> list[Candidate]:
    """Simulate ``load`` with every scheduling policy and several token budgets. Returns the candidates, best first.

    A candidate is a policy with a budget. The best has the most requests per second within all limits. If these are
    equal, the mean time of an answer decides. Of candidates with equal results only the one with the smallest budget is
    kept.

    ``build``: makes an engine from a policy and a token budget. ``curve``: predicts the time of a step.
    ``percentiles``: percentiles of each metric to compute. ``limits``: for each metric of latency, the largest number
    of milliseconds within which a request counts.
    """
    candidates: list[Candidate] = []
    for policy, budget in product(compared_policies(), BUDGETS):
        candidate = play_candidate(
            build, policy, budget, load, curve, percentiles, limits
        )
        if all(candidate.figures != other.figures for other in candidates):
            candidates.append(candidate)
    return sorted(
        candidates,
        key=lambda candidate: (
            -candidate.figures.get("request_goodput", 0),
            candidate.figures["mean_e2el_ms"],
        ),
    )


def highest_rate(
    build: Build,
    best: Candidate,
    load: Sequence[TimedRequest],
    curve: Curve,
    limits: Mapping[str, float],
) -> float:
    """Return the highest rate of requests at which nine tenths of the requests of ``load`` meet all ``limits``.

    The rate is in requests per second, and exact to within 3 %. It is 0 if the limits are missed even when requests
    come one by one, and infinite if all requests may arrive at once.

    Rates are tried by simulation. The requests of ``load`` keep their order; their arrival times are all multiplied by
    the same factor. ``build``: makes an engine from a policy and a token budget. ``best``: the policy and budget to
    simulate. ``curve``: predicts the time of a step. ``limits``: for each metric of latency, the largest number of
    milliseconds.
    """
    whole = load[-1].time

    def holds(rate: float) -> bool:
        places = [
            request.time / whole if whole else i / len(load)
            for i, request in enumerate(load)
        ]
        coming = [
            request._replace(time=place * len(load) / rate)
            for request, place in zip(load, places, strict=True)
        ]
        played = play_candidate(
            build, best.policy, best.budget, coming, curve, (), limits
        ).figures
        return played["request_goodput"] * played["duration"] >= SHARE * len(load)

    low, high = 0.0, 1e-3
    while holds(high):
        low, high = high, 4 * high
        if high > 1e6:
            return math.inf
    while low and high / low > 1.03:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
