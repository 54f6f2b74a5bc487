"""The section ``[generate]``: what the model writes at the end of the run."""

from pydantic import Field, PositiveInt

from weft.section import Section


class Generate(Section):
    """What the model writes at the end of the run."""

    prompt: str = Field("def ", description="Text to go on with.")
    prompts: tuple[str, ...] = Field(
        (), description="Several texts, instead of 'prompt'."
    )
    chat: bool = Field(
        False,
        description="Prompts are user messages, and the chat template is applied.",
    )
    before: bool = Field(
        False, description="Also show what the model of model.from writes."
    )
    tokens: PositiveInt = Field(120, description="Tokens to write at most.")
    temperature: float = Field(
        0.8, ge=0, description="Temperature of sampling; 0 takes the most likely token."
    )
    top_k: int = Field(
        40, ge=0, description="Sample from the so many most likely tokens; 0: from all."
    )

    @property
    def all_prompts(self) -> tuple[str, ...]:
        return self.prompts or (self.prompt,)
