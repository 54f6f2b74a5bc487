"""The card of a model that clients have trained says whose data it has learned from, and what protects them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from weft.checkpoint.model_card import model_card


def card(section: dict[str, Any], **kept: Any) -> str:
    meta = {
        "progress": {"step": 8, "tokens": 0, "loader": kept},
        "recipe": {"name": "together", "model": {}, "federated": section},
    }
    stored: Any = SimpleNamespace(meta=meta)
    return model_card(stored) or ""


def test_the_card_of_clients_says_what_the_server_saw_and_epsilon() -> None:
    secret = card(
        {"listen": "h:1", "secure": True, "clip": 1.0, "noise": 0.5},
        federated_version=8,
        federated={"clients": 3, "epsilon": 4.25},
    )
    assert "Changed 8 times by 3 clients (`fedavg`)" in secret
    assert "Secure sums: the server saw sums" in secret
    assert "epsilon 4.25 at delta 1e-05" in secret
    plain = card({"listen": "h:1", "policy": "fedbuff"}, federated_version=2)
    assert "Changed 2 times (`fedbuff`)" in plain
    assert "No secure sums" in plain and "No differential privacy" in plain
    assert card({"join": "x"}) == ""
    assert "What was read" not in card({"listen": "h:1"}, data=[{"sources": [{}]}])
