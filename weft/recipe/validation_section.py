"""The sections ``[validation]`` and ``[[tasks]]``: how a model is measured while it learns."""

from typing import Self

from pydantic import Field, model_validator

from weft.section import Section


class Validation(Section):
    """How the loss on ``data.validation`` is measured, and what follows from it (docs/training.md).

    ``keep_best``: the checkpoint of the lowest loss is kept beside the newest ones, is called ``best`` in the run's
    folder, and is what ``checkpoint.export`` exports.
    """

    every: int = Field(
        50, ge=0, description="steps between validations; 0 turns them off"
    )
    batches: int = Field(
        4, ge=0, description="of train.batch sequences; 0: all there are"
    )
    keep_best: bool = False
    patience: int = Field(
        0,
        ge=0,
        description="validations without a lower loss that end the run; 0: it never ends so",
    )

    @model_validator(mode="after")
    def _happens(self) -> Self:
        if not self.every and (self.keep_best or self.patience):
            name = "keep_best" if self.keep_best else "patience"
            raise ValueError(
                f"{name} waits for validations, and every = 0 turns them off; set validation.every"
            )
        return self


class Task(Section):
    """A file of questions that the model is asked before the first step, every so many, and at the end.

    docs/evaluation.md has the file's form. ``chat``: prompts are what a user says, and the chat template is applied.
    """

    path: str
    name: str = Field(
        "", pattern=r"^[\w.-]*$", description="in records; the file's if left out"
    )
    every: int = Field(
        0,
        ge=0,
        description="steps between; 0 asks at the beginning and at the end alone",
    )
    chat: bool = False
    limit: int = Field(0, ge=0, description="the first so many questions; 0 for all")
