"""Generation with weights from the host: the two stages against a machine whose jobs are simulated one by one."""

from __future__ import annotations

import heapq
import json
import random
from collections import defaultdict, deque
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import numpy as np
import pytest

from tests.conftest import Command
from weft.planner.generation_price import (
    BUFFERED,
    PAGE,
    Workload,
    generating,
    room,
    streamed_bytes,
    together,
)
from weft.planner.machine import DEVICES, Machine, machine_of
from weft.recipe import ModelShape
from weft.shapes.shape import Shape, shape_of

Key = tuple[str | int, ...]


class Resources:
    """Things that do one job at a time: what the host waits for before all else, then what was ready first."""

    def __init__(self) -> None:
        self.now, self.busy = 0.0, dict[str, bool]()
        self.waiting: dict[str, list[tuple[bool, float, int, Key, float]]] = (
            defaultdict(list)
        )
        self.events: list[tuple[float, int, str, Key]] = []
        self.needs: dict[Key, int] = {}
        self.jobs: dict[Key, tuple[str, float]] = {}
        self.after: dict[Key, list[Key]] = defaultdict(list)
        self.done: set[Key] = set()
        self.number = count()

    def add(self, key: Key, resource: str, seconds: float, *needs: Key) -> None:
        self.jobs[key] = resource, seconds
        left = [need for need in needs if need in self.jobs and need not in self.done]
        self.needs[key] = len(left)
        for need in left:
            self.after[need].append(key)
        if not left:
            self._ready(key)

    def run(self) -> float:
        """Until all is done; returns when."""
        while self.events:
            self.now, _, resource, key = heapq.heappop(self.events)
            self.busy[resource] = False
            self.done.add(key)
            for following in self.after.pop(key, ()):
                self.needs[following] -= 1
                if not self.needs[following]:
                    self._ready(following)
            self._begin(resource)
        return self.now

    def _ready(self, key: Key) -> None:
        resource, seconds = self.jobs[key]
        heapq.heappush(
            self.waiting[resource],
            (key[0] != "first", self.now, next(self.number), key, seconds),
        )
        self._begin(resource)

    def _begin(self, resource: str) -> None:
        if not self.busy.get(resource) and self.waiting[resource]:
            _, _, _, key, seconds = heapq.heappop(self.waiting[resource])
            self.busy[resource] = True
            heapq.heappush(
                self.events, (self.now + seconds, next(self.number), resource, key)
            )


class Sequence(NamedTuple):
    """Tokens of its prompt, and that have been written; in which half of the machine's work it is."""

    prompt: int
    written: int
    half: int


