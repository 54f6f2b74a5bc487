"""Rewards by a Python function of the user's own: ``reward = "FILE.py:FUNCTION"``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING, Any

from weft.errors import UsageError
from weft.paths import home_path, real_path
from weft.rl.prompt_task import PromptTask

if TYPE_CHECKING:
    from weft.recipe import Task
    from weft.rl.rollout import RewardQuestion


class FunctionTask(PromptTask):
    """Task whose rewards come from a user's function: it is called with the answer's text and the question."""

    def __init__(self, settings: Task, seed: int = 0) -> None:
        super().__init__(settings, seed)
        self._function = _function_of(settings.reward)

    def score(self, question: RewardQuestion, answer: str) -> float:
        given: float = self._function(answer, question)
        return given


def _function_of(word: str) -> Callable[[str, RewardQuestion], Any]:
    """Load the function ``FILE.py:FUNCTION``. Raises :class:`UsageError` in one line if this fails."""
    path, _, name = word.rpartition(":")
    file = real_path(home_path(path))

    def refuse(why: str) -> UsageError:
        return UsageError(f"tasks.reward = {word!r}: {why}")

    if not file.is_file():
        raise refuse(f"there is no file {file}")
    spec = spec_from_file_location(file.stem, file)
    assert spec and spec.loader
    module = module_from_spec(spec)
    # what the file imports may stand beside it
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        line = (str(error).splitlines() or [""])[0]
        raise refuse(
            f"{path} cannot be imported: {type(error).__name__}: {line}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise refuse(f"{path} has no function {name!r}")
    try:
        inspect.signature(function).bind("answer", "question")
    except TypeError as error:
        raise refuse(
            f"{name} cannot be called with (answer, question): {error}"
        ) from None
    checked: Callable[[str, RewardQuestion], Any] = function
    return checked
