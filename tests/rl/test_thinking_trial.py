"""Trials of a model whose logits are not numbers end with one line, in place of waiting for its tokens for ever."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.serve.running import build
from weft.data.tokenizer import load_tokenizer
from weft.errors import WeftError
from weft.generate.decoding_trace import trace_decoding
from weft.generate.engine import Engine
from weft.models.transformer import Transformer
from weft.planner.thinking_price import Thinking
from weft.rl.rollout import RewardQuestion
from weft.rl.thinking_trial import time_thinking, try_questions

HOW = Thinking("m", 3, 2, 1.0)


def damage(model: Transformer) -> float:
    """Done by a clock that is read: 0 seconds."""
    model.embedding.table.data.fill_(torch.nan)
    return 0.0


def damaged() -> Transformer:
    damage(model := build())
    return model


def late(folder: Path) -> object:
    """Its first tokens are sound, and no others."""
    model = build()
    return time_thinking(model, HOW, 5, lambda: damage(model))


def tried(folder: Path) -> object:
    task: Any = SimpleNamespace(reward=lambda question, answer: 1.0)
    tokenizer = load_tokenizer("bytes")
    return try_questions(damaged(), tokenizer, task, [RewardQuestion("a")], 2, 3, 1.0)


@pytest.mark.parametrize(
    "trial",
    [
        lambda folder: time_thinking(damaged(), HOW, 5),
        lambda folder: trace_decoding(damaged(), 2, 5, 3, folder),
        late,
        tried,
    ],
    ids=["timed", "traced", "timed late", "tried"],
)
def test_a_model_without_numbers_is_not_waited_for(
    trial: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, step = count(), Engine.step

    def stepping(engine: Engine) -> Any:
        assert next(steps) < 50, "it waits for ever"
        return step(engine)

    monkeypatch.setattr(Engine, "step", stepping)
    with pytest.raises(WeftError, match="are not numbers"):
        trial(tmp_path)
    assert not [*tmp_path.iterdir()]
