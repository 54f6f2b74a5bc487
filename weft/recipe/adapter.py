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
            "Type of adapter. 'lora': two thin matrices beside each frozen weight; 'dora': as 'lora', and the norm "
            "of each row of the weight is trained, too; 'qlora': as 'lora', with frozen weights kept in four bits "
            "to save memory."
        ),
    )
    rank: PositiveInt = Field(
        8,
        description=(
            "Rank of the adapter: the smaller dimension of its two thin matrices. A larger rank can learn more and "
            "takes more memory."
        ),
    )
    alpha: PositiveFloat = Field(
        16.0,
        description="Scale of the adapter: the product of its two matrices is multiplied by alpha / rank.",
    )
    targets: tuple[str, ...] = Field(
        ("*",),
        min_length=1,
        description=(
            "Linear layers that get an adapter: by name ('wq' or 'q_proj'), by a pattern of paths "
            "('blocks.3.attention.*'), or '*' for all of them."
        ),
    )
    rank_stabilised: bool = Field(
        False,
        description=(
            "Multiply the product of the adapter's matrices by alpha / sqrt(rank) instead of alpha / rank, which "
            "helps large ranks (rsLoRA)."
        ),
    )
    rank_pattern: dict[str, PositiveInt] = Field(
        {},
        description=(
            "Other ranks than 'rank' for some weights, by name or pattern of paths, such as { 'wq' = 16 }. If "
            "several match a weight, the first counts."
        ),
    )
    alpha_pattern: dict[str, PositiveFloat] = Field(
        {},
        description=(
            "Other values than 'alpha' for some weights, by name or pattern of paths, such as { 'wq' = 32.0 }. If "
            "several match a weight, the first counts."
        ),
    )
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Dropout rate: share of the adapter's input elements that is set to zero at random in training. 0: no "
            "dropout."
        ),
    )
    whole: tuple[VocabularyWeight, ...] = Field(
        (),
        description=(
            "Weights that are trained as a whole, besides the adapters of other weights: the embedding "
            "('embed_tokens') or the output layer ('lm_head'). Empty: neither."
        ),
    )
    tokens: tuple[int, ...] | Literal["new"] = Field(
        (),
        description=(
            "Ids of tokens whose rows in the embedding and output layer (see tokens_of) are trained besides the "
            "adapters. 'new': the tokens that model.vocab adds to the model in model.from. Empty: none."
        ),
    )
    tokens_of: tuple[VocabularyWeight, ...] = Field(
        ("embed_tokens", "lm_head"),
        description=(
            "Where the rows of 'tokens' are trained: in the embedding ('embed_tokens'), in the output layer "
            "('lm_head') or in both."
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
