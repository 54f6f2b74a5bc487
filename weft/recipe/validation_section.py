"""The sections ``[validation]`` and ``[[tasks]]``: how a model is measured while it learns."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from weft.recipe.host_section import HostSection
from weft.registry import check_name
from weft.section import Section


class Validation(Section):
    """Section on the validation loss: how it is measured on held-out data, and which decisions follow from it
    (docs/how-to/training.md).
    """

    every: int = Field(
        50,
        ge=0,
        description="Number of steps between two validations. 0: no validation.",
    )
    batches: int = Field(
        4,
        ge=0,
        description=(
            "Number of held-out batches, each of train.batch sequences, on which a validation computes the loss. 0: "
            "all held-out data."
        ),
    )
    keep_best: bool = Field(
        False,
        description=(
            "Whether the checkpoint with the lowest validation loss is kept under the name 'best', besides the "
            "newest checkpoints. checkpoint.export then exports it. In a run with [rl], it is the checkpoint that "
            "answers most held-out questions correctly."
        ),
    )
    patience: int = Field(
        0,
        ge=0,
        description=(
            "End the run after this many validations in a row without a new lowest loss (early stopping). 0: "
            "never."
        ),
    )
    until: float = Field(
        0,
        ge=0,
        description="End the run after the first validation with a loss of at most this number. 0: never.",
    )

    @model_validator(mode="after")
    def _happens(self) -> Self:
        waiting = [n for n in ("keep_best", "patience", "until") if getattr(self, n)]
        if not self.every and waiting:
            name = waiting[0]
            raise ValueError(
                f"{name} waits for validations, and every = 0 turns them off; set validation.every"
            )
        return self


class Task(HostSection):
    """A task of the model: a file of questions that the model is asked during training (docs/how-to/evaluation.md).

    With ``reward``, the answers get a reward for reinforcement learning (docs/how-to/rewards.md).
    """

    hosts: ClassVar = {"reward": "task"}

    reward: str = Field(
        "",
        description=(
            "How answers are rewarded in a run with [rl]: by a built-in task such as 'addition' or 'code', given by "
            "its name, or by a Python function of your own, given as FILE.py:FUNCTION (docs/how-to/rewards.md). "
            "Empty: there are no rewards; the task only measures how many of the questions in 'path' the model "
            "answers correctly."
        ),
    )
    path: str = Field(
        "",
        description=(
            "File of questions and their right answers, on which the model is evaluated: JSON lines, TOML, CSV or "
            "the like (docs/how-to/evaluation.md). With 'reward': file of the prompts that are answered, for tasks "
            "that do not make questions themselves."
        ),
    )
    name: str = Field(
        "",
        pattern=r"^[\w.-]*$",
        description="Name of this task in metrics and reports. Empty: the name of the file, or of the reward.",
    )
    every: int = Field(
        0,
        ge=0,
        description="Number of steps between two evaluations. 0: only at the beginning and at the end of the run.",
    )
    chat: bool = Field(
        False,
        description=(
            "Whether each question is asked as a message of the user, through the chat template. If false, the "
            "model continues the question as plain text."
        ),
    )
    limit: int = Field(
        0,
        ge=0,
        description="Number of questions that are used, from the start of the file. 0: all.",
    )

    @field_validator("*")
    @classmethod
    def _is_known(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a reward that no task has, and that is no function of a file."""
        if info.field_name == "reward" and value and ".py:" not in value:
            check_name("task", value)
        return value

    @model_validator(mode="after")
    def _has_questions(self) -> Self:
        if not (self.path or self.reward):
            raise ValueError(
                "path is missing; name a file of questions, or set reward to a task that makes them"
            )
        return self

    @classmethod
    def more_settings(cls, values: Mapping[str, Any]) -> tuple[type[Section], ...]:
        if not values.get("reward"):
            return ()
        from weft.recipe.reward_settings import RewardSettings

        return (RewardSettings,)

    @property
    def title(self) -> str:
        """The task's name in metrics and reports."""
        return self.name or Path(self.path).stem or self.reward
