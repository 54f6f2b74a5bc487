"""Who may ask: names and pages that are let in, on this computer and elsewhere; and how keys are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.conftest import Command
from tests.serve.running import Running
from weft.data.tokenizer import load_tokenizer
from weft.errors import UsageError
from weft.serve.gate import gate_rules, is_json, is_loopback

ASKED = {"prompt": "a", "max_tokens": 2}
LOCAL = gate_rules("127.0.0.1")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    running = Running(load_tokenizer("bytes"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def open_server() -> Iterator[Running]:
    """With names and pages of others, and with keys."""
    rules = gate_rules("127.0.0.1", ["box.example,*.lan"], ["https://page.example"])
    running = Running(load_tokenizer("bytes"), ("kéy", "two"), rules=rules)
    yield running
    running.close()


@pytest.mark.parametrize(("headers", "status", "said"), [
    ({"host": "rebound.example"}, 403, "not called 'rebound.example'; start it with --allowed-hosts"),
    ({"host": "127.0.0.1.example.com"}, 403, "--allowed-hosts"),
    ({"host": "0.0.0.0:8000"}, 403, "--allowed-hosts"),
    ({"host": "user@localhost"}, 403, "--allowed-hosts"),
    ({"host": "localhost:9000"}, 200, ""),
    ({"host": "LOCALHOST."}, 200, ""),
    ({"host": "[::1]:80"}, 200, ""),
    ({"origin": "https://page.example"}, 403, "pages of 'https://page.example' may not ask"),
    ({"origin": "https://page.example", "content-type": "text/plain"}, 403, "--cors"),
    ({"origin": "null"}, 403, "--cors"),
    # a server of somebody else's on this computer
    ({"origin": "http://localhost:1"}, 403, "--cors"),
    ({"content-type": "text/plain"}, 415, "Content-Type: application/json"),
    ({"content-type": "application/x-www-form-urlencoded"}, 415, "Content-Type"),
    ({"content-type": "Application/JSON; charset=UTF-8"}, 200, ""),
], ids=str)  # fmt: skip
def test_who_may_ask_on_loopback(
    server: Running, headers: dict[str, str], status: int, said: str
) -> None:
    answer = server.client.post("/v1/completions", json=ASKED, headers=headers)
    assert answer.status_code == status, answer.text
    assert said in (answer.json().get("error") or {"message": ""})["message"]
    assert "access-control-allow-origin" not in answer.headers


def test_the_page_of_the_server_itself_may_ask(server: Running) -> None:
    port = server.address[1]
    for name in (f"127.0.0.1:{port}", f"localhost:{port}"):
        headers = {"host": name, "origin": f"http://{name}"}
        assert server.client.get("/", headers=headers).status_code == 200
        assert (
            server.client.post(
                "/v1/completions", json=ASKED, headers=headers
            ).status_code
            == 200
        )
    assert (
        server.client.options(
            "/v1/completions", headers={"origin": "https://a.example"}
        ).status_code
        == 403
    )
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert server.client.options("/v1/completions", headers=asked).status_code == 403
    assert (
        'weft_requests_total{path="other",status="403"}'
        in server.client.get("/metrics").text
    )


def test_a_body_without_a_type_is_refused(server: Running) -> None:
    answer = server.client.build_request("POST", "/v1/completions", content=b"{}")
    del answer.headers["content-type"]
    assert server.client.send(answer).status_code == 415


def test_names_and_pages_that_are_let_in(open_server: Running) -> None:
    client, key = open_server.client, {"authorization": "Bearer two"}
    for host, status in (
        ("box.example:8000", 200),
        ("a.lan", 200),
        ("lan", 403),
        ("x.example", 403),
        ("[::1]", 200),
    ):
        assert (
            client.post(
                "/v1/completions", json=ASKED, headers=key | {"host": host}
            ).status_code
            == status
        ), host
    page = {"origin": "https://page.example"}
    asked = page | {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-a",
                    "access-control-request-private-network": "true"}  # fmt: skip
    before = client.options("/v1/completions", headers=asked)
    assert (
        before.status_code == 204
        and before.headers["access-control-allow-headers"] == "authorization,x-a"
    )
    assert (
        before.headers["access-control-allow-private-network"] == "true"
        and not before.content
    )
    for headers, status in ((page | key, 200), (page, 401)):
        answer = client.post("/v1/completions", json=ASKED, headers=headers)
        assert (
            answer.status_code == status
            and answer.headers["access-control-allow-origin"] == page["origin"]
        )
        assert answer.headers["vary"] == "origin"
    with client.stream(
        "POST", "/v1/completions", json=ASKED | {"stream": True}, headers=page | key
    ) as answer:
        assert (
            answer.headers["access-control-allow-origin"] == page["origin"]
            and "[DONE]" in answer.read().decode()
        )
    other = client.post(
        "/v1/completions",
        json=ASKED,
        headers=key | {"origin": "https://page.example.net"},
    )
    assert (
        other.status_code == 403 and "access-control-allow-origin" not in other.headers
    )


@pytest.mark.parametrize(("value", "status"), [
    ("Bearer two", 200), ("bearer two", 200), ("BEARER   two", 200), ("Bearer kéy".encode(), 200), ("two", 401),
    ("Basic two", 401), ("Bearertwo", 401), ("Bearer", 401), ("Bearer two three", 401), ("", 401),
])  # fmt: skip
def test_the_scheme_of_a_key_in_any_case(
    open_server: Running, value: Any, status: int
) -> None:
    assert (
        open_server.client.get(
            "/v1/models", headers={"authorization": value}
        ).status_code
        == status
    )


@settings(max_examples=50)
@given(
    st.text(st.characters(codec="latin-1", exclude_characters="\r\n\0"), max_size=30)
)
@example("localhost:80:80")
@example("[::1")
@example("127.0.0.1@evil.example")
@example("evil.example#localhost")
def test_no_other_name_is_a_loopback_name(text: str) -> None:
    """A header is let in only if a browser that was given it as an address would ask this computer."""
    if LOCAL.takes_host(text, "127.0.0.1"):
        name = (
            text.strip().lower().rsplit(":", 1)[0]
            if not text.strip().endswith("]")
            else text.strip()
        )
        assert is_loopback(name.strip("[]").rstrip("."))
    for tail in (".evil.example", "@evil.example", ".evil.example:80"):
        assert not LOCAL.takes_host(text + tail, "127.0.0.1")
    assert not LOCAL.takes_origin(f"http://{text}x", text)


def test_elsewhere_every_name_is_let_in_unless_some_are_named() -> None:
    anywhere, named = gate_rules("0.0.0.0"), gate_rules("0.0.0.0", ["api.example."])
    assert not anywhere.loopback and anywhere.takes_host("any.example", "10.0.0.1")
    assert (
        not anywhere.takes_origin("https://a.example", "any.example")
        and gate_rules("::1").loopback
    )
    for host, taken in (
        ("api.example", True),
        ("10.0.0.1:80", True),
        ("10.0.0.2", False),
        ("b.example", False),
    ):
        assert named.takes_host(host, "10.0.0.1") == taken
    assert gate_rules("127.0.0.1", ["*"]).takes_host("any.example", "")
    assert gate_rules("127.0.0.1", (), ["*"]).takes_origin("https://a.example", "x")


def test_types_that_are_json() -> None:
    assert all(
        map(
            is_json,
            (
                "application/json",
                "application/JSON;charset=utf-8",
                "application/vnd.api+json",
            ),
        )
    )
    assert not any(
        map(
            is_json,
            (
                None,
                "",
                "text/json",
                "text/plain; application/json",
                "image/x+json",
                "+json",
            ),
        )
    )


@pytest.mark.parametrize(("words", "said"), [
    (["--allowed-hosts", "http://a.example"], "--allowed-hosts 'http://a.example' is no name"),
    (["--allowed-hosts", "a.example:80"], "without scheme and port"),
    (["--cors", "a.example"], "--cors 'a.example' is no origin; give for instance https://"),
    (["--cors", "https://a.example/path"], "is no origin"),
])  # fmt: skip
def test_what_no_request_can_have_is_refused(
    command: Command, words: list[str], said: str
) -> None:
    code, _, error = command("serve", "--from", "nowhere", *words)
    assert code == 2 and said in error, error
    with pytest.raises(UsageError):
        gate_rules("127.0.0.1", ["a b"])
