"""Beam search over HTTP: the texts of ``weft generate --beams``, between the steps of other answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from math import inf
from typing import Any

import pytest

from tests.serve.inprocess import InProcess, serving
from tests.serve.running import build
from weft.data.tokenizer import load_tokenizer
from weft.errors import WeftError
from weft.generate.backend import Busy, Hypothesis, SearchRequest, ServerEnding
from weft.generate.beam_search import LENGTH_PENALTY, Search
from weft.generate.cache_policy import cache_policy_of
from weft.generate.engine import Engine
from weft.serve.service import Service


@pytest.fixture(scope="module")
def served() -> Iterator[InProcess]:
    with serving("{{ messages[0].content }}") as server:
        yield server


def ask(served: InProcess, **fields: Any) -> Any:
    asked = {"prompt": "ab", "use_beam_search": True, "n": 3, "max_tokens": 6}
    return served.client.post("/v1/completions", json=asked | fields)


@pytest.mark.parametrize(("penalty", "prune"), [(None, 0), (0, 0), (1, 0.3)])
def test_the_likeliest_texts_are_those_of_a_search(
    served: InProcess, penalty: float | None, prune: float
) -> None:
    tokenizer = load_tokenizer("bytes")
    stops = [*tokenizer.stops, ord("e"), ord(" ")]
    alpha = 0.2 if penalty is None else penalty
    engine = Engine(build(), 4096, size=8)
    answer = ask(
        served, prompt=["ab", "c"], length_penalty=penalty, stop_token_ids=stops[-2:], prune=prune
    ).json()  # fmt: skip
    wanted = [
        hypothesis
        for text in ("ab", "c")
        for hypothesis in Search(
            engine, tokenizer.prompt_ids(text), 6, 3, stops, alpha, prune or inf
        ).run()
    ]
    assert [
        (choice["index"], choice["text"], choice["finish_reason"])
        for choice in answer["choices"]
    ] == [(i, tokenizer.decode(h.ids), h.finish) for i, h in enumerate(wanted)]
    assert answer["usage"]["completion_tokens"] == sum(len(h.ids) for h in wanted)
    assert len(wanted) == 6 if not prune else 2 <= len(wanted) < 6


def test_a_stop_string_cuts_a_text(served: InProcess) -> None:
    whole = ask(served).json()["choices"][0]["text"]
    assert whole
    cut = ask(served, stop=[whole[1:3]]).json()["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (whole[:1], "stop")


@pytest.mark.parametrize(("fields", "name"), [
    ({"stream": True}, "stream"), ({"top_p": 0.5}, "top_p"), ({"logprobs": 1}, "logprobs"), ({"best_of": 4}, "best_of"),
    ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"), ({"n": 2000}, "n"),
    ({"use_beam_search": False, "prune": 3}, "prune"), ({"prune": -1}, "prune"),
    ({"response_format": {"type": "json_object"}}, "response_format"), ({"max_tokens": 0}, "max_tokens"),
])  # fmt: skip
def test_what_a_search_does_not_take_is_refused(
    served: InProcess, fields: dict[str, Any], name: str
) -> None:
    answer = ask(served, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name


def test_words_of_other_servers_are_understood(served: InProcess) -> None:
    plain = ask(served).json()["choices"]
    more = {"temperature": 0, "top_p": 1, "stream": False, "seed": 3, "logprobs": None}
    more |= {"early_stopping": False, "top_k": -1}
    assert ask(served, **more).json()["choices"] == plain
    chat = {"messages": [{"role": "user", "content": "x"}], "use_beam_search": True}
    answer = served.client.post("/v1/chat/completions", json=chat)
    assert answer.status_code == 400
    assert "use /v1/completions" in answer.json()["error"]["message"]


def test_a_search_shares_prefixes_only_within_its_key() -> None:
    """As all answers: whoever has another key does not learn by its time what was asked before."""
    hits: list[tuple[str, int]] = []
    with serving("{{ messages[0].content }}", keys=("one", "other")) as server:
        end = Search.end

        def noting(search: Search) -> None:
            hits.extend((beam.tenant, beam.hits) for beam in search.beams)
            end(search)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Search, "advance", noting)  # each ends after its first pass
            for key in ("one", "other", "other"):
                asked = {"prompt": "a" * 20, "use_beam_search": True, "n": 2}
                answer = server.client.post(
                    "/v1/completions",
                    json=asked,
                    headers={"authorization": f"Bearer {key}"},
                )
                assert answer.status_code == 200
    tenants, shared = zip(*hits, strict=True)
    assert shared == (0, 0, 16) and tenants[0] != tenants[1] == tenants[2]


def test_searches_go_on_beside_others_and_end_with_whoever_asked() -> None:
    """Two at once are what each is alone; one that is left, or that the server cuts, gives its blocks back."""
    engine = Engine(build(), 4096, size=8)
    ids = load_tokenizer("bytes").prompt_ids("ab")
    alone = Search(Engine(build(), 4096, size=8), ids, 6, 3).run()
    service = Service(engine, most=8)

    def ids_of(best: list[Hypothesis]) -> list[list[int]]:
        return [hypothesis.ids for hypothesis in best]

    async def ask(count: int = 6, width: int = 3) -> Any:
        return await service.search(
            SearchRequest(ids, count, width, (), LENGTH_PENALTY)
        )

    async def main() -> None:
        first, second = await asyncio.gather(ask(), ask())
        assert ids_of(first) == ids_of(second) == ids_of(alone)
        both = asyncio.gather(ask(12, 5), ask(12, 5), return_exceptions=True)
        assert Busy in map(type, await both)
        leaving = asyncio.ensure_future(ask(2000))
        await asyncio.sleep(0.2)
        leaving.cancel()
        await asyncio.wait([leaving])
        left = [engine.scheduler.running, engine.scheduler.waiting]
        assert not any(left) and not service.thread.searches
        cut = asyncio.ensure_future(ask(2000))
        await asyncio.sleep(0.2)
        assert service.cut_answers() == 3
        with pytest.raises(ServerEnding):
            await cut
        with pytest.raises(ServerEnding):
            await ask()

    asyncio.run(main())
    service.close()


def test_an_engine_that_fails_ends_its_searches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(build(), 4096, size=8)
    service = Service(engine)

    def fail() -> None:
        raise RuntimeError("no more")

    async def main() -> None:
        monkeypatch.setattr(engine, "step", fail)
        with pytest.raises(WeftError, match="the engine has failed: no more"):
            await service.search(SearchRequest([1, 2], 6, 3, (), LENGTH_PENALTY))

    asyncio.run(main())
    service.close()


def test_a_cache_policy_that_keeps_sums_takes_no_search() -> None:
    """As ``weft generate --beams``: forks could share no blocks."""
    with serving(
        "{{ messages[0].content }}", cache_policy=cache_policy_of("alisa:0.5")
    ) as server:
        answer = ask(server)
        assert answer.status_code == 400
        assert "without a cache policy" in answer.json()["error"]["message"]
    with serving(
        "{{ messages[0].content }}", cache_policy=cache_policy_of("window:64")
    ) as server:
        assert server.server.backend.facts.searches
