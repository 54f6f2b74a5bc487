"""The section ``[adapter]``: low-rank adapters."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from weft.section import Section

#: Weights with a row for each token, as PEFT calls them.
VocabularyWeight = Literal["embed_tokens", "lm_head"]


class Adapter(Section):
    """Low-rank adapters: small matrices that are trained in place of the model's weights, which are frozen.

    LoRA (Hu et al. 2021), DoRA (Liu et al. 2024), QLoRA (Dettmers et al. 2023), rsLoRA (Kalajdzievski 2023).
    """

    kind: Literal["lora", "dora", "qlora"] = Field(
        "lora",
        description=(
            "Type of adapter. 'lora': two thin matrices beside each weight; 'dora': as 'lora', but the norm of each "
            "row of the weight is trained as well; 'qlora': as 'lora', with the frozen weights kept in four bits."
        ),
    )
    rank: PositiveInt = Field(
        8,
        description="Rank of the adapter's two matrices. Larger ranks learn more and take more memory.",
    )
    alpha: PositiveFloat = Field(
        16.0,
        description="Scale of the adapter: its output is multiplied by alpha / rank.",
    )
    targets: tuple[str, ...] = Field(
        ("*",),
        min_length=1,
        description=(
            "Weights that get an adapter: names ('wq' or 'q_proj'), paths "
            "('blocks.3.attention.*') or '*' for every linear layer."
        ),
    )
    rank_stabilised: bool = Field(
        False,
        description=(
            "Multiply the adapter's output by alpha / sqrt(rank) instead of alpha / rank "
            "(rsLoRA)."
        ),
    )
    rank_pattern: dict[str, PositiveInt] = Field(
        {},
        description=(
            "Ranks for some weights instead of 'rank', by name or path: { 'wq' = 16 }. The "
            "first match counts."
        ),
    )
    alpha_pattern: dict[str, PositiveFloat] = Field(
        {},
        description=(
            "Alphas for some weights instead of 'alpha', by name or path: { 'wq' = 32.0 }. "
            "The first match counts."
        ),
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the adapter's inputs that is set to zero at random in training.",
    )
    whole: tuple[VocabularyWeight, ...] = Field(
        (),
        description=(
            "Also train the whole embedding ('embed_tokens') or output layer ('lm_head'), "
            "beside the adapters of other weights. Empty: neither."
        ),
    )
    tokens: tuple[int, ...] | Literal["new"] = Field(
        (),
        description=(
            "Token ids whose embedding rows are trained, too. 'new': the tokens by which "
            "model.vocab is larger than the vocabulary of the model in model.from. Empty: "
            "none."
        ),
    )
    tokens_of: tuple[VocabularyWeight, ...] = Field(
        ("embed_tokens", "lm_head"),
        description=(
            "Where the rows of 'tokens' are trained: in the embedding ('embed_tokens'), the "
            "output layer ('lm_head') or both."
        ),
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
