"""Adapters as names of models: what each writes is what the model with it merged writes, beside others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command
from tests.generate.test_adapters import merged, write
from tests.serve.running import Running, build, until
from weft.checkpoint.convert.peft import read_adapter
from weft.data.tokenizer import load_tokenizer
from weft.errors import UsageError
from weft.generate.engine import Engine
from weft.generate.open_engine import add_adapters
from weft.generate.sampling import GREEDY
from weft.serve.text_requests import TextRequest, write_texts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, rank in enumerate((2, 5)):
        write(tmp_path / "adapters" / f"tiny-{number}", build(), rank, number)
    (tmp_path / "adapters" / "notes").mkdir()
    return tmp_path / "adapters"


def test_each_name_has_its_own_weights(folder: Path) -> None:
    tokenizer = load_tokenizer("bytes")
    server = Running(tokenizer, adapters=folder)
    models = server.client.get("/v1/models").json()["data"]
    assert [(one["id"], one["parent"]) for one in models] == [
        ("tiny", None),
        ("tiny-0", "tiny"),
        ("tiny-1", "tiny"),
    ]
    expected = {}
    for name in ("tiny", "tiny-0", "tiny-1"):
        model = (
            build()
            if name == "tiny"
            else merged(build(), read_adapter(folder / name, build()))
        )
        ask = TextRequest(
            tokenizer.prompt_ids("a prompt of several blocks"),
            25,
            GREEDY,
            tokenizer.stops,
        )
        (expected[name],) = write_texts(Engine(model), tokenizer, [ask])

    def ask(name: str) -> Any:
        asked = {
            "prompt": "a prompt of several blocks",
            "max_tokens": 25,
            "temperature": 0,
        }
        return server.post("completions", model=name, **asked).json()

    with ThreadPoolExecutor(6) as pool:
        names = [*expected] * 3
        answers = list(pool.map(ask, names))
    assert [a["model"] for a in answers] == names and len(set(expected.values())) == 3
    assert [a["choices"][0]["text"] for a in answers] == [
        expected[name] for name in names
    ]
    assert server.post("completions", model="tiny-2", prompt="x").status_code == 404
    refused = server.post("embeddings", model="tiny-1", input="x")
    assert (
        refused.status_code == 400
        and "adapters make none" in refused.json()["error"]["message"]
    )
    until(
        lambda: not (server.engine.scheduler.running or server.engine.scheduler.waiting)
    )
    server.close()


def test_mistakes(folder: Path, command: Command) -> None:
    with pytest.raises(UsageError, match="is named like the model"):
        add_adapters(Engine(build()), folder, "tiny-1")
    with pytest.raises(UsageError, match="has no folder with an adapter"):
        add_adapters(Engine(build()), folder / "notes", "tiny")
    with pytest.raises(UsageError, match="is no folder"):
        add_adapters(Engine(build()), folder / "none", "tiny")
