"""The process that scores answers for :class:`weft.rl.reward_workers.RewardWorkers`: JSON lines in, JSON lines out.

What a reward prints goes to the standard error, so that it cannot be mistaken for a score.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from weft.errors import WeftError
from weft.plugins import load_plugins
from weft.recipe import Task
from weft.rl.build_task import reward_task
from weft.rl.reward_numbers import NotAReward, reward_value
from weft.rl.reward_task import RewardTask
from weft.rl.rollout import RewardQuestion

#: Seconds after the limit at which a process that nobody has killed ends by itself, as its parent is gone.
ORPHANED = 5.0
#: Characters of an error that are passed on.
LONG = 300


def run_reward_process() -> None:
    """Run a process that scores answers: the first line of standard input names the task, and each further line an
    answer.

    The process ends when its input ends.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "r")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    words = json.loads(requests.readline())
    try:
        load_plugins(words["plugins"])
        task = reward_task(Task(**words["task"]), words["seed"])
        task.prepare()
    except (WeftError, ValueError) as error:
        return _reply(replies, {"error": str(error)})
    except BaseException as error:
        return _reply(replies, {"error": _in_a_line(error)})
    _limit_memory(words["megabytes"])
    _reply(replies, {"ready": True})
    for line in requests:
        signal.setitimer(signal.ITIMER_REAL, words["seconds"] + ORPHANED)
        try:
            reply = _scored(task, json.loads(line))
        except MemoryError:
            reply = {"error": f"needs more than {words['megabytes']} MB of memory"}
        except BaseException as error:
            reply = {"error": _in_a_line(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(replies, reply)


def _scored(task: RewardTask, request: Mapping[str, Any]) -> dict[str, Any]:
    given = task.reward(RewardQuestion(**request["question"]), request["answer"])
    try:
        value = reward_value(given)
    except NotAReward as error:
        return {"error": str(error)}
    return {"value": value, "travelled": task.travelled}


def _reply(replies: IO[str], reply: Mapping[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _limit_memory(megabytes: int) -> None:
    """Let this process have so much memory beside what it has now."""
    status = Path("/proc/self/status").read_text()
    now = int(status.partition("VmData:")[2].split()[0]) << 10
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + (megabytes << 20), hard))


def _in_a_line(error: BaseException) -> str:
    """Return what an error says, and the file and line that raised it."""
    line = (str(error).splitlines() or [""])[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    said = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return f"raised {said[:LONG]}{where}"


if __name__ == "__main__":
    run_reward_process()
