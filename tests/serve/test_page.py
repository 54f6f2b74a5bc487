"""The chat page in a real browser: words go out, an answer streams in, it can be stopped, and refusals are shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.browser import CHROMIUM, Page, opened
from tests.serve.running import Running, until
from weft.data.tokenizer import load_tokenizer

#: Files that want a browser: it starts for them once.
TOGETHER = "browser"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium"),
]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
)
SEND = "document.querySelector('#words').value = {!r}; document.querySelector('#send').click()"
ANSWER = (
    "document.querySelector('article.assistant:last-of-type')?.firstChild?.textContent"
)
DONE = "document.querySelector('#stop').disabled"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    running = Running(replace(load_tokenizer("bytes"), chat_template=TEMPLATE))
    yield running
    running.close()


@pytest.fixture
def page(server: Running) -> Iterator[Page]:
    with opened(str(server.client.base_url)) as page:
        page.wait("document.title == 'tiny · Weft chat'")
        yield page


def ask(page: Page, words: str, tokens: int) -> None:
    page.value(
        f"document.querySelector('#temperature').value = 0; document.querySelector('#tokens').value = {tokens}"
    )
    page.value(SEND.format(words))


@pytest.mark.sampled(1)
def test_a_talk_streams_and_remembers(
    server: Running, page: Page, tmp_path: Path
) -> None:
    ask(page, "Hi <b>there</b>", 200)
    # in the middle of it
    page.wait(f"!{DONE} && {ANSWER}.length > 3 && {ANSWER}.length < 150")
    page.wait(DONE)
    talk: list[dict[str, Any]] = [{"role": "user", "content": "Hi <b>there</b>"}]
    answer = server.post(
        "chat/completions", messages=talk, temperature=0, max_tokens=200
    ).json()
    text = answer["choices"][0]["message"]["content"]
    assert page.value(ANSWER) == text.replace("\r\n", "\n")
    assert (
        page.value("document.querySelector('article.user').textContent")
        == "Hi <b>there</b>"
    )
    assert "200 tokens" in page.value("document.querySelector('small').textContent")
    ask(page, "And now?", 5)
    page.wait(f"{DONE} && document.querySelectorAll('small').length == 2")
    talk += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And now?"},
    ]
    answer = server.post(
        "chat/completions", messages=talk, temperature=0, max_tokens=5
    ).json()
    assert page.value(ANSWER) == answer["choices"][0]["message"]["content"]
    page.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 5000


@pytest.mark.sampled(2)
def test_a_greeting_goes_and_a_system_prompt_is_sent(
    server: Running, page: Page
) -> None:
    assert "This is tiny." in page.value(
        "document.querySelector('#greeting').textContent"
    )
    page.value("document.querySelector('#system').value = 'Be brief'")
    ask(page, "Hi", 8)
    page.wait(f"{DONE} && document.querySelectorAll('small').length == 1")
    assert page.value("document.querySelector('#greeting')") is None
    talk = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi"},
    ]
    answer = server.post(
        "chat/completions", messages=talk, temperature=0, max_tokens=8
    ).json()
    assert page.value(ANSWER) == answer["choices"][0]["message"]["content"]


@pytest.mark.sampled(2)
def test_stop_ends_what_the_server_writes(server: Running, page: Page) -> None:
    ask(page, "Go on", 3500)
    page.wait(f"{ANSWER}?.length > 10")
    (written,) = server.engine.scheduler.running
    page.value("document.querySelector('#stop').click()")
    until(server.empty)
    assert 10 < len(written.written) < 3500
    page.wait(DONE)
    assert "stopped" in page.value("document.querySelector('small').textContent")


@pytest.mark.sampled(2)
def test_a_refusal_is_shown(server: Running, page: Page) -> None:
    ask(page, "Too much", 10**6)
    assert "are more than the cache of" in page.wait(
        "document.querySelector('article.error')?.textContent"
    )


def test_a_key_is_asked_for() -> None:
    running = Running(
        replace(load_tokenizer("bytes"), chat_template=TEMPLATE), keys=("secret",)
    )
    with opened(str(running.client.base_url)) as page:
        assert "no valid API key" in page.wait(
            "document.querySelector('article.error')?.textContent"
        )
        page.value(
            "key = document.querySelector('#key'); key.value = 'secret'; key.dispatchEvent(new Event('change'))"
        )
        page.wait("document.title == 'tiny · Weft chat'")
        ask(page, "Hi", 5)
        page.wait(f"{DONE} && {ANSWER}")
    running.close()
