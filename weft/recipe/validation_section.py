"""The sections ``[validation]`` and ``[[tasks]]``: how a model is measured while it learns."""

from typing import Self

from pydantic import Field, model_validator

from weft.section import Section


class Validation(Section):
    """How the loss on ``data.validation`` is measured, and what follows from it (docs/how-to/training.md)."""

    every: int = Field(
        50, ge=0, description="Steps between validations; 0 turns them off."
    )
    batches: int = Field(
        4, ge=0, description="Batches of train.batch sequences; 0: all there are."
    )
    keep_best: bool = Field(
        False,
        description="Keep the checkpoint of the lowest loss beside the newest ones; it is "
        "called 'best', and is what checkpoint.export exports.",
    )
    patience: int = Field(
        0,
        ge=0,
        description="Validations without a lower loss that end the run; 0: it never ends "
        "so.",
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
    """A file of questions that the model is asked (docs/how-to/evaluation.md)."""

    path: str = Field(description="File of questions.")
    name: str = Field(
        "", pattern=r"^[\w.-]*$", description="Name in records; left out: the file's."
    )
    every: int = Field(
        0,
        ge=0,
        description="Steps between; 0 asks at the beginning and at the end alone.",
    )
    chat: bool = Field(
        False,
        description="Prompts are what a user says, and the chat template is applied.",
    )
    limit: int = Field(0, ge=0, description="The first so many questions; 0 for all.")
