"""Sections of a recipe whose class is imported when a recipe names the section, and only then."""

from importlib import import_module
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from weft.section import Section


class SectionElsewhere:
    """Marker of a field that holds a recipe section whose class is imported only when a recipe has the section.

    The field has the type ``Any``. ``module``: name of the file in ``weft/recipe/``, without its ending; ``name``:
    name of the class in this file.
    """

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    @property
    def section(self) -> type[Section]:
        """The class of the section; its module is imported when this property is first read."""
        section: type[Section] = getattr(
            import_module(f"weft.recipe.{self.module}"), self.name
        )
        return section

    def validate(self, values: Any) -> Any:
        """Return ``values``, a dictionary or an instance of the section, as an instance of the section."""
        section = self.section
        if isinstance(values, section):
            return values
        with_settings = getattr(section, "with_settings", None)
        if with_settings and isinstance(values, dict):
            from weft.recipe.host_section import section_of

            return section_of(with_settings.__self__, values)
        return section.model_validate(values)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.validate)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return handler(self.section.__pydantic_core_schema__)


def section_elsewhere(module: str, name: str) -> Any:
    """Return the annotation of a field that holds the section ``name`` of ``weft/recipe/module.py``."""
    return Annotated[Any, SectionElsewhere(module, name)]
