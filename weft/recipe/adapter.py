"""The section ``[adapter]``: low-rank adapters."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from weft.section import Section

#: Weights with a row for each token, as PEFT calls them.
VocabularyWeight = Literal["embed_tokens", "lm_head"]


class Adapter(Section):
    """Low-rank adapters that are trained in place of the model's weights, which are frozen.

    LoRA (Hu et al. 2021), DoRA (Liu et al. 2024), QLoRA (Dettmers et al. 2023), rsLoRA (Kalajdzievski 2023).
    """

    kind: Literal["lora", "dora", "qlora"] = Field(
        "lora",
        description="lora; dora, which also learns the norms of the weights' rows; or "
        "qlora, beside weights in four bits.",
    )
    rank: PositiveInt = Field(8, description="Rank of an adapter.")
    alpha: PositiveFloat = Field(
        16.0, description="What an adapter adds is multiplied by alpha / rank."
    )
    targets: tuple[str, ...] = Field(
        ("*",),
        min_length=1,
        description="Weights by name ('wq' or 'q_proj', '*') or path "
        "('blocks.3.attention.*').",
    )
    rank_stabilised: bool = Field(
        False, description="Multiply by alpha / sqrt(rank) instead."
    )
    rank_pattern: dict[str, PositiveInt] = Field(
        {},
        description="Other ranks for weights by name or path; the first that fits counts.",
    )
    alpha_pattern: dict[str, PositiveFloat] = Field(
        {},
        description="Other alphas for weights by name or path; the first that fits counts.",
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of what an adapter reads that is set to zero while it learns.",
    )
    whole: tuple[VocabularyWeight, ...] = Field(
        (),
        description="Of embedding and output layer, those that learn all of their weight.",
    )
    tokens: tuple[int, ...] | Literal["new"] = Field(
        (),
        description="Ids whose rows learn; 'new': those by which model.vocab is larger than "
        "in the model to start from.",
    )
    tokens_of: tuple[VocabularyWeight, ...] = Field(
        ("embed_tokens", "lm_head"), description="Where the rows of 'tokens' learn."
    )

    @field_validator("tokens")
    @classmethod
    def _in_order(cls, given: Any) -> Any:
        if given != "new" and any(token < 0 for token in given):
            raise ValueError(f"{min(given)} is the id of no token; ids count from 0")
        return given if given == "new" else tuple(sorted(set(given)))

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if both := [
            name for name in self.whole if self.tokens and name in self.tokens_of
        ]:
            raise ValueError(
                f"{both[0]} is in whole and in tokens_of, and learns all rows or some; leave out one"
            )
        return self

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @property
    def quantizes(self) -> bool:
        return self.kind == "qlora"
