"""Code: Python functions that are judged by asserts, in a process that can reach nothing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pydantic import Field, PositiveFloat

from weft.errors import UsageError
from weft.registry import register
from weft.rl.prompt_task import PromptTask
from weft.rl.rollout import RewardQuestion
from weft.section import Section

if TYPE_CHECKING:
    from weft.rl.code_sandbox import CodeSandbox

#: A block of code in Markdown.
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
#: Characters of an answer that is run.
LONGEST = 50_000


class CodeSettings(Section):
    """Settings of the task of writing Python code that passes tests."""

    run_seconds: PositiveFloat = Field(
        3.0,
        description="Longest time in seconds that the code in an answer may run with its tests.",
    )
    run_megabytes: int = Field(
        256, ge=16, description="Memory in MB that the code in an answer may take."
    )
    modules: tuple[str, ...] = Field(
        (),
        description=(
            "Python modules that the code in an answer may import, besides common ones of the standard library."
        ),
    )
    partial: bool = Field(
        False,
        description=(
            "Whether an answer whose code passes only some of the tests gets the share of passed tests as its "
            "reward. If false, the reward is 1 if all tests pass, else 0."
        ),
    )


@register("task", "code", settings=CodeSettings, title="Python code judged by asserts")
class CodeTask(PromptTask):
    """Asks the prompts of a file for Python code, and rewards code that passes its tests. A record has ``tests`` (or
    ``test_list``), a list of asserts, and perhaps ``setup`` (or ``test_setup_code``), code that runs before them. The
    code is the last block in backticks of the answer, or the whole answer if there is none. It runs in a process
    without network, without files to write and without privileges (:mod:`weft.rl.sandbox_process`). Code can still
    deceive its own tests on purpose, for example by objects that are equal to everything.
    """

    _sandbox: CodeSandbox | None = None

    def prepare(self) -> None:
        from weft.rl.code_sandbox import CodeSandbox

        settings = self.settings.own(CodeSettings)
        if settings.run_seconds >= self.common.seconds:
            raise UsageError(
                f"tasks.run_seconds = {settings.run_seconds:g} is not below tasks.seconds = {self.common.seconds:g}, "
                "after which an answer is left out; lower one, or raise the other"
            )
        self._sandbox = CodeSandbox(
            settings.modules, settings.run_seconds, settings.run_megabytes
        )

    def question(
        self, index: int, held_out: bool = False, level: int | None = None
    ) -> RewardQuestion:
        question = super().question(index, held_out, level)
        _tests(question.facts)
        return question

    def score(self, question: RewardQuestion, answer: str) -> float:
        blocks = BLOCK.findall(answer[-LONGEST:])
        code = blocks[-1] if blocks else answer
        tests, setup = _tests(question.facts)
        if len(code) > LONGEST:
            return 0.0
        if self._sandbox is None:
            self.prepare()
            assert self._sandbox is not None
        passed = self._sandbox.passes(code, tests, setup)
        share = sum(passed) / len(passed)
        return share if self.settings.own(CodeSettings).partial else float(share == 1)

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None


def _tests(facts: Any) -> tuple[list[str], str]:
    """Return the tests of a question, and the code that runs before them."""
    tests = facts.get("tests") or facts.get("test_list")
    tests = [tests] if isinstance(tests, str) else tests
    if not tests or not all(isinstance(test, str) for test in tests):
        raise UsageError(
            "tasks.reward = 'code' needs records with 'tests', a list of asserts in Python, and one has none"
        )
    setup = facts.get("setup") or facts.get("test_setup_code") or ""
    return [*tests], str(setup)
