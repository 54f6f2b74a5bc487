"""A campaign of faults: processes that write rollouts or score them are killed or stopped at random moments.

A loop with ``staleness = 0`` trains a tiny policy by a rule that any other token, log-probability or reward would
change. Beside it, in this process, one engine with nothing else to do writes the same answers. Every group, reward and
parameter is compared bit by bit. A fault is drawn by its seed: which process, when, killed (SIGKILL) or stopped
(SIGSTOP); a stopped process goes on or is killed some seconds later. Engines are hit while they write.

Then trainers are killed, each in a process of its own with engines and processes that score, which must all end.

    OMP_NUM_THREADS=1 python bench/rl_faults.py --faults 100 --trainers 10 [--json bench/results/rl_faults.json]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from weft.cluster.engine_processes import EngineProcesses
from weft.cluster.engine_router import EngineRouter
from weft.generate.engine import Engine
from weft.generate.sampling import Sampling
from weft.layout.mesh import Mesh
from weft.net.endpoint import process_endpoint
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Task, Train
from weft.rl.remote_rollouts import RemoteRollouts, RemoteSettings
from weft.rl.reward_workers import RewardWorkers, reward_workers
from weft.rl.rollout import AnswerGroup, GroupRequest, RewardQuestion
from weft.rl.rollout_processes import rollout_secret, start_rollout_engines
from weft.rl.weight_channel import WeightSender

SHAPE = ModelShape(
    vocab=31, layers=2, embed=32, heads=4, kv_heads=2, ffn=48, init_std=0.5
)
STOP, MOST, BATCH, GROUP = 7, 120, 4, 3
#: Makes the stop token less likely, so that answers take longer.
LONG = {STOP: -2.5}
#: Seconds that the processes of a killed trainer have to end: more than an engine waits for its router.
END_S = 30.0
JUDGE = """
from zlib import crc32

def judge(answer, question):
    return crc32(answer.encode()) % 1000 / 1000
