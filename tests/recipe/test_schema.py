"""The JSON schema and the reference page of recipes, which are made from the fields."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft4Validator
from jsonschema.exceptions import best_match

from weft.errors import UsageError
from weft.recipe.read import build_recipe
from weft.recipe.schema import recipe_schema
from weft.recipe.shipped import shipped_recipes
from weft.recipe.template import starter

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from recipe_reference import PAGE, page  # noqa: E402

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def validator() -> Draft4Validator:
    schema = recipe_schema()
    Draft4Validator.check_schema(schema)
    return Draft4Validator(schema)


def test_the_schema_takes_every_shipped_recipe(validator: Draft4Validator) -> None:
    texts = [path.read_text() for path in shipped_recipes().values()]
    assert len(texts) > 30
    for text in [*texts, starter()]:
        assert not list(validator.iter_errors(tomllib.loads(text)))


@pytest.mark.parametrize("folder", ["plugins", "techniques"])
def test_the_schema_knows_what_named_plugins_add(
    folder: str,
    validator: Draft4Validator,
    command: Command,
    no_plugins: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = tomllib.loads((ROOT / "examples" / folder / "recipe.toml").read_text())
    monkeypatch.syspath_prepend(str(ROOT / "examples" / folder))
    assert list(validator.iter_errors(recipe))
    options = [word for name in recipe["plugins"] for word in ("--plugin", name)]
    for name in recipe["plugins"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    code, out, _ = command("recipes", "--schema", *options)
    assert code == 0
    assert not list(Draft4Validator(json.loads(out)).iter_errors(recipe))


WRONG: list[tuple[str, Any]] = [
    ("optimizer.lr", -1e-3),
    ("optimizer.lr", "fast"),
    ("optimizer.kind", "adam"),
    ("optimizer.learning_rate", 1e-3),
    ("optimizer.betas", [0.9]),
    ("model.layers", 0),
    ("model.layers", 2.5),
    ("model.mixer", "mamba"),
    ("model.rope_scaling.kind", "ntk"),
    ("data.kind", "webdataset"),
    ("data.validation", True),
    ("data.chat.truncation", "left"),
    ("layout.zero", 4),
    ("layout.schedule", "1b1f"),
    ("train.dtype", "float16"),
    ("train.compile", "maybe"),
    ("memory.alternate", "half"),
    ("checkpoint.keep", 0),
    ("sync.update", "diloco"),
    ("resilience.detect", 0),
    ("observe.trackers", "wandb"),
    ("adapter.dropout", 1),
    ("generate.tokens", 0),
    ("trainer", {}),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_the_schema_refuses_what_the_recipe_refuses_and_names_the_key(
    key: str, value: Any, validator: Draft4Validator
) -> None:
    tree: dict[str, Any] = {}
    *sections, last = key.split(".")
    section = tree
    for name in sections:
        section = section.setdefault(name, {})
    section[last] = value
    error = best_match(validator.iter_errors(tree))
    assert error is not None
    path = [str(part) for part in error.absolute_path]
    assert path == [*sections, last] or (
        path == sections and f"'{last}' was unexpected" in error.message
    )
    with pytest.raises(UsageError, match=last):
        build_recipe(tree)


def test_a_technique_s_setting_is_checked_as_its_own(
    validator: Draft4Validator,
) -> None:
    tree = {"optimizer": {"kind": "muon", "momentum": 1.5}}
    (error,) = validator.iter_errors(tree)
    assert list(error.absolute_path) == ["optimizer", "momentum"]
    with pytest.raises(UsageError, match=r"optimizer\.momentum = 1\.5"):
        build_recipe(tree)


def test_every_setting_of_a_technique_says_whose_it_is() -> None:
    fields = recipe_schema()["definitions"]["Sync"]["properties"]
    assert fields["mix"]["description"].startswith('With update = "streaming": ')
    assert '"co2" or "eager" or "nesterov"' in fields["momentum"]["description"]


def test_the_reference_page_says_what_the_fields_say(no_plugins: None) -> None:
    """If this fails: ``python bench/recipe_reference.py --mend``."""
    assert PAGE.read_text() == page()
