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
            "Number of batches (of train.batch sequences) in one validation; 0: all held-out "
            "data."
        ),
    )
    keep_best: bool = Field(
        False,
        description=(
            "Keep the checkpoint with the lowest validation loss beside the newest ones, under "
            "the name 'best'. checkpoint.export then exports it. With [rl] it is the one that "
            "answers most held-out questions right."
        ),
    )
    patience: int = Field(
        0,
        ge=0,
        description=(
            "End the run after this many validations in a row without a lower loss (early stopping); 0: never."
        ),
    )
    until: float = Field(
        0,
        ge=0,
        description="End the run after the first validation whose loss is at most this number; 0: never.",
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
            "What gives the answers a reward, in a run with [rl]: the name of a task, such as 'addition', or "
            "FILE.py:FUNCTION, a Python function of your own (docs/how-to/rewards.md). If not set: this task only "
            "evaluates the model on the questions in 'path', and gives no rewards."
        ),
    )
    path: str = Field(
        "",
        description=(
            "File of questions with known answers: JSON lines, TOML, CSV or the like "
            "(docs/how-to/evaluation.md). With 'reward': file of prompts, for tasks that do not "
            "make their questions themselves."
        ),
    )
    name: str = Field(
        "",
        pattern=r"^[\w.-]*$",
        description="Name of the task in metrics and reports. If not set: the name of the file, or of the reward.",
    )
    every: int = Field(
        0,
        ge=0,
        description="Steps between two evaluations; 0: only at the beginning and at the end of the run.",
    )
    chat: bool = Field(
        False,
        description="Ask each question as a user's message, through the chat template.",
    )
    limit: int = Field(
        0,
        ge=0,
        description="Use only this many questions, from the start of the file; 0: all.",
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
