"""Settings of tasks ``[[tasks]]`` that give rewards, beside those of the reward itself."""

from typing import Self

from pydantic import Field, model_validator

from weft.section import Section


class RewardSettings(Section):
    """Base of the settings of tasks with a reward: the settings that every such task has."""

    held_out: str = Field(
        "",
        description=(
            "For a task with a reward and a 'path': file of prompts for evaluation. If not set: an eighth of the "
            "prompts in 'path' is held out for evaluation."
        ),
    )
    ask: str = Field(
        "",
        description=(
            "For a task with a reward: template of each prompt, in which {question} stands for the question. If not "
            "set: the prompt is the question alone."
        ),
    )
    tag: str = Field(
        "",
        pattern=r"^[\w.-]*$",
        description=(
            "Tag around the answer in what the model writes: the reward is for the text between <TAG> and </TAG>, "
            "and 0 without them. If not set: all that the model writes is the answer."
        ),
    )
    curriculum: bool = Field(
        False,
        description=(
            "Choose the difficulty of each question by the share of right answers so far, so that the model learns "
            "most. If false, the task's own settings give the difficulty. For tasks with levels of difficulty, such "
            "as 'addition'."
        ),
    )
    turns: int = Field(
        8,
        ge=1,
        description=(
            "Largest number of turns of the model in one answer, for tasks with an environment, such as 'calculator'."
        ),
    )
    workers: int = Field(
        2, ge=1, description="Number of processes that score answers by the reward."
    )
    seconds: float = Field(
        10.0,
        gt=0,
        description=(
            "Longest time in seconds for the reward of one answer, and for each turn of an environment. An answer "
            "whose reward or environment takes longer gets no reward and is not learned from."
        ),
    )
    megabytes: int = Field(
        1024,
        ge=16,
        description=(
            "Memory in MB that a process may take while it scores, beside what the loaded task takes."
        ),
    )

    @model_validator(mode="after")
    def _has_question(self) -> Self:
        if self.ask and "{question}" not in self.ask:
            raise ValueError("ask has no {question}; write where the question stands")
        return self
