"""Models of one shape under their folders' names: what each writes is what it writes alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.generate.test_adapters import merged, write
from tests.models.test_shared_weights import Weights, tuned
from tests.serve.running import Running, build
from weft.checkpoint.convert.peft import read_adapter
from weft.checkpoint.model_family import ModelFamily, model_folders
from weft.data.tokenizer import load_tokenizer
from weft.errors import UsageError
from weft.generate.engine import Engine
from weft.generate.many_models import add_models
from weft.generate.sampling import GREEDY
from weft.models.hugging_face import export
from weft.models.transformer import Transformer
from weft.serve.text_requests import TextRequest, write_texts

BYTES = load_tokenizer("bytes")
PROMPT = "a prompt of several blocks"


def weights_of(model: Transformer) -> Weights:
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The base and two fine-tunes as Hugging Face's folders, an adapter for the base, and a folder without a model."""
    base, folder = weights_of(build()), tmp_path / "models"
    export(base, build().shape, tmp_path / "base")
    for number in range(2):
        export(
            tuned(base, f"blocks.{number}"), build().shape, folder / f"kind-{number}"
        )
    adapter = write(folder / "lora", build(), 4, 1)
    config = (adapter / "adapter_config.json").read_text()
    named = f'{{"base_model_name_or_path": "{tmp_path / "base"}", ' + config[1:]
    (adapter / "adapter_config.json").write_text(named)
    (folder / "notes").mkdir()
    return folder


def expected(model: Transformer) -> str:
    ask = TextRequest(BYTES.prompt_ids(PROMPT), 25, GREEDY, BYTES.stops)
    (text,) = write_texts(Engine(model), BYTES, [ask])
    return text


def test_each_name_has_its_own_weights(folder: Path) -> None:
    base, said = weights_of(build()), list[str]()
    family = ModelFamily(build())
    server = Running(BYTES, model=family.base)
    folders = model_folders(folder, said.append)
    names = add_models(server.engine, family, folders, BYTES, "tiny", said.append)
    assert names == ["kind-0", "kind-1", "lora"]
    assert said == [f"{folder / 'notes'} holds no model, and is left out"]
    server.server.adapters = names
    alone = {"tiny": build(), "lora": merged(build(), read_adapter(folder / "lora", build()))}  # fmt: skip
    for number in range(2):
        alone[f"kind-{number}"] = model = build()
        kind = tuned(base, f"blocks.{number}")
        for name, p in model.named_parameters():
            p.data.copy_(kind[name])
    texts = {name: expected(model) for name, model in alone.items()}
    assert len(set(texts.values())) == 4

    def ask(name: str) -> Any:
        return server.post(
            "completions", model=name, prompt=PROMPT, max_tokens=25, temperature=0
        ).json()

    models = server.client.get("/v1/models").json()["data"]
    assert [one["id"] for one in models] == ["tiny", *names]
    with ThreadPoolExecutor(8) as pool:
        asked = [*texts] * 2
        answers = list(pool.map(ask, asked))
    assert [a["model"] for a in answers] == asked
    assert [a["choices"][0]["text"] for a in answers] == [texts[name] for name in asked]
    # the two models share a block with the base each; the adapter changes both
    blocks = {b for m in (family.base, *server.engine.reader.others.values()) for b in m.blocks.values()}  # fmt: skip
    assert len(blocks) == 2 + 1 + 1 + 2
    server.close()


def test_mistakes(folder: Path, tmp_path: Path) -> None:
    family, said = ModelFamily(build()), list[str]()

    def added(name: str = "tiny") -> list[str]:
        folders = model_folders(folder, said.append)
        return add_models(Engine(family.base), family, folders, BYTES, name, said.append)  # fmt: skip

    with pytest.raises(UsageError, match="kind-1 is named like another model"):
        added("kind-1")
    with pytest.raises(UsageError, match="has no folder with a model"):
        model_folders(folder / "notes", said.append)
    with pytest.raises(UsageError, match="is no folder"):
        model_folders(folder / "none", said.append)
    wide = build().shape.model_copy(update={"layers": 1})
    export(weights_of(build()), wide, folder / "other")
    with pytest.raises(
        UsageError, match="other is of another shape than the base, with layers = 1"
    ):
        added()
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.save(str(folder / "kind-0" / "tokenizer.json"))
    with pytest.raises(UsageError, match="kind-0 has another tokenizer than the base"):
        added()
