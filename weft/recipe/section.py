"""The base of all sections of a recipe."""

from pydantic import BaseModel, ConfigDict

from weft.recipe.validation import OneLine


class Section(BaseModel, metaclass=OneLine):
    """Base of every section: unknown keys are errors and values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
