"""Requests that are stages of a workflow, over HTTP."""

from __future__ import annotations

import time

from tests.serve.inprocess import serving
from tests.serve.test_call_finder import HERMES
from weft.generate.policies import policy_of
from weft.generate.workflow import Workflow

STAGE = {"id": "q", "stage": "link", "remaining": ["select"], "deadline_ms": 5000}


def test_every_interface_tells_the_policy_of_the_stage() -> None:
    """The field changes no text; the engine learns the tokens of stages by their labels."""
    policy = policy_of("urgency")
    seen: list[Workflow | None] = []
    talk = [{"role": "user", "content": "hi"}]
    bodies = {
        "/v1/completions": {"prompt": "hello", "temperature": 0, "max_tokens": 5},
        "/v1/chat/completions": {"messages": talk, "max_tokens": 3},
        "/v1/responses": {"input": "hi", "max_output_tokens": 3},
        "/v1/messages": {"model": "tiny", "messages": talk, "max_tokens": 3},
    }
    with serving(HERMES, policy=policy) as served:
        submit = served.server.backend.engine.submit  # type: ignore[attr-defined]

        def noting(*arguments, **named):  # type: ignore[no-untyped-def]
            generations = submit(*arguments, **named)
            seen.extend(generation.workflow for generation in generations)
            return generations

        served.server.backend.engine.submit = noting  # type: ignore[attr-defined]
        for path, body in bodies.items():
            workflow = {"workflow": STAGE | {"stage": path}}
            answer = served.client.post(path, json=body | workflow)
            assert answer.status_code == 200, answer.text
        assert [job and job.stage for job in seen] == [*bodies]
        now = time.monotonic()
        assert all(job and now - 60 < job.deadline - 5 <= now for job in seen)
        plain, stage = (
            served.client.post("/v1/completions", json=bodies["/v1/completions"] | extra).json()
            for extra in ({}, {"workflow": {"id": "q"}})
        )  # fmt: skip
    assert plain["choices"] == stage["choices"] and seen[-1] == Workflow("q")
    assert policy.times.tokens.mean("/v1/completions") == (5, 5)  # type: ignore[attr-defined]
