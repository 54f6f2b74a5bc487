"""The JSON schema of recipes: editors complete and check recipes by it, and the reference page is made from it."""

from functools import cache
from typing import Any

from pydantic import BaseModel

from weft.recipe.data_section import RECORD_FILES
from weft.recipe.host_section import HostSection
from weft.recipe.recipe import Recipe
from weft.recipe.reward_settings import RewardSettings
from weft.recipe.validation_section import Task
from weft.registry import KINDS, Registered, setting_values
from weft.section import section_in

#: The dialect that Taplo reads, the TOML language server within Even Better TOML.
DRAFT_4 = "http://json-schema.org/draft-04/schema#"

#: Settings for which any text is possible: a technique with its strength, such as ``topk:0.01``, or a file's function.
WORDS = ("sync.compress", "tasks.reward", "data.path")

Schema = dict[str, Any]


def recipe_schema() -> Schema:
    """Return the JSON schema (draft 4) of a recipe, with the settings that techniques add to its sections.

    Techniques of plugins are included if their modules have been imported (:func:`weft.plugins.load_plugins`).
    """
    tree = Recipe.model_json_schema()
    definitions: dict[str, Schema] = tree.pop("$defs")
    _define_inline(tree, definitions)
    for name, field in Recipe.model_fields.items():
        section = section_in(field.annotation)
        if section and section is not Task and issubclass(section, HostSection):
            settings = _settings_of_techniques(section)
            _section(tree, definitions, name)["properties"] |= settings
    more = RewardSettings.model_json_schema()["properties"]
    definitions["Task"]["properties"] |= more | _settings_of_techniques(Task)
    _add_names(tree, definitions)
    # keys of a single source may stand in [data] itself, and a callback may be its name alone
    data, source = definitions["Data"], definitions["Source"]
    data["properties"] = source["properties"] | data["properties"]
    callbacks = tree["properties"]["callbacks"]
    callbacks["items"] = {"anyOf": [{"type": "string"}, callbacks["items"]]}
    schema: Schema = _in_draft_4(tree | {"definitions": definitions})
    return {"$schema": DRAFT_4, "title": "Weft recipe"} | schema


def _define_inline(tree: Schema, definitions: dict[str, Schema]) -> None:
    """Move sections whose class is imported when they are named (:class:`SectionElsewhere`) to the definitions."""
    for node in tree["properties"].values():
        options = node.get("anyOf", [{}])
        if "properties" in options[0]:
            title = options[0]["title"]
            definitions[title] = options[0]
            options[0] = {"$ref": f"#/$defs/{title}"}


def _section(tree: Schema, definitions: dict[str, Schema], name: str) -> Schema:
    """Return the definition of the recipe's section ``name``."""
    node = tree["properties"][name]
    # a section that may be left out is one of two
    reference: str = node.get("anyOf", [node])[0]["$ref"]
    return definitions[reference.rpartition("/")[2]]


def _add_names(tree: Schema, definitions: dict[str, Schema]) -> None:
    """Limit each setting that names a technique to the names there are."""
    for setting in {kind.setting for kind in KINDS.values()} - {*WORDS}:
        section, dot, key = setting.partition(".")
        if not dot or section not in Recipe.model_fields:
            continue  # an option of a command, or a list of tables
        values = setting_values(setting)
        if setting == "data.kind":
            definition, values = definitions["Source"], [*values, *RECORD_FILES]
        else:
            definition = _section(tree, definitions, section)
        node = definition["properties"][key]
        node.get("items", node)["enum"] = values


def technique_fields(technique: Registered) -> dict[str, Schema]:
    """Return the JSON schema of each setting that a technique adds to its section, by key; empty if there is none."""
    return {} if technique.settings is None else section_fields(technique.settings)


@cache  # asked once per setting
def section_fields(section: type[BaseModel]) -> dict[str, Schema]:
    """Return the JSON schema of each setting of a section, by key. Callers share it, and leave it as it is."""
    fields: dict[str, Schema] = section.model_json_schema()["properties"]
    return {key: _in_draft_4(field) for key, field in fields.items()}


def _settings_of_techniques(section: type[HostSection]) -> dict[str, Schema]:
    """Settings of the techniques that a section can name, by key; each says whose it is."""
    properties: dict[str, Schema] = {}
    for key in dict.fromkeys(section.technique_settings()):
        owners = section.owners(key)
        options = [technique_fields(technique)[key] for technique in owners]
        names = " or ".join(f'"{technique.name}"' for technique in owners)
        setting = KINDS[owners[0].kind].setting.rpartition(".")[2]
        about = f"With {setting} = {names}: {options[0]['description']}"
        same = all(option == options[0] for option in options)
        node = options[0] if same else {"anyOf": options}
        properties[key] = node | {"description": about}
    return properties


def _in_draft_4(node: Any) -> Any:
    """Translate pydantic's dialect into draft 4, and leave out ``null``, which TOML has not."""
    if isinstance(node, list):
        return [_in_draft_4(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = dict(node)
    if isinstance(node.get("anyOf"), list):
        options = [option for option in node["anyOf"] if option != {"type": "null"}]
        node["anyOf"] = options
        if len(options) == 1:
            del node["anyOf"]
            node = options[0] | node
    if isinstance(node.get("title"), str):
        del node["title"]
    if node.get("default") is None or "$ref" in node:
        node.pop("default", None)
    if "$ref" in node:
        node["$ref"] = node["$ref"].replace("$defs", "definitions")
    for limit in ("minimum", "maximum"):
        exclusive = f"exclusive{limit.capitalize()}"
        if node.get(exclusive, True) is not True:
            node[limit], node[exclusive] = node[exclusive], True
    if "const" in node:
        node["enum"] = [node.pop("const")]
    if "prefixItems" in node:
        node["items"] = node.pop("prefixItems")
    return {key: _in_draft_4(value) for key, value in node.items()}
