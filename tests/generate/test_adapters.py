"""Requests with adapters of their own beside others, against models that each adapter is merged into."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.generate.test_many import NEW, PROMPTS, SETTINGS, alone, build
from weft.checkpoint.convert.peft import peft_name, read_adapter
from weft.errors import UsageError, WeftError
from weft.generate.engine import Engine
from weft.generate.lookup import Lookup
from weft.generate.sampling import GREEDY
from weft.models.row_adapters import HostAdapter, layer_modules
from weft.models.transformer import Transformer

TARGETS = ("wq", "wv", "wo", "gate", "down")


def write(
    folder: Path,
    model: Transformer,
    rank: int,
    seed: int,
    targets: tuple[str, ...] = TARGETS,
) -> Path:
    """An adapter as PEFT writes it, with numbers that matter."""
    drawn, tensors = torch.Generator().manual_seed(seed), {}
    for number, modules in enumerate(layer_modules(model)):
        for module, projections in modules.items():
            for name, logical in projections.logical.items():
                if name in targets:
                    out, into = logical.shape
                    path = f"blocks.{number}.{module}.adapters.{name}"
                    tensors[peft_name(f"{path}.a")] = (
                        torch.randn(rank, into, generator=drawn) / into**0.5
                    )
                    tensors[peft_name(f"{path}.b")] = (
                        torch.randn(out, rank, generator=drawn) / rank**0.5
                    )
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank * 0.7,
        "target_modules": list(targets),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(model: Transformer, adapter: HostAdapter) -> Transformer:
    """``model`` with the adapter in its weights."""
    for number, modules in enumerate(layer_modules(model)):
        for one in adapter.forms[number]:
            a, b = one.of(adapter.values[number])
            weight = getattr(modules[one.module], one.name)
            weight.data += b.to(weight.dtype) @ a.to(weight.dtype)
    return model


def adapters(
    folder: Path, model: Transformer, ranks: list[int]
) -> dict[str, HostAdapter]:
    return {
        f"a{i}": read_adapter(write(folder / f"a{i}", model, rank, i), model)
        for i, rank in enumerate(ranks)
    }


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "setting", ["chunks of 5", "exact fill", "two at once", "small"]
)
@pytest.mark.parametrize("kind", ["softmax", "windows", "hybrid", "latent"])
def test_each_request_is_as_with_its_adapter_merged(
    kind: str, setting: str, tmp_path: Path
) -> None:
    """Adapters of three ranks and none, twice each, in a cache that does not hold them all."""
    model = build(kind, torch.float64)
    targets = ("wo", "gate", "down") if kind == "latent" else TARGETS
    known = {
        f"a{i}": read_adapter(write(tmp_path / f"a{i}", model, rank, i, targets), model)
        for i, rank in enumerate([1, 4, 8, 4])
    }
    names = ["", "a0", "a1", "a2", "a3", "a1", ""]
    expected = [
        alone(
            merged(build(kind, torch.float64), known[n]) if n else model,
            p,
            GREEDY,
            top=0,
        )
        for n, p in zip(names, PROMPTS, strict=True)
    ]
    settings = (
        {"tokens": 300, "size": 4, "budget": 9}
        if setting == "small"
        else SETTINGS[setting]
    )
    engine = Engine(model, **settings, drafter=Lookup(least=1))
    for name, adapter in known.items():
        engine.add_adapter(name, adapter)
    for _ in range(2):
        found = []
        for name, prompt in zip(names, PROMPTS, strict=True):
            found += engine.submit(prompt, NEW, GREEDY, top=0, adapter=name)
            engine.step()
        engine.run()
        assert [one.written for one in found] == [one.written for one in expected]
        for one, single in zip(found, expected, strict=True):
            for (p, _), (q, _) in zip(
                one.log_probabilities, single.log_probabilities, strict=True
            ):
                assert abs(p - q) < 1e-10
    assert len({tuple(one.written) for one in found}) > 4
    assert not engine.scheduler.pool.owners
    assert all(
        module.beside is None
        for modules in layer_modules(model)
        for module in modules.values()
    )


def test_an_adapter_is_loaded_once_and_again_when_its_blocks_were_needed(
    tmp_path: Path,
) -> None:
    model = build("softmax", torch.float32)
    engine = Engine(model, tokens=4 * 400, size=4)
    for name, adapter in adapters(tmp_path, model, [2, 2]).items():
        engine.add_adapter(name, adapter)
    loaded: list[str] = []
    load = engine.reader.shelf.load
    engine.reader.shelf.load = lambda name, table: (
        loaded.append(name),
        load(name, table),
    )  # type: ignore
    for name in ("a0", "a0", "a1", "a0"):
        engine.submit(PROMPTS[1], 4, GREEDY, adapter=name, n=2)
        engine.run()
    assert loaded == ["a0", "a1"]
    engine.submit([1] * 1590, 4, GREEDY)
    engine.run()
    engine.submit(PROMPTS[1], 4, GREEDY, adapter="a0")
    engine.run()
    assert loaded == ["a0", "a1", "a0"]


@pytest.mark.slow
def test_a_thousand_adapters(tmp_path: Path) -> None:
    """Each with a request; all of them in one cache, that holds some tens at once."""
    model, drawn = build("softmax", torch.float32), random.Random(0)
    four = adapters(tmp_path, model, [1, 2, 4, 8])
    engine = Engine(model, tokens=16_000, size=4)
    scales = {}
    for i in range(1000):
        base = four[f"a{i % 4}"]
        scales[f"n{i}"] = 0.5 + drawn.random()
        values = tuple(numbers * scales[f"n{i}"] for numbers in base.values)
        engine.add_adapter(f"n{i}", HostAdapter(base.forms, values))
    ones = {
        name: engine.submit([3, i % 31, 7], 3, GREEDY, top=0, adapter=name)[0]
        for i, name in enumerate(scales)
    }
    engine.run()
    assert (
        len({tuple(one.written) for one in ones.values()}) > 100
        and not engine.scheduler.pool.owners
    )
    for name in drawn.sample(sorted(scales), 40):
        adapter = engine.reader.shelf.host[name]
        (single,) = [
            alone(
                merged(build("softmax", torch.float32), adapter),
                ones[name].ids[:3],
                GREEDY,
                top=0,
            )
        ]
        pairs = zip(
            ones[name].log_probabilities, single.log_probabilities, strict=False
        )
        assert all(abs(p - q) < 1e-5 for (p, _), (q, _) in list(pairs)[:3])
        assert ones[name].written == single.written[:3]


def test_what_cannot_be(tmp_path: Path) -> None:
    model, other = build("softmax", torch.float32), build("latent", torch.float32)
    engine = Engine(model, tokens=64, size=4)
    with pytest.raises(UsageError, match="there is no adapter 'x' here"):
        engine.submit([1], 1, adapter="x")
    engine.add_adapter("x", read_adapter(write(tmp_path / "x", model, 64, 0), model))
    with pytest.raises(UsageError, match="already"):
        engine.add_adapter("x", engine.reader.shelf.host["x"])
    with pytest.raises(
        UsageError, match="do not fit into a cache of 64 beside the adapter"
    ):
        engine.submit([1], 1, adapter="x")
    with pytest.raises(WeftError, match="which this model does not have"):
        read_adapter(write(tmp_path / "y", other, 4, 0, ("wkv_b",)), other)
    with pytest.raises(WeftError, match="no adapter as PEFT writes it"):
        read_adapter(tmp_path, model)
    config: dict[str, Any] = json.loads(
        (tmp_path / "x" / "adapter_config.json").read_text()
    )
    (tmp_path / "x" / "adapter_config.json").write_text(
        json.dumps(config | {"use_dora": True})
    )
    with pytest.raises(WeftError, match="weft export --merge"):
        read_adapter(tmp_path / "x", model)
