"""The other side of :mod:`weft.data.line_processes`: a process that answers lines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from weft.errors import UsageError, WeftError
from weft.lock_wait import SIGNS_OF_LIFE

#: What a process writes between answers while it waits for a lock that another process holds.
WAITS = "waits"


def answer_lines(begin: Callable[[Any], Callable[[Any], Any]]) -> None:
    """Answer each line of the standard input with a line: the result, or the error.

    ``begin``: gets the JSON value of the first line, the task, and returns the function that gets that of every further
    line and returns its answer. The process ends when its input ends, at the latest after one more line, so it does not
    outlive its parent.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def tell(answer: Any) -> None:
        try:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
        except ConnectionError:  # the parent has ended
            os._exit(1)

    SIGNS_OF_LIFE.append(lambda: tell(WAITS))
    if not (task := sys.stdin.readline()):
        return
    answered = begin(json.loads(task))
    for line in sys.stdin:
        try:
            answer = answered(json.loads(line))
        except WeftError as error:
            answer = {"error": str(error), "usage": isinstance(error, UsageError)}
        tell(answer)
