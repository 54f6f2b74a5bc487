"""Tasks whose answers get a reward: their questions, how a recipe names them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from weft import registry
from weft.errors import UsageError, WeftError
from weft.recipe import Task, build_recipe
from weft.recipe.read import settings_without_use
from weft.registry import names, register
from weft.rl.build_task import reward_task
from weft.rl.reward_task import RewardTask
from weft.rl.rollout import RewardQuestion
from weft.section import validated


def task(reward: str, seed: int = 0, **settings: Any) -> RewardTask:
    """The task of a table ``[[tasks]]``."""
    section = Task(reward=reward, **settings)
    return reward_task(section, seed)


def test_sums() -> None:
    sums = task("addition", digits=2)
    question = sums.question(5)
    first, second = str(question.prompt).rstrip("=").split("+")
    assert question.answer == str(int(first) + int(second))
    assert sums.score(question, f" {question.answer}\n") == 1
    assert sums.score(question, f"{question.answer}0") == 0
    turned = task("addition", digits=2, reversed=True)
    assert turned.question(5).answer == question.answer[::-1]


def test_questions_follow_from_index_and_seed_alone() -> None:
    sums = [task("addition", seed, digits=3) for seed in (0, 0, 1)]
    first, again, other = ([s.question(i) for i in range(50)] for s in sums)
    assert first == again != other
    assert sums[0].question(7) == first[7]
    assert len({str(q.prompt) for q in first}) > 45


def test_no_question_for_evaluation_is_one_for_training() -> None:
    """Under no seed, either."""
    asked = {
        str(task("addition", seed, digits=1).question(i).prompt)
        for seed in range(3)
        for i in range(300)
    }
    held_out = {
        str(task("addition", seed, digits=1).question(i, held_out=True).prompt)
        for seed in range(3)
        for i in range(100)
    }
    assert len(asked) > 70 and held_out and not asked & held_out


def test_levels_of_difficulty() -> None:
    sums = task("addition", digits=3)
    assert sums.levels == 3
    easy = [str(sums.question(i, level=0).prompt) for i in range(30)]
    assert max(map(len, easy)) == len("1+2=")


def test_too_few_questions_are_refused() -> None:
    few = task("addition")
    with pytest.raises(UsageError, match="too few different questions"):
        few.draw(0, True, lambda random: RewardQuestion("the same"))


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"reward": "additon"}, r"did you mean 'addition'\?"),
        ({"reward": "addition", "digits": 0}, "digits = 0"),
        ({"reward": "addition", "digts": 2}, "unknown key 'tasks.0.digts'"),
        ({"name": "mine"}, "path is missing"),
    ],
)
def test_wrong_tables_are_refused(table: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        build_recipe({"tasks": [table]})


def test_a_setting_of_another_task_is_named() -> None:
    tree = {"tasks": [{"path": "questions.jsonl", "digits": 7}]}
    (line,) = settings_without_use(tree, build_recipe(tree))
    assert line.startswith("tasks[0].digits = 7 is not used: it is a setting of")


def test_a_task_of_files_stays_what_it_is() -> None:
    (section,) = build_recipe({"tasks": [{"path": "some/questions.jsonl"}]}).tasks
    assert (section.title, section.reward) == ("questions", "")
    named = validated(Task, {"path": "questions.jsonl", "name": "quiz"}, "task")
    assert named.title == "quiz"


def test_tasks_of_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    @register("task", "always")
    class Always(RewardTask):
        """Rewards whatever is written."""

        def question(
            self, index: int, held_out: bool = False, level: int | None = None
        ) -> RewardQuestion:
            return RewardQuestion(f"{self.seed} {index}")

        def score(self, question: RewardQuestion, answer: str) -> float:
            return 1.0

    try:
        assert "always" in names("task")
        assert task("always", 3).question(4).prompt == "3 4"
        register("task", "never")(lambda: None)
        with pytest.raises(UsageError, match=r"task 'never' .*cannot be called with"):
            build_recipe({"tasks": [{"reward": "never"}]})
        register("task", "nothing")(lambda settings, seed: 3)
        with pytest.raises(WeftError, match=r"task 'nothing' .*gives int; derive it"):
            task("nothing")
    finally:
        for name in ("always", "never", "nothing"):
            registry._REGISTERED.pop(("task", name), None)
