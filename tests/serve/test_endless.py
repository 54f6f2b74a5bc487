"""A model without an end token writes as many tokens as are asked for, and says so; it still trains on nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from starlette.testclient import TestClient

from tests.conftest import Command
from tests.serve.running import build
from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.errors import WeftError
from weft.generate.engine import Engine
from weft.models.hugging_face import export
from weft.parallel.build import resident_state
from weft.serve.server import Server
from weft.serve.service import Service


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model whose tokenizer has bytes and nothing else."""
    model = build().float()
    whole = tokenizers.ByteLevelBPETokenizer()
    whole.train_from_iterator(["a few words"], 257, show_progress=False)
    files = {
        "tokenizer.json": whole._tokenizer.to_str().encode(),
        "tokenizer_config.json": b"{}",
    }
    export(
        {p.name: p.local for p in resident_state(model, model.mesh).held},
        model.shape,
        tmp_path / "m",
        files=files,
    )
    return tmp_path / "m"


def test_it_writes_what_is_asked_for_and_says_so(
    folder: Path, command: Command
) -> None:
    words = ["--from", folder, "--prompt", "a few", "--temperature", 0]
    code, out, error = command("generate", *map(str, words), "--tokens", "30")
    assert code == 0 and out.startswith("a few") and len(out) > 10, error
    assert (
        error.count(
            "has no end token: texts go on until they have as many tokens as are asked for"
        )
        == 1
    )
    code, _, error = command(
        "generate", *map(str, words), "--beams", "2", "--tokens", "5"
    )
    assert code == 0, error
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.stops == () and load_tokenizer(str(folder)).files().keys() == {
        "tokenizer.json", "tokenizer_config.json", "generation_config.json"
    }  # fmt: skip
    with pytest.raises(
        WeftError, match="no end-of-document token; name one as 'eos_token'"
    ):
        tokenizer.closing  # noqa: B018 (what ends documents of training data)


def test_it_is_served(folder: Path) -> None:
    tokenizer: Tokenizer = load_tokenizer(str(folder))
    service = Service(Engine(build(), tokens=512, size=8))
    with TestClient(
        Server(service, tokenizer, "tiny").app(), base_url="http://127.0.0.1"
    ) as client:
        (choice,) = client.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 40}
        ).json()["choices"]
        assert choice["finish_reason"] == "length"
        form = {"prompt": "a", "structured_outputs": {"regex": "ab"}}
        refused = client.post("/v1/completions", json=form)
        assert (
            refused.status_code == 400
            and "no end token" in refused.json()["error"]["message"]
        )
        streamed = client.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 9, "stream": True}
        ).text
        assert (
            json.loads(streamed.split("data: ")[-2])["choices"][0]["finish_reason"]
            == "length"
        )
