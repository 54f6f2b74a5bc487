"""The section ``[generate]``: texts that the model writes at the end of the run."""

from pydantic import Field, PositiveInt

from weft.section import Section


class Generate(Section):
    """Section on the texts that the model writes at the end of the run."""

    prompt: str = Field("def ", description=("Text that the model is to continue."))
    prompts: tuple[str, ...] = Field(
        (), description="Several texts to continue, instead of 'prompt'."
    )
    from_data: bool = Field(
        False,
        description=(
            "Take prompts from the training data instead of 'prompt' and 'prompts': the first"
            " two short questions (conversations), or the first five words of each of the "
            "first two texts (plain texts). 'weft train --data FILE' turns it on, unless "
            "--set gives prompts."
        ),
    )
    chat: bool = Field(
        False,
        description="Give each prompt as a user's message, through the chat template.",
    )
    before: bool = Field(
        False,
        description=(
            "Also show what the model in model.from writes for the same prompts before "
            "training."
        ),
    )
    tokens: PositiveInt = Field(
        120, description="Largest number of tokens to generate for each prompt."
    )
    temperature: float = Field(
        0.8,
        ge=0,
        description=(
            "Randomness of sampling: logits are divided by it. 0: always the most likely "
            "token."
        ),
    )
    top_k: int = Field(
        40, ge=0, description="Sample from this many most likely tokens; 0: from all."
    )

    @property
    def all_prompts(self) -> tuple[str, ...]:
        return self.prompts or (self.prompt,)
