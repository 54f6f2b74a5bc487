"""Requests that were answered wrong (``requests.jsonl``, one a line): a status, or words on what is right."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.inprocess import InProcess, serving
from tests.serve.test_call_finder import HERMES

CASES = [
    json.loads(line)
    for line in Path(__file__).with_name("requests.jsonl").read_text().splitlines()
]

#: Cases whose words are checked beside their status: what the answer says, by the case's id.
SAYS = {"too-many-stops": "stop: at most 16 stops are taken, not 17", "model-by-id": '"max_model_len":512',
        "beyond-context": '"code":"context_length_exceeded"'}  # fmt: skip

#: Tokens of the model's context, and the key of a server that asks for one.
CONTEXT, KEY = 512, "KEY"


@pytest.fixture(scope="module")
def served() -> Iterator[InProcess]:
    with serving(HERMES, context=CONTEXT) as served:
        yield served


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_cases_are_answered_right(
    served: InProcess, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, headers = case["path"].replace("{id}", "tiny"), case.get("headers", {})
    if "Authorization" in headers:
        monkeypatch.setattr(served.server, "keys", ["other", KEY])
    if case["id"] == "beyond-context":
        case["body"]["prompt"] = "x" * (CONTEXT + 1)
    if "body" in case:
        answer = served.client.post(path, json=case["body"], headers=headers)
    else:
        answer = served.client.get(path, headers=headers)
    assert str(answer.status_code) in re.findall(r"\b\d{3}\b", str(case["expect"])), (
        answer.text
    )
    assert SAYS.get(case["id"], "") in answer.text
