"""The section ``[generate]``: what the model writes at the end of the run."""

from pydantic import Field, PositiveInt

from weft.section import Section


class Generate(Section):
    """What the model writes at the end of the run: after ``prompt``, or after each of ``prompts``.

    ``chat``: prompts are user messages, and the chat template is applied. ``before``: also show what the model of
    ``model.from`` writes.
    """

    prompt: str = "def "
    prompts: tuple[str, ...] = ()
    chat: bool = False
    before: bool = False
    tokens: PositiveInt = 120
    temperature: float = Field(0.8, ge=0)
    top_k: int = Field(40, ge=0)

    @property
    def all_prompts(self) -> tuple[str, ...]:
        return self.prompts or (self.prompt,)
