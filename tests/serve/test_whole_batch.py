"""Whole batches through experts that move through memory: the same tokens, and times as simulated and as measured."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cli.test_mixtures import folder_of
from tests.conftest import Command
from tests.generate.test_resting import DRAWN, SHAPES, SMALL, whole
from weft.errors import WeftError
from weft.generate.engine import Engine
from weft.generate.sampling import GREEDY
from weft.layout.mesh import Mesh
from weft.memory.streamed_experts import RING, StreamedExperts
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train
from weft.serve.batch_costs import BatchCosts, LayerCost, RingClock, measure_costs
from weft.serve.batch_plan import plan_batch, played_batch
from weft.serve.whole_batch import prompts_of_file

DEEP = SMALL | {"layers": 6}


def streamed(name: str, folder: Path | None, share: float) -> tuple[Transformer, StreamedExperts]:  # fmt: skip
    experts = StreamedExperts(folder, share)
    lift = partial(experts.lift, values=DRAWN)
    layers = {} if name == "pyramid" else {"layers": 6}
    shape = ModelShape(**SMALL | SHAPES[name] | layers)
    return parallelize(shape, Mesh.single(), Train(), DRAWN, lift=lift)[0], experts


def written(model: Transformer, limit: int = 5, budget: int = 24) -> list[list[int]]:
    engine, drawn = Engine(model, budget=budget, limit=limit), random.Random(4)
    texts = [
        engine.submit([drawn.randrange(61) for _ in range(drawn.randint(1, 20))], drawn.randint(1, 6), GREEDY)[0]
        for _ in range(9)
    ]  # fmt: skip
    engine.run()
    return [text.ids for text in texts]


@pytest.mark.parametrize(
    "name", ["mixtral", "pyramid", pytest.param("deepseek", marks=pytest.mark.soak)]
)
def test_a_batch_gets_the_tokens_of_experts_in_memory(
    name: str, tmp_path: Path
) -> None:
    layers = {} if name == "pyramid" else {"layers": 6}
    shape = ModelShape(**SMALL | SHAPES[name] | layers)
    expected = written(parallelize(shape, Mesh.single(), Train(), DRAWN)[0])
    for share, folder in ((0.0, tmp_path), (0.7, tmp_path), (1.0, tmp_path), (0.0, None)):  # fmt: skip
        model, experts = streamed(name, folder, share)
        assert written(model) == expected
        ring, every = experts.ring, len(experts.ring.firsts) - 1
        if share == 1 or every <= RING:
            assert ring.counts["read"] == ring.records.count, "once, and then they stay"
        else:
            passes = ring.counts["read"] / ring.records.count
            assert len(ring.streamed) == every - (ring.layers - RING)
            assert passes > 5 and ring.layers == max(RING, round(share * every))
        if folder is not None:
            assert experts.file is not None
            assert experts.file.bytes["read"] == ring.counts["read"] * ring.records.size


def test_a_pass_that_fails_leaves_no_wrong_experts(tmp_path: Path) -> None:
    model, _ = streamed("mixtral", tmp_path, 0.0)
    expected = written(model)
    hook = model.blocks["3"].ffn.experts.register_forward_hook(
        lambda *_: (_ for _ in ()).throw(KeyError("stop"))
    )
    with pytest.raises(KeyError, match="stop"):
        written(model)
    hook.remove()
    assert written(model) == expected


def costs_of(moved: float, layers: int = 4, every: int = 8) -> BatchCosts:
    """A tenth of a millisecond per token, a microsecond per key; every token chooses a quarter of the experts."""
    shares = np.full(every, 0.25)
    return BatchCosts([0, 1e-4, 0, 0, 1e-6, 0], [1e-4, 1e-5, 0], [1e-3, 0, 0, 0],
                      [LayerCost(moved, shares)] * layers)  # fmt: skip


class Step:
    """A step of so many texts that each compute one token behind a hundred."""

    def __init__(self, texts: int) -> None:
        class Text:
            computed, wanted = 100, 1

        self.work = {Text(): 1 for _ in range(texts)}


@pytest.mark.parametrize("moved", [0.0, 1e-4, 3e-3, 0.1])
def test_passes_take_as_long_as_the_slower_of_mover_and_computation(
    moved: float,
) -> None:
    """Over many passes; with what is computed outside of layers the mover is ahead by no more than the ring's room."""
    clock, step = RingClock(costs_of(moved)), Step(16)
    for _ in range(3):
        clock(step)  # type: ignore[arg-type]
    seconds = [clock(step) for _ in range(20)]  # type: ignore[arg-type]
    parts = clock.costs.parts(clock.costs.work([1, 16, 16, 16, 16 * 101, 16 * 100.5]))
    computing = parts["products"] + parts["attention"]
    assert sum(seconds) / 20 == pytest.approx(max(computing, 4 * moved), rel=0.02)


