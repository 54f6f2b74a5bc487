"""Models of one shape under their folders' names: what each writes is what it writes alone."""

from __future__ import annotations

import gc
import random
import shutil
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
from weft.generate.engine_thread import EngineThread
from weft.generate.many_models import Room, add_models, members_of
from weft.generate.sampling import GREEDY
from weft.models.hugging_face import export
from weft.models.transformer import Transformer
from weft.serve.resident_models import resident_models
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


def texts_of(folder: Path) -> dict[str, str]:
    """What each model writes alone."""
    adapter = read_adapter(folder / "lora", build())
    alone = {"tiny": build(), "lora": merged(build(), adapter)}
    for number in range(2):
        alone[f"kind-{number}"] = model = build()
        kind = tuned(weights_of(build()), f"blocks.{number}")
        for name, p in model.named_parameters():
            p.data.copy_(kind[name])
    texts = {name: expected(model) for name, model in alone.items()}
    assert len(set(texts.values())) == 4
    return texts


def test_each_name_has_its_own_weights(folder: Path) -> None:
    said = list[str]()
    family = ModelFamily(build())
    server = Running(BYTES, model=family.base)
    folders = model_folders(folder, said.append)
    members = members_of(family, folders, BYTES, {"tiny"}, said.append)
    add_models(server.engine, family, members.values())
    gc.collect()
    assert str(folder) not in Path("/proc/self/maps").read_text(), "a file stays mapped"
    names = [*members]
    assert names == ["kind-0", "kind-1", "lora"]
    assert said == [f"{folder / 'notes'} holds no model, and is left out"]
    server.server.adapters = names
    texts = texts_of(folder)

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

    def added(name: str = "tiny") -> None:
        folders = model_folders(folder, said.append)
        members_of(family, folders, BYTES, {name}, said.append)

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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("resident", ["1", "2", "400KB"])
def test_models_come_into_memory_when_they_are_asked_for(
    folder: Path, resident: str
) -> None:
    """Many requests to all models, in random order; never more models are in memory than may be."""
    family, seen = ModelFamily(build()), list[int]()
    server = Running(BYTES, model=family.base, limit=4)
    engine, add = server.engine, server.engine.add_model
    folders = model_folders(folder, lambda line: None)
    members = members_of(family, folders, BYTES, {"tiny"}, lambda line: None)
    models = resident_models(
        server.service.thread, family, members, Room.parse(resident), 0.3, 100
    )
    server.service.resident, server.server.adapters = models, [*members]

    def adding(name: str, model: Transformer, digest: bytes) -> None:
        add(name, model, digest)
        seen.append(len(engine.reader.others))

    engine.add_model = adding  # type: ignore[method-assign]
    texts = texts_of(folder)

    def ask(name: str) -> Any:
        return server.post(
            "completions", model=name, prompt=PROMPT, max_tokens=25, temperature=0
        ).json()

    asked = [*texts] * 5
    random.Random(1).shuffle(asked)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, asked))
    assert [a["choices"][0]["text"] for a in answers] == [texts[n] for n in asked]
    most = 2 if resident == "400KB" else int(resident)
    assert len(seen) > most and max(seen) <= most
    assert sum(models.residency.running.values()) == 0 and not models.queues
    gc.collect()
    weights = sum(members[name].own for name in engine.reader.others)
    held = family.shared.nbytes
    assert held <= 1.01 * (family.nbytes + weights), "others have left memory"
    server.close()


def test_a_model_whose_files_have_changed_is_refused_and_the_others_go_on(
    folder: Path,
) -> None:
    family = ModelFamily(build())
    server = Running(BYTES, model=family.base)
    folders = model_folders(folder, lambda line: None)
    members = members_of(family, folders, BYTES, {"tiny"}, lambda line: None)
    server.service.resident = resident_models(
        server.service.thread, family, members, Room(1, None), 0.1, 100
    )
    server.server.adapters = [*members]

    def ask(name: str) -> Any:
        return server.post("completions", model=name, prompt=PROMPT, max_tokens=5)

    assert ask("kind-0").status_code == 200 and ask("kind-1").status_code == 200
    shutil.rmtree(folder / "kind-0")
    export(tuned(weights_of(build()), "blocks.0", "norm"), build().shape, folder / "kind-0")  # fmt: skip
    for _ in range(2):
        refused = ask("kind-0")
        assert refused.status_code == 500
        said = refused.json()["error"]["message"]
        assert "kind-0: the weight " in said and "has changed since" in said
    assert ask("kind-1").status_code == 200 and ask("tiny").status_code == 200
    server.close()


def test_room() -> None:
    assert Room.parse("4") == Room(4, None) and Room.parse("1.5GiB")[1] == 3 * 2**29
    for word in ("0", "1.5", "8gb", "-1", "many"):
        with pytest.raises(UsageError, match="neither a number of models nor bytes"):
            Room.parse(word)
    family = ModelFamily(build())
    thread = EngineThread(Engine(family.base))
    with pytest.raises(UsageError, match="the base alone takes"):
        resident_models(thread, family, {}, Room(0, 9), 1, 1)
    thread.close()
