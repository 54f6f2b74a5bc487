"""Presets of models, devices and programs: ``models.toml``, ``devices.toml``, ``programs.toml``."""

import tomllib
from pathlib import Path
from typing import Any


def read_presets(name: str) -> dict[str, Any]:
    """The tables of ``name.toml`` beside this file."""
    return tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8"))


def members(families: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The members of all ``families`` by name, each with what its family says of ``all``."""
    return {
        name: family["all"] | fields for family in families.values() for name, fields in family.items() if name != "all"
    }
