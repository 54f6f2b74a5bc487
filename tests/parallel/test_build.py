"""The build: its steps have names, and what it returns stays as it is."""

from __future__ import annotations

import logging
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from weft.layout.mesh import Mesh
from weft.models.hooks import Hooks
from weft.parallel.build import parallelize
from weft.recipe import Memory, ModelShape, Train

SHAPE = ModelShape(vocab=11, layers=2, embed=8, heads=2, kv_heads=2, head_dim=4, ffn=8)


@pytest.mark.parametrize(("memory", "more"), [
    ({}, []),
    ({"weights": "file"}, ["stages"]),
    ({"activations": "host"}, ["saved activations"]),
], ids=str)  # fmt: skip
def test_steps_are_logged_in_their_order(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, memory: dict[str, str], more: list[str]
) -> None:  # fmt: skip
    """Those that a run has always, and those that its recipe asks for."""
    with caplog.at_level(logging.DEBUG, "weft.parallelize"):
        parallelize(
            SHAPE, Mesh.single(), Train(), memory=Memory(folder=str(tmp_path), **memory)
        )
    every = [
        "where tensors rest", "saved activations", "stages", "attention and experts over ranks",
        "types, and what learns", "memory", "state", "values",
    ]  # fmt: skip
    optional = {"stages", "saved activations"} - {*more}
    assert caplog.messages == [step for step in every if step not in optional]


def test_nothing_is_added_to_what_was_built() -> None:
    hooks = Hooks(passed=lambda done, of: None)
    built = parallelize(SHAPE, Mesh.single(), Train(), hooks=hooks)
    assert built.model.hooks is hooks
    with pytest.raises(AttributeError):
        built.state = built.state  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        built.model.hooks.objective = None  # type: ignore[misc]