def simulated(shape: Shape, machine: Machine, job: Workload) -> float:
    """Seconds of a job with whole sequences of unequal prompts, whole pages, and layers one after the other.

    Tokens are in two halves, so that one attends on the host while the device multiplies for the other; prompts are
    cut between them. A layer's weights come while the one before computes, into the place of the one before that. Who
    finds no page for its next token gives all of its own back, and reads prompt and new tokens again later.
    """
    resources, waiting, running = (
        Resources(),
        deque(Sequence(prompt, 0, 0) for prompt in job.prompts.tolist()),
        list[Sequence](),
    )
    layers, layer = int(shape.layers), 0
    begun, allowed = float(together(shape, machine, job)) / job.new, 0.0
    flops = 2 * shape.active_parameters / (machine.peak * machine.clock) / layers
    weights = float(streamed_bytes(shape, machine)) / machine.host / layers

    def fit(*more: Sequence) -> bool:
        return (
            sum(-(-(s.prompt + s.written) // PAGE) for s in (*running, *more))
            <= room(shape, machine) // PAGE
        )

    while waiting or running:
        while not fit():
            waiting.appendleft(running.pop())  # who came last makes room
        new, allowed = [], allowed + begun + 1e-9
        while waiting and allowed >= 1 and fit(*new, waiting[0]):
            halves = [
                sum(s.prompt + s.written for s in (*running, *new) if s.half == half)
                for half in (0, 1)
            ]
            new.append(waiting.popleft()._replace(half=halves.index(min(halves))))
            allowed -= 1
        read = [s.prompt + s.written for s in new]
        for _ in range(layers):
            freed = [("second", layer - BUFFERED, half) for half in (0, 1)]
            resources.add(("weights", layer), "link", weights, *freed)
            for half in (0, 1):
                seen = [s.prompt + s.written for s in running if s.half == half]
                scores = (
                    sum(2 * shape.heads * shape.score_dim * n**2 for n in read)
                    / machine.peak16
                )
                products = (sum(read) / 2 + len(seen)) * flops + scores / 2
                attended = (
                    sum(seen) * shape.cache_bytes / machine.host_bandwidth / layers
                )
                before = ("weights", layer), ("second", layer - 1, half)
                resources.add(("first", layer, half), "device", products / 3, *before)
                resources.add(
                    ("attention", layer, half), "host", attended, ("first", layer, half)
                )
                resources.add(
                    ("second", layer, half),
                    "device",
                    products * 2 / 3,
                    ("attention", layer, half),
                )
            layer += 1
        running = [
            s
            for s in (s._replace(written=s.written + 1) for s in (*running, *new))
            if s.written < job.new
        ]
    return resources.run()


def drawn_setting(seed: int) -> tuple[Shape, Machine, Workload]:
    """A mixture on a machine of which now link, now device, now host is the slowest."""
    drawn = random.Random(seed)
    experts = drawn.choice((4, 8, 32))
    shape = shape_of(ModelShape(
        layers=drawn.randint(4, 8), embed=1024, heads=16, kv_heads=drawn.choice((2, 8)), vocab=32000, experts=experts,
        expert_ffn=drawn.choice((1024, 2048)),
    ))  # fmt: skip
    prompt = drawn.randint(40, 400)
    prompts = [
        round(prompt * drawn.uniform(0.5, 1.5)) for _ in range(drawn.randint(120, 400))
    ]
    job = Workload(np.array(prompts), drawn.randint(8, 48))
    sequences, weights = drawn.uniform(24, 96), 2 * shape.parameters
    held = job.prompt + job.new / 2
    # What link, device and host take for a pass is alike but for a factor of up to 4 between any two.
    a, b, c = (1e-2 * 2 ** drawn.uniform(-1, 1) for _ in range(3))
    machine = replace(
        machine_of(DEVICES["L40S"]), memory=drawn.choice((0.0, 0.4 * weights)), clock=1.0, peak16=1e18,
        host_memory=weights + sequences * (held + PAGE / 2) * shape.cache_bytes, host=weights / a,
        peak=2 * shape.active_parameters * sequences * (job.prompt / job.new + 1) / b,
        host_bandwidth=sequences * held * shape.cache_bytes / c,
    )  # fmt: skip
    return shape, machine, job


def test_predicted_as_simulated() -> None:
    """Where the three take about as long, so that what is slowest changes from pass to pass."""
    errors, slowest = [], set()
    for seed in range(16):
        shape, machine, job = drawn_setting(seed)
        answer = generating(shape, machine, job)
        assert answer.rate <= answer.bound
        errors.append(answer.seconds / simulated(shape, machine, job) - 1)
        slowest.add(max(answer.limits, key=answer.limits.__getitem__))
    assert slowest == {"link", "device", "host"}
    assert max(map(abs, errors)) < 0.06, [f"{e:+.1%}" for e in errors]


def test_the_command_says_what_a_device_writes(command: Command) -> None:
    words = ("plan", "mixtral-8x7b", "--cluster", "a100-40", "--gpus", "1")
    code, out, err = command(*words, "--generate", "2000x512+128", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert 0 < told["rate"] <= told["bound"]
    assert sum(told["limits"].values()) == pytest.approx(1, abs=0.01)
    code, out, err = command(*words, "--generate", "2000x512+128")
    assert code == 0 and "sequences under way" in out, err
    code, _, err = command(*words, "--generate", "many")
    assert code == 2 and "PROMPTSxTOKENS+NEW" in err
    code, _, err = command(
        "plan", "llama3-405b", *words[2:], "--generate", "10x512+128"
    )
    assert code == 2 and "do not fit" in err
