"""What ``--phases`` and ``--quota`` refuse, before any model is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.errors import UsageError
from weft.generate.open_engine import EngineOptions
from weft.generate.quotas import FixedQuota, quota_of

PLAIN: dict[str, Any] = {
    "checkpoint": "m", "requests": 4, "waiting": 4, "budget": 8, "policy": "exact-fill", "cache": 0,
    "adapters": None, "models": None, "ema": False, "weights": "float", "invariant": False, "draft": "", "ahead": 0,
    "early_layer": 0, "plugins": (), "layout": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"phases": "two"}, "--phases cannot be 'two'; choose from: one, split"),
        ({"phases": "splt"}, r"did you mean 'split'\? Choose from: one, split"),
        ({"quota": "0.5"}, "--quota is for --phases split"),
        ({"phases": "split", "quota": "0.95"}, "--quota cannot be '0.95'"),
        ({"phases": "split", "quota": "nan"}, "or a number from 0.1 to 0.9"),
        ({"phases": "split", "invariant": True}, "leave out --invariant"),
        ({"phases": "split", "weights": "int8"}, "leave out --weights"),
        ({"phases": "split", "layout": "tp=2"}, "leave out --layout"),
        ({"phases": "split", "adapters": Path("a")}, "leave out --adapters"),
        ({"phases": "split", "lend": True}, "leave out --lend"),
    ],
)
def test_what_does_not_go_together_is_said(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        EngineOptions(**PLAIN | given).check()


def test_engines_of_a_router_are_split_as_it_was_asked() -> None:
    options = EngineOptions(**PLAIN, phases="split", quota="0.3")
    options.check()
    assert {"--phases=split", "--quota=0.3"} <= {*options.words()}
    quota = quota_of("0.3")
    assert isinstance(quota, FixedQuota) and quota.initial == 0.3
