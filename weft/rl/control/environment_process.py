"""Process that holds environments and steps them as its parent asks. It needs no PyTorch.

An episode that ends is followed by the next one within the same step: the answer has the last observation of the old
episode and the first of the new one, so there are no transitions that lead from one episode into another.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from ctypes import CDLL
from typing import Any

import numpy as np

from weft.rl.control.array_frames import FramePipe
from weft.rl.control.environment_kinds import (
    ActionForm,
    action_form,
    flat_observation,
    form_in_words,
    make_environment,
    native_action,
)
from weft.rl.control.simple_reward import SimpleReward
from weft.rl.reward_numbers import NotAReward, reward_value

#: What the marker says between steps.
IDLE = -1


def episode_seed(*numbers: int) -> int:
    """Return one seed that depends on all of ``numbers``, such as a run's seed and an environment's number."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


class EpisodeRunner:
    """One environment with its reward, which plays episode after episode.

    ``about``: the settings that :class:`weft.rl.control.environment_pool.EnvironmentPool` sends. ``number``: number of
    the environment among all of the run. ``seed``: seed of its first episode.
    """

    def __init__(self, about: Mapping[str, Any], seed: int) -> None:
        self.environment = make_environment(
            about["environment"], about["settings"], about["time_limit"]
        )
        self.form: ActionForm = action_form(self.environment)
        high = max((term["index"] for term in about["terms"]), default=0)
        if max(high, about["progress"] or 0) >= self.form.observed:
            from weft.errors import UsageError

            raise UsageError(
                f"control.terms and control.progress name component {max(high, about['progress'] or 0)} of an "
                f"observation that has {self.form.observed}; count from 0"
            )
        self._reward = SimpleReward(about["reward"], about["progress"], about["terms"])
        self.begin(seed)

    def begin(self, seed: int | None = None) -> np.ndarray:
        """Begin an episode and return its first observation, ``[observed]``. ``seed``: seed of the episode; None: the
        environment's random numbers go on.
        """
        seen, _ = self.environment.reset(seed=seed)
        self.observation = flat_observation(self.form, seen)
        self._reward.begin(self.observation)
        return self.observation

    def step(self, action: np.ndarray) -> dict[str, Any]:
        """Take one step, and begin the next episode if this one has ended.

        Returns values by name. ``final``: the observation after the step. ``observation``: the observation to act on
        next, of the next episode if this one has ended. ``reward``: the reward to learn from. ``own``: the
        environment's own reward. ``terminated``, ``truncated``: whether the episode has ended, and how.
        """
        native = native_action(self.form, action, self.environment.action_space)
        seen, own, terminated, truncated, _ = self.environment.step(native)
        final = flat_observation(self.form, seen)
        if not np.isfinite(final).all():
            raise ValueError("it returned an observation that is not finite")
        own = _checked_reward(own)
        shaped = self._reward.after_step(final, own)
        _checked_reward(shaped.reward)
        terminated = bool(terminated) or shaped.ended
        truncated = bool(truncated) and not terminated
        if terminated or truncated:
            self.begin()
        else:
            self.observation = final
        return {
            "observation": self.observation,
            "final": final,
            "reward": shaped.reward,
            "own": own,
            "terminated": terminated,
            "truncated": truncated,
        }


def _checked_reward(given: Any) -> float:
    """Return the number ``given`` as a reward, within the limits of rewards of language tasks."""
    try:
        return reward_value(given)
    except NotAReward as error:
        raise ValueError(f"it {error} as a reward") from None


def end_with_parent() -> None:
    """Make this process end when its parent ends, and ignore Ctrl-C, which the parent handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def in_words(error: BaseException) -> str:
    """Return an exception as one line for the user: its message if it is an error of Weft's, else its type and
    message.
    """
    text = str(error).splitlines()[0] if str(error) else ""
    return text if is_usage(error) else f"{type(error).__name__}: {text}"


def is_usage(error: BaseException) -> bool:
    """Return whether ``error`` is an error of Weft, whose line can be shown to the user as it is."""
    from weft.errors import WeftError

    return isinstance(error, WeftError)


def run_environments(pipe_handle: int, marker_handle: int) -> None:
    """Run a process of environments: create them, then answer each message with a step, until the pipe is closed.

    ``pipe_handle``: inherited descriptor of a pipe, whose first message says which environments to create.
    ``marker_handle``: handle of shared memory in which the process notes which environment it is stepping.
    """
    end_with_parent()
    pipe, marker = FramePipe(pipe_handle), mmap.mmap(marker_handle, 8)

    def mark(number: int) -> None:
        marker[:8] = number.to_bytes(8, "little", signed=True)

    try:
        about = pipe.receive().head
        runners = []
        for number, seed in zip(about["numbers"], about["seeds"], strict=True):
            mark(number)
            runners.append(EpisodeRunner(about, seed))
        mark(IDLE)
        first = np.stack([runner.observation for runner in runners])
        form = form_in_words(runners[0].form)
        pipe.send({"form": form}, {"observation": first})
        while True:
            actions = pipe.receive().arrays["action"]
            steps = []
            for number, runner, action in zip(about["numbers"], runners, actions, strict=True):  # fmt: skip
                mark(number)
                steps.append(runner.step(action))
            mark(IDLE)
            answer = {key: np.array([step[key] for step in steps]) for key in steps[0]}
            pipe.send({}, answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        usage = type(error).__name__ == "UsageError"
        with suppress(OSError):
            pipe.send({"failed": in_words(error), "usage": usage}, {})
        os._exit(1)
