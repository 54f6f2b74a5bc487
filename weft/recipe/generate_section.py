"""The section ``[generate]``: texts that the model writes at the end of the run."""

from pydantic import Field, PositiveInt

from weft.section import Section


class Generate(Section):
    """Section of the texts that the model writes at the end of the run."""

    prompt: str = Field("def ", description="Text that the model continues.")
    prompts: tuple[str, ...] = Field(
        (), description="Several texts to continue, instead of 'prompt'."
    )
    from_data: bool = Field(
        False,
        description=(
            "Instead of 'prompt' and 'prompts' take the first two short questions of the conversations "
            "that are learned, or the first five words of each of the first two texts. "
            "weft train --data sets it, unless --set gives prompts."
        ),
    )
    chat: bool = Field(
        False,
        description="Give each prompt as a user's message, through the chat template.",
    )
    before: bool = Field(
        False,
        description="Also show what the model in model.from writes before training.",
    )
    tokens: PositiveInt = Field(
        120, description="Most tokens to generate for each prompt."
    )
    temperature: float = Field(
        0.8,
        ge=0,
        description="Randomness of sampling; 0: always the most likely token.",
    )
    top_k: int = Field(
        40, ge=0, description="Sample from this many most likely tokens; 0: from all."
    )

    @property
    def all_prompts(self) -> tuple[str, ...]:
        return self.prompts or (self.prompt,)
