"""The sections ``[validation]`` and ``[[tasks]]``: how a model is measured while it learns."""

from typing import Self

from pydantic import Field, model_validator

from weft.section import Section


class Validation(Section):
    """Section on how the loss on held-out data is measured, and what it is used for (docs/how-to/training.md)."""

    every: int = Field(50, ge=0, description="Steps between validations; 0: never.")
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
            "the name 'best'. checkpoint.export then exports it."
        ),
    )
    patience: int = Field(
        0,
        ge=0,
        description=(
            "End the run after so many validations without a lower loss (early stopping); 0: "
            "never."
        ),
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
    """A file of questions with known answers that the model is asked during training (docs/how-to/evaluation.md)."""

    path: str = Field(
        description=(
            "File of questions with known answers: JSON lines, TOML, CSV or the like "
            "(docs/how-to/evaluation.md)."
        )
    )
    name: str = Field(
        "",
        pattern=r"^[\w.-]*$",
        description="Name of the task in metrics and reports. Left out: the name of the file.",
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
