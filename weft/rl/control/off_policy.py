"""The steps of a run with ``control.method`` "dqn" or "sac": workers send transitions, and a learner learns from them.

Neither waits for the other: workers act by the newest weights that they find, and the learner draws from what has
arrived. The ratio of updates to transitions that comes out is recorded, as it is part of what was learned.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from weft.errors import UsageError, WeftError
from weft.layout.mesh import Mesh
from weft.recipe.control_section import Control
from weft.recipe.recipe import Recipe
from weft.rl.control.acting_policy import best_actions, split_weights
from weft.rl.control.array_frames import (
    ArrayFrame,
    FramePipe,
    pipe_ends,
    readable_pipes,
)
from weft.rl.control.child_end import end_process, how_ended
from weft.rl.control.control_ppo import RunningEpisodes
from weft.rl.control.environment_kinds import form_from_words
from weft.rl.control.environment_pool import START_S, TRIES
from weft.rl.control.method_step import MethodStep
from weft.rl.control.on_policy import environment_words
from weft.rl.control.published_weights import PublishedWeights
from weft.rl.control.stored_learners import stored_learner
from weft.rl.control.transition_replay import TransitionReplay
from weft.run.signals import requests

T = torch.Tensor

#: Stream of the learner's random numbers.
LEARN = 5
#: Seconds that the learner waits for transitions where it has nothing to do.
PAUSE_S = 0.05
#: Transitions of a worker that are kept between two updates, where no ratio is to be kept.
AT_ONCE = 64


class WorkerProcess:
    """Learner's handle of a process that acts in one environment. ``number``: number of the environment.

    Attributes:
        ``pipe``: the learner's end of the pipe to the process.
        ``heard``: time of its last transition in seconds of the monotonic clock.
        ``failures``: how often it was lost since its last transition.
        ``lives``: how often it was restarted.
    """

    def __init__(self, number: int) -> None:
        self.number, self.failures, self.lives = number, 0, -1
        self._process: subprocess.Popen[bytes] | None = None
        self.pipe: FramePipe

    @property
    def name(self) -> str:
        """The worker in words for error lines: numbers of its environment and of its process."""
        pid = self._process.pid if self._process else 0
        return f"environment {self.number} (process {pid})"

    def start(self, about: Mapping[str, Any], weights_handle: int) -> None:
        """Start the process that acts in the environment.

        ``about``: settings of the environment. ``weights_handle``: handle of the shared memory with the policy's
        weights.
        """
        self.lives += 1
        self.pipe, theirs = pipe_ends()
        handles = theirs.fileno(), weights_handle
        command = [
            sys.executable,
            "-c",
            "import sys; from weft.rl.control.off_policy_worker import run_worker; "
            "run_worker(*map(int, sys.argv[1:]))",
            *map(str, handles),
        ]
        # one core each: environments are what takes the time
        own = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, pass_fds=handles, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=own, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        with suppress(OSError):  # it has ended already, which the answer shows
            self.pipe.send(about)
        self.heard = time.monotonic()

    def take(self) -> ArrayFrame | str:
        """Read and return the message that has arrived from the worker. If the worker is lost, return the reason as a
        text.
        """
        assert self._process is not None
        try:
            frame = self.pipe.receive()
        except (EOFError, OSError, ValueError):
            return how_ended(self._process)
        if "failed" in frame.head:
            if frame.head["usage"]:
                raise UsageError(frame.head["failed"])
            return f"failed: {frame.head['failed']}"
        self.heard = time.monotonic()
        return frame

    def end(self) -> None:
        """Kill the worker process at once."""
        if self._process is not None:
            end_process(self._process, self.pipe)
        self._process = None


class OffPolicy:
    """Deep Q-learning or soft actor-critic, with worker processes that act while the learner learns.

    It is a :class:`weft.rl.control.method_step.ControlMethod`. ``recipe``: recipe with the section ``[control]``;
    ``mesh``: mesh of its single rank.

    Attributes:
        ``tensors``: tensors to checkpoint, by name, including the replay buffer.
        ``parameters``: number of parameters.
        ``facts``: settings in which a resumed run must agree.
        ``updates``: number of updates so far.
    """

    def __init__(self, recipe: Recipe, mesh: Mesh) -> None:
        assert recipe.control is not None
        self._settings: Control = recipe.control
        self._seed, settings = recipe.train.seed, recipe.control
        self._about = environment_words(settings)
        dtype = getattr(torch, recipe.train.dtype)
        self._dtype_name = recipe.train.dtype
        # the widths of the network are known with the first environment; weights come after that
        self._published: PublishedWeights | None = None
        self._workers = [WorkerProcess(n) for n in range(settings.environments)]
        reserved = os.memfd_create("weft-weights")
        try:
            for worker in self._workers:
                worker.start(self._about, reserved)
            forms = [self._await_form(worker) for worker in self._workers]
            self.form = forms[0]
            self._learner = stored_learner(settings, self.form, self._seed, mesh.device, dtype)  # fmt: skip
        except BaseException:
            os.close(reserved)
            self.close()
            raise
        self._count = sum(p.numel() for p in self._learner.acting.parameters())
        self._published = PublishedWeights(self._count, self._dtype_name, reserved)
        self._replay = TransitionReplay(settings.replay, self.form, dtype, mesh.device)
        self._episodes = RunningEpisodes(settings.environments)
        self._begun = self.updates = self._version = self._dropped = 0
        self._lines: list[str] = []
        self._lags: list[int] = []
        self.tensors: Mapping[str, T] = {
            **self._learner.tensors,
            **self._replay.tensors,
        }
        self.parameters = sum(
            t.numel() for name, t in self._learner.tensors.items() if name.startswith("model.")
        )  # fmt: skip
        self.facts = {
            "method": settings.method,
            "hidden": list(settings.hidden),
            "replay": settings.replay,
        }

    def _await_form(self, worker: WorkerProcess) -> Any:
        left = START_S - (time.monotonic() - worker.heard)
        if not worker.pipe.poll(max(0.0, left)):
            raise WeftError(f"{worker.name} was not made within {START_S:g} s")
        answer = worker.take()
        if isinstance(answer, str):
            raise WeftError(f"{worker.name} {answer}")
        return form_from_words(answer.head["form"])

    def _let_go(self, worker: WorkerProcess) -> None:
        """Let a worker that has made its environment act."""
        with suppress(OSError):  # it is lost, which the next look shows
            worker.pipe.send({
                "count": self._count, "dtype": self._dtype_name, "sizes": list(self._learner.sizes),
                "seeds": [self._seed, self._begun, worker.lives, worker.number], "lockstep": self._settings.lockstep,
            })  # fmt: skip
        worker.heard = time.monotonic()

    def resume(self, begun: int, updates: int) -> None:
        """Start the workers of a run that has taken ``begun`` steps with ``updates`` updates."""
        self._begun, self.updates = begun, updates
        if updates:
            self._publish()
        for worker in self._workers:
            self._let_go(worker)

    def _flat(self) -> np.ndarray:
        with torch.no_grad():
            parts = [p.flatten() for p in self._learner.acting.parameters()]
            return torch.cat(parts).cpu().numpy()

    def _publish(self) -> None:
        assert self._published is not None
        settings, taken = self._settings, self._replay.added
        share = min(1.0, taken / max(1.0, 0.1 * settings.transitions))
        explore = 1 - (1 - settings.explore) * share
        self._version = self._published.publish(explore, self._flat())

    def take_step(self, number: int) -> MethodStep:
        """Take the run's step ``number``, from 0: learn until ``control.every`` more transitions have arrived; return
        the result.
        """
        settings = self._settings
        aim = min((number + 1) * settings.every, settings.transitions)
        before, updates = self._replay.added, self.updates
        sums: dict[str, Any] = {}
        # a step may take as long as many slow environments: a wish to end is not to wait for it
        while self._replay.added < aim and not requests.asked:
            if settings.lockstep:
                due = self._exchange_in_step()
            else:
                due = self._exchange()
            for _ in range(due):
                for name, value in self._update().items():
                    sums[name] = sums.get(name, 0.0) + value
            if due:
                self._publish()
            if settings.lockstep:
                for worker in self._workers:
                    with suppress(OSError):
                        worker.pipe.send({})
        ended, done = self._episodes.take(), self.updates - updates
        values: dict[str, Any] = {n: float(v) / done for n, v in sums.items()}
        if ended.episodes:
            values |= {
                "return": ended.returns / ended.episodes,
                "own_return": ended.own / ended.episodes,
                "length": ended.steps / ended.episodes,
            }
        taken = max(1, self._replay.added)
        values |= {
            "episodes": ended.episodes,
            "dropped": self._dropped,
            "lr": settings.lr,
            "ratio": self.updates / taken,
            "reuse": self.updates * settings.minibatch / taken,
            "lag": float(np.mean(self._lags)) if self._lags else 0.0,
        }
        lines, self._lines, self._lags = self._lines, [], []
        return MethodStep(self._replay.added - before, done, values, lines)

    def _may_update(self) -> bool:
        settings, taken = self._settings, self._replay.added
        if taken < settings.warmup:
            return False
        allowed = settings.ratio * (taken - settings.warmup + 1)
        return not settings.ratio or self.updates < allowed

    def _exchange(self) -> int:
        """Keep transitions that have arrived; return the number of updates due.

        With a ratio to keep, workers that are ahead of the learner wait when their pipes are full. Without one nobody
        waits for anybody.
        """
        behind = self._may_update()
        if not (behind and self._settings.ratio):
            self._receive(0.0 if behind else PAUSE_S)
        return int(self._may_update())

    def _update(self) -> Mapping[str, Any]:
        draw = np.random.default_rng([self._seed, LEARN, self.updates])
        batch = self._replay.draw(self._settings.minibatch, draw)
        self.updates += 1
        return self._learner.update(batch, draw)

    def _receive(self, seconds: float) -> None:
        """Keep the transitions that have arrived, and look after workers that are silent."""
        pipes = {worker.pipe: worker for worker in self._workers}
        for pipe in readable_pipes(pipes, seconds):
            worker = pipes[pipe]
            # what is there, in its order, but not without end
            for _ in range(1 if self._settings.ratio else AT_ONCE):
                answer = worker.take()
                if isinstance(answer, str):
                    self._start_anew(worker, answer)
                    break
                self._keep(worker, answer.arrays)
                if not pipe.poll():
                    break
        self._look_for_silent()

    def _exchange_in_step(self) -> int:
        """Wait for a transition of every worker, and keep them in the order of workers. Returns the updates due."""
        due = 0
        for worker in list(self._workers):
            while True:
                left = self._settings.step_seconds - (time.monotonic() - worker.heard)
                if not worker.pipe.poll(max(0.0, left)):
                    why = f"has not answered for {self._settings.step_seconds:g} s"
                    self._start_anew(worker, why)
                    continue
                answer = worker.take()
                if isinstance(answer, str):
                    self._start_anew(worker, answer)
                    continue
                break
            self._keep(worker, answer.arrays)
            due += self._replay.added >= self._settings.warmup
        for worker in self._workers:
            worker.heard = time.monotonic()
        return due

    def _keep(self, worker: WorkerProcess, step: Mapping[str, np.ndarray]) -> None:
        worker.failures = 0
        terminated = bool(step["terminated"])
        self._replay.add(
            step["observation"], step["action"], float(step["reward"]), terminated, step["final"]
        )  # fmt: skip
        self._lags.append(self._version - int(step["version"]))
        self._episodes.add_for(
            worker.number, float(step["reward"]), float(step["own"]), terminated or bool(step["truncated"])
        )  # fmt: skip

    def _look_for_silent(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if now - worker.heard > self._settings.step_seconds:
                if worker.pipe.poll():
                    continue
                why = f"has not answered for {self._settings.step_seconds:g} s"
                self._start_anew(worker, why)

    def _start_anew(self, worker: WorkerProcess, why: str) -> None:
        worker.failures += 1
        name = worker.name
        if worker.failures >= TRIES:
            raise WeftError(
                f"{name} {why}, for the {TRIES}rd time in a row; mend the environment, or raise "
                "control.step_seconds if its steps take so long"
            )
        assert self._published is not None
        worker.end()
        self._dropped += 1
        self._episodes.forget(worker.number)
        worker.start(self._about, self._published.handle)
        self._await_form(worker)
        self._let_go(worker)
        self._lines.append(
            f"{name} {why}; 1 episode was dropped, and the process started anew"
        )

    def best(self, observations: np.ndarray) -> np.ndarray:
        """Return the policy's actions for ``observations``, ``[environments, observed]``, without exploration: one
        action per environment.
        """
        layers = split_weights(self._flat(), self._learner.sizes)
        return best_actions(self.form, layers, observations)

    def close(self) -> None:
        """End all worker processes, and free the memory that they share."""
        for worker in self._workers:
            worker.end()
        if self._published is not None:
            self._published.close()
        self._published = None
