"""The model of requests that name ``auto``: rules in order, the nearest examples, and the general model else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chats import QWEN3
from tests.generate.test_adapters import write
from tests.serve.inprocess import serving
from tests.serve.running import build
from weft.checkpoint.convert.peft import read_adapter
from weft.data.tokenizer import load_tokenizer
from weft.errors import UsageError
from weft.serve.model_choice import (
    EXAMPLES,
    ChoiceSettings,
    ModelChoice,
    ModelRule,
    backend_embedder,
    last_question,
    model_embedder,
    read_choice_settings,
)


async def letters(text: str) -> torch.Tensor:
    """How often each letter stands in ``text``, and something that all texts have in common."""
    counts = [float(text.count(chr(c))) for c in range(97, 123)]
    return torch.nn.functional.normalize(torch.tensor([*counts, 3.0]), dim=0)


def chosen(settings: ChoiceSettings, *texts: str) -> list[str]:
    async def each() -> list[str]:
        choice = ModelChoice(settings, "base", ["sql", "poem", "mail"], letters)
        return [await choice.choose(text) for text in texts]

    return asyncio.run(each())


def written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "router.toml").write_text(text)
    return tmp_path / "router.toml"


def test_rules_in_order_then_the_general_model(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
        general = "mail"
        [models.sql]
        words = ["select", "order by"]
        [models.poem]
        pattern = '(?i)rhyme|\\bselection'
        """,
    )
    texts = ["SELECT a", "a rhyme to select", "Selection!", "please ORDER  by", "x", ""]
    assert chosen(read_choice_settings(file), *texts) == [
        "sql", "sql", "poem", "mail", "mail", "mail",
    ]  # fmt: skip


def test_the_nearest_examples_unless_it_is_not_clear() -> None:
    rules = (
        ModelRule("sql", examples=("aaaa", "aaab")),
        ModelRule("poem", ("verse",), examples=("zzz",)),
    )
    texts = ["aaaa b", "zz", "verse", "aaaazzz", "qqq"]
    assert chosen(ChoiceSettings(rules, margin=0.7), *texts) == [
        "sql", "poem", "poem", "base", "base",
    ]  # fmt: skip
    strict = ChoiceSettings(rules, least=1.1)
    assert chosen(strict, *texts[:2]) == ["base", "base"]
    single = ChoiceSettings(rules[:1], least=0.1, margin=0.0)
    assert chosen(single, "aaaa") == ["sql"]


def test_what_is_the_last_question() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "image_url"}, {"text": "two"}]
    talk: list[Any] = [{"role": "user", "content": "old"}, {"role": "assistant", "content": "x"}]  # fmt: skip
    assert last_question(talk) == "old"
    assert last_question([*talk, {"role": "user", "content": parts}]) == "one two"
    assert last_question([{"role": "system", "content": "x"}, 3]) == ""


@pytest.mark.parametrize("own", [False, True])
def test_auto_over_http(tmp_path: Path, own: bool) -> None:
    """The answer names the model that was chosen, and is that model's."""
    settings = ChoiceSettings(
        (ModelRule("sql", ("select",)), ModelRule("poem", examples=("zzzz zzzz",)),
         ModelRule("sums", examples=("1+1=2",)))
    )  # fmt: skip
    with serving(QWEN3) as (server, client):
        engine = server.backend.engine  # type: ignore[attr-defined]
        for number, name in enumerate(("sql", "poem", "sums")):
            adapter = write(tmp_path / name, build(), 4, number)
            engine.add_adapter(name, read_adapter(adapter, build()))
        server.adapters = ["sql", "poem", "sums"]
        refused = client.post("/v1/completions", json={"model": "auto", "prompt": "x"})
        assert refused.status_code == 404
        bytes_ = load_tokenizer("bytes")
        embedder = model_embedder(build(), bytes_) if own else backend_embedder(server.backend, bytes_)  # fmt: skip
        server.choice = ModelChoice(settings, "tiny", server.adapters, embedder)
        models = client.get("/v1/models").json()["data"]
        assert [m["id"] for m in models] == ["tiny", "sql", "poem", "sums", "auto"]

        def ask(model: str, prompt: Any) -> Any:
            asked = {
                "model": model,
                "prompt": prompt,
                "max_tokens": 8,
                "temperature": 0,
            }
            return client.post("/v1/completions", json=asked).json()

        for prompt, name in {
            "select x": "sql",
            "zzzz": "poem",
            "1+1=2": "sums",
        }.items():
            for given in (prompt, bytes_.prompt_ids(prompt)):
                answer = ask("auto", given)
                assert answer["model"] == name
                alone = ask(name, given)
                assert answer["choices"][0]["text"] == alone["choices"][0]["text"]
        talk = {"messages": [{"role": "user", "content": "Select it"}], "max_tokens": 4}
        answer = client.post("/v1/chat/completions", json=talk | {"model": "auto"})
        assert answer.json()["model"] == "sql"


def test_examples_beside_models(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("sql", "poem")]
    for folder in folders:
        folder.mkdir()
    with pytest.raises(UsageError, match="needs examples: write"):
        read_choice_settings(tmp_path / "embedder", folders)
    (folders[1] / EXAMPLES).write_text("roses\n\n violets \n")
    settings = read_choice_settings(tmp_path / "embedder", folders)
    assert settings.rules == (ModelRule("poem", examples=("roses", "violets")),)
    assert settings.embedding == str(tmp_path / "embedder")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("general =", "cannot be read"),
        ("general = 'x'", "says of no model what it is for"),
        (
            "genral = 'x'",
            "there is no genral; did you mean 'general'.* Choose from: models, general",
        ),
        (
            "[models.sql]\nword = ['a']",
            "there is no models.sql.word; did you mean 'words'",
        ),
        ("[models.sql]\nwords = 'a'", "models.sql.words = 'a' is no list"),
        ("[models.sql]\nwords = ['']", "models.sql.words is a list of texts"),
        ("[models.sql]\npattern = '('", "pattern is no regular expression"),
        ("models = 3", "models = 3 is no dict"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_choice_settings(written(tmp_path, text))


def test_models_that_are_not_served() -> None:
    settings = ChoiceSettings((ModelRule("law", ("x",)),))
    with pytest.raises(
        UsageError,
        match=r"names 'law', which is not served; did you mean 'a'. Choose from: a",
    ):
        ModelChoice(settings, "a", ["b"], letters)
    with pytest.raises(UsageError, match="'auto' stands for a choice"):
        ModelChoice(settings, "auto", ["law"], letters)