"""


class TinyPolicy:
    """A policy on one rank, which changes with everything that its rollouts say."""

    def __init__(self) -> None:
        self.model, self.state = parallelize(SHAPE, Mesh.single(), Train(seed=2))

    @torch.no_grad()
    def train(self, groups: Sequence[AnswerGroup], rewards: Sequence[float]) -> None:
        said = [p for g in groups for a in g.answers for p in a.log_probabilities]
        ids = [i for g in groups for a in g.answers for i in a.ids]
        amount = float(np.tanh(sum(said) / 100)) + 1e-3 * (sum(ids) % 97)
        amount += float(np.tanh(sum(rewards)))
        for held in self.state.held:
            generator = torch.Generator().manual_seed(held.local.numel() + len(ids))
            noise = torch.randn(held.local.shape, generator=generator)
            held.local += 0.01 * amount * noise


def asked_group(number: int) -> GroupRequest:
    prompt = tuple((5 * number + 3 * i) % 31 for i in range(3 + number % 4))
    question = RewardQuestion("", str(number % 10), {})
    return GroupRequest(number, question, prompt, GROUP, 1000 * number)


def written_alone(policy: TinyPolicy, request: GroupRequest) -> list[Any]:
    """Ids and log-probabilities of each answer of the group, from an engine with nothing else to do."""
    engine = Engine(policy.model, 4096, invariant=True)
    how = Sampling(seed=request.seed, bias=LONG)
    texts = engine.submit(request.prompt, MOST, how, (), GROUP, 0)
    engine.run()
    answers = []
    for text in texts:
        ids = text.written
        length = ids.index(STOP) + 1 if STOP in ids else len(ids)
        said = [p for p, _ in text.log_probabilities[:length]]
        answers.append((ids[:length], said))
    return answers


def text_of(ids: Sequence[int]) -> str:
    return " ".join(str(i % 10) for i in ids)


class Faults:
    """Kills and stops processes at random moments, in a thread of its own, until so many have been."""

    def __init__(
        self, count: int, seed: int, router: EngineRouter, engines: EngineProcesses, rewards: RewardWorkers,
        pause: float,
    ) -> None:  # fmt: skip
        self.count, self.chance, self.pause = count, Random(seed), pause
        self.router = router
        self.engines, self.rewards = engines, rewards
        self.kinds: Counter[str] = Counter()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    @property
    def done(self) -> int:
        return sum(self.kinds.values())

    def _work(self) -> None:
        while self.done < self.count and not self.over.wait(
            self.chance.uniform(0.1, 2 * self.pause)
        ):
            role = self.chance.choice(["rollout", "rollout", "reward"])
            how = self.chance.choice(["killed", "killed", "stopped"])
            if role == "reward":
                pid = self.chance.choice(self.rewards.pids)
            else:
                name = self._writing()
                time.sleep(self.chance.uniform(0, 0.05))
                pid = self.engines.pids[name]
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
                self.kinds[f"{role} {how}"] += 1
                if how == "stopped":
                    later = self.chance.choice([signal.SIGCONT, signal.SIGKILL])
                    seconds = self.chance.uniform(0.5, 6)
                    threading.Timer(seconds, self._later, (pid, later)).start()

    def _writing(self) -> str:
        """Name of an engine that writes, as soon as there is one."""
        while not self.over.is_set():
            busy = [link.name for link in [*self.router.links.values()] if link.flights]
            if busy:
                return self.chance.choice(sorted(busy))
            time.sleep(0.001)
        return next(iter(self.engines.pids))

    def _later(self, pid: int, what: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, what)


def orphans(seed: int) -> int:
    """Kill a trainer at a random moment; return how many of its processes have not ended after :data:`END_S`."""
    chance = Random(seed)
    words = [sys.executable, __file__, "--faults=-1", "--engines=2"]
    trainer = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    pids = [int(word) for word in trainer.stdout.readline().split()]
    time.sleep(chance.uniform(0, 2))
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + END_S
    while (left := [*filter(alive, pids)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return len(left)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # fmt: skip
    except (FileNotFoundError, ProcessLookupError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--trainers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument(
        "--pause", type=float, default=4.0, help="mean seconds between faults"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    policy, other = TinyPolicy(), TinyPolicy()
    said: list[str] = []
    endpoint, secret = process_endpoint("127.0.0.1"), rollout_secret()
    sender = WeightSender(Mesh.single(), policy.state, endpoint, secret)
    settings = RemoteSettings(
        bound=0, batch=BATCH, group=GROUP, most=MOST, stops=frozenset({STOP}), how=Sampling(bias=LONG),
        requests=2 * GROUP, cache=4096, invariant=True, patience=300, stall=600,
    )  # fmt: skip
    engines = start_rollout_engines(given.engines, endpoint, secret, said.append, 1)
    rollouts = RemoteRollouts(
        endpoint, secret, SHAPE, sender, settings, said.append,
        lambda router: engines.await_joined(lambda: len(router.links), 300), engines.close,
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp())
    (folder / "judge.py").write_text(JUDGE)
    (folder / "prompts.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 8)
    task = Task(
        name="judge", reward=f"{folder}/judge.py:judge", path=f"{folder}/prompts.jsonl", workers=2, seconds=20
    )  # fmt: skip
    rewards, alone = reward_workers(task), reward_workers(task)
    begun, slowest, update = time.monotonic(), 0.0, 0
    unscored = 0
    rollouts.take_weights(0)
    rollouts.request([asked_group(n) for n in range(BATCH)])
    if given.faults < 0:
        print(*engines.pids.values(), *rewards.pids, *alone.pids, flush=True)
    faults = Faults(
        given.faults, given.seed, rollouts.router, engines, rewards, given.pause
    )
    while given.faults < 0 or faults.thread.is_alive():
        since = time.monotonic()
        groups = rollouts.finished(BATCH)
        asked = [each.request for each in groups]
        assert [each.number for each in asked] == [
            *range(update * BATCH, (update + 1) * BATCH)
        ]
        expected = [written_alone(other, request) for request in asked]
        ours = [
            [([*a.ids], [*a.log_probabilities]) for a in each.answers]
            for each in groups
        ]
        assert ours == expected, f"update {update}: other samples"
        questions = [each.question for each in asked for _ in range(GROUP)]
        texts = [text_of(a.ids) for each in groups for a in each.answers]
        scored = [s.value for s in rewards.scores(questions, texts)]
        right = [s.value for s in alone.scores(questions, texts)]
        # an answer whose process was killed twice in turn has no score: it is left out, and not scored otherwise
        unscored += sum(value is None for value in scored)
        assert all(a == b for a, b in zip(scored, right, strict=True) if a is not None)
        values = [value or 0.0 for value in scored]
        policy.train(groups, values)
        other.train(groups, values)
        update += 1
        rollouts.request([asked_group(n) for n in range(update * BATCH, (update + 1) * BATCH)])  # fmt: skip
        rollouts.take_weights(update)
        slowest = max(slowest, time.monotonic() - since)
    pairs = zip(policy.state.held, other.state.held, strict=True)
    assert all(torch.equal(a.local, b.local) for a, b in pairs)
    row = {
        "faults": dict(faults.kinds),
        "all_faults": faults.done,
        "updates": update,
        "answers": sum(rollouts.lags.values()),
        "other_answers": 0,
        "answers_without_score": unscored,
        "answers_continued_elsewhere": rollouts.router.continued,
        "engines_started_again": sum("started again" in line for line in said),
        "slowest_update_s": round(slowest, 2),
        "seconds": round(time.monotonic() - begun, 1),
        "load": os.getloadavg()[0],
    }
    faults.over.set()
    rollouts.close()
    rewards.close()
    alone.close()
    left = [orphans(seed) for seed in range(given.trainers)]
    row |= {"trainers_killed": len(left), "processes_left_behind": sum(left)}
    print(json.dumps(row, indent=1))
    if given.json:
        given.json.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
