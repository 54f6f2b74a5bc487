"""Settings of tasks ``[[tasks]]`` that give rewards, beside those of the reward itself."""

from typing import Self

from pydantic import Field, model_validator

from weft.section import Section


class RewardSettings(Section):
    """Base of the settings of tasks with a reward: the settings that every such task has."""

    held_out: str = Field(
        "",
        description=(
            "For a task with 'reward' and 'path': file of other prompts, on which the model is evaluated but not "
            "trained. Empty: an eighth of the prompts in 'path' is set aside for this."
        ),
    )
    ask: str = Field(
        "",
        description=(
            "For a task with 'reward': text in which {question} is replaced by the question, for prompts such as "
            "'Compute {question} step by step.'. Empty: the prompt is the question alone."
        ),
    )
    tag: str = Field(
        "",
        pattern=r"^[\w.-]*$",
        description=(
            "For a task with 'reward': name T of a tag, so that only the text between <T> and </T> counts as the "
            "model's answer. An answer without the tag gets the reward 0. Empty: all that the model writes is the "
            "answer."
        ),
    )
    curriculum: bool = Field(
        False,
        description=(
            "For a task with levels of difficulty, such as 'addition': whether levels that the model answers about "
            "half correctly are asked most, since these teach it most. If false, questions have all difficulties "
            "that the other settings allow."
        ),
    )
    turns: int = Field(
        8,
        ge=1,
        description=(
            "For a task with tools or another environment, such as 'calculator': largest number of turns that the "
            "model may write in one answer."
        ),
    )
    workers: int = Field(
        2,
        ge=1,
        description="For a task with 'reward': number of processes that compute rewards beside the training.",
    )
    seconds: float = Field(
        10.0,
        gt=0,
        description=(
            "For a task with 'reward': longest time in seconds for computing the reward of one answer, and for each "
            "turn of an environment. An answer that takes longer has no reward and is not learned from."
        ),
    )
    megabytes: int = Field(
        1024,
        ge=16,
        description=(
            "For a task with 'reward': memory in MB that a process may take while it computes a reward, besides "
            "that of the loaded task."
        ),
    )

    @model_validator(mode="after")
    def _has_question(self) -> Self:
        if self.ask and "{question}" not in self.ask:
            raise ValueError("ask has no {question}; write where the question stands")
        return self
