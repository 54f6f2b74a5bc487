"""Fingerprints of plugins' data sets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from weft.data import plugin_texts
from weft.recipe import Source


def test_addresses_that_differ_behind_a_query_have_other_fingerprints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plugin = SimpleNamespace(implementation=lambda path: iter(()))
    monkeypatch.setattr(plugin_texts, "find", lambda kind, name: plugin)
    asked = [
        Source.model_construct(kind="x", path=f"https://h/{query}", settings={"of": other})
        for query, other in (("?a", ""), ("?b", ""), ("?a", "https://h/?a"), ("?a", "https://h/?b"))
    ]  # fmt: skip
    assert len({plugin_texts.plugin_fingerprint(each) for each in asked}) == 4
