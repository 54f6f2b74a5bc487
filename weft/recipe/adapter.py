"""The section ``[adapter]``: low-rank adapters."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from weft.section import Section

#: Weights with a row for each token, as PEFT calls them.
VocabularyWeight = Literal["embed_tokens", "lm_head"]


class Adapter(Section):
    """Low-rank adapters that are trained in place of the model's weights, which are frozen.

    ``kind``: ``lora`` (Hu et al. 2021), ``dora``, which also learns the norms of the weights' rows (Liu et al. 2024),
    or ``qlora``: beside weights in four bits (Dettmers et al. 2023).
    ``targets`` are weights by name (``wq`` or ``q_proj``, ``*``) or path (``blocks.3.attention.*``). What an adapter
    adds is multiplied by ``alpha / rank``, or by ``alpha / sqrt(rank)`` if ``rank_stabilised`` (Kalajdzievski 2023).
    ``rank_pattern`` and ``alpha_pattern``: other values for weights by name or path, of which the first that fits
    counts. ``dropout``: this share of what an adapter reads is set to zero while it learns.
    ``whole``: of embedding and output layer, which learn all of their weight. ``tokens``: ids whose rows learn there,
    or ``new``, those by which ``model.vocab`` is larger than in the model to start from; ``tokens_of``: in which.
    """

    kind: Literal["lora", "dora", "qlora"] = "lora"
    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    targets: tuple[str, ...] = Field(("*",), min_length=1)
    rank_stabilised: bool = False
    rank_pattern: dict[str, PositiveInt] = Field({})
    alpha_pattern: dict[str, PositiveFloat] = Field({})
    dropout: float = Field(0.0, ge=0, lt=1)
    whole: tuple[VocabularyWeight, ...] = ()
    tokens: tuple[int, ...] | Literal["new"] = ()
    tokens_of: tuple[VocabularyWeight, ...] = ("embed_tokens", "lm_head")

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