def test_more_texts_are_chosen_while_the_mover_is_the_limit() -> None:
    drawn = random.Random(1)
    prompts = [[drawn.randrange(50) for _ in range(drawn.randint(20, 60))] for _ in range(40)]  # fmt: skip
    slow, fast = (plan_batch(costs_of(moved), prompts, 12, 2000, 16) for moved in (0.05, 1e-5))  # fmt: skip
    assert slow.limits["mover"] > 0.8 > 0.05 > fast.limits["mover"]
    assert slow.limit >= 32
    assert slow.rate < slow.bound and fast.rate < fast.bound
    few = played_batch(costs_of(0.05), prompts, 12, 4, 512, range(40), 2000, 16)
    assert few.seconds > 4 * slow.seconds
    narrow = plan_batch(costs_of(0.05), prompts, 12, 20, 16)
    assert narrow.limit <= 6, "the cache has room for no more"


def test_costs_are_measured_of_what_runs(tmp_path: Path) -> None:
    """Every layer's experts are counted, and those that stay are not moved; requests of before and after are whole."""
    model, experts = streamed("mixtral", tmp_path, 0.7)
    engine, drawn = Engine(model, 4096), random.Random(2)
    prompts = [[drawn.randrange(61) for _ in range(drawn.randint(5, 30))] for _ in range(6)]  # fmt: skip
    costs = measure_costs(engine, experts.ring, prompts)
    assert not engine.scheduler.running and not engine.scheduler.waiting
    assert (engine.scheduler.budget, engine.scheduler.limit) == (512, 64)
    assert [layer.moved > 0 for layer in costs.layers].count(False) == 1
    assert all(layer.shares.sum() == pytest.approx(2) for layer in costs.layers)
    parts = costs.parts(costs.work([1, 8, 8, 8, 100, 100]))
    assert all(seconds >= 0 for seconds in parts.values()) and parts["products"] > 0


@pytest.mark.parametrize("often", [1, 1000])
def test_texts_without_numbers_are_not_waited_for(
    often: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one pass have no logits: costs are of the others. Those of all passes: there are none to measure."""
    (model, experts), step = streamed("mixtral", tmp_path, 0.7), Engine.step
    lost, steps, scores = iter(range(often)), iter(range(200)), model.scores

    def damage(*given: Any) -> torch.Tensor:
        logits = scores(*given)
        gone = logits.numel() > 0 and next(lost, None) is not None
        return logits * torch.nan if gone else logits

    def stepping(engine: Engine) -> Any:
        assert next(steps, None) is not None, "it waits for ever"
        return step(engine)

    monkeypatch.setattr(model, "scores", damage)
    monkeypatch.setattr(Engine, "step", stepping)
    engine, prompts = Engine(model, 4096), [[1, 2, 3, 4, 5] * 3] * 5
    with pytest.raises(WeftError, match="not numbers") if often > 1 else nullcontext():
        costs = measure_costs(engine, experts.ring, prompts)
        assert costs.parts(costs.work([1, 8, 8, 8, 100, 100]))["products"] > 0
    assert not engine.scheduler.running and not engine.scheduler.waiting


@pytest.mark.slow(2)
def test_the_command_continues_all_prompts_of_a_file(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.serve.whole_batch.PROGRESS_S", -1.0)
    folder, _ = folder_of("mixtral", tmp_path / "model")
    said = ["def add(a, b):", "x = ", "import os\n", "def add(a, c):"]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": p} if i else p) for i, p in enumerate(said)))  # fmt: skip
    words: tuple[Any, ...] = ("generate", "--checkpoint", folder, "--prompts", file, "--tokens", "5",
                              "--temperature", "0")  # fmt: skip
    code, expected, err = command(*words)
    assert code == 0, err
    assert "1 of 4 texts are written\n" in err and "3 of 4 texts" in err
    rows = [json.loads(line) for line in expected.splitlines()]
    assert [row["prompt"] for row in rows] == said and all(row["text"] for row in rows)
    code, out, err = command(*words, "--experts-in", tmp_path / "experts")
    assert code == 0, err
    assert out == expected
    assert "predicted" in err and "new tokens/s, at most" in err and "experts moved from" in err  # fmt: skip
    (tmp_path / "bad.jsonl").write_text('"a"\n{"text": "b"}\n')
    (tmp_path / "empty.txt").write_text("\n\n")
    for more, line in (
        (("--prompts", tmp_path / "bad.jsonl"), "line 2: give a string"),
        (("--prompts", tmp_path / "empty.txt"), "has no prompt"),
        (("--prompts", tmp_path / "none.txt"), "cannot be read"),
        (("--chat", "--system", "x"), "leave out --system"),
        (("--layout", "tp=2"), "leave out --layout"),
    ):
        code, _, err = command(*words, *more)
        assert code == 2 and line in err, err


def test_other_line_separators_are_part_of_a_prompt(tmp_path: Path) -> None:
    """JSON allows them inside of a string."""
    file = tmp_path / "prompts.jsonl"
    file.write_bytes('"a\u2028b"\r\n\n"c"\n'.encode())
    assert prompts_of_file(file) == ["a\u2028b", "c"]


def test_logits_of_one_text_are_the_same_bits(tmp_path: Path) -> None:
    from tests.generate.test_resting import logits

    model, _ = streamed("pyramid", tmp_path, 0.0)
    assert torch.equal(logits(model), logits(whole("pyramid")))
