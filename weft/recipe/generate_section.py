"""The section ``[generate]``: texts that the model writes at the end of the run."""

from pydantic import Field, PositiveInt

from weft.section import Section


class Generate(Section):
    """Section on the texts that the model writes at the end of the run."""

    prompt: str = Field(
        "def ", description="Prompt that the model continues at the end of the run."
    )
    prompts: tuple[str, ...] = Field(
        (),
        description="Several prompts that the model continues, instead of 'prompt'. Empty: only 'prompt'.",
    )
    from_data: bool = Field(
        False,
        description=(
            "Whether prompts are taken from the training data instead of 'prompt' and 'prompts': the first two "
            "short questions of conversations, or the first five words of two plain texts. 'weft train --data FILE' "
            "turns this on, unless --set gives prompts."
        ),
    )
    chat: bool = Field(
        False,
        description=(
            "Whether each prompt is given as a message of the user, through the chat template. If false, the model "
            "continues it as plain text."
        ),
    )
    before: bool = Field(
        False,
        description=(
            "Whether the model in model.from also answers the prompts before training, so that one sees the "
            "difference."
        ),
    )
    tokens: PositiveInt = Field(
        120, description="Largest number of tokens that are generated for each prompt."
    )
    temperature: float = Field(
        0.8,
        ge=0,
        description=(
            "Randomness of sampling: logits are divided by this number before a token is drawn. 0: always the most "
            "likely token."
        ),
    )
    top_k: int = Field(
        40,
        ge=0,
        description="Number of most likely tokens among which each token is drawn. 0: all tokens.",
    )

    @property
    def all_prompts(self) -> tuple[str, ...]:
        return self.prompts or (self.prompt,)
