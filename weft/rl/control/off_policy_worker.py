"""Worker process of an off-policy run: acts in one environment, sends each transition, and reads the newest weights.

It never waits for the learner, except in lock step (asynchronous parallel training for fin-ray control).
"""

from __future__ import annotations

import os
from contextlib import suppress

import numpy as np

from weft.rl.control.acting_policy import exploring_action, random_action, split_weights
from weft.rl.control.array_frames import FramePipe
from weft.rl.control.environment_kinds import form_in_words
from weft.rl.control.environment_process import (
    EpisodeRunner,
    end_with_parent,
    episode_seed,
    in_words,
    is_usage,
)
from weft.rl.control.published_weights import (
    NO_WEIGHTS,
    PublishedWeights,
    WeightsVersion,
)

#: Stream of random numbers for actions that explore.
EXPLORE = 4


class ActingWorker:
    """Acts in one environment with the newest weights, and returns transitions.

    ``runner``: the environment. ``sizes``: widths of the policy's network. ``seeds``: seeds of the worker's random
    numbers.
    """

    def __init__(
        self, runner: EpisodeRunner, sizes: list[int], seeds: tuple[int, ...]
    ) -> None:
        self._runner, self._sizes = runner, sizes
        self._draw = np.random.default_rng([EXPLORE, *seeds])
        runner.begin(episode_seed(*seeds))

    def step(self, newest: WeightsVersion) -> dict[str, np.ndarray]:
        """Act once with the weights ``newest``, or at random if there are none yet; return the transition's arrays by
        name.
        """
        before = self._runner.observation
        form = self._runner.form
        if newest.version:
            layers = split_weights(newest.weights, self._sizes)
            action = exploring_action(form, layers, before, self._draw, newest.explore)
        else:
            action = random_action(form, self._draw)
        step = self._runner.step(action.native)
        return {
            "observation": before,
            "action": np.asarray(action.kept),
            "reward": np.array(step["reward"]),
            "own": np.array(step["own"]),
            "terminated": np.array(step["terminated"]),
            "truncated": np.array(step["truncated"]),
            "final": step["final"],
            "version": np.array(newest.version),
        }


def run_worker(pipe_handle: int, weights_handle: int) -> None:
    """Run a worker process: act in its environment and send transitions, until the pipe is closed.

    ``pipe_handle``: inherited descriptor of a pipe, whose first message says which environment to create.
    ``weights_handle``: handle of the memory of :class:`PublishedWeights`.
    """
    end_with_parent()
    pipe = FramePipe(pipe_handle)
    try:
        about = pipe.receive().head
        runner = EpisodeRunner(about, 0)
        pipe.send({"form": form_in_words(runner.form)})
        go = pipe.receive().head
        published = PublishedWeights(go["count"], go["dtype"], weights_handle)
        worker, newest = ActingWorker(runner, go["sizes"], tuple(go["seeds"])), NO_WEIGHTS  # fmt: skip
        while True:
            newest = published.newest(newest)
            pipe.send({}, worker.step(newest))
            if go["lockstep"]:
                pipe.receive()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        with suppress(OSError):
            pipe.send({"failed": in_words(error), "usage": is_usage(error)})
        os._exit(1)
